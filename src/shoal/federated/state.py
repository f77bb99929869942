"""The state of a simulation on disk: one file, replaced at once, so that there is always a whole one."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import save

from shoal.errors import CheckpointError, UserError
from shoal.federated.settings import STATE
from shoal.federated.simulation import Federation
from shoal.replace import sync


def save_state(simulation: Federation, directory: Path, about: Mapping[str, Any], seconds: float = 0.0) -> Path:
    """Writes the state after a round into `directory`. Raises CheckpointError where it cannot be written.

    about: what the run is of, as JSON; whoever goes on must give the same. seconds: how long its rounds have been
    trained so far.
    """
    tensors, rest = simulation.state()
    path = directory / STATE
    fresh = path.with_name(f"{STATE}.tmp")
    content = save(
        {name: each.contiguous().cpu() for name, each in tensors.items()},
        {"state": json.dumps(rest), "about": json.dumps(about, sort_keys=True), "seconds": str(seconds)},
    )
    try:
        with fresh.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(fresh, path)
        sync(directory)
    except OSError as error:
        raise CheckpointError(f"{path} cannot be written after round {simulation.number}: {error}") from error
    return path


def load_state(simulation: Federation, directory: Path, about: Mapping[str, Any]) -> bool:
    """Goes on from the state in `directory`; returns False where there is none.

    Raises UserError where it is of something else than `about`, CheckpointError where it cannot be read.
    """
    path = directory / STATE
    if not path.exists():
        return False
    try:
        with safe_open(path, "pt") as file:
            metadata = file.metadata()
            was, rest = json.loads(metadata["about"]), json.loads(metadata["state"])
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  # no mapping
    except (OSError, SafetensorError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(
            f"{path} cannot be read: {error}. Give another directory, or delete {directory} to begin again"
        ) from error
    now = json.loads(json.dumps(about))
    for key in sorted(was.keys() | now.keys()):
        if was.get(key) != now.get(key):
            raise UserError(
                f"{key} = {now.get(key)!r}, but the rounds in {directory} were trained with {was.get(key)!r}: give "
                "that again, or another run.dir"
            )
    simulation.load(tensors, rest)
    return True


def seconds_of(directory: Path) -> float:
    """Returns how long the rounds of the state in `directory` have been trained; 0 where there is none, or none that
    can be read."""
    try:
        with safe_open(directory / STATE, "pt") as file:
            return float(file.metadata()["seconds"])
    except (OSError, SafetensorError, ValueError, KeyError, TypeError):
        return 0.0
