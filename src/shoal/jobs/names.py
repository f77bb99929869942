"""Names in a run directory, for those who look at it without torch."""

from __future__ import annotations

from pathlib import Path

DIRECTORY, TOKENIZER = "checkpoints", "tokenizer"
"""Names in a run directory: its checkpoints, and its own copy of the tokenizer."""


def checkpoints_in(path: Path) -> Path:
    """Returns the directory of checkpoints of a run directory, or `path` itself where it is none."""
    return path / DIRECTORY if (path / DIRECTORY).is_dir() else path
