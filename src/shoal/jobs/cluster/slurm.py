"""Jobs of Slurm, by its commands: sbatch, squeue, scontrol, sacct, scancel.

squeue knows what waits and runs, and for some minutes what has ended; sacct knows it for ever, where a site keeps
accounts. Neither is asked for JSON, which sites build Slurm without.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import time
from collections.abc import Mapping
from pathlib import Path

from shoal.errors import UserError
from shoal.jobs.cluster.backend import State, Submitted
from shoal.jobs.cluster.local import environment
from shoal.jobs.cluster.request import Request
from shoal.jobs.cluster.slurm_script import log_name, sbatch_script
from shoal.replace import replace_text
from shoal.report.events import Event

_WORDS = {
    "waits": ("PENDING", "CONFIGURING", "REQUEUED", "REQUEUE_HOLD", "REQUEUE_FED", "RESIZING", "SUSPENDED", "STOPPED"),
    "runs": ("RUNNING", "COMPLETING", "SIGNALING", "STAGE_OUT"),
    "ended": ("COMPLETED",),
    "stopped": ("CANCELLED", "REVOKED"),
}
"""Slurm's states by ours; the others are failures."""
_UNKNOWN_JOB = "invalid job id"
_SECONDS = 60


class Backend:
    """See `backend.Backend`. A job's number is Slurm's; about["cluster"] names its cluster where there are several."""

    def submit(self, request: Request, file: Path | None) -> tuple[str, dict[str, str]]:
        script = replace_text(request.record / "logs" / "job.sbatch", sbatch_script(request, str(file)))
        answer = _ask("sbatch", "--parsable", str(script)).strip().splitlines()
        found = re.fullmatch(r"(\d+)(?:;(.*))?", answer[-1]) if answer else None
        if found is None:
            raise UserError(f"sbatch did not say the job's number, but {answer!r}: look at `squeue --me`")
        return found[1], {"log": log_name(found[1]), **({"cluster": found[2]} if found[2] else {})}

    def state(self, job: Submitted) -> State:
        found = _queued(job) or _accounted(job)
        return State("lost", "Slurm does not know it any more") if found is None else found

    def log(self, job: Submitted) -> str:
        return job.log.read_text(encoding="utf-8", errors="replace") if job.log.exists() else ""

    def stop(self, job: Submitted) -> None:
        _ask("scancel", *_cluster(job), job.number)

    def events(self, job: Submitted) -> list[Event]:
        about = _described(job)
        named = {"SubmitTime": "submitted", "StartTime": "started", "EndTime": "ended"}
        found = [(_seconds(about.get(key, "")), text) for key, text in named.items()]
        nodes = f" on {about['NodeList']}" if about.get("NodeList", "(null)") != "(null)" else ""
        state = about.get("JobState", "")
        tail = {"started": nodes, "ended": f": {state}, exit code {about.get('ExitCode', '?')}"}
        now = time.time()  # Slurm says when a job that runs will end at the latest
        return [
            Event(
                at,
                None,
                f"Slurm: job {job.number} {text}{tail.get(text, '')}",
                text == "ended" and _word(state) == "failed",
            )
            for at, text in found
            if at is not None and at <= now
        ]


def _ask(command: str, *arguments: str) -> str:
    """Runs a command of Slurm and returns its output. Raises UserError where it is missing, fails or hangs."""
    if shutil.which(command) is None:
        raise UserError(f"{command} is not here: run this where Slurm's commands are, or give --on local or --on ray")
    try:
        done = subprocess.run(
            [command, *arguments], capture_output=True, text=True, timeout=_SECONDS, env=environment(), check=True
        )
    except subprocess.TimeoutExpired:
        raise UserError(
            f"{command} did not answer within {_SECONDS} s: look whether slurmctld runs (`sinfo`)"
        ) from None
    except subprocess.CalledProcessError as error:
        said = error.stderr.strip() or error.stdout.strip() or f"exit code {error.returncode}"
        raise UserError(f"{command} failed: {said}") from error
    return done.stdout


def _queued(job: Submitted) -> State | None:
    """Returns what squeue says; None where it does not know the job."""
    asked = ("--noheader", "--states=all", f"--jobs={job.number}", "--format=%i|%T|%r")
    try:
        answer = _ask("squeue", *_cluster(job), *asked)
    except UserError as error:
        if _UNKNOWN_JOB in str(error).lower():
            return None
        raise
    for line in answer.splitlines():
        number, _, rest = line.strip().partition("|")
        state, _, reason = rest.partition("|")
        if number == job.number and state:
            return State(_word(state), state if reason in ("", "None") else f"{state}, {reason}")
    return None


def _accounted(job: Submitted) -> State | None:
    """Returns what sacct says; None where it does not know the job, or the site keeps no accounts."""
    asked = ("--noheader", "--parsable2", "--allocations", f"--jobs={job.number}", "--format=JobIDRaw,State,ExitCode")
    try:
        answer = _ask("sacct", *_cluster(job), *asked)
    except UserError:
        return None
    for line in reversed(answer.splitlines()):  # the last attempt of a job that was queued again
        number, state, code = [*line.strip().split("|"), "", ""][:3]
        if number == job.number and state:
            return State(_word(state), f"{state}, exit code {code}")
    return None


def _described(job: Submitted) -> Mapping[str, str]:
    """Returns the fields of `scontrol show job`; nothing where it does not know the job any more."""
    try:
        answer = _ask("scontrol", *_cluster(job), "show", "job", "--oneliner", job.number)
    except UserError as error:
        if _UNKNOWN_JOB in str(error).lower():
            return {}
        raise
    return dict(re.findall(r"(?:^|\s)([A-Z]\w*)=(\S*)", answer))


def _word(state: str) -> str:
    first = state.split()[0].rstrip("+") if state.strip() else ""  # "CANCELLED by 1000"
    return next((word for word, states in _WORDS.items() if first in states), "failed")


def _cluster(job: Submitted) -> list[str]:
    return [f"--clusters={job.about['cluster']}"] if "cluster" in job.about else []


def _seconds(text: str) -> float | None:
    """Returns the Unix time of Slurm's "2026-11-23T21:00:00"; None for "Unknown"."""
    try:
        return time.mktime(time.strptime(text, "%Y-%m-%dT%H:%M:%S"))
    except ValueError:
        return None
