"""Profiles on disk."""
