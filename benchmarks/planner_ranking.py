"""Question `planner_ranking`: are the plans that the planner ranks first those that are fast?

    python -m benchmarks.planner_ranking [--models gpt,mixtral,resnet] [--links here,slow] [--plans 40] [--rounds 5]
        [--pairs 8] [--steps 4] [--seconds 840] [--quick]

A tiny GPT, a tiny Mixtral and a ResNet, each under the plans that the planner's own space has for 4 ranks of this host
(`--plans`: so many of them, at even distances in the order of the space; 0 for all; and those that come first by any
of three measurements beforehand), with the ranks' own link and behind an emulated slow one. Plans run in turn, round
after round, each in all rounds. Before each round the ranks measure anew what the planner goes by (rates, links, the
model itself), since a machine that is shared takes twice as long in one minute as in the next. A plan's figures are
medians over the rounds: of the mean step of a turn, of two seconds at least, and of what is predicted. Each set is also
judged under a budget of memory, by the plans that fit half of what the largest one needs. By how much the step of the
chosen is off is the median over `--pairs` turns of that plan, of five seconds, each beside what is predicted from
measurements right before and right after it. `--seconds` is divided among the sets: rounds that do not fit are left
out, but for two.

A job with `plan.measure = 3` runs three plans for a few steps each before it goes on with the quickest. What it would
choose is judged beside the first by prediction: of the first three that have its microbatch (trials of a run all have
one) the quickest in the first round, by what the plans take over all rounds.

A set that was run replaces that of the record, results/planner_ranking.json; the others stay, so it may be run in
pieces. Two predictions are judged: that of the measured rates, and that after one comparison, in which the plain
data-parallel plan tells how much slower computing is than measured (`shoal plan --compare` keeps the same number).
"""

from __future__ import annotations

import argparse
import math
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from benchmarks import harness
from benchmarks.planner_plans import LINKS, MODELS, RANKS, every, ran, reaches, run, standing, task_of
from benchmarks.processes import ProcessGroup
from benchmarks.targets import Target, judge, print_targets
from shoal.comm import Reaches
from shoal.planner.cluster import Cluster
from shoal.planner.measure import here
from shoal.planner.search import Search
from shoal.planner.task import Choice, Estimate, Task
from shoal.toml import plan_text

REGRET, ORDER, ERROR = 0.05, 0.8, 0.05
TRIED = 3
"""Plans that a run with `plan.measure` of so many tries."""
LEAST, PAIRED = 2.0, 5.0
"""Seconds of steps that a turn of a plan has at least, in a round and in a pair: of a step of 30 ms more are run than
of one of 500. The kernel brings pages to a disk every five seconds."""
MEASURED = 3
"""Measurements before the first round, whose first plans are run."""
BUDGETS = {"": 1.0, " in half the memory": 0.5}


def spearman(one: Sequence[float], other: Sequence[float]) -> float:
    """The correlation of ranks; equal values share the mean of theirs."""
    first, second = _ranks(one), _ranks(other)
    return statistics.correlation(first, second) if len(set(first)) > 1 and len(set(second)) > 1 else 0.0


def _ranks(values: Sequence[float]) -> list[float]:
    return [sum(other < each for other in values) + sum(other == each for other in values) / 2 for each in values]


def thinned(measured: Sequence[dict[Choice, Estimate]], number: int) -> dict[Choice, Estimate]:
    """So many plans at even distances, all for 0, and the first by each prediction. `measured`: what is predicted of
    all plans, by measurement."""
    first, chosen = measured[0], {min(each, key=lambda key: each[key].seconds) for each in measured}
    keys = list(first)
    if not number or number >= len(keys):
        chosen |= set(keys)
    else:
        chosen |= {keys[round(place * (len(keys) - 1) / (number - 1))] for place in range(number)}
    return {key: each for key, each in first.items() if key in chosen}


@dataclass
class Judged:
    """A plan that is run. `samples`: milliseconds of a step by round; `predicted`, `learnt`: those that were predicted
    in the same rounds, from measured rates and after a comparison; `refused`: why it does not run."""

    estimate: Estimate
    samples: list[float] = field(default_factory=list)
    predicted: list[float] = field(default_factory=list)
    learnt: list[float] = field(default_factory=list)
    refused: str = ""

    def row(self) -> dict[str, Any]:
        """What is recorded of it."""
        by = {"predicted": self.predicted, "learnt": self.learnt}
        off = (
            (f"{name}_off", [each / taken - 1 for each, taken in zip(of, self.samples, strict=True)])
            for name, of in by.items()
        )
        return {
            "plan": self.estimate.choice.plan({}).to_dict(),
            "microbatch": self.estimate.choice.microbatch,
            **{f"{name}_ms": statistics.median(of) for name, of in by.items()},
            **{name: statistics.median(each) for name, each in off},
            "terms_ms": {what: 1e3 * value for what, value in self.estimate.terms.items() if value},
            "mib": self.estimate.bytes / 2**20,
            "measured_ms": statistics.median(self.samples),
            "samples_ms": self.samples,
        }


def asked(name: str, group: ProcessGroup) -> tuple[Task, str]:
    """What the planner is asked, as the machine is now, and what its links reach."""
    groups: Reaches = group.call(reaches)[0]
    cluster = here(RANKS, RANKS, torch.float32, groups=groups, fresh=True)
    return task_of(name, cluster, group.call(partial(ran, name))[0]), str(groups)


def step_of(answers: Sequence[Sequence[float]]) -> float:
    """Milliseconds of a step of a turn, the mean over its steps and the ranks: what a job takes, also where some steps
    wait for pages of a disk."""
    return statistics.fmean(statistics.fmean(of_a_rank) for of_a_rank in answers)


def turn(name: str, group: ProcessGroup, estimate: Estimate, steps: int, least: float = LEAST) -> list[Any]:
    """What each rank says of a turn of the plan (`planner_plans.run`): of so many steps, or of those of `least` seconds
    if these are more."""
    choice, enough = estimate.choice, math.ceil(least / estimate.seconds)
    plan = choice.plan(MODELS[name].pins).to_dict()
    return group.call(partial(run, name, plan, choice.microbatch, max(steps, enough)))


def predicted(name: str, group: ProcessGroup) -> tuple[Task, str, dict[Choice, Estimate]]:
    """What the planner is asked, as the machine is now, what its links reach, and what is predicted of all plans."""
    task, carrier = asked(name, group)
    return task, carrier, {_key(each): each for each in every(name, task)}


def one_round(name: str, group: ProcessGroup, known: dict[Choice, Judged], steps: int) -> tuple[str, float]:
    """Measures what the planner goes by, and runs each plan once. Returns what the links reach, and how many times
    longer computing takes than measured."""
    task, carrier, found = predicted(name, group)
    ran_now = {key: each for key, each in known.items() if not each.refused and key in found}
    for key, each in ran_now.items():
        answers = turn(name, group, found[key], steps)
        if isinstance(answers[0], str):
            each.refused = answers[0]
            continue
        each.samples.append(step_of(answers))
        each.predicted.append(1e3 * found[key].seconds)
    ran_now = {key: each for key, each in ran_now.items() if not each.refused}
    factor = learning([(found[key], each.samples[-1]) for key, each in ran_now.items()])
    again = {_key(each): each for each in every(name, replace(task, cluster=slower(task.cluster, factor)))}
    for key, each in ran_now.items():
        each.learnt.append(1e3 * again.get(key, found[key]).seconds)
    return carrier, factor


def steps_off(name: str, group: ProcessGroup, choice: Choice, pairs: int, steps: int) -> list[float]:
    """By which share of it the step of a plan is off what is predicted right before and right after it, the mean of
    both, one pair after the other."""

    def now() -> Estimate:
        search = Search(replace(asked(name, group)[0], recompute=(str(choice.recompute),)))
        return search.simulated(search.estimate(choice))

    off, before = [], now()
    for _ in range(pairs):
        taken = step_of(turn(name, group, before, steps, PAIRED))
        after = now()
        off.append(1e3 * (before.seconds + after.seconds) / 2 / taken - 1)
        before = after
    return off


def judged(rows: Sequence[dict[str, Any]], name: str) -> dict[str, float]:
    """How a prediction ranks the plans of `rows`; `error`: by how much the step of the chosen is off in the same
    rounds; `spread`: the median over plans of what their rounds differ by."""
    predicted, taken = [row[f"{name}_ms"] for row in rows], [row["measured_ms"] for row in rows]
    first = min(range(len(rows)), key=predicted.__getitem__)
    spreads = [max(row["samples_ms"]) / min(row["samples_ms"]) - 1 for row in rows]
    return {
        "plans": len(rows),
        "spearman": spearman(predicted, taken),
        "regret": taken[first] / min(taken) - 1,
        "error": rows[first][f"{name}_off"],
        "spread": statistics.median(spreads),
    }


def with_tried(each: dict[str, Any]) -> dict[str, Any]:
    """A set with how much longer than the fastest the plan takes that a run chooses of those that it tries."""
    for budget, rows in within_budgets(each["rows"]).items():
        for name in ("predicted", "learnt"):
            chosen = min(tried(rows, name), key=lambda row: row["samples_ms"][0])
            fastest = min(row["measured_ms"] for row in rows)
            each["judged"][f"{name}{budget}"]["tried"] = chosen["measured_ms"] / fastest - 1
    return each


def tried(rows: Sequence[dict[str, Any]], name: str) -> list[dict[str, Any]]:
    """The plans that a run tries: the first ones by prediction that have the microbatch of the first."""
    ranked = sorted(rows, key=lambda row: row[f"{name}_ms"])
    return [row for row in ranked if row["microbatch"] == ranked[0]["microbatch"]][:TRIED]


def within_budgets(rows: Sequence[dict[str, Any]]) -> dict[str, list[dict[str, Any]]]:
    """The plans that fit each budget of memory, where any does."""
    largest = max(row["mib"] for row in rows)
    found = {budget: [row for row in rows if row["mib"] <= share * largest] for budget, share in BUDGETS.items()}
    return {budget: own for budget, own in found.items() if own}


def learning(ran: Sequence[tuple[Estimate, float]]) -> float:
    """How many times longer computing takes than measured, by the plain data-parallel plan; 1 where none ran. `ran`:
    plans with the milliseconds of their steps."""
    for each, taken in ran:
        if set(each.choice.plan({}).to_dict()) <= {"dp"}:
            computing = sum(each.terms.get(what, 0.0) for what in ("compute", "optimizer"))
            return max(0.1, (taken / 1e3 - (each.seconds - computing)) / computing)
    return 1.0


def slower(cluster: Cluster, factor: float) -> Cluster:
    """The cluster whose devices compute so many times slower."""
    hosts = []
    for host in cluster.hosts:
        device, flops = host.device, {name: rate / factor for name, rate in host.device.flops.items()}
        device = replace(device, flops=flops, bandwidth=device.bandwidth / factor, launch=device.launch * factor)
        hosts.append(replace(host, device=device))
    return replace(cluster, hosts=tuple(hosts))


def one_set(
    name: str, link_name: str, group: ProcessGroup, seconds: float, arguments: argparse.Namespace
) -> dict[str, Any]:
    """All of one model behind one kind of link."""
    measured = [predicted(name, group)[2] for _ in range(MEASURED)]
    known = {key: Judged(each) for key, each in thinned(measured, arguments.plans).items()}
    carriers, factors, began = [], [], time.monotonic()
    for number in range(arguments.rounds):
        if number >= 2 and (time.monotonic() - began) * (number + 1) / number > seconds:
            break
        carrier, factor = one_round(name, group, known, arguments.steps)
        carriers.append(carrier)
        factors.append(factor)
    ran_now = {key: each.row() for key, each in known.items() if each.samples}
    chosen = dict[str, dict[str, Any]]()
    for budget, rows in within_budgets(list(ran_now.values())).items():
        chosen |= {f"{of}{budget}": judged(rows, of) for of in ("predicted", "learnt")}
        chosen_row = min(rows, key=lambda row: row["predicted_ms"])
        first = next(key for key, row in ran_now.items() if row is chosen_row)
        off = steps_off(name, group, first, arguments.pairs, arguments.steps)
        chosen[f"predicted{budget}"] |= {"error": statistics.median(off), "errors": off}
    found = {
        "model": name,
        "link": link_name,
        "carrier": carriers[0],
        "slower": statistics.median(factors),
        "refused": {plan_text(key.plan({}).to_dict()): each.refused for key, each in known.items() if each.refused},
        "judged": chosen,
        "rows": list(ran_now.values()),
    }
    return with_tried(found)


def _key(each: Estimate) -> Choice:
    """The plan, without what prices find of it."""
    return each.choice._replace(stages=(), shares=())


def targets() -> list[Target]:
    """What each set should reach."""
    found = []
    for name in MODELS:
        for link_name in LINKS:
            for budget in BUDGETS:
                key, where = f"{name} {link_name}{budget}", f"{name}, link {link_name}{budget}"
                found += [
                    Target(f"{key} spearman", f"{where}: correlation of ranks", ORDER, unit=""),
                    Target(f"{key} regret", f"{where}: the chosen over the fastest", 1 + REGRET, False),
                    Target(f"{key} tried", f"{where}: that chosen of three tried", 1 + REGRET, False),
                    Target(f"{key} error", f"{where}: step of the chosen, off by", ERROR, False, unit=""),
                ]
    return found


def figures(sets: Sequence[dict[str, Any]]) -> dict[str, float]:
    """What the targets judge: the prediction from measured rates."""
    found = {}
    for each in sets:
        for budget in BUDGETS:
            key, of = f"{each['model']} {each['link']}{budget}", each["judged"].get(f"predicted{budget}")
            if of is None:  # no plan that ran fits that
                continue
            found[f"{key} spearman"], found[f"{key} regret"] = of["spearman"], 1 + of["regret"]
            found[f"{key} tried"] = 1 + of["tried"]
            found[f"{key} error"] = abs(of["error"])
    return found


def print_set(each: dict[str, Any]) -> None:
    """Prints how one set is ranked."""
    title = f"{each['model']}, link {each['link']} ({each['carrier']}), computing {each['slower']:.2f} times slower"
    table = Table(title=title, title_justify="left", box=None)
    chosen = "chosen over best", "of three tried", "step of the chosen"
    for heading in ("prediction", "plans", "Spearman", *chosen, "spread of rounds"):
        table.add_column(heading)
    for key, of in each["judged"].items():
        shares = f"{of['regret']:+.1%}", f"{of['tried']:+.1%}", f"{of['error']:+.1%}", f"{of['spread']:.1%}"
        table.add_row(key, str(of["plans"]), f"{of['spearman']:.3f}", *shares)
    console = Console(width=160)
    console.print(table)
    for plan, why in each["refused"].items():
        console.print(f"refused: {plan}: {why}", markup=False)


def kept(question: str, sets: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The sets of the last record of a question that are none of `sets`, which were run again."""
    before = (harness.read_record(question) or {"results": {"sets": []}})["results"]["sets"]
    ran = {(each["model"], each["link"]) for each in sets}
    return [each for each in before if (each["model"], each["link"]) not in ran]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", type=harness.several(list(MODELS)), default=list(MODELS))
    parser.add_argument("--links", type=harness.several(list(LINKS)), default=list(LINKS))
    parser.add_argument("--plans", type=int, default=40)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--pairs", type=int, default=8)
    parser.add_argument("--seconds", type=float, default=840.0)
    arguments = harness.parse(parser, "4 plans, 2 rounds and pairs of 2 steps", plans=4, rounds=2, pairs=2, steps=2)
    sets = []
    seconds = arguments.seconds / (len(arguments.models) * len(arguments.links))
    for link_name in arguments.links:
        with ProcessGroup(standing, {"bits": LINKS[link_name]}, size=RANKS, warm_up=0) as group:
            for name in arguments.models:
                sets.append(one_set(name, link_name, group, seconds, arguments))
                print_set(sets[-1])
    every_set = sets if arguments.quick else [*map(with_tried, kept("planner_ranking", sets)), *sets]
    verdicts = judge(targets(), figures(every_set))
    print_targets(verdicts)
    if not arguments.quick:
        record = {"sets": every_set, "targets": verdicts}
        print(harness.write_record("planner_ranking", vars(arguments), record, ["transformers"]))


if __name__ == "__main__":
    main()
