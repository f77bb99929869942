"""The command line. Each command imports what it needs when it runs: `shoal --help` answers at once."""

from __future__ import annotations

import errno
import sys

from shoal.cli.app import app
from shoal.errors import ShoalError, UserError, told

__all__ = ["app", "main"]

_OUTSIDE = {errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOSPC, errno.EDQUOT, errno.ENAMETOOLONG}
"""Errors of the system that are of a file or a disk and not of the program: a traceback would say nothing more."""


def main() -> None:
    """Runs the command `shoal`. Prints a ShoalError, and what the system says of a file that may not be read or
    written, as its message on stderr, and exits with its code."""
    try:
        app()
    except ShoalError as error:
        print(told(error), file=sys.stderr)
        sys.exit(error.exit_code)
    except OSError as error:
        if error.errno not in _OUTSIDE:
            raise
        print(f"error: {error}", file=sys.stderr)
        sys.exit(UserError.exit_code)
