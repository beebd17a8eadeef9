"""What does a call compute? Options and Problem, made without reading elements of q, k and v."""
