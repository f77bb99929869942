"""Starts the tasks of a TF_CONFIG cluster on this host: the ranks by `launch`, and beside them what is no rank.

chief or master, workers    ranks 0, 1, ...: they have SHOAL_* variables, as under `launch`, and TF_CONFIG
ps, evaluator               processes that have TF_CONFIG alone
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from shoal.launch import tf_config
from shoal.launch.environment import MARKS
from shoal.launch.local import launch
from shoal.launch.process import make_logs

_TERM_GRACE = 2.0  # seconds between SIGTERM and SIGKILL


def launch_roles(program: list[str], roles: Mapping[str, int], *, run_dir: Path | None = None) -> int:
    """Runs `program` once for each task of a cluster on this host, with its TF_CONFIG; returns the exit code.

    program, run_dir: as in `launch`.
    roles: the number of tasks by role (see `tf_config.parse_roles`).

    Once the ranks have ended well an evaluator is waited for; parameter servers, which serve for ever, are ended. The
    exit code is that of `launch`, or else that of a process beside the ranks that failed.
    """
    cluster = tf_config.local_cluster(roles)
    others = [(role, number) for role in ("ps", "evaluator") for number in range(roles.get(role, 0))]
    beside: list[_Beside] = []
    try:
        beside += [_Beside(program, cluster, task, run_dir) for task in others]
        variables = {"SHOAL_CLUSTER": json.dumps(cluster)}
        code = launch(program, len(tf_config.trainers(cluster)), env=variables, run_dir=run_dir)
        failures = [each.failure(wait=code == 0) for each in beside]
    finally:
        for each in beside:
            each.end()
    return code or max(failures, default=0)


class _Beside:
    """The process of a task that is no rank. Its output goes to run_dir/logs, or where this process's own goes."""

    def __init__(
        self, program: list[str], cluster: tf_config.Cluster, task: tf_config.Task, run_dir: Path | None
    ) -> None:
        self.role, number = task
        self.log = None if run_dir is None else run_dir / "logs" / f"{self.role}{number}.log"
        if self.log is not None:
            make_logs(self.log.parent)
        variables = {name: value for name, value in os.environ.items() if name not in MARKS}
        variables["SHOAL_LAUNCHER"] = str(os.getpid())
        variables[tf_config.VARIABLE] = tf_config.written(cluster, task)
        with open(self.log or os.devnull, "wb") as output:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "shoal.launch.rank", *program],
                env=variables,
                stdin=subprocess.DEVNULL,
                stdout=output if self.log else None,
                stderr=output if self.log else None,
                start_new_session=True,
            )

    def failure(self, wait: bool) -> int:
        """Returns the exit code of a process that failed, and prints it; 0 for others. `wait`: for an evaluator."""
        ended = self._ended(wait and self.role == "evaluator")
        if ended is None or not ended.si_status:
            return 0
        code = ended.si_status if ended.si_code == os.CLD_EXITED else 128 + ended.si_status
        where = f": see {self.log}" if self.log is not None else ""
        print(f"error: the {self.role} ended with exit code {code}{where}", file=sys.stderr, flush=True)
        return code

    def end(self) -> None:
        """Ends the process and those that it started."""
        self._signal_group(signal.SIGTERM)
        deadline = time.monotonic() + _TERM_GRACE
        while self._ended(wait=False) is None and time.monotonic() < deadline:
            time.sleep(0.02)
        self._signal_group(signal.SIGKILL)
        self.process.wait()

    def _ended(self, wait: bool) -> os.waitid_result | None:
        """Returns how the process ended, None while it runs. It is not reaped, so that its group's id stays valid."""
        return os.waitid(os.P_PID, self.process.pid, os.WEXITED | os.WNOWAIT | (0 if wait else os.WNOHANG))

    def _signal_group(self, signum: int) -> None:
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signum)
