"""`shoal plan --on`: the plan that the planner found, what it takes, and why, as text, JSON or a page."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any, NamedTuple

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from shoal import units
from shoal.cli.answer_stages import shares_said, stage_table
from shoal.cli.layer_table import layer_lines
from shoal.errors import UserError
from shoal.jobs.answer import Chosen
from shoal.jobs.auto import Asked, ask
from shoal.plan import Plan, nbytes
from shoal.planner.cluster import Cluster
from shoal.planner.explain import NEAR, Explanation, explain, why_not
from shoal.planner.profile import NOT_ASKED
from shoal.planner.replicable import not_kept
from shoal.planner.task import NAMES, ROLES, TERMS, Estimate
from shoal.replace import place_of
from shoal.toml import plan_text, toml_fields

WAYS = {
    "parts": "tensor parallelism",
    "tokens": "context parallelism",
    "ring": "ring context parallelism",
    "experts": "expert parallelism",
    "copies": "data parallelism",
    "stages": "stages",
}
"""The ways to divide a model, or its rows, that a trace can refuse, for a reader."""


class Options(NamedTuple):
    """What `shoal plan` is given beside the job: --on, --pin, --budget, --device and --allow."""

    on: str
    pins: Sequence[str] = ()
    budget: str | None = None
    device: str | None = None
    allow: Sequence[str] = ()


def answer_for(job: Path, assignments: Sequence[str], given: Options, as_json: bool, page: Path | None) -> None:
    """Asks the planner and prints what it found. `page`: an HTML file to write besides. Raises UserError where nothing
    is legal or fits."""
    place = None if page is None else place_of(page, "--html", "plan.html", _is_page)
    limit = None if given.device is None else float(nbytes(given.device, "--device", 1))
    budget, currency = (None, "") if given.budget is None else money(given.budget)
    chosen = ask(job, assignments, Asked(given.on, given.pins, budget, currency, limit, given.allow))
    told = explain(chosen.task, chosen.estimate, chosen.others, refused=[each for each, _ in chosen.passed])
    if place is not None:
        from shoal.cli.answer_page import write_page

        write_page(place, chosen, told)
    if as_json:
        print(json.dumps(to_dict(chosen, told), indent=1))
        return
    console = Console(highlight=False, soft_wrap=True)
    console.print(*lines(chosen, told), sep="\n")
    if page is not None:
        console.print(f"drawn in {page}")


def _is_page(path: Path) -> bool:
    """Whether a file is a page, or empty."""
    with path.open("rb") as file:
        return file.read(15).lower() in (b"", b"<!doctype html>")


def money(text: str) -> tuple[float, str]:
    """Reads "40000USD", "40,000" or "40000 EUR": the amount, and its currency, "" where that is left to the cluster.
    Raises UserError otherwise."""
    found = re.fullmatch(r"\s*((?:[0-9]{1,3}(?:,[0-9]{3})+|[0-9]+)(?:\.[0-9]+)?)\s*([^\d\s]*(?: [^\d\s]+)*)\s*", text)
    amount = 0.0 if found is None else float(found[1].replace(",", ""))
    if found is None or not 0 < amount < math.inf:
        raise UserError(
            f'--budget {text}: give an amount above 0 in digits, and the currency if you like, such as "40000USD"'
        )
    return amount, found[2]


def toml(chosen: Chosen) -> str:
    """The plan as a job file has it, with the microbatch but where that is all of a rank's rows (sync_bn). What was
    given stands there also where it is the default, so that it is given to who asks again."""
    given = {key for key, value in chosen.task.pins.items() if value is not None}
    plan, train = chosen.plan.to_dict(), chosen.settled.job.train
    said = {each.name: getattr(chosen.plan, each.name) for each in fields(Plan) if each.name in plan.keys() | given}
    lines = ["[plan]", *([toml_fields({key: value}) for key, value in said.items()] or ["dp = 1"])]
    if not train.sync_bn:
        rows = train.microbatch or chosen.estimate.choice.microbatch
        lines += ["", "[train]", f"microbatch = {rows}"]
    return "\n".join(lines)


def lines(chosen: Chosen, told: Explanation) -> Iterator[str | Table]:
    """Yields what is printed."""
    task, estimate, cluster = chosen.task, chosen.estimate, chosen.task.cluster
    model = chosen.settled.job.model["name"]
    yield escape(f"{model} of {units.count(task.profile.parameters)} parameters on {devices_said(cluster)}")
    yield ""
    yield escape(toml(chosen))
    yield ""
    yield term_table(estimate)
    yield ""
    yield role_table(chosen)
    yield ""
    if (stages := stage_table(estimate)) is not None:
        yield stages
        yield ""
    yield from shares_said(estimate)
    yield from totals(chosen)
    yield from (escape(each) for each in cluster.said)
    yield ""
    if chosen.layers is not None:
        yield from layer_lines(chosen.layers, dict(chosen.plan.placements or {}))
        yield ""
    yield other_table(chosen, shown(told))
    yield ""
    yield from reasons(chosen, told)


def devices_said(cluster: Cluster) -> str:
    """Says how many devices of each kind there are: "8 x h100 and 8 x a100"."""
    numbers = [sum(host.count for host in cluster.hosts if host.device == each) for each in cluster.devices]
    return " and ".join(f"{number} x {each.name}" for number, each in zip(numbers, cluster.devices, strict=True))


def term_table(estimate: Estimate) -> Table:
    """Makes a table of what a step takes."""
    table = Table(
        title="a step; of communication and offload, what is not hidden", title_justify="left", box=None, pad_edge=False
    )
    for heading, where in (("term", "left"), ("seconds", "right"), ("share", "right"), ("sent by a rank", "right")):
        table.add_column(heading, justify=where, no_wrap=True)  # type: ignore[arg-type]
    for what in TERMS:
        seconds, wire = estimate.terms.get(what, 0.0), estimate.wire.get(what, 0.0)
        if seconds or wire:
            sent = units.size(wire) if wire else ""
            table.add_row(NAMES[what], f"{seconds:.4g}", f"{seconds / estimate.seconds:.1%}", sent)
    table.add_row("[bold]together", f"{estimate.seconds:.4g}", "", units.size(sum(estimate.wire.values())))
    return table


def role_table(chosen: Chosen) -> Table:
    """Makes a table of a rank's memory: by closed form, and as the dry run of the fullest rank counts it. Of a budget
    the closed form fills what there is, and a dry run counts the least that would do."""
    table = Table(title="memory of the fullest rank", title_justify="left", box=None, pad_edge=False)
    for heading in ("role", "estimated", "dry run, at least" if chosen.plan.memory is not None else "dry run"):
        table.add_column(heading, justify="left" if heading == "role" else "right", no_wrap=True)
    fullest = max(chosen.predictions, key=lambda each: each.need.total("device"))
    rows: dict[str, int] = {}
    for row in fullest.need.rows:
        if row.tier == "device":
            rows[row.role] = rows.get(row.role, 0) + row.nbytes
    for role in (*ROLES, *(role for role in rows if role not in ROLES)):
        estimated = chosen.estimate.memory.get(role, 0.0)
        if estimated or rows.get(role):
            table.add_row(role, units.size(estimated), units.size(rows.get(role, 0)))
    table.add_row("[bold]most at a time", units.size(chosen.estimate.bytes), units.size(chosen.bytes))
    for tier, estimated in (("host", chosen.estimate.on_host), ("disk", chosen.estimate.on_disk)):
        if estimated:
            table.add_row(f"at home on the {tier}", units.size(estimated), units.size(fullest.need.total(tier)))
    return table


def totals(chosen: Chosen) -> Iterator[str]:
    """Yields the time, price and energy of the whole job."""
    task, cluster = chosen.task, chosen.task.cluster
    share = chosen.bytes / task.usable
    takes = "needs at least" if chosen.plan.memory else "takes"  # a budget: what is left keeps what is used again
    yield f"a rank {takes} {share:.0%} of the {units.size(task.usable)} that it may use, confirmed by dry runs"
    if task.rows < (batch := chosen.settled.job.train.global_batch):
        yield f"a step has {task.rows} rows, not {batch} as train.global_batch says: the data have no more"
    said = f"{chosen.steps} steps take {units.duration(chosen.hours * 3600)}"
    if chosen.steps != chosen.settled.total:
        said = f"train.seconds = {chosen.settled.job.train.seconds:g} ends the job: {said}"
    if chosen.price is not None:
        said += f" and cost {escape(cluster.money(chosen.price))}"
    if cluster.watts:
        said += f"; the devices use up to {chosen.hours * cluster.watts / 1e3:,.3g} kWh"
    yield said


def other_table(chosen: Chosen, shown: int) -> Table:
    """Makes a table of so many of the next best plans, and of those that a dry run refused."""
    table = Table(title="instead", title_justify="left", box=None, pad_edge=False)
    for heading in ("", "plan", "microbatch", "s", "why not"):
        table.add_column(heading, no_wrap=heading not in ("plan", "why not"))
    for place, each in enumerate(chosen.others[:shown], 1):
        plan = _other(chosen, each)
        why = why_not(chosen.estimate, each)
        table.add_row(str(place), escape(plan), str(each.choice.microbatch), f"{each.seconds:.4g}", why)
    for each, why in chosen.passed[:5]:
        plan = _other(chosen, each)
        table.add_row("-", escape(plan), str(each.choice.microbatch), f"{each.seconds:.4g}", escape(why))
    return table


def shown(told: Explanation) -> int:
    """How many alternatives are shown: the five best, and all that an error of a term would have win."""
    return max((NEAR, *told.fragile.values()))


def _other(chosen: Chosen, other: Estimate) -> str:
    """The plan of another candidate in one line, without the placements, which it has alike."""
    plan = other.choice.plan(chosen.task.pins).to_dict()
    return plan_text({key: value for key, value in plan.items() if key != "placements"})


def reasons(chosen: Chosen, told: Explanation) -> Iterator[str]:
    """Yields what binds, what more would buy, what is fragile, and how far the machine reaches."""
    yield f"held back by {told.binding}"
    for what, seconds in told.bought.items():
        yield f"one more {what} would save {seconds:.3g} s of {chosen.estimate.seconds:.4g} s"
    if told.fragile:
        said = ", ".join(f"{NAMES[what]} (then {place} wins)" for what, place in told.fragile.items())
        yield f"an error of 10% would change the winner in {said}"
    else:
        yield "no error of 10% in one term would change the winner"
    sequence = chosen.settled.job.data.sequence
    if told.blocks is not None:
        size = units.count(told.parameters)
        about = "at least" if told.more_blocks else "about"
        yield f"the largest model of this width that fits has {about} {told.blocks} blocks, {size} parameters"
    if sequence is not None:
        about = "at least" if told.more_rows else "about"
        yield f"the longest row that fits has {about} {int(told.rows * sequence)} tokens"
    devices = chosen.task.cluster.size
    yield f"the smallest part of this machine that would do has {told.devices} of its {devices} devices"
    if chosen.eager:
        yield f"blocks are not compiled: {chosen.eager}"
    refused = {what: why for what, why in _not_cut(chosen).items() if why != NOT_ASKED}
    for what, why in refused.items():
        yield escape(f"no {WAYS[what]}: {why}")
    looked = chosen.found
    yield f"{looked.priced} choices priced, {looked.bounded} of {looked.spreads} degrees left out by their bound"


def _not_cut(chosen: Chosen) -> dict[str, str]:
    """Why ranks cannot divide what, of all that they cannot divide."""
    refused = {what: why for what, why in chosen.task.profile.refused.items() if why}
    return refused | not_kept(chosen.task, chosen.settled.job.train.buffers)


def to_dict(chosen: Chosen, told: Explanation) -> dict[str, Any]:
    """Returns the answer as JSON values; memory in bytes, times in seconds."""
    task, cluster = chosen.task, chosen.task.cluster

    def one(each: Estimate) -> dict[str, Any]:
        return {
            "plan": each.choice.plan(task.pins).to_dict(),
            "microbatch": each.choice.microbatch,
            "seconds": each.seconds,
            "terms": dict(each.terms),
            "memory": dict(each.memory),
            "bytes": each.bytes,
            "on_host": each.on_host,
            "on_disk": each.on_disk,
            "wire": dict(each.wire),
            "recompute_by_stage": [dict(own) for own in each.again],
            "shares": list(each.choice.shares),
        }

    return {
        **one(chosen.estimate),
        "parameters": task.profile.parameters,
        "cluster": {
            "name": cluster.name,
            "devices": cluster.size,
            "said": list(cluster.said),
            "sources": [each.source for each in cluster.devices],
        },
        "dry_run": [
            {"bytes": each.need.total("device"), "rows": [asdict(row) for row in each.need.rows]}
            for each in chosen.predictions
        ],
        "limit": task.usable,
        "steps": chosen.steps,
        "hours": chosen.hours,
        "price": chosen.price,
        "currency": cluster.currency,
        "kwh": chosen.hours * cluster.watts / 1e3 if cluster.watts else None,
        "others": [{**one(each), "why_not": why_not(chosen.estimate, each)} for each in chosen.others[: shown(told)]],
        "refused": [{**one(each), "why": why} for each, why in chosen.passed],
        "explanation": asdict(told),
        "layers": None if chosen.layers is None else asdict(chosen.layers),
        "not_compiled": chosen.eager or None,
        "not_cut": _not_cut(chosen),
        "priced": chosen.found.priced,
    }
