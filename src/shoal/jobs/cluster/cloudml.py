"""The field names of Cloud-ML's train jobs, so that such a file is a job file here too.

    {"job_name": "mnist", "module_name": "trainer.task", "job_args": "--steps 100", "worker_count": 2, "gpu_limit": 1}

Each worker is a host of which `gpu_limit` GPUs have a rank each. What only that service has (its packages and volumes)
is refused by name.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from shoal.errors import UserError, check_names
from shoal.jobs.cluster.table import LEAST_MEMORY
from shoal.plan import MOST_RANKS, MOST_RANKS_OF_A_HOST

_INSTALL = "install the package in prepare_command"
_ADD = "add it to the document that `shoal jobs render` prints"
ELSEWHERE = {
    "trainer_uri": _INSTALL,
    "framework": "choose docker_image",
    "framework_version": "choose docker_image",
    "docker_command": "say it in prepare_command",
    **dict.fromkeys(("volume_type", "volume_path", "mount_path", "mount_read_only"), _ADD),
    **dict.fromkeys(("node_selector_key", "node_selector_value"), _ADD),
}
"""Fields of the service that mean nothing elsewhere, with what to do instead."""


@dataclass(frozen=True)
class Fields:
    """The fields of such a file; None where it does not say. memory_limit in bytes."""

    job_name: str
    module_name: str
    job_args: tuple[str, ...] = ()
    cpu_limit: float | None = None
    memory_limit: int | None = None
    gpu_limit: int | None = None
    ps_count: int | None = None
    worker_count: int | None = None
    docker_image: str | None = None
    prepare_command: str | None = None
    finish_command: str | None = None


def is_cloudml(content: Mapping[str, Any]) -> bool:
    """Returns whether a file has these fields rather than the tables of a job file."""
    return "job_name" in content or "module_name" in content


def read_fields(content: Mapping[str, Any], where: str) -> Fields:
    """Returns the fields of `content`. Raises UserError with field, value and remedy; where: the file's name."""
    for field, remedy in ELSEWHERE.items():
        if field in content:
            raise UserError(f'"{field}" in {where} means nothing outside of Cloud-ML: leave it out, and {remedy}')
    check_names(f"{where}: there is no field", content, [each.name for each in fields(Fields)], "Fields")
    for field in ("job_name", "module_name"):
        if not isinstance(content.get(field), str) or not content[field]:
            raise UserError(f'{where}: "{field}" is missing; give a text, e.g. "trainer.task" as module_name')
    if not re.fullmatch(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*", content["module_name"]):
        raise UserError(f'{where}: module_name = {content["module_name"]!r} is no name of a module like "trainer.task"')

    def count(field: str) -> int | None:
        return _count(field, content.get(field), where)

    def text(field: str) -> str | None:
        return _text(field, content.get(field), where)

    return Fields(
        job_name=content["job_name"],
        module_name=content["module_name"],
        job_args=_arguments(content.get("job_args", ""), where),
        cpu_limit=_cores(content.get("cpu_limit"), where),
        memory_limit=_memory(content.get("memory_limit"), where),
        gpu_limit=count("gpu_limit"),
        ps_count=count("ps_count"),
        worker_count=count("worker_count"),
        docker_image=text("docker_image"),
        prepare_command=text("prepare_command"),
        finish_command=text("finish_command"),
    )


def _arguments(value: Any, where: str) -> tuple[str, ...]:
    try:
        return tuple(shlex.split(value) if isinstance(value, str) else map(str, value))
    except (ValueError, TypeError) as error:
        raise UserError(f"{where}: job_args = {value!r} is no line of arguments: {error}") from error


def _cores(value: Any, where: str) -> float | None:
    if value is None:
        return None
    if isinstance(value, bool) or not re.fullmatch(r"\d{1,9}(\.\d+)?", str(value)) or not float(value):
        raise UserError(f'{where}: cpu_limit = {value!r:.100}: give a number of cores, e.g. "4"')
    return float(value)


def _memory(value: Any, where: str) -> int | None:
    """Returns bytes of a number with K, M or G, which are 1000, 1000^2, 1000^3 bytes."""
    if value is None:
        return None
    found = re.fullmatch(r"(\d{1,9}(?:\.\d+)?)([KMG])", str(value))
    nbytes = 0 if found is None else int(float(found[1]) * {"K": 10**3, "M": 10**6, "G": 10**9}[found[2]])
    if nbytes < LEAST_MEMORY:
        raise UserError(
            f'{where}: memory_limit = {value!r:.100}: give a number with K, M or G, at least 2M, e.g. "64G"'
        )
    return nbytes


def _count(field: str, value: Any, where: str) -> int | None:
    """Returns a count; a text of digits counts too, as the service's command line writes one."""
    if value is None:
        return None
    most = MOST_RANKS_OF_A_HOST if field == "gpu_limit" else MOST_RANKS
    if isinstance(value, bool) or not re.fullmatch(r"\d{1,9}", str(value)) or not 1 <= int(value) <= most:
        raise UserError(f"{where}: {field} = {value!r:.100}: give a whole number from 1 to {most}, or leave it out")
    return int(value)


def _text(field: str, value: Any, where: str) -> str | None:
    if value is not None and (not isinstance(value, str) or not value):
        raise UserError(f"{where}: {field} = {value!r}: give a text, or leave it out")
    return value
