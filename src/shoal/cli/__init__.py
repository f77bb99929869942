"""The command line. Each command imports what it needs when it runs: `shoal --help` answers at once."""

from __future__ import annotations

import errno
import sys
import tempfile

from shoal.cli.app import app
from shoal.errors import ShoalError, UserError, told

__all__ = ["app", "main"]

_OUTSIDE = {errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOSPC, errno.EDQUOT, errno.ENAMETOOLONG}
"""Errors of the system that are of a file or a disk and not of the program: a traceback would say nothing more."""
_NO_FOLDER = "Free space there, or set TMPDIR to a folder that can be written"


def main() -> None:
    """Runs the command `shoal`. Prints a ShoalError, and what the system says of a file that may not be read or
    written, as its message on stderr, and exits with its code."""
    try:
        app()
    except ShoalError as error:
        print(told(error), file=sys.stderr)
        sys.exit(error.exit_code)
    except OSError as error:
        lacks = _lacks_temporary_folder()
        if error.errno not in _OUTSIDE and not lacks:
            raise
        print(f"error: {error}{f'. {_NO_FOLDER}' if lacks else ''}", file=sys.stderr)
        sys.exit(UserError.exit_code)


def _lacks_temporary_folder() -> bool:
    """Returns whether no folder for temporary files can be written, as on a disk that is full."""
    try:
        tempfile.gettempdir()
    except FileNotFoundError:
        return True
    return False
