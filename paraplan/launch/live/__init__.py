"""Answers of a launcher to commands about its job while that runs."""
