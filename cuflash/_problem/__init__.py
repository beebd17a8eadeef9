"""What is asked? Options and the problem that they make with q, k and v; no array is read."""
