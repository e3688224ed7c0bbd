"""What went wrong: which rank failed first, where ranks wait, and what is said of it."""
