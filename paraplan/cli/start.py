"""The start of the `paraplan` command: a launch goes to the launcher without the imports of the command line."""

from __future__ import annotations

import sys

from paraplan.errors import ParaplanError
from paraplan.launch.handover import become_launcher


def main() -> None:
    """Run the command line; the entry point of the console script and of `python -m paraplan`."""
    if sys.argv[1:2] != ["launch"]:
        from paraplan.cli.main import main as run  # typer, which a launch does without

        run()
        return
    try:
        become_launcher(sys.argv[2:])
    except ParaplanError as error:
        from paraplan.cli.main import print_error

        print_error(error)
        sys.exit(error.exit_status)
