"""How a model is built, found without rewriting it: its blocks, their chain, what each is computed from."""
