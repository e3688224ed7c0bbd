"""Replicas (DDP) and shards (ZeRO) over `dp` and `cp`, and when their gradients travel."""
