"""The process that runs simulated programs, each in a fork of itself; torch and the simulator are loaded here."""

from __future__ import annotations

import ctypes
import gc
import multiprocessing
import os
import pickle
import signal
import sys
import tempfile
import time
import traceback
from multiprocessing.connection import Connection, wait
from typing import Any

import torch
import torch._dynamo  # what most programs come to import, here once and not in each fork

from shoal.models import GPT, GPTConfig
from shoal.module.build import build
from tests.device.simulator import group
from tests.device.simulator.run import Rank

_PR_SET_PDEATHSIG = 1
_fork = multiprocessing.get_context("fork")
Answer = tuple[Any, list[str], str]


def serve(descriptor: int) -> None:
    """Answers requests until the pipe ends."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    torch.set_num_threads(1)
    pipe = Connection(descriptor)
    _warm_up()
    while True:
        try:
            sys.path[:], request = pickle.loads(pipe.recv_bytes())
        except EOFError:
            os._exit(0)  # without the seconds that torch takes to end
        pipe.send_bytes(pickle.dumps(_answers(*request)))  # not `send`, which shares the memory of tensors


def _warm_up() -> None:
    """Does what most programs begin with, so that torch has looked up each operation here and not in each fork. Nothing
    is computed: forks have no threads."""
    built = build(lambda: GPT(GPTConfig(61, 12, 4, 32, 4)), 0)
    for name, parameter in built.module.named_parameters():
        built.value(name, parameter)


def _answers(call: bytes, ranks: int, *rest: Any) -> list[Answer]:
    *settings, timeout = rest
    try:
        program, args = pickle.loads(call)  # imported here once, for this and later runs
    except Exception:
        return [(None, [], traceback.format_exc())]
    gc.freeze()  # a fork that collects would look through all that was imported, and so copy it
    with tempfile.TemporaryDirectory(prefix="simulated-") as folder:
        pipes, processes = [], []
        for rank in range(max(ranks, 1)):
            mine, theirs = _fork.Pipe(duplex=False)
            seat = (Rank(rank, ranks, folder),) if ranks else ()
            process = _fork.Process(target=_run, args=(theirs, folder, program, (*seat, *args), ranks > 1, settings))
            process.start()
            theirs.close()
            pipes.append(mine)
            processes.append(process)
        answers = _collect(pipes, timeout)
        for process in processes:
            process.kill()
            process.join()
    return answers


def _collect(pipes: list[Any], timeout: float) -> list[Answer]:
    answers: dict[Any, Answer] = {}
    deadline = time.monotonic() + timeout
    while len(answers) < len(pipes):
        ready = wait([pipe for pipe in pipes if pipe not in answers], max(deadline - time.monotonic(), 0))
        if not ready:
            break
        for pipe in ready:
            try:
                answers[pipe] = pickle.loads(pipe.recv_bytes())
            except EOFError:
                answers[pipe] = (None, [], "its process died")
    return [answers.get(pipe, (None, [], f"it took longer than {timeout} s")) for pipe in pipes]


def _run(pipe: Any, folder: str, program: Any, args: Any, several: bool, settings: Any) -> None:
    """The run's own process."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    *settings, patience = settings
    group.meet_in(folder, patience)
    result, error = None, ""
    torch.ops.sim.configure(*settings, several)
    try:
        result = program(*args)
        torch.ops.sim.drain()
    except BaseException:  # also of SystemExit, which is an answer too
        error = traceback.format_exc()
    group.leave()
    try:
        answer = pickle.dumps((result, torch.ops.sim.trace(), error))
    except Exception:
        answer = pickle.dumps((None, [], f"the result cannot be pickled\n{traceback.format_exc()}"))
    pipe.send_bytes(answer)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)
