"""Ranks on the GPUs of a machine: by the traffic of each axis and the links that it crosses."""
