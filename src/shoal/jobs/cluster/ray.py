"""Jobs of a Ray cluster, by the client of its job server."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from shoal.errors import UserError
from shoal.jobs.cluster.backend import State, Submitted
from shoal.jobs.cluster.ray_job import specification
from shoal.jobs.cluster.request import Request
from shoal.launch.failure import first_line
from shoal.launch.ray import TOKEN
from shoal.report.events import Event

ADDRESS = "http://127.0.0.1:8265"
"""Where the job server of a cluster on this host listens; RAY_ADDRESS names another one."""
_WORDS = {"PENDING": "waits", "RUNNING": "runs", "SUCCEEDED": "ended", "FAILED": "failed", "STOPPED": "stopped"}
_LOGS_FOLLOW = ", last available logs"
"""What stands in a message before the whole output of a job that failed."""
T = TypeVar("T")


class Backend:
    """See `backend.Backend`. A job's number is Ray's submission id; about["address"] is that of the job server."""

    def submit(self, request: Request, file: Path | None) -> tuple[str, dict[str, str]]:
        address = os.environ.get("RAY_API_SERVER_ADDRESS") or os.environ.get("RAY_ADDRESS") or ADDRESS
        number = f"{request.name}-{time.time_ns():x}"
        asked = specification(request, str(file))
        return _asked(address, lambda client: str(client.submit_job(submission_id=number, **asked))), {
            "address": address
        }

    def state(self, job: Submitted) -> State:
        try:
            about = self._about(job)
        except UnknownJob:
            return State("lost", "this cluster does not know it")
        word = _WORDS.get(str(about.status), "failed")
        said = (about.message or "").split(_LOGS_FOLLOW)[0]
        return State(word, " ".join(said.split()))

    def log(self, job: Submitted) -> str:
        return _asked(job.about["address"], lambda client: str(client.get_job_logs(job.number)))

    def stop(self, job: Submitted) -> None:
        _asked(job.about["address"], lambda client: client.stop_job(job.number))

    def events(self, job: Submitted) -> list[Event]:
        try:
            about = self._about(job)
        except UnknownJob:
            return []
        found = []
        if about.start_time:
            found.append(Event(about.start_time / 1000, None, f"Ray: {job.number} started"))
        if about.end_time:
            failed = str(about.status) == "FAILED"
            found.append(Event(about.end_time / 1000, None, f"Ray: {job.number} {about.status}", failed))
        return found

    def _about(self, job: Submitted) -> Any:
        """Returns Ray's details of the job."""
        return _asked(job.about["address"], lambda client: client.get_job_info(job.number))


class UnknownJob(UserError):
    """A job that the job server does not know."""


def _asked(address: str, ask: Callable[[Any], T]) -> T:
    """Asks the job server. Raises UserError where there is none or it refuses, UnknownJob for a job of another one."""
    try:
        import ray.exceptions
        from ray.job_submission import JobSubmissionClient
    except ImportError:
        raise UserError(
            "jobs of Ray need its client: pip install 'ray[default]' of the cluster's version, or give --on local or "
            "--on slurm"
        ) from None
    unauthenticated = getattr(ray.exceptions, "AuthenticationError", ())  # older ones have no tokens
    try:
        return ask(JobSubmissionClient(address))
    except unauthenticated as error:
        said = first_line(error)
        raise UserError(f"the job server of Ray at {address} asks for a token: {TOKEN} ({said})") from error
    except ConnectionError as error:
        raise UserError(
            f"there is no job server of Ray at {address}: `ray start --head` starts one, and "
            f"RAY_ADDRESS=http://HOST:8265 names another ({error})"
        ) from error
    except RuntimeError as error:
        said = str(error).splitlines()[0]
        if "status code 404" in said:
            raise UnknownJob(
                f"the job server of Ray at {address} does not know this job: a cluster that began anew has forgotten "
                "those before. Submit it again"
            ) from error
        raise UserError(f"the job server of Ray at {address} refuses: {said}") from error
