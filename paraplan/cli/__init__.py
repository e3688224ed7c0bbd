"""The command line: parse, call one function, render."""
