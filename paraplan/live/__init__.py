"""Jobs that run, as commands from outside see them: which there are, where ranks wait, their logs, and profiles."""
