"""The secret that the ranks of a job share and other users of their hosts do not know; see docs/security.md.

From SHOAL_SECRET (the local launcher makes one for each job), else the file that SHOAL_SECRET_FILE names, else a file in the user's own
configuration, made at first use: ranks of one user find it wherever the home directory is the same.
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
"""Characters of a secret."""

REMEDY = f"give all ranks the same secret, e.g. `export {VARIABLE}=$(openssl rand -hex 32)` in the script that starts them"


def new_secret() -> str:
    """A fresh one, 256 bits."""
    return secrets.token_hex(32)


def find_secret(environ: Mapping[str, str] = os.environ) -> bytes:
    """This process's secret. UserError where it is too short, or its file could be read or was written by others."""
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
    """Where the user's own is: `$XDG_CONFIG_HOME/shoal/secret`, or `~/.config/shoal/secret`; else, for a user whose home cannot be written, under
    the temporary directory of the host."""
    root = Path(environ.get("XDG_CONFIG_HOME") or Path(environ.get("HOME") or "/") / ".config")
    return [root / "shoal" / "secret", Path(tempfile.gettempdir()) / f"shoal-user-{os.geteuid()}" / "secret"]


def _make(path: Path) -> None:
    """Written aside and linked: of ranks that come at once, one makes it, whole, also on a network's file system."""
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
                    f"the secret {path} is not this user's alone: it must be a file of user {os.geteuid()} (it is user {state.st_uid}'s) that "
                    f"nobody else may read or write (its mode is {stat.S_IMODE(state.st_mode):03o}). `chmod 600` it, or remove it; or {REMEDY}"
                )
            return _long_enough(file.read(4096).strip(), str(path))
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"the ranks' secret {path} cannot be read: {error}; {REMEDY}") from error


def _long_enough(secret: str, where: str) -> bytes:
    if len(secret) < LEAST:
        raise UserError(f"{where} holds a secret of {len(secret)} characters: it takes at least {LEAST}; {REMEDY}")
    return secret.encode()
