"""Time on the wire, and how much of it is exposed."""
