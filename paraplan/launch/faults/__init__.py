"""Failures: which rank failed first, where ranks wait, and the sentences that say so."""
