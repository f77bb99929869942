"""What a `[model]` table leaves to the data, and whether a model takes what it gives, for which no data is opened."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from shoal.errors import UserError
from shoal.jobs.config import Job
from shoal.models import PRESETS, build

SEQUENCE = 256
IDS = 1 << 16
"""Stands for the number of ids of a tokenizer, where that is not opened."""
OF_SAMPLES = {"resnet": {"classes": 2, "channels": 3}}
"""Stands for what follows from samples that are not opened, by the name of the model."""


def sequence_of(table: Mapping[str, Any]) -> int:
    """Returns the tokens in a row of a model that reads text, where data.sequence is not given. Raises UserError for
    what is no number of tokens."""
    preset = PRESETS.get(str(table.get("preset")))
    longest = table.get("sequence", preset.sequence if preset else SEQUENCE)
    if type(longest) is not int or longest < 1:
        raise UserError(f"model.sequence = {longest!r:.100}: give the number of tokens in a row, at least 1")
    return longest


def from_text(table: Mapping[str, Any], ids: int, sequence: int | None) -> dict[str, Any]:
    """Returns the settings of our own language models that follow from a tokenizer of `ids` and from rows of `sequence`
    tokens, and that the job leaves open."""
    open_settings: dict[str, dict[str, Any]] = {
        "gpt": {"vocab_size": ids, "sequence": sequence},
        "bert": {"vocab_size": ids + 1, "sequence": sequence},  # its last id is the mask
        "lstm": {"vocab_size": ids},
    }
    return {key: value for key, value in open_settings.get(str(table.get("name")), {}).items() if key not in table}


def check_model(job: Job) -> None:
    """Raises UserError, as training would, for a model that there is not, and for settings that it does not take. No
    model is built and no data is opened: for what follows from data something stands in."""
    table = dict(job.model)
    sequence = sequence_of(table) if job.data.sequence is None else job.data.sequence
    build({**OF_SAMPLES.get(table["name"], {}), **from_text(table, IDS, sequence), **table})
