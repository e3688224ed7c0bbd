"""Comparisons in numbers before a plan trains: the loss, its parts, states, outputs and gradients."""
