"""One module for each format that a plan is written in."""
