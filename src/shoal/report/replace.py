"""Replaces a file at once, so that nobody reads half of it."""

from __future__ import annotations

import os
from pathlib import Path


def replace_text(path: Path, text: str, errors: str = "strict") -> Path:
    """Writes `text` in UTF-8 in place of what `path` holds; returns `path`. `errors`: see `str.encode`."""
    fresh = path.with_name(f"{path.name}.tmp")
    fresh.write_text(text, encoding="utf-8", errors=errors)
    os.replace(fresh, path)
    return path
