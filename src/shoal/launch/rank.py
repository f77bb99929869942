"""The program that `launch` starts for each rank: runs a script as `python` would, and leaves a Failure if it raises.

python -m shoal.launch.rank script.py ARGS...
python -m shoal.launch.rank -m module ARGS...

A process that `launch_roles` starts beside the ranks runs it too, and leaves its error on its own stderr.
"""

from __future__ import annotations

import atexit
import ctypes
import faulthandler
import json
import os
import pkgutil
import runpy
import signal
import sys
import traceback
from pathlib import Path
from typing import NoReturn

from shoal.errors import UserError, tell_plainly
from shoal.launch import tf_config
from shoal.launch.failure import failure_of, first_line, write_end, write_failure

_PR_SET_PDEATHSIG = 1


def main() -> None:
    """Runs the program in `sys.argv`; exits with the code of its error."""
    die_with_launcher(int(os.environ["SHOAL_LAUNCHER"]))
    faulthandler.enable()  # a crash in native code prints the Python stack
    if "SHOAL_FAILURE_FILE" not in os.environ:
        tell_plainly()
        run_program(sys.argv[1:])
        return
    rank = int(os.environ.get("SHOAL_RANK", "-1"))  # one that may have several in its life has none yet
    if "SHOAL_CLUSTER" in os.environ:
        cluster = json.loads(os.environ["SHOAL_CLUSTER"])
        os.environ[tf_config.VARIABLE] = tf_config.written(cluster, tf_config.trainers(cluster)[rank])
    report = Path(os.environ["SHOAL_FAILURE_FILE"])
    try:
        run_program(sys.argv[1:])
        write_end(report)
    except KeyboardInterrupt:
        sys.exit(128 + signal.SIGINT)
    except SystemExit as end:
        if not end.code:
            write_end(report)
        raise
    except Exception as error:
        failure = failure_of(error, rank)
        write_failure(failure, report)
        _leave(failure.exit_code)


def _leave(code: int) -> NoReturn:
    """Ends the process after a failure: runs the at-exit functions, but does not finalize the interpreter, which would
    abort where a thread waits in native code for a rank that is gone."""
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def die_with_launcher(launcher: int) -> None:
    """Asks Linux to kill this process when the launcher ends in any way; on other systems only the launcher ends it."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != launcher:  # it ended before the request
        sys.exit(1)


def run_program(program: list[str]) -> None:
    """Runs ["script.py", ...] or ["-m", "module", ...] as `__main__`; sets `sys.argv` and `sys.path` like `python`.
    Raises UserError where there is no such program."""
    try:
        if program[0] == "-m":
            sys.argv = program[1:]
            sys.path[0] = os.getcwd()
            runpy.run_module(program[1], run_name="__main__", alter_sys=True)
        else:
            sys.argv = program
            sys.path[0] = str(Path(program[0]).resolve().parent)
            runpy.run_path(program[0], run_name="__main__")
    except (ImportError, OSError) as error:
        if not _none_has_run(error):
            raise
        said = " ".join(program[:2]) if program[0] == "-m" else program[0]
        looked = f" (looked in {os.getcwd()} and the paths of Python)" if program[0] == "-m" else ""
        raise UserError(f"{said} cannot be run: {first_line(error)}{looked}") from None


def _none_has_run(error: Exception) -> bool:
    """Whether `error` is Python's own, raised before any line of the program was run."""
    files = {frame.f_code.co_filename for frame, _ in traceback.walk_tb(error.__traceback__)}
    return files <= {__file__, *(each.__code__.co_filename for each in (runpy.run_module, pkgutil.read_code))}


if __name__ == "__main__":
    main()
