"""Optimizers under a plan: whole tensors, several of them, averages of parameters, states on the host."""
