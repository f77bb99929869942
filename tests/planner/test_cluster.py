"""Machines by name and by file, and what is wrong with one."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

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
    assert cluster_of("910bx16", MACHINES, BETWEEN).hosts[0].device.name == "910b"
    with pytest.raises(UserError, match="is no machine"):
        cluster_of("8xh10", MACHINES, BETWEEN)
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


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "describes no hosts"),
        ('[[hosts]]\ndevice = "h1000"', "give one of a100"),
        ('[[hosts]]\ndevice = "h100"\nprize = 3', "prize"),
        ('[[hosts]]\ndevice = "h100"\nnumber = 0', "at least 1"),
        ('[[hosts]]\ndevice = "h100"\nprice = "much"', "not negative"),
        ('[[hosts]]\ndevice = "measured"\nflops = {fp32 = 1e9}', "give bandwidth, device_memory, count, inside"),
        ('[[hosts]]\ndevice = "h100"\nreached = [[2e6, 0.5], [1e6, 0.6]]', "ascending"),
        ('[[hosts]]\ndevice = "h100"\non_host = 1', "true or false"),
        ('[[hosts]]\ndevice = "h100"\n[between]\nreached = [{operation = "send"}]', "give rows such as"),
        ('[[hosts]]\ndevice = "h100"\n[[hosts]]\ndevice = "h100"\ncount = 4', "different numbers"),
        ("[[hosts", "cannot be read"),
    ],
)
def test_what_is_wrong_with_a_file(tmp_path: Path, text: str, said: str) -> None:
    path = tmp_path / "mine.toml"
    path.write_text(text)
    with pytest.raises(UserError, match=said):
        cluster_of(str(path), MACHINES, BETWEEN)


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
                    ((1e6, 0.25), (1e9, 0.8)), 1.25, 0.5)  # fmt: skip
    host = Host(device, 2, Link(1e-5, 2e9, reached), 2**33, 5e9, 1e9, 2e10)
    made = Cluster("mine", (host, host), Link(1e-4, 1e9), 0.3, 0.75, 0.125, 0.0625, said=("measured",))
    write_cluster(tmp_path / "mine.toml", made)
    found = cluster_of(str(tmp_path / "mine.toml"), MACHINES, BETWEEN)
    assert replace(found, said=("measured",)) == made
    with pytest.raises(UserError, match="cannot be written"):
        write_cluster(tmp_path / "nowhere" / "mine.toml", made)
