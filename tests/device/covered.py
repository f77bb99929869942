"""Which of the branches that only an accelerator takes the tests of this room come to.

    python -m tests.device.covered                                  # the tests of `make test`
    python -m tests.device.covered tests/device/test_uses.py -k door # as for pytest

A branch is guarded by a question to the room of devices whose answer is known of a CPU (`places.value`), or stands in a
file of accelerators alone; a question itself counts when the answer was yes.
"""

from __future__ import annotations

import sys
from collections import Counter

from tests.device.watch import places, watch


def main(arguments: list[str]) -> None:
    """Prints each branch that no test comes to, and how many each file has."""
    seen = set().union(*watch(arguments).seen.values())
    everywhere = places("branch")
    for key, place in everywhere.items():
        if key not in seen:
            print(f"not reached  {place}")
    reached, there = (Counter(path for _, path, _ in keys) for keys in (seen & set(everywhere), everywhere))
    for path, number in there.items():
        print(f"{reached[path]:4} of {number:3}  {path}")
    print(f"{reached.total():4} of {there.total():3} branches of accelerators reached")


if __name__ == "__main__":
    main(sys.argv[1:])
