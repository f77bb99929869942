"""The measure of the house finds what it is to find."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from tests import shape

pytestmark = pytest.mark.fast


def test_long_functions_and_wide_constructors_are_found():
    body = "".join(f"        x = {line}\n" for line in range(shape.FUNCTION))
    wide = ", ".join(f"p{index}" for index in range(shape.PARAMETERS + 1))
    source = f"class Big:\n    def __init__(self, {wide}):\n        pass\n\n    def long(self):\n{body}"
    assert dict(shape._large(list(ast.walk(ast.parse(source))))) == {
        "parameters of Big.__init__": shape.PARAMETERS + 1,
        "lines of Big.long": shape.FUNCTION + 1,
    }


def test_devices_and_axes_are_found_in_code_and_not_in_docstrings():
    tree = ast.parse('"""cuda, plan.cp"""\nif tensor.is_cuda or kind == "cuda:0":\n    size = plan.cp\n')
    code = shape._without_docstrings(list(ast.walk(tree)))
    assert shape._devices(code) == 2
    assert shape._names(code) == {"tensor", "is_cuda", "kind", "cuda:0", "size", "plan", "cp"}


def test_long_files_and_wide_lines_are_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "engine.py").write_text("\n" * (shape.ENGINE + 1))
    (tmp_path / "page.js").write_text("\n" * shape.FILE + "x" * (shape.LINE + 1))
    (tmp_path / "fits.py").write_text("\n" * (shape.FILE - 1) + "#" * shape.LINE)
    monkeypatch.setattr(shape, "SOURCES", tmp_path)
    assert shape.excess() == {
        "engine.py: lines": shape.ENGINE + 1,
        "page.js: lines": shape.FILE + 1,
        f"page.js: lines over {shape.LINE} characters": 1,
    }


def test_the_house_has_its_shape():
    assert not shape.excess()
