"""Runs the tests that need Flower, in processes that can import it."""

from pathlib import Path

from tests.federated.packages import with_flower

FOLDER = Path(__file__).parent


def test_in_the_process():
    said = with_flower("pytest", "-q", "-p", "no:cacheprovider", *map(str, sorted(FOLDER.glob("inside_*.py"))))
    assert " passed" in said and "skipped" not in said
