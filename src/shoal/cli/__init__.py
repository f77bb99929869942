"""The command line. Each command imports what it needs when it runs: `shoal --help` answers at once."""

from __future__ import annotations

import sys

from shoal.cli.app import app
from shoal.errors import ShoalError, told

__all__ = ["app", "main"]


def main() -> None:
    """The entry point `shoal`. An error of Shoal's is its message on stderr and its exit code, nothing more."""
    try:
        app()
    except ShoalError as error:
        print(told(error), file=sys.stderr)
        sys.exit(error.exit_code)
