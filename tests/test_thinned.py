"""The rows that `make test` leaves to the matrix are rows of tests that there are."""

from __future__ import annotations

from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


@pytest.mark.fast
def test_thinned_rows_are_rows_of_tests():
    for row in (ROOT / "tests/thinned.txt").read_text().splitlines():
        file, _, name = row.partition("::")
        test, bracket, _ = name.partition("[")
        assert bracket and f"def {test}(" in (ROOT / file).read_text(), row
