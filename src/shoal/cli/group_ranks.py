"""The script of the ranks of `shoal plan --measure`, python -m shoal.cli.group_ranks RESULT: measures what their groups
reach, and keeps it."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from shoal.launch import join
from shoal.planner.measure import groups_of


def main(result: Path) -> None:
    """result: the file that rank 0 writes what was measured to, as JSON."""
    world = join()
    found = groups_of(world, fresh=True)
    if world.rank == 0 and found is not None:
        result.write_text(json.dumps(found.to_wire()))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
