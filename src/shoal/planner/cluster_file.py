"""Clusters by name, and in TOML files: how they are read, and how one that was measured is written.

8xh100, h200x64             hosts of eight of that machine; x64 after the name counts devices too
cluster.toml                [[hosts]] device = "h100", count = 8, number = 2, price = 24.0; [between] bandwidth = ...
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from shoal.comm import Reach
from shoal.errors import UserError, check_choice, check_names, did_you_mean
from shoal.plan import nbytes
from shoal.planner.cluster import FORMATS, MOST_DEVICES, ROUNDED, Cluster, Device, Host, Link
from shoal.replace import replace_text
from shoal.toml import read_toml, toml_value

LEAST, LARGEST = 1e-30, 1e30
"""Numbers are below the second, and what is below the first counts as 0: none of the units has as few, or as many, of
anything."""
Allowed = tuple[str, Callable[[Any], bool]]
"""What a number may be, in words and as a test."""
OTHERS = ("overlap", "contention", "step", "data")
"""Keys of a file that are numbers of the whole cluster."""
LINKED = ("latency", "bandwidth")
"""Keys of a link."""
MEASURED = "measured"
"""In the place of a machine's name: the file says all of it."""
NEEDED = ("flops", "bandwidth", "device_memory", "count", "inside", "memory", "to_host")
"""What it then has to say."""
ABOVE_0: Allowed = ("a number above 0", lambda value: LEAST <= value < LARGEST)
FROM_0: Allowed = ("0 or a number above it", lambda value: 0 <= value < LARGEST)
FROM_1: Allowed = ("1 or a number above it", lambda value: 1 <= value < LARGEST)
SHARE: Allowed = ("a share, above 0 and at most 1", lambda value: LEAST <= value <= 1)
WHOLE: Allowed = (
    f"a whole number from 1 to {MOST_DEVICES}",
    lambda value: isinstance(value, int) and 1 <= value <= MOST_DEVICES,
)
GROUP: Allowed = (f"a whole number from 2 to {MOST_DEVICES}", lambda value: WHOLE[1](value) and value > 1)
NUMBERS = {
    "overlap": ("a share from 0 to 1", lambda value: 0 <= value <= 1),
    "contention": FROM_0, "step": FROM_0, "data": FROM_0,
    "number": WHOLE, "count": WHOLE, "price": FROM_0, "watts": FROM_0,
    "rate": ABOVE_0, "operations": ABOVE_0, "ranks": GROUP,
    "bandwidth": ABOVE_0, "latency": FROM_0, "launch": FROM_0, "reaches": SHARE, "streams": SHARE,
    "to_host": ABOVE_0, "disk": FROM_0, "update": ABOVE_0, "backward": ABOVE_0, "updating": ABOVE_0,
    "slower": ABOVE_0, "crowd": FROM_1, "cold": FROM_1,
}  # fmt: skip
"""What each numeric key of a file may be, but those of bytes."""
TEXTS = {
    "name": "a name for the device",
    "source": "where the figures are from, as a text",
    "scratch": "a directory on the host's disk",
}
SUMMED = {"price": "0 for hosts that cost nothing", "watts": "of a device"}
"""Keys whose sum over all hosts is told, and how each host says it."""
OPERATIONS = (
    "all_reduce", "reduce_scatter", "all_gather", "all_to_all", "exchange", "send", "broadcast", "gather", "scatter",
)  # fmt: skip
"""What `reached` may have rows of."""
BLANK = Host(Device(MEASURED, {}, 0, 1.0), 1, Link(0.0, 1.0), 0, 1.0)
"""A host of which nothing is known but the usual shares."""
NAMED = re.compile(r"(?:(?P<number>\d{1,9})x)?(?P<name>[a-z0-9]*?[a-z][a-z0-9]*?)(?:x(?P<total>\d{1,9}))?")


def cluster_of(text: str, machines: Mapping[str, Host], between: Link, asked: str = "--on") -> Cluster:
    """Reads what --on gives: the path of a cluster file, or a name such as "8xh100", "h100x64". Raises UserError
    otherwise. `asked`: where it was given."""
    if text.endswith(".toml"):
        return read_cluster(Path(text), machines, between)
    found = NAMED.fullmatch(text.lower())
    known = [] if found is None else [name for name in machines if name == found["name"]]
    if found is None or not known or (found["number"] and found["total"]):
        name = "" if found is None else found["name"]
        raise UserError(
            f'{asked} "{text}" is no machine.{did_you_mean(name, list(machines))} Give 8xNAME or NAMEx64 (devices) '
            f"with one of {', '.join(machines)}, or the path of a cluster file, *.toml"
        )
    host, devices = machines[known[0]], int(found["total"] or found["number"] or machines[known[0]].count)
    if not 1 <= devices <= MOST_DEVICES:
        raise UserError(f'{asked} "{text}": give from 1 to {MOST_DEVICES} devices')
    if devices > host.count and devices % host.count:
        raise UserError(
            f'{asked} "{text}": hosts of {known[0]} have {host.count} devices, so more are a multiple of that'
        )
    if devices <= host.count:
        hosts: tuple[Host, ...] = (replace(host, count=devices, price=host.price * devices / host.count),)
    else:
        hosts = (host,) * (devices // host.count)
    return Cluster(text, hosts, between)


def read_cluster(path: Path, machines: Mapping[str, Host], between: Link) -> Cluster:
    """Reads a cluster file. Raises UserError for an unknown key, or a value of another kind."""
    content = read_toml(path, "cluster file", "Give the path of one, or a machine by name, such as 8xh100")
    check_names(f"{path} has no key", content, ["hosts", "between", *OTHERS, "currency"], "Keys")
    tables = content.get("hosts")
    if not isinstance(tables, list) or not tables or not all(isinstance(each, Mapping) for each in tables):
        raise UserError(f'{path} describes no hosts: give [[hosts]] with device = "h100", count = 8, number = 2')
    by_table = [_hosts(dict(table), str(path), machines) for table in tables]
    _check_summed(tables, by_table, str(path))
    hosts = [host for each in by_table for host in each]
    others = {key: _number(content[key], key, f"{path}: {key}") for key in OTHERS if key in content}
    link = _link(content.get("between", {}), f"{path}: between", between)
    assumed = list(_assumed(tables, machines, str(path)))
    if len(hosts) > 1 and (missing := [key for key in LINKED if key not in content.get("between", {})]):
        taken = " and ".join(f"{key} = {getattr(link, key):g}" for key in missing)
        assumed.append(f"{path}: between does not say its {' and '.join(missing)}: {taken} (s, bytes/s), as a port of "
                       "400 Gb/s for each device has, are taken")  # fmt: skip
    currency = _text(content.get("currency", "USD"), f"{path}: currency", 'the name of a currency, such as "USD"')
    try:
        return Cluster(path.stem, tuple(hosts), link, currency=currency, said=tuple(assumed), **others)
    except UserError as error:
        raise UserError(f"{path}: {error}") from None


def _assumed(tables: Sequence[Mapping[str, Any]], machines: Mapping[str, Host], where: str) -> Iterator[str]:
    """What is taken for how many hosts and devices there are, where the `tables` do not say it."""
    for table in tables:
        name = table["device"]
        if "number" not in table:
            yield f"{where}: hosts of {name} have no number: 1 is taken"
        if "count" not in table and name in machines:
            yield f"{where}: hosts of {name} have no count: {machines[name].count} devices each are taken"


def _number(value: Any, key: str, what: str) -> Any:
    """Returns a number that `key` may have. Raises UserError for another value, or what is none."""
    said, holds = NUMBERS[key]
    if isinstance(value, bool) or not isinstance(value, int | float) or not holds(value):
        raise UserError(f"{what} = {value!r}: give {said}")
    return value


def _text(value: Any, what: str, said: str) -> str:
    if not isinstance(value, str) or not value.strip():
        raise UserError(f"{what} = {value!r}: give {said}")
    return value


def _hosts(table: dict[str, Any], where: str, machines: Mapping[str, Host]) -> list[Host]:
    """The hosts of one [[hosts]] table: a machine by name, with what is said otherwise."""
    own = [each.name for each in fields(Device) if each.name != "memory"]
    keys = ["device", "number", "device_memory", *own, *(each.name for each in fields(Host) if each.name != "device")]
    check_names(f"{where}: hosts has no key", table, keys, "Keys")
    name, number = table.pop("device", None), table.pop("number", 1)
    if name not in (*machines, MEASURED):
        said, hint = ("hosts say no device", "") if name is None else _unknown(name, machines)
        raise UserError(
            f"{where}: {said}: give one of {', '.join(machines)}, the nearest to yours, and what differs beside it "
            f'(flops, device_memory, bandwidth, ...), or "{MEASURED}" and all of it.{hint}'
        )
    if name == MEASURED and (missing := [key for key in NEEDED if key not in table]):
        raise UserError(f'{where}: hosts.device = "{MEASURED}": give {", ".join(missing)}, too')
    _number(number, "number", f"{where}: hosts.number")
    host = machines.get(name, BLANK)
    changed = {key: table.pop(key) for key in own if key in table}
    if "device_memory" in table:
        changed["memory"] = nbytes(table.pop("device_memory"), f"{where}: hosts.device_memory", 1)
    if "inside" in table:
        table["inside"] = _link(table["inside"], f"{where}: hosts.inside", None if host is BLANK else host.inside)
    if "memory" in table:
        table["memory"] = nbytes(table["memory"], f"{where}: hosts.memory", 1)
    if "reached" in changed:
        changed["reached"] = _shares(changed["reached"], f"{where}: hosts.reached")
    if "flops" in changed:
        changed["flops"] = {**host.device.flops, **_flops(changed["flops"], f"{where}: hosts.flops")}
    if not isinstance(changed.get("on_host", False), bool):
        raise UserError(f"{where}: hosts.on_host = {changed['on_host']!r}: give true or false")
    for key, said in TEXTS.items():
        if key in table or key in changed:
            _text({**table, **changed}[key], f"{where}: hosts.{key}", said)
    for key, value in {**table, **changed}.items():
        if key in NUMBERS:
            _number(value, key, f"{where}: hosts.{key}")
    changed.setdefault("name", name if not changed else f"{name}, changed by {where}")
    return [replace(host, device=replace(host.device, **changed), **table)] * number


def _unknown(name: Any, machines: Mapping[str, Host]) -> tuple[str, str]:
    return f"hosts.device = {name!r:.100}", did_you_mean(str(name), [*machines, MEASURED])


def _check_summed(tables: Sequence[Mapping[str, Any]], hosts: Sequence[Sequence[Host]], where: str) -> None:
    """Raises UserError where price or energy of the whole would leave out hosts that do not say theirs."""
    for key, of_each in SUMMED.items():
        values = [getattr(each[0], key) for each in hosts]
        if any(values) and any(not value and key not in table for table, value in zip(tables, values, strict=True)):
            raise UserError(f"{where}: hosts.{key} is given of some of [[hosts]] only: give it in each, {of_each}")


def _link(table: Any, what: str, default: Link | None) -> Link:
    """Reads a link; what it does not say is that of `default`. Raises UserError where it says too little."""
    if not isinstance(table, Mapping):
        raise UserError(f"{what} = {table!r}: give a table with latency (s) and bandwidth (bytes/s each way)")
    check_names(f"{what} has no key", table, [*LINKED, "reached"], "Keys")
    reached = _reached(table.get("reached", ()), f"{what}.reached")
    values = {key: float(_number(table[key], key, f"{what}.{key}")) for key in LINKED if key in table}
    if default is None and (missing := [key for key in LINKED if key not in values]):
        raise UserError(f"{what} = {dict(table)!r:.200}: give {' and '.join(missing)}, too")
    return Link(
        **{**({} if default is None else {key: getattr(default, key) for key in LINKED}), **values}, reached=reached
    )


def _reached(rows: Any, what: str) -> tuple[Reach, ...]:
    keys = [each.name for each in fields(Reach)]
    if not isinstance(rows, Sequence) or not all(isinstance(row, Mapping) and row.keys() == {*keys} for row in rows):
        raise UserError(
            f'{what} = {rows!r:.200}: give rows such as {{operation = "all_reduce", ranks = 2, latency = 3e-5, '
            "bandwidth = 2e9}"
        )
    for row in rows:
        check_choice(f'{what} has no operation "{row["operation"]}": give one of', row["operation"], OPERATIONS)
        for key in keys[1:]:
            _number(row[key], key, f"{what}.{key}")
    return tuple(Reach(**row) for row in rows)


def _shares(rows: Any, what: str) -> tuple[tuple[float, float], ...]:
    try:
        found = tuple((operations, share) for operations, share in rows)
        if sorted({operations for operations, _ in found}) != [operations for operations, _ in found]:
            raise ValueError
    except (TypeError, ValueError):
        raise UserError(
            f"{what} = {rows!r:.200}: give pairs of operations of a product, ascending, and the share of the peak that "
            "it reaches"
        ) from None
    for operations, share in found:
        _number(operations, "operations", f"{what}: operations")
        _number(share, "reaches", f"{what}: share")
    return found


def _flops(table: Any, what: str) -> Mapping[str, float]:
    if not isinstance(table, Mapping) or not table:
        raise UserError(f"{what} = {table!r}: give a table by format, such as {{bf16 = 9.9e14}}")
    check_names(f"{what} has no format", table, (*FORMATS.values(), *ROUNDED), "Formats")
    return {name: _number(rate, "rate", f"{what}.{name}") for name, rate in table.items()}


def write_cluster(path: Path, cluster: Cluster) -> None:
    """Writes a cluster that was measured, for `read_cluster`. Raises UserError where the file cannot be written."""
    said = "".join(f"# {each}\n" for each in cluster.said)
    others = {key: getattr(cluster, key) for key in OTHERS}
    text = said + "".join(f"{line}\n" for line in _lines(others))
    for place, host in enumerate(cluster.hosts):
        if host in cluster.hosts[:place]:
            continue
        values = {each.name: getattr(host, each.name) for each in fields(Host) if each.name not in ("device", "inside")}
        own = {each.name: getattr(host.device, each.name) for each in fields(Device)}
        own["device_memory"] = own.pop("memory")
        table = {"device": MEASURED, "number": cluster.hosts.count(host), **own, **values}
        table = {key: value for key, value in table.items() if value != ""}
        text += "\n[[hosts]]\n" + "".join(f"{line}\n" for line in _lines(table))
        text += "[hosts.inside]\n" + "".join(f"{line}\n" for line in _of_link(host.inside))
    text += "\n[between]\n" + "".join(f"{line}\n" for line in _of_link(cluster.between))
    try:
        replace_text(path, text)
    except OSError as error:
        raise UserError(f"the cluster file {path} cannot be written: {error.strerror}") from error


def _of_link(link: Link) -> Iterator[str]:
    yield from _lines({"latency": link.latency, "bandwidth": link.bandwidth})
    if link.reached:
        rows = ",\n".join(f"    {toml_value(_short(vars(each)))}" for each in link.reached)
        yield f"reached = [\n{rows},\n]"


def _lines(values: Mapping[str, Any]) -> Iterator[str]:
    for key, value in values.items():
        yield f"{key} = {toml_value(_short(value))}"


def _short(value: Any) -> Any:
    """A value with five digits of each number."""
    if isinstance(value, Mapping):
        return {key: _short(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_short(each) for each in value]
    return float(f"{value:.5g}") if isinstance(value, float) else value
