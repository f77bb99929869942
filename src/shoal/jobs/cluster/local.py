"""Jobs on this host: processes that go on when their terminal closes. Their directory is all the record there is."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import psutil

from shoal.errors import UserError
from shoal.jobs.cluster.backend import State, Submitted
from shoal.jobs.cluster.request import Request
from shoal.jobs.cluster.script import local_script
from shoal.jobs.lock import Holder, refuse_if_taken
from shoal.replace import replace_text
from shoal.report.events import Event

_KEEPER = """\
trap : TERM INT HUP
bash "$1" &
child=$!
wait "$child"; code=$?
while kill -0 "$child" 2>/dev/null; do wait "$child"; code=$?; done
echo "$code" > "$2.tmp" && mv "$2.tmp" "$2"
"""
"""A shell that outlives the job, and writes down its exit code."""
SCRIPT, LOG, CODE = "job.sh", "job.log", "job.code"


class Backend:
    """See `backend.Backend`. A job's number is the process id of the shell that keeps it."""

    def submit(self, request: Request, file: Path | None) -> tuple[str, dict[str, str]]:
        refuse_if_taken(request.record)
        logs = request.record / "logs"
        script = replace_text(logs / SCRIPT, local_script(request, str(file)))
        (logs / CODE).unlink(missing_ok=True)
        with (logs / LOG).open("ab") as output:
            keeper = subprocess.Popen(
                ["bash", "-c", _KEEPER, "shoal-job", str(script), str(logs / CODE)],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
                env=environment(),
            )
        holder = Holder(socket.gethostname(), keeper.pid, psutil.Process(keeper.pid).create_time())
        return str(keeper.pid), {"host": holder.host, "started": str(holder.started), "log": LOG}

    def state(self, job: Submitted) -> State:
        if job.about["host"] != socket.gethostname():
            return State("unknown", f"it is on {job.about['host']}: ask there")
        code = job.run_dir / "logs" / CODE
        if code.exists():
            return _ended(int(code.read_text()))
        if not _holder(job).has_ended:
            return State("runs")
        return _ended(int(code.read_text())) if code.exists() else State("lost", "its process was killed")

    def log(self, job: Submitted) -> str:
        return job.log.read_text(encoding="utf-8", errors="replace") if job.log.exists() else ""

    def stop(self, job: Submitted) -> None:
        _here(job)
        with suppress(psutil.NoSuchProcess):
            for child in psutil.Process(int(job.number)).children():
                # a script that is at cluster.setup or .finish ends without the command that it waits for
                beside = child.children() if child.name() == "bash" else []
                for each in (child, *beside):
                    each.send_signal(signal.SIGTERM)

    def events(self, job: Submitted) -> list[Event]:
        code = job.run_dir / "logs" / CODE
        if not code.exists():
            return []
        state = self.state(job)
        return [Event(code.stat().st_mtime, None, f"the job {state.word}: {state.detail}", state.word == "failed")]


def environment() -> dict[str, str]:
    """Returns the variables of a job: those of this process, where `shoal` and `python` are those that run now."""
    return {**os.environ, "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', os.defpath)}"}


def _holder(job: Submitted) -> Holder:
    return Holder(job.about["host"], int(job.number), float(job.about["started"]))


def _here(job: Submitted) -> None:
    if job.about["host"] != socket.gethostname():
        raise UserError(f"{job.run_dir} runs on {job.about['host']}, and this is {socket.gethostname()}: do it there")


def _ended(code: int) -> State:
    if code == 0:
        return State("ended", "exit code 0")
    if code in (128 + signal.SIGTERM, 128 + signal.SIGINT):
        return State("stopped", f"exit code {code}")
    return State("failed", f"exit code {code}")
