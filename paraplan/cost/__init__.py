"""Cost: pure functions that predict the memory and time of a plan."""
