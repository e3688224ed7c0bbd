"""Search: the decision tree, the space of plans, and the ranked result."""
