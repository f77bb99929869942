"""Servers and clients for tests: small models, and gradients that depend on client and step alone."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from shoal.server import Async, Client, ParameterServer, connect

TOKEN = "a token of the tests"
SGD = partial(torch.optim.SGD, lr=0.1, momentum=0.9)
ROOT = Path(__file__).resolve().parents[2]


def model(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3))


def serve(policy: Any = None, **more: Any) -> ParameterServer:
    return ParameterServer(model(), more.pop("optimizer", SGD), policy or Async(), token=TOKEN, **more)


def client(server: ParameterServer | str, **more: Any) -> Client:
    address = server if isinstance(server, str) else server.address
    return connect(address, TOKEN, **{"timeout": 20.0, **more})


def gradients(into: nn.Module, rank: int, step: int) -> None:
    """Sets gradients that are those of this rank and step."""
    draw = torch.Generator().manual_seed(1000 * rank + step)
    for parameter in into.parameters():
        parameter.grad = torch.randn(parameter.shape, generator=draw)


def same(one: nn.Module, other: nn.Module) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one.parameters(), other.parameters(), strict=True))


def together(*jobs: Callable[[], Any]) -> list[Any]:
    """Runs jobs in threads; returns their results, or raises the first error."""
    results: list[Any] = [None] * len(jobs)

    def run(number: int) -> None:
        try:
            results[number] = jobs[number]()
        except BaseException as error:
            results[number] = error

    threads = [threading.Thread(target=run, args=(number,)) for number in range(len(jobs))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()
    for result in results:
        if isinstance(result, BaseException):
            raise result
    return results


def python(program: str, *arguments: str) -> subprocess.Popen[str]:
    """Starts a program of this folder's words as a process of its own."""
    code = f"import sys; sys.path.insert(0, {str(ROOT)!r})\nfrom tests.server.common import *\n{program}"
    return subprocess.Popen([sys.executable, "-c", code, *arguments], stdout=subprocess.PIPE, text=True)
