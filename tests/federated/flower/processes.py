"""Servers and clients as processes of their own, forked from one that has imported what they need."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import socket
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.torch import load_file

from shoal.federated.flower.keys import make_keys
from shoal.federated.settings import STATE
from shoal.jobs.federated.serve import Serving, serve
from shoal.jobs.federated.take_part import Taking, take_part
from shoal.jobs.read import load_job
from shoal.jobs.write import toml_value
from tests.federated.common import CLASSES, INPUTS, samples
from tests.federated.test_job import JOB

_fork = multiprocessing.get_context("fork")
PATIENCE = 6.0


STEP = "a slow step"
"""What a slow client prints when a local step begins."""


class Forked:
    """A process that runs `work`; what it prints is in `path`."""

    def __init__(self, work: Callable[..., int], path: Path, *arguments: Any) -> None:
        self.path, self.process = path, _fork.Process(target=_child, args=(work, path, *arguments))
        self.process.start()

    def said(self) -> str:
        return self.path.read_text() if self.path.exists() else ""

    def kill(self, number: int = signal.SIGKILL) -> None:
        os.kill(self.process.pid or 0, number)

    def ends(self, seconds: float = 90) -> int:
        """Returns the exit code."""
        self.process.join(seconds)
        assert self.process.exitcode is not None, f"still running: {self.said()}"
        return self.process.exitcode


def _child(work: Callable[..., int], path: Path, *arguments: Any) -> None:
    with path.open("a") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
        sys.stdout, sys.stderr = os.fdopen(1, "w", buffering=1), os.fdopen(2, "w", buffering=1)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        code = work(*arguments)
    except Exception as error:
        print(f"{type(error).__name__}: {error}", flush=True)
        code = getattr(error, "exit_code", 1)
    sys.stdout.flush()
    os._exit(code)


class Federation:
    """A job, its keys and its processes, which are killed at the end of the context."""

    def __init__(self, folder: Path, clients: int, **federated: Any) -> None:
        self.folder, self.clients, self._all = folder, clients, ExitStack()
        make_keys(folder / "keys", clients, ["localhost", "127.0.0.1"])
        inputs, labels = (np.stack([each[key].numpy() for each in samples()]) for key in ("inputs", "labels"))
        np.savez(folder / "set.npz", inputs=inputs, labels=labels)
        text = JOB.format(inputs=INPUTS, classes=CLASSES, source=folder / "set.npz", run_dir=folder / "run")
        values = {"rounds": 3, "clients": clients, "dropout": 0.0, **federated}
        rows = [f"{key} = {toml_value(value)}" for key, value in values.items()]
        kept = [each for each in text.splitlines() if each.split(" = ")[0] not in values]
        self.job = folder / "job.toml"
        self.job.write_text("\n".join(kept).replace("[federated]", "\n".join(["[federated]", *rows])))
        self.port = free_port()

    def __enter__(self) -> Federation:
        return self

    def __exit__(self, *_: object) -> None:
        self._all.close()

    def _start(self, name: str, work: Callable[..., int], *arguments: Any) -> Forked:
        made = Forked(work, self.folder / name, *arguments)
        self._all.callback(made.process.join)
        self._all.callback(made.process.kill)
        return made

    def server(self, insecure: bool = False, **options: Any) -> Forked:
        keys = None if insecure else self.folder / "keys"
        serving = Serving(f"127.0.0.1:{self.port}", keys, **{"patience": PATIENCE, **options})
        return self._start("server.out", _serve, self.job, serving)

    def client(self, number: int, *sets: str, insecure: bool = False, slow: float = 0.0, **options: Any) -> Forked:
        keys = None if insecure else str(self.folder / "keys")
        values = {"certificates": keys, "wait": 60.0, **options}
        taking = Taking(f"127.0.0.1:{self.port}", client=number, **values)
        return self._start(f"client{number}.out", _take_part, self.job, list(sets), taking, slow)

    def records(self, kind: str) -> list[dict[str, Any]]:
        path = self.folder / "run" / "metrics.jsonl"
        written = path.read_text().rpartition("\n")[0] if path.exists() else ""  # without a line that is being written
        return [each for each in map(json.loads, written.splitlines()) if each["kind"] == kind]

    def rounds(self) -> list[dict[str, Any]]:
        return self.records("round")

    def weights(self, run: str = "run") -> Any:
        found = load_file(self.folder / run / STATE)
        return next(each for name, each in found.items() if name.startswith("weights"))

    def until(self, holds: Callable[[], Any], seconds: float = 60) -> None:
        """Waits until something holds."""
        end = time.monotonic() + seconds
        while not holds():
            assert time.monotonic() < end, {each.name: each.read_text()[-2000:] for each in self.folder.glob("*.out")}
            time.sleep(0.02)


def free_port() -> int:
    with socket.socket() as made:
        made.bind(("127.0.0.1", 0))
        return int(made.getsockname()[1])


def _serve(job: Path, serving: Serving) -> int:
    outcome = serve(*load_job(job), serving)
    return 128 + outcome.signal if outcome.signal else 0


def _take_part(job: Path, sets: list[str], taking: Taking, slow: float) -> int:
    if slow:
        _slow_down(slow)
    return take_part(job, sets, taking, None)


def _slow_down(seconds: float) -> None:
    """Has each local step take so much longer, and say so when it begins."""
    from shoal.federated.mesh import MeshClient

    load = MeshClient._load

    def slowly(self: MeshClient, ids: Any) -> Any:
        print(STEP, flush=True)
        time.sleep(seconds)
        return load(self, ids)

    MeshClient._load = slowly  # type: ignore[method-assign]
