"""The public functions and records of paraplan, by subject. `import paraplan` offers them, each when it is used."""
