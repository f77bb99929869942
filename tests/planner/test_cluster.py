"""Machines by name and by file, and what is wrong with one."""

from __future__ import annotations

from dataclasses import fields, replace
from pathlib import Path

import pytest

from shoal.cli.answer import devices_said
from shoal.comm import Reach
from shoal.errors import UserError
from shoal.planner.cluster import Cluster, Device, Host, Link
from shoal.planner.cluster_file import cluster_of, write_cluster
from shoal.planner.machines import BETWEEN, MACHINES


def test_machines_by_name() -> None:
    for name, host in MACHINES.items():
        assert host.device.source, name
    one = cluster_of("8xh100", MACHINES, BETWEEN)
    assert one.size == 8 and one.link(1, 8) == MACHINES["h100"].inside
    many = cluster_of("h100x64", MACHINES, BETWEEN)
    assert many.size == 64 and len(many.hosts) == 8
    assert many.link(8, 8) == BETWEEN and many.link(2, 4) == MACHINES["h100"].inside
    assert many.link(1, 64).bandwidth == 8 * BETWEEN.bandwidth  # all ports of a host
    assert many.link(4, 16).bandwidth == 2 * BETWEEN.bandwidth
    assert many.link(1, 64, "all_to_all") == many.link(1, 64, "send") == BETWEEN
    fast = replace(many, between=Link(0.0, 1e12))
    assert fast.link(1, 64).bandwidth == MACHINES["h100"].inside.bandwidth  # no faster than inside
    assert fast.link(1, 64, "send").bandwidth == MACHINES["h100"].inside.bandwidth and fast.link(8, 8) == fast.between
    assert cluster_of("910bx16", MACHINES, BETWEEN).hosts[0].device.name == "910b"
    with pytest.raises(UserError, match=r'^--on "8xh10" is no machine'):
        cluster_of("8xh10", MACHINES, BETWEEN)
    for devices in ("0", "1000000", "9" * 5000):
        with pytest.raises(UserError, match=r'^--on "\w+": give from 1 to 131072 devices|is no machine'):
            cluster_of(f"h100x{devices}", MACHINES, BETWEEN)
    with pytest.raises(UserError, match="a multiple of that"):
        cluster_of("h100x12", MACHINES, BETWEEN)


def test_a_cluster_file(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text(
        'currency = "EUR"\n[[hosts]]\ndevice = "h100"\nnumber = 2\nprice = 20\n[[hosts]]\ndevice = "a100"\n'
        'device_memory = "40GB"\nprice = 10\n[between]\nbandwidth = 1e10\n'
    )
    found = cluster_of(str(path), MACHINES, BETWEEN)
    assert found.size == 24 and found.price == 50 and found.currency == "EUR" and found.memory == 40 * 10**9
    assert found.between.bandwidth == 1e10 and found.between.latency == BETWEEN.latency and len(found.devices) == 2
    assert found.said == (
        f"{path}: hosts of h100 have no count: 8 devices each are taken",
        f"{path}: hosts of a100 have no number: 1 is taken",
        f"{path}: hosts of a100 have no count: 8 devices each are taken",
        f"{path}: between does not say its latency: latency = 1.5e-05 (s, bytes/s), as a port of 400 Gb/s for each "
        "device has, are taken",
    )


def test_a_cluster_file_that_says_all_has_nothing_assumed(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text('[[hosts]]\ndevice = "h100"\nnumber = 1\ncount = 4\n')
    assert cluster_of(str(path), MACHINES, BETWEEN).said == ()  # one host has nothing between


WRONG = {
    "a number above 0": ["0", "1e-300", "-1", "nan", "inf", "true", '"1"'],
    "0 or a number above it": ["-1e-9", "nan", "inf", "-inf", "false", "[1]"],
    "1 or a number above it": ["0.5", "0", "nan", "inf", "true"],
    "a share, above 0 and at most 1": ["0", "1e-300", "70", "nan", "true"],
    "a share from 0 to 1": ["-0.1", "1.1", "nan", "true"],
    "a whole number from 1 to": ["0", "-2", "1.5", "8.0", "inf", "true", "1000000", f"1{'0' * 400}"],
    "byte": ["0", "-1", "nan", "inf", "true", '"0GB"', '"much"'],
}
HOST = '[[hosts]]\ndevice = "h100"\n'
KEYS = {
    "a number above 0": [
        "bandwidth",
        "to_host",
        "update",
        "backward",
        "updating",
        "slower",
        "flops.bf16",
        "inside.bandwidth",
    ],
    "0 or a number above it": ["launch", "disk", "price", "watts", "inside.latency"],
    "1 or a number above it": ["crowd", "cold"],
    "a share, above 0 and at most 1": ["reaches", "streams"],
    "a whole number from 1 to": ["number", "count"],
    "byte": ["device_memory", "memory"],
}
NUMBERS = [(f"{HOST}{{key}} = {{value}}", f"hosts.{key}", said) for said, keys in KEYS.items() for key in keys]
NUMBERS += [
    ("overlap = {value}\n" + HOST, "overlap", "a share from 0 to 1"),
    *((f"{key} = {{value}}\n{HOST}", key, "0 or a number above it") for key in ("contention", "step", "data")),
    (HOST + "[between]\nlatency = {value}", "between.latency", "0 or a number above it"),
    (HOST + "[between]\nbandwidth = {value}", "between.bandwidth", "a number above 0"),
    (HOST + "reached = [[{value}, 0.5]]", "hosts.reached: operations", "a number above 0"),
    (HOST + "reached = [[1e9, {value}]]", "hosts.reached: share", "a share, above 0 and at most 1"),
]


def test_every_number_of_a_host_is_checked() -> None:
    checked = {key for _, key, _ in NUMBERS}
    numbers = [each.name for of in (Device, Host) for each in fields(of) if each.type in ("int", "float")]
    assert not [each for each in numbers if f"hosts.{each}" not in checked] and len(numbers) > 10


@pytest.mark.parametrize(("text", "key", "said"), NUMBERS, ids=[key for _, key, _ in NUMBERS])
def test_numbers_that_cannot_be_are_refused(tmp_path: Path, text: str, key: str, said: str) -> None:
    path = tmp_path / "mine.toml"
    for value in WRONG[said]:
        path.write_text(text.format(key=key.removeprefix("hosts."), value=value))
        with pytest.raises(UserError) as caught:
            cluster_of(str(path), MACHINES, BETWEEN)
        refusal = str(caught.value)
        assert refusal.startswith(f"{path}: {key} = ") and ": give " in refusal and said in refusal, (value, refusal)


def test_devices_of_one_name_are_two_kinds(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text(f"{HOST}flops = {{bf16 = 1e14}}\n{HOST}flops = {{bf16 = 2e14}}\n")
    found = cluster_of(str(path), MACHINES, BETWEEN)
    assert [device.flops["bf16"] for device in found.devices] == [1e14, 2e14]
    assert found.devices[0].flops["fp32"] == MACHINES["h100"].device.flops["fp32"], "what is not said is the h100's"
    assert devices_said(found) == f"8 x h100, changed by {path} and 8 x h100, changed by {path}"


MEASURED = (
    "flops = {fp32 = 1}\nbandwidth = 1\ndevice_memory = 1\ncount = 8\nmemory = 1\nto_host = 1\n"
    "inside = {latency = 1e-6, bandwidth = 1}\n"
)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (HOST + "flops = {bf17 = 1e15}", 'hosts.flops has no format "bf17". Did you mean "bf16"'),
        (HOST + "flops = {}", "give a table by format"),
        (HOST + "name = 3", "hosts.name = 3: give a name"),
        (HOST + "scratch = 3", "give a directory"),
        ("currency = 3\n" + HOST, "currency = 3: give the name of a currency"),
        (HOST + "inside = {latency = 1e-6, speed = 3}", 'hosts.inside has no key "speed"'),
        (
            HOST + '[between]\nreached = [{operation = "allreduce", ranks = 2, latency = 0, bandwidth = 1}]',
            "all_reduce",
        ),
        (
            HOST + '[between]\nreached = [{operation = "send", ranks = 1, latency = 0, bandwidth = 1}]',
            "between.reached.ranks = 1: give a whole number from 2",
        ),
        (
            HOST.replace("h100", "measured") + "flops = {fp32 = 1}\nbandwidth = 1\ndevice_memory = 1\ncount = 1\n"
            "memory = 1\nto_host = 1\ninside = {latency = 1e-6}",
            "hosts.inside = .* give bandwidth, too",
        ),
        ("", "describes no hosts"),
        ('[[hosts]]\ndevice = "h1000"', "give one of a100"),
        ('[[hosts]]\ndevice = "h100"\nprize = 3', "prize"),
        ('[[hosts]]\ndevice = "h100"\nprice = "much"', "hosts.price = 'much': give 0 or a number above it"),
        ('[[hosts]]\ndevice = "measured"\nflops = {fp32 = 1e9}', "give bandwidth, device_memory, count, inside"),
        ('[[hosts]]\ndevice = "h100"\nreached = [[2e6, 0.5], [1e6, 0.6]]', "ascending"),
        ('[[hosts]]\ndevice = "h100"\non_host = 1', "true or false"),
        ('[[hosts]]\ndevice = "h100"\n[between]\nreached = [{operation = "send"}]', "give rows such as"),
        ('[[hosts]]\ndevice = "h100"\n[[hosts]]\ndevice = "h100"\ncount = 4', r"^/.*mine.toml: .* the same count"),
        (
            HOST + "number = 2\ncount = 100000",
            r"^/.*mine.toml: the cluster mine has 200000 .* at most 131072 .*number in \[\[hosts.*count",
        ),
        (HOST + "price = 2.0\n" + HOST, r"hosts.price is given of some of \[\[hosts\]\] only: give it in each, 0 for"),
        (HOST + HOST.replace("h100", "measured") + MEASURED, "hosts.watts is given of some .* in each, of a device"),
        ("[[hosts]]\ncount = 2", "mine.toml: hosts say no device: give one of a100"),
        ('[[hosts]]\ndevice = "l40"', "hosts.device = 'l40': give one of a100, .* all of it. Did you mean \"l40s\"?"),
        (HOST + 'name = ""', "hosts.name = '': give a name for the device"),
        (HOST + 'scratch = " "', "hosts.scratch = ' ': give a directory"),
        ('currency = ""\n' + HOST, "currency = '': give the name of a currency"),
        ("[[hosts", "the cluster file /.*mine.toml is not TOML: "),
        ("hosts = " + "[" * 5000 + "]" * 5000, "the cluster file /.*mine.toml is not TOML: "),
        (b"\xff\xfe\x00", r"the cluster file /.*mine.toml cannot be read: .*\. Give the path of a text file in TOML"),
        (None, r"the cluster file /.*mine.toml cannot be read: Is a directory\. Give the path of a text file"),
    ],
    ids=lambda value: "" if isinstance(value, str) and len(value) > 80 else None,
)
def test_what_is_wrong_with_a_file(tmp_path: Path, text: str | bytes | None, said: str) -> None:
    path = tmp_path / "mine.toml"
    if text is None:
        path.mkdir()
    else:
        path.write_bytes(text.encode() if isinstance(text, str) else text)
    with pytest.raises(UserError, match=said) as caught:
        cluster_of(str(path), MACHINES, BETWEEN)
    assert "\n" not in str(caught.value) and caught.value.exit_code == 2


def test_hosts_that_cost_nothing_are_said_so(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text(HOST + "price = 2.0\n" + HOST + "price = 0\n" + HOST + "watts = 0\nprice = 1\n")
    found = cluster_of(str(path), MACHINES, BETWEEN)
    assert (found.price, found.watts) == (3.0, 2 * 8 * MACHINES["h100"].watts)


def test_collectives_take_what_rings_take() -> None:
    link = Link(1e-6, 1e9)
    assert link.seconds("all_reduce", 8e6, 4) == pytest.approx(6e-6 + 1.5 * 8e-3)
    assert link.seconds("all_gather", 8e6, 4) == pytest.approx(3e-6 + 0.75 * 8e-3)
    assert link.seconds("send", 8e6, 2) == pytest.approx(1e-6 + 8e-3)
    assert link.seconds("all_reduce", 8e6, 1) == 0


def test_measured_collectives_take_what_was_measured() -> None:
    link = Link(1e-6, 1e9, (Reach("all_reduce", 2, 1e-3, 1e8), Reach("all_reduce", 8, 2e-3, 5e7)))
    assert link.seconds("all_reduce", 1e8, 2) == pytest.approx(1.001)
    assert link.seconds("all_reduce", 1e8, 8, 3) == pytest.approx(2.006)
    assert link.seconds("all_reduce", 1e8, 4) == pytest.approx(3e-3 + 1.5)  # as a ring of 4 differs from one of 2
    assert link.seconds("all_gather", 8e6, 4) == Link(1e-6, 1e9).seconds("all_gather", 8e6, 4)
    assert link.times(2).seconds("all_reduce", 1e8, 2) == pytest.approx(0.501)


def test_small_products_reach_less() -> None:
    device = Device("toy", {"fp32": 1e9}, 1, 1.0, reached=((1e3, 0.2), (1e5, 0.6)))
    shares = [device.share(operations) for operations in (1, 1e3, 1e4, 1e5, 1e9)]
    assert shares == pytest.approx([0.2, 0.2, 0.4, 0.6, 0.6])
    assert replace(device, reached=()).share(1e3) == device.reaches


def test_a_measured_cluster_comes_back_from_its_file(tmp_path: Path) -> None:
    reached = (Reach("all_reduce", 2, 1e-3, 1e8), Reach("send", 2, 1e-4, 2e8))
    device = Device('cores of "this" host', {"fp32": 5e10, "bf16": 1e9}, 2**33, 1e10, 0.8, 1.0, 1e-6, "measured", True,
                    ((1e6, 0.25), (1e9, 0.8)), 1.25, 0.5, 2.0, 1.5, 2.5)  # fmt: skip
    host = Host(device, 2, Link(1e-5, 2e9, reached), 2**33, 5e9, 1e9, 2e10)
    made = Cluster("mine", (host, host), Link(1e-4, 1e9), 0.3, 0.75, 0.125, 0.0625, said=("measured",))
    write_cluster(tmp_path / "mine.toml", made)
    found = cluster_of(str(tmp_path / "mine.toml"), MACHINES, BETWEEN)
    assert replace(found, said=("measured",)) == made
    with pytest.raises(UserError, match="cannot be written"):
        write_cluster(tmp_path / "nowhere" / "mine.toml", made)
