"""Ranks that measure links and kernels."""
