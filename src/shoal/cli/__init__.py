"""The command line. Each command imports what it needs when it runs: `shoal --help` answers at once."""

from __future__ import annotations

import sys

from shoal.cli.app import app
from shoal.errors import ShoalError, told

__all__ = ["app", "main"]


def main() -> None:
    """Runs the command `shoal`. Prints a ShoalError as its message on stderr and exits with its code."""
    try:
        app()
    except ShoalError as error:
        print(told(error), file=sys.stderr)
        sys.exit(error.exit_code)
