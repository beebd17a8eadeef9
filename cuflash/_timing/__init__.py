"""What is timed, and by which clock? Shared by tuning, `explain`, `compile` and `benchmarks/`."""
