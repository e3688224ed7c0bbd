"""Report: pictures and traces of topologies and plans."""
