"""Expert parallelism: the experts of a model shared out over ranks, and tokens sent to them and back."""
