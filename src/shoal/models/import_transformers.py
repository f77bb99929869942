"""transformers, imported in half the time: it reads the 3,000 files of its models twice, each from its first line, to
learn what they export."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any

READS = "transformers.utils.import_utils"
"""The module with the functions that read them."""


def import_transformers() -> ModuleType:
    """Imports transformers. Raises ImportError where it is not installed."""
    finder = _Finder()
    if "transformers" not in sys.modules:
        sys.meta_path.insert(0, finder)
    try:
        import transformers
    finally:
        if finder in sys.meta_path:
            sys.meta_path.remove(finder)
    return transformers


class _Finder(MetaPathFinder):
    """Finds the module that reads, and makes it quick."""

    def find_spec(self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None) -> Any:
        spec = PathFinder.find_spec(fullname, path, target) if fullname == READS else None
        if spec is not None and spec.loader is not None:
            spec.loader = _Quick(spec.loader)
        return spec


class _Quick(Loader):
    def __init__(self, loader: Any) -> None:
        self._loader = loader

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        made: ModuleType | None = self._loader.create_module(spec)
        return made

    def exec_module(self, module: Any) -> None:
        self._loader.exec_module(module)
        module.__spec__.loader = self._loader
        if hasattr(module, "fetch__all__") and hasattr(module, "create_import_structure_from_path"):
            module.fetch__all__ = _from_there(module.fetch__all__)
            module.create_import_structure_from_path = _once(module.create_import_structure_from_path)


def _from_there(fetch: Callable[[str], list[str]]) -> Callable[[str], list[str]]:
    """`fetch`, which wants the last line that begins with `__all__` and what follows, given no more than that."""

    def fetched(content: str) -> list[str]:
        return fetch(content[content.rfind("\n__all__") + 1 :]) if "__all__" in content else []

    return fetched


def _once(structure: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """`structure` of a folder, or of one of its files, found once for the folder."""
    known: dict[str, Any] = {}

    def found(path: Any) -> Any:
        folder = os.path.dirname(path) if os.path.isfile(path) else os.fspath(path)
        if folder not in known:
            known[folder] = structure(folder)
        return known[folder]

    return found
