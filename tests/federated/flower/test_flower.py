"""Runs the tests that need Flower, in processes that can import it."""

from tests.federated.packages import with_flower


def test_in_the_process():
    said = with_flower("pytest", "-q", "-p", "no:cacheprovider", "tests/federated/flower/inside_process.py")
    assert " passed" in said and "skipped" not in said
