"""Predictions of measured runs: how far they are off, and constants fitted to them."""
