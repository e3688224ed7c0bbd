"""Data of one rank: its share of a dataset or a stream, in batches and micro-batches."""
