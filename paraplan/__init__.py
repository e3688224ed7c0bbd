"""paraplan: choose how to train a model on several GPUs, see what it costs, and run it."""

from __future__ import annotations

__version__ = "0.1.0"
