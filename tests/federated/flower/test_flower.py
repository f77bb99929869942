"""Runs the tests that need Flower, in processes that can import it."""

from pathlib import Path

import pytest

from tests.federated.packages import with_flower

FOLDER = Path(__file__).parent


def inside(marked: str, timeout: float) -> None:
    files = map(str, sorted(FOLDER.glob("inside_*.py")))
    said = with_flower("pytest", "-q", "-p", "no:cacheprovider", "-m", marked, *files, timeout=timeout)
    assert " passed" in said and "skipped" not in said


def test_in_the_process():
    inside("not matrix", 600)


@pytest.mark.matrix
@pytest.mark.alone
def test_dear_rows_in_the_process():
    inside("matrix", 3600)
