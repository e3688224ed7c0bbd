"""Whether a plan, or a training script as it is launched, trains what one process trains on all ranks' batches."""
