"""Benchmarks: one clock for the command line, the sweeps and `benchmarks/`."""
