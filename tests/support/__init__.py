"""What the tests share: the error budget, input families, drawn problems, memory discipline."""
