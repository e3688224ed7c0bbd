"""Layers, vocabularies and tokens split over `tp` and `cp`, in models that nobody rewrote."""

from paraplan.runtime.split import rules as rules  # what torch functions do to split tensors
