"""Starts parameter servers and their workers on this host, each as a task of a TF_CONFIG cluster, and again where one
is killed.

    launcher --+-- ps          output straight to the terminal; further ones into files
               +-- worker 0    output kept in a file; started again a few times if it is killed, then let go
               ...
               +-- evaluator   is waited for at the end

They find each other at the servers' addresses. Each is in a session of its own, and is killed by the kernel if the
launcher dies.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Mapping
from pathlib import Path

from shoal.comm.secret import VARIABLE, new_secret
from shoal.errors import CheckpointError, LaunchError
from shoal.launch import tf_config
from shoal.launch.environment import MARKS
from shoal.launch.failure import read_failure
from shoal.launch.local import SIGNAL_GRACE, signals
from shoal.launch.process import POLL, RankProcess, library_variables, make_logs
from shoal.launch.scratch import scratch

RESTARTS = 3
_LEAVE_SECONDS = 10.0
"""How long a worker may take to end once the server has ended well."""
_TERM_GRACE = 2.0
_STOPPED = (128 + signal.SIGINT, 128 + signal.SIGTERM)


def launch_served(program: list[str], roles: Mapping[str, int], run_dir: Path, restarts: int = RESTARTS) -> int:
    """Runs `program` once for each task of a cluster on this host; returns the exit code of its first parameter
    server.

    program: the arguments for `python`, as for `launch`.
    roles: the number of tasks by role (see `tf_config.parse_roles`), among them "ps".
    run_dir: keeps the output of all but the first server in run_dir/logs.
    restarts: how often each server, and each worker, is started again that was killed or has crashed. A worker that is
        no longer started is let go; without one of the servers, and after the error of a task, as of a job that does
        not fit, all ends.

    SIGINT and SIGTERM go to the first server, which ends the workers and the other servers. The exit code is then
    128 + n, unless the checkpoint that it writes failed.
    """
    cluster = tf_config.local_cluster(roles)
    order = ("ps", *tf_config.TRAINERS, "evaluator")
    tasks = [(role, number) for role in order for number in range(roles.get(role, 0))]
    with scratch("served") as folder, signals() as received:
        logs = make_logs(run_dir / "logs")
        variables = {name: value for name, value in os.environ.items() if name not in MARKS}
        variables |= {"SHOAL_LAUNCHER": str(os.getpid()), VARIABLE: new_secret()}
        variables |= library_variables(variables, len(tasks))
        all_tasks: list[_Task] = []
        try:
            for task in tasks:
                log = None if task == ("ps", 0) else logs / f"{task[0]}{task[1]}.log"
                given = {**variables, tf_config.VARIABLE: tf_config.written(cluster, task)}
                given["SHOAL_FAILURE_FILE"] = str(folder / f"{task[0]}{task[1]}.json")
                all_tasks.append(_Task(program, task, given, log, restarts, several=roles[task[0]] > 1))
            return _watch(all_tasks[0], all_tasks[1:], received)
        finally:
            for each in all_tasks:
                each.end()


class _Task:
    """A task's process, which is started again `restarts` times at most."""

    def __init__(
        self,
        program: list[str],
        task: tf_config.Task,
        variables: Mapping[str, str],
        log: Path | None,
        restarts: int,
        several: bool,
    ) -> None:
        role, number = task
        self.role, self.name = role, f"{role} {number}" if several or role == "worker" else role
        self._program, self._variables, self._log, self._left = program, variables, log, restarts
        self._number, self._kept_down = number, False
        self.gone = False
        """Whether it has ended, and is not started again."""
        self._start()

    def _start(self) -> None:
        try:
            self.process = RankProcess(self._number, self._program, self._variables, self._log)
        except OSError as error:
            raise LaunchError(f"the {self.name} cannot be started: {error}. Try fewer workers.") from error

    def look(self) -> int | None:
        """Returns the exit code of a task that has ended for good; starts again what was killed or has crashed."""
        if self.gone or self.process.running:
            return None
        self.process.reap()
        self.gone = True
        code, failure = self.process.process.returncode, read_failure(self.process.failure_file)
        why = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
        ended = 128 - code if code < 0 else code  # as a shell says it
        if self._kept_down and ended in _STOPPED and failure is None:
            return ended
        if code in _STOPPED and failure is None:
            why = f"was stopped by {signal.Signals(code - 128).name}"
        if failure is not None:
            why = f"has failed: {failure.message}"
        lost = code != 0 and (failure is None or failure.exit_code in (1, LaunchError.exit_code)) and code < 128
        if lost and self._left > 0:
            self._left -= 1
            self.process.failure_file.unlink(missing_ok=True)
            _say(f"the {self.name} {why}; it is started again")
            self._start()
            self.gone = False
            return None
        if code:
            where = "" if self._log is None or (failure is not None and not failure.traceback) else f": see {self._log}"
            _say(f"error: the {self.name} {why}{where}")
        return ended

    def is_fatal(self, code: int) -> bool:
        """Returns whether the others cannot make up for its end."""
        failure = read_failure(self.process.failure_file)
        return failure is not None and failure.exit_code not in (0, 1, LaunchError.exit_code)

    def keep_down(self) -> None:
        """Has it not started again from here on, where all are to end."""
        self._left, self._kept_down = 0, True

    def end(self) -> None:
        """Ends the process and those that it started."""
        self.process.signal_group(signal.SIGTERM)
        deadline = time.monotonic() + _TERM_GRACE
        while self.process.running and time.monotonic() < deadline:
            time.sleep(POLL)
        self.process.reap()


def _watch(server: _Task, others: list[_Task], received: list[int]) -> int:
    """Waits for the server's end, and then for that of the others; returns the exit code."""
    workers = [each for each in others if each.role in tf_config.TRAINERS]
    deadline, forwarded, failed = float("inf"), False, 0
    while time.monotonic() < deadline and len(received) < 2:
        if received and not forwarded:
            forwarded, deadline = True, time.monotonic() + SIGNAL_GRACE
            for each in (server, *others):
                each.keep_down()
            server.process.signal(received[0])
        if (code := server.look()) is not None:
            break
        for each in others:
            ended = each.look()
            if ended is None or each.role == "evaluator":
                continue
            if each.role == "ps":
                if ended:
                    return ended
                continue
            if each.is_fatal(ended) or (ended and all(worker.gone for worker in workers)):
                failed = failed or ended
        if failed and not forwarded:
            if not any(worker.gone and worker.is_fatal(failed) for worker in workers):
                _say("error: no worker is left")
                failed = LaunchError.exit_code
            forwarded, deadline = True, time.monotonic() + SIGNAL_GRACE
            server.keep_down()
            server.process.signal(signal.SIGTERM)
        time.sleep(POLL)
    else:
        return failed or (128 + received[0] if received else LaunchError.exit_code)
    if failed:
        return failed
    if received and code != CheckpointError.exit_code:
        return 128 + received[0]
    return code or _wait_for(others, received)


def _wait_for(others: list[_Task], received: list[int]) -> int:
    """Waits for the workers, which have been told that nothing is left, and for the evaluator."""
    deadline = time.monotonic() + _LEAVE_SECONDS
    codes = [0]
    for each in others:
        each.keep_down()
        while not each.gone and not received and (each.role == "evaluator" or time.monotonic() < deadline):
            ended = each.look()
            codes.append(ended or 0 if each.role == "evaluator" else 0)
            time.sleep(POLL)
    return max(codes)


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
