"""Whether a training script, as it is launched, trains what one process trains on all of its ranks' batches."""
