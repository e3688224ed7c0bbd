"""Costs of the blocks of a model under each sharding."""
