"""Checkpoints: written under one plan, read under any other, and weights of other files."""
