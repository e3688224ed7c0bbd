"""Machines: GPUs, links, nodes, clusters, and the readers and profiles that describe them."""
