"""Question `planner_survey`: are plans ordered as they are fast over all that are legal?

    python -m benchmarks.planner_survey [--models gpt,mixtral,resnet] [--links here,slow] [--plans 0] [--steps 3]
        [--quick]

The models, links and plans of `planner_ranking`, which runs a few of the plans many times; here each of them runs once
(`--plans`: so many of them at even distances; 0 for all), for two steps and `--steps` more, of which those of a power
of two are not timed (`planner_plans.run`): of 3 the third and the fifth are, of 1 the third. What the planner goes by
is measured anew every minute, as the machine changes its speed. One turn of so few steps is off by a tenth, and of
hundreds the fastest by luck comes first: so the plans that were within a tenth of the fastest, at most FINALISTS, and
the one that is predicted to be the fastest run in turn, FINALS times, by whose medians the choice is judged.

A set that was run replaces that of the record, results/planner_survey.json; the others stay.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Sequence
from functools import partial
from typing import Any

from benchmarks import harness
from benchmarks.planner_plans import LINKS, MODELS, RANKS, run, standing
from benchmarks.planner_ranking import ORDER, REGRET, kept, predicted, spearman, step_of, thinned, turn
from benchmarks.processes import ProcessGroup
from benchmarks.targets import Target, judge, print_targets
from shoal.planner.task import Choice, Estimate

SETTLED = 1
"""Untimed steps of a plan, beside the first."""
FRESH = 60.0
"""Seconds after which is measured anew what the planner goes by."""
NEAR, FINALISTS, FINALS, FINAL_STEPS = 0.1, 8, 5, 3


def once(
    name: str, group: ProcessGroup, number: int, steps: int
) -> tuple[list[dict[str, Any]], dict[Choice, Estimate], int]:
    """Runs the plans once. Returns of each what is predicted and what it takes, what is predicted of all at first, and
    how many the engine refuses."""
    _, _, first = predicted(name, group)
    now, began, rows, refused = first, time.monotonic(), list[dict[str, Any]](), 0
    for key in thinned([first], number):
        if time.monotonic() - began > FRESH:
            (_, _, now), began = predicted(name, group), time.monotonic()
        estimate = now.get(key, first[key])
        plan = estimate.choice.plan(MODELS[name].pins).to_dict()
        answers = group.call(partial(run, name, plan, key.microbatch, steps, SETTLED))
        if isinstance(answers[0], str):
            refused += 1
            continue
        own = {"key": key, "plan": plan, "microbatch": key.microbatch}
        rows.append({**own, "predicted_ms": 1e3 * estimate.seconds, "measured_ms": step_of(answers)})
    return rows, first, refused


def finals(name: str, group: ProcessGroup, rows: Sequence[dict[str, Any]], found: dict[Choice, Estimate]) -> float:
    """By how much the plan that is predicted to be the fastest takes longer than the fastest."""
    fastest = sorted(rows, key=lambda row: row["measured_ms"])
    near = [row for row in fastest if row["measured_ms"] <= (1 + NEAR) * fastest[0]["measured_ms"]][:FINALISTS]
    chosen = min(rows, key=lambda row: row["predicted_ms"])
    keys = list(dict.fromkeys([chosen["key"], *(row["key"] for row in near)]))
    taken: dict[Choice, list[float]] = {key: [] for key in keys}
    for _ in range(FINALS):
        for key in keys:
            taken[key].append(step_of(turn(name, group, found[key], FINAL_STEPS)))
    medians = {key: statistics.median(each) for key, each in taken.items()}
    return medians[chosen["key"]] / min(medians.values()) - 1


def one_set(name: str, link: str, group: ProcessGroup, number: int, steps: int) -> dict[str, Any]:
    """All of one model behind one kind of link."""
    rows, found, refused = once(name, group, number, steps)
    regret = finals(name, group, rows, found)
    offs = sorted(row["predicted_ms"] / row["measured_ms"] - 1 for row in rows)
    return {
        "model": name,
        "link": link,
        "legal": len(found),
        "plans": len(rows),
        "refused": refused,
        "steps": steps,
        "spearman": spearman(*([row[f"{what}_ms"] for row in rows] for what in ("predicted", "measured"))),
        "regret": regret,
        "median_off": statistics.median(offs),
        "within": {str(share): sum(abs(off) <= share for off in offs) for share in (0.05, 0.1, 0.2)},
        "rows": [{what: value for what, value in row.items() if what != "key"} for row in rows],
    }


def targets() -> list[Target]:
    """What each set should reach."""
    found = []
    for name in MODELS:
        for link in LINKS:
            found += [
                Target(f"{name} {link} spearman", f"{name}, link {link}: correlation of ranks", ORDER, unit=""),
                Target(f"{name} {link} regret", f"{name}, link {link}: the chosen over the fastest", 1 + REGRET, False),
            ]
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", type=harness.several(list(MODELS)), default=list(MODELS))
    parser.add_argument("--links", type=harness.several(list(LINKS)), default=list(LINKS))
    parser.add_argument("--plans", type=int, default=0)
    parser.add_argument("--steps", type=int, default=3)
    arguments = harness.parse(parser, "6 plans", plans=6)
    sets = list[dict[str, Any]]()
    for link in arguments.links:
        with ProcessGroup(standing, {"bits": LINKS[link]}, size=RANKS, warm_up=0) as group:
            for name in arguments.models:
                sets.append(each := one_set(name, link, group, arguments.plans, arguments.steps))
                said = {what: value for what, value in each.items() if what != "rows"}
                print(said, flush=True)
    if not arguments.quick:
        sets = [*kept("planner_survey", sets), *sets]
    found = {f"{each['model']} {each['link']} spearman": each["spearman"] for each in sets}
    found |= {f"{each['model']} {each['link']} regret": 1 + each["regret"] for each in sets}
    verdicts = judge(targets(), found)
    print_targets(verdicts)
    if not arguments.quick:
        print(
            harness.write_record(
                "planner_survey", vars(arguments), {"sets": sets, "targets": verdicts}, ["transformers"]
            )
        )


if __name__ == "__main__":
    main()
