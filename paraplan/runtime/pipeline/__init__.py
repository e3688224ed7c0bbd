"""Pipelines: a model cut into stages, and micro-batches run through them."""
