"""Layers, vocabularies and tokens split over `tp` and `cp`, in models that nobody rewrote."""
