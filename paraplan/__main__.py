"""`python -m paraplan`."""

from paraplan.cli.main import main

main()
