"""A job that runs, seen from outside: who runs, where ranks wait, their logs, and profiles that are asked for."""
