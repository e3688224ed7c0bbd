"""Interop: a plan in the words of other tools."""
