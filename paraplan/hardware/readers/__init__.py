"""Topologies from the texts, XML and JSON of other tools."""
