"""The secret that the ranks of a job share and other users of their hosts do not know; see docs/security.md.

It comes from SHOAL_SECRET (the local launcher makes one for each job), else from the file that SHOAL_SECRET_FILE names,
else from a file in the user's own configuration, made at first use: ranks of one user find it wherever the home
directory is the same.
"""

from __future__ import annotations

import os
import secrets
import stat
import tempfile
from collections.abc import Mapping
from pathlib import Path

from shoal.errors import UserError

VARIABLE, FILE_VARIABLE = "SHOAL_SECRET", "SHOAL_SECRET_FILE"
LEAST = 16
"""The fewest characters of a secret."""

REMEDY = (
    f"give all ranks the same secret, e.g. `export {VARIABLE}=$(openssl rand -hex 32)` in the script that starts them"
)


def new_secret() -> str:
    """Returns a fresh secret of 256 bits, as hex."""
    return secrets.token_hex(32)


def find_secret(environ: Mapping[str, str] = os.environ) -> bytes:
    """Returns this process's secret.

    Raises UserError where it is too short, where others could read or have written its file, or where no file can be
    made.
    """
    if given := environ.get(VARIABLE, ""):
        return _long_enough(given, VARIABLE)
    if named := environ.get(FILE_VARIABLE, ""):
        return _read(Path(named))
    causes = []
    for path in own_files(environ):
        try:
            if not path.exists():
                _make(path)
            return _read(path)
        except OSError as error:
            causes.append(f"{path}: {error}")
    raise UserError(f"there is no place for the ranks' secret ({'; '.join(causes)}); {REMEDY}")


def own_files(environ: Mapping[str, str] = os.environ) -> list[Path]:
    """Returns the user's own files, in order: `$XDG_CONFIG_HOME/shoal/secret` (else `~/.config/shoal/secret`); and, for
    a user whose home cannot be written, one under the temporary directory of the host.
    """
    root = Path(environ.get("XDG_CONFIG_HOME") or Path(environ.get("HOME") or "/") / ".config")
    return [root / "shoal" / "secret", Path(tempfile.gettempdir()) / f"shoal-user-{os.geteuid()}" / "secret"]


def _make(path: Path) -> None:
    """Writes a temporary file and links it: of several ranks one makes the secret, also on a network file system."""
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    descriptor, aside = tempfile.mkstemp(dir=path.parent)  # mode 0600
    try:
        with os.fdopen(descriptor, "w") as file:
            file.write(new_secret())
        os.link(aside, path)
    except FileExistsError:  # another rank was first
        return
    finally:
        os.unlink(aside)


def _read(path: Path) -> bytes:
    try:
        with open(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC), encoding="ascii") as file:
            state = os.fstat(file.fileno())
            if not stat.S_ISREG(state.st_mode) or state.st_uid != os.geteuid() or state.st_mode & 0o077:
                raise UserError(
                    f"the secret {path} is not this user's alone: it must be a file of user {os.geteuid()} "
                    f"(it is user {state.st_uid}'s) that nobody else may read or write (its mode is "
                    f"{stat.S_IMODE(state.st_mode):03o}). `chmod 600` it, or remove it; or {REMEDY}"
                )
            return _long_enough(file.read(4096).strip(), str(path))
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"the ranks' secret {path} cannot be read: {error}; {REMEDY}") from error


def _long_enough(secret: str, where: str) -> bytes:
    if len(secret) < LEAST:
        raise UserError(f"{where} holds a secret of {len(secret)} characters: it takes at least {LEAST}; {REMEDY}")
    return secret.encode()
