"""Question `overhead`: what does Shoal's engine itself cost, beside a plain loop?

    python -m benchmarks.overhead [--tokens 64,8] [--precision fp32,bf16] [--rounds 9] [--quick]

The GPT of `dp` on 2 processes of one thread, each by itself: the engine with the exchange removed, a plain PyTorch loop
with the same numerics (bf16: fp32 masters and gradients), and that loop with what the engine does in each step as well:
it takes the norm of the gradient and refuses one that is not finite. So few tokens that what is done once a step takes
a large part of it. Writes results/overhead.json.
"""

from __future__ import annotations

import argparse
import itertools
from dataclasses import replace

from benchmarks import harness
from benchmarks.contenders import CONTENDERS, LIMIT, run_entries
from benchmarks.targets import Target, judge, print_targets
from benchmarks.workload import Case

RANKS = 2
PLAIN = "no-communication-by-hand"
NAMES = (PLAIN, f"{PLAIN}-norm", LIMIT)
CASES = {f"{tokens}": Case(f"{tokens} tokens", sequence=tokens, batch=RANKS, steps=12) for tokens in (64, 8)}
TARGETS = [
    Target(
        f"{case} {precision}", f"{case} tokens, {precision}: a step of the engine over the plain loop's", 1.01, False
    )
    for case in CASES
    for precision in ("fp32", "bf16")
]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=harness.several(list(CASES)), default=list(CASES))
    parser.add_argument("--precision", type=harness.several(("fp32", "bf16")), default=["fp32", "bf16"])
    parser.add_argument("--rounds", type=int, default=9)
    arguments = harness.parse(parser, "1 round of 2 steps", rounds=1)
    entries, sets = {name: CONTENDERS[name] for name in NAMES}, {}
    for tokens, precision in itertools.product(arguments.tokens, arguments.precision):
        case = replace(CASES[tokens], steps=2) if arguments.quick else CASES[tokens]
        sets[f"{tokens} {precision}"] = run_entries(entries, case, precision, arguments.rounds, RANKS, PLAIN)
    for each in sets.values():
        harness.print_table(each)
    ratios = {key: harness.times_over(each["contenders"], LIMIT, PLAIN) for key, each in sets.items()}
    judged = judge(TARGETS, ratios)
    print_targets(judged)
    if not arguments.quick:
        record = {"sets": list(sets.values()), "targets": judged}
        print(harness.write_record("overhead", vars(arguments), record))


if __name__ == "__main__":
    main()
