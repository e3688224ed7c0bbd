"""Speeds of a machine's links and kernels, from timings."""
