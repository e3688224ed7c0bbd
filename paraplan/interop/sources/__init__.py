"""One module for each format that a plan is read from."""
