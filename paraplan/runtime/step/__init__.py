"""One optimizer step: its batch, its micro-batches, and what is measured and said of it."""
