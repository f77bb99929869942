"""The program that `ForkServer` starts: imports what a rank does, then forks one whenever it is asked.

python -m shoal.launch.forks PROGRAM
"""

from __future__ import annotations

import gc
import importlib.util
import io
import json
import os
import signal
import socket
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from shoal.launch import rank
from shoal.launch.fork_server import LENGTH, NAME, PATIENCE, PID, READY, SOCKET, receive

_MOST_DESCRIPTORS = 16


def main() -> None:
    """The fork server: forks whenever it is asked, until its launcher ends. A fork returns from the loop, and is a rank
    then."""
    launcher = int(os.environ["SHOAL_LAUNCHER"])
    rank.die_with_launcher(launcher)
    line = socket.socket(fileno=int(os.environ.pop(SOCKET)))
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the launcher
    own = _name_of_process(NAME)
    _import_for(sys.argv[1:])
    gc.freeze()  # or the first collection of each rank would copy all that they share
    line.sendall(READY)
    while True:
        try:
            start, descriptors, _, _ = socket.recv_fds(line, LENGTH.size, _MOST_DESCRIPTORS)
            if not start:
                return
            start += receive(line, LENGTH.size - len(start)) if len(start) < LENGTH.size else b""
            request = json.loads(receive(line, LENGTH.unpack(start)[0]))
        except ConnectionError:
            return
        if _forks(line, launcher):
            break
        for descriptor in descriptors:
            os.close(descriptor)
    line.close()
    _become(request, descriptors, own)
    rank.main()


def _import_for(program: Sequence[str]) -> None:
    """Imports what all ranks of `program` do: of a script or module of a user, whose imports may depend on the rank,
    torch alone."""
    if program[0] != "-m" or program[1].partition(".")[0] != "shoal":
        importlib.import_module("torch")
        return
    spec = importlib.util.find_spec(program[1])
    is_package = spec is not None and spec.submodule_search_locations is not None
    main = f"{program[1]}.__main__" if is_package else program[1]
    importlib.import_module(main)
    del sys.modules[main]  # a rank runs it as `__main__`, and runpy warns of one that is there already


def _forks(line: socket.socket, launcher: int) -> bool:
    """Forks a process that is the launcher's child, and tells the launcher its pid; returns whether this is it."""
    try:
        between = os.fork()
    except OSError as error:
        line.sendall(PID.pack(-(error.errno or 1)))
        return False
    if between:
        os.waitpid(between, 0)
        return False
    try:
        forked = os.fork()
    except OSError as error:
        line.sendall(PID.pack(-(error.errno or 1)))
        os._exit(0)
    if forked:
        os._exit(0)
    deadline = time.monotonic() + PATIENCE
    while os.getppid() != launcher:  # for as long as the process between takes to end
        if time.monotonic() > deadline:
            os._exit(1)  # the launcher has ended
        time.sleep(0.0005)
    line.sendall(PID.pack(os.getpid()))
    return True


def _become(request: Mapping[str, Any], descriptors: Sequence[int], name: str) -> None:
    """Gives this process what a new one would have that the launcher had started."""
    os.setsid()
    signal.signal(signal.SIGINT, signal.default_int_handler)
    _name_of_process(name)
    stdout, stderr, *given = descriptors
    for own, standard in ((stdout, 1), (stderr, 2)):
        os.dup2(own, standard)
        os.close(own)
    assert isinstance(sys.stdout, io.TextIOWrapper)
    sys.stdout.reconfigure(line_buffering=sys.stdout.isatty())
    numbers = {variable: str(number) for variable, number in zip(request["given"], given, strict=True)}
    os.environ.clear()
    os.environ.update(request["variables"] | numbers)
    sys.argv[1:] = request["program"]
    if (numpy := sys.modules.get("numpy")) is not None:
        numpy.random.seed()  # as a new process's: the standard library sees to its own


def _name_of_process(name: str) -> str:
    """Sets what the kernel calls this process; returns what it was called."""
    path = Path("/proc/self/comm")
    before = path.read_text().rstrip("\n")
    path.write_text(name)
    return before


if __name__ == "__main__":
    main()
