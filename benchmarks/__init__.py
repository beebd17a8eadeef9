"""Benchmarks of cuflash and its peers. Part of a checkout, not of the installed package."""
