"""Question `agreement`: how long do thousands of supervisors take to agree on a new generation, and how many messages
does one of them send and get for that?

    python -m benchmarks.agreement [--members 1024 4096 16384]

All supervisors run in one process, a new one for each number of them, with emulated time and links: a message is 0.1 ms
under way, and a node takes 20 microseconds for each that it sends or gets (tests/elastic/simulated.py). The last member
dies; the seconds are those until all others have new places. Beside them the CPU seconds that the coordinator computes
for all, which the emulation does not count (tests/elastic/test_scale.py), and what the emulation itself took. Writes
results/agreement.json.
"""

from __future__ import annotations

import argparse
import multiprocessing
import resource
import time
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks import harness
from tests.elastic.simulated import COST, JOINING, LINK, LOOK, change
from tests.elastic.test_scale import measure

COLUMNS = {
    "seconds": "ms until all have new places",
    "most": "most messages of a node",
    "mean": "mean",
    "direct": "connections of the coordinator",
    "relays": "relays on the longest way",
    "coordinator": "s of the coordinator's CPU",
}


def figures(members: int) -> dict[str, Any]:
    """Returns the figures of so many members, to be measured in a process of their own."""
    began = time.perf_counter()
    found = asdict(change(members))
    took, memory = time.perf_counter() - began, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    return {
        **found,
        "coordinator": measure(members).seconds,
        "emulation": {"seconds": round(took, 1), "GiB": round(memory, 2)},
    }


def table(rows: dict[str, dict[str, Any]]) -> Table:
    found = Table("members", *COLUMNS.values())
    for members, row in rows.items():
        texts = [f"{1e3 * row['seconds']:.1f}", f"{row['most']:,}", f"{row['mean']:.1f}"]
        texts += [str(row["direct"]), str(row["relays"]), f"{row['coordinator']:.2f}"]
        found.add_row(f"{int(members):,}", *texts)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--members", type=int, nargs="+", default=[1024, 4096, 16384])
    arguments = parser.parse_args()
    rows: dict[str, dict[str, Any]] = {}
    for members in arguments.members:
        with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as alone:
            rows[str(members)] = alone.submit(figures, members).result()
        Console().print(table(rows))
        about = {**vars(arguments), "link": LINK, "cost": COST, "look": LOOK, "look while joining": JOINING}
        harness.write_record("agreement", about, {"rows": rows})


if __name__ == "__main__":
    main()
