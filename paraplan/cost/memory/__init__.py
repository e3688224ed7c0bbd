"""Peak memory of a rank."""
