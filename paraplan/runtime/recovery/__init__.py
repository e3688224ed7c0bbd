"""How a training outlives failures: what the launcher knows of it, copies of its state in memory, stopping in time."""
