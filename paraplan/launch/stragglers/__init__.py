"""Ranks that are slower than the others, while they run: read, judged, named."""
