"""`python -m paraplan`."""

from paraplan.cli.start import main

main()
