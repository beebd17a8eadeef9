"""Benchmarks of cuflash beside its peers: part of a checkout, not of the installed package."""
