"""The ranks of one node: started, fed, watched, copied and ended."""
