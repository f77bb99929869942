"""The measure of the house finds what it is to find."""

from __future__ import annotations

import ast
import json

import pytest

from tests import shape

pytestmark = pytest.mark.fast


def test_long_functions_and_wide_constructors_are_found():
    body = "".join(f"        x = {line}\n" for line in range(shape.FUNCTION))
    wide = ", ".join(f"p{index}" for index in range(shape.PARAMETERS + 1))
    source = f"class Big:\n    def __init__(self, {wide}):\n        pass\n\n    def long(self):\n{body}"
    assert dict(shape._large(ast.parse(source))) == {
        "parameters of Big.__init__": shape.PARAMETERS + 1,
        "lines of Big.long": shape.FUNCTION + 1,
    }


def test_devices_and_axes_are_found_in_code_and_not_in_docstrings():
    tree = ast.parse('"""cuda, plan.cp"""\nif tensor.is_cuda or kind == "cuda:0":\n    size = plan.cp\n')
    assert shape._devices(tree) == 2
    assert shape._names(tree, "cp") and not shape._names(tree, "tp")


def test_what_grows_is_wrong_and_what_shrinks_is_to_be_recorded():
    assert not shape.check({"a: lines": 310}, {"a: lines": 310})
    assert "at most 310" in shape.check({"a: lines": 311}, {"a: lines": 310})[0]
    assert "at most the limit" in shape.check({"b: lines": 301}, {})[0]
    assert "record" in shape.check({}, {"a: lines": 310})[0]


def test_the_house_has_the_shape_that_is_recorded():
    assert not shape.check(shape.excess(), json.loads(shape.RECORD.read_text()))
