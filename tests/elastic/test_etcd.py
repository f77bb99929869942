"""Supervisors whose coordinator is elected in etcd: one that pretends, and a real cluster (matrix)."""

from __future__ import annotations

import asyncio
import socket
import threading
import time
from collections import Counter
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest

from shoal.elastic import etcd_election
from shoal.elastic.election import Candidate, Office
from shoal.elastic.etcd import Address, Etcd, Unreachable, parse, put
from shoal.elastic.etcd_election import EtcdElection
from shoal.elastic.events import Draining, Finish, Joined, StepDown
from shoal.elastic.journal import Journal
from shoal.elastic.messages import Drain
from shoal.errors import LaunchError, UserError
from tests.elastic.clock import in_a_loop
from tests.elastic.cluster import KEY, Member, close, generation, until
from tests.elastic.etcd import Pretended, Real

PREFIX = "/jobs/one/"


@pytest.fixture(params=["pretended", pytest.param("real", marks=pytest.mark.matrix)])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    cluster = Pretended() if request.param == "pretended" else Real(tmp_path)
    asyncio.run(answers(cluster.url))
    yield cluster.url
    cluster.close()


async def answers(url: str, seconds: float = 30.0) -> None:
    deadline = time.monotonic() + seconds
    while True:
        try:
            await Etcd(parse(url)).get("/")
            return
        except Unreachable:
            assert time.monotonic() < deadline
            await asyncio.sleep(0.1)


def names(url: str) -> list[str]:
    found = asyncio.run(Etcd(parse(url)).below(PREFIX))
    return [key.removeprefix(PREFIX) for key, _ in found]


def test_the_first_node_founds_the_others_join_and_a_killed_coordinator_is_replaced_at_once(url: str) -> None:
    @in_a_loop
    async def job() -> None:
        a = Member("node").by_etcd(url).run()
        await until(lambda: generation(a) == 1)
        b, c = (Member("node").by_etcd(url).run() for _ in range(2))
        await until(lambda: generation(a, b, c) > 1)
        assert sorted(each.at.name for each in (a, b, c)) == ["node", "node.2", "node.3"]
        assert not b.at.succession.journal.lines and b.at._coordinator is None
        before = generation(a, b, c)
        await a.die()
        assert await until(lambda: generation(b, c) > before) < 3.0  # the port refuses: the lease is not waited for
        leader = next(each for each in (b, c) if each.at._coordinator is not None)
        leader.supervisor.wish(Drain())
        assert await leader.task == 143
        last = b if leader is c else c
        await until(lambda: generation(last) > before + 1)
        d = Member("node").by_etcd(url).run()
        await until(lambda: generation(last, d))
        for member in (last, d):
            member.starts[-1].end("finished")
        assert [await last.task, await d.task] == [0, 0]

    job()
    assert names(url) == []  # the job is over


def test_a_coordinator_that_etcd_does_not_answer_steps_down_and_another_takes_over(url: str, monkeypatch) -> None:
    monkeypatch.setattr(etcd_election, "LEASE", 2)

    @in_a_loop
    async def job() -> None:
        a = Member("a").by_etcd(url).run()
        await until(lambda: generation(a) == 1)
        b = Member("b").by_etcd(url).run()
        await until(lambda: generation(a, b))
        before = generation(a, b)

        def cut(path: str, body: Any) -> dict[str, Any]:
            raise Unreachable("no etcd answers: it is behind a cut link")

        keys = a.at._election._keys
        whole, keys.etcd._ask_all = keys.etcd._ask_all, cut
        took = await until(lambda: generation(b) > before, 15)
        assert took > 1.0 and any("etcd has not renewed its lease" in line for line in a.said)
        assert a.at._coordinator is None and a.runs is None  # two nodes: there is no majority, and none is needed
        keys.etcd._ask_all = whole
        await until(lambda: generation(a, b) > before + 1)
        assert b.at._coordinator is not None
        await close(a, b)

    job()


def test_who_looks_for_a_coordinator_watches_its_key_instead_of_asking_again_and_again(url: str) -> None:
    @in_a_loop
    async def job() -> None:
        lost = Member("lost").by_etcd(url)
        lost.at.stand(None)  # it has no job file: it waits for a node that has one
        asked, ask = Counter[str](), lost.at._election._keys.etcd._ask_all

        def counted(path: str, body: Any) -> dict[str, Any]:
            asked[path] += 1
            return ask(path, body)

        lost.at._election._keys.etcd._ask_all = counted
        lost.run()
        await asyncio.sleep(1.5)
        assert asked == {"kv/range": 2}
        a = Member("a").by_etcd(url).run()
        await until(lambda: a.at._coordinator is not None)
        assert await until(lambda: lost.at._connected, 5) < 0.2
        await until(lambda: generation(a, lost))
        await close(a, lost)

    job()


@in_a_loop
async def test_a_watch_tells_of_its_own_key_from_a_revision_on_and_else_says_that_it_knows_nothing() -> None:
    cluster = Pretended("root", "right")
    etcd = Etcd(parse(cluster.url))
    await etcd.get("x")
    since = etcd.revision
    waits = asyncio.create_task(etcd.changed("x", since, 10.0))
    await etcd.change("other", 0, [put("other", b"1")])
    await asyncio.sleep(0.1)
    assert not waits.done()
    lease, _ = await etcd.grant(5)
    await etcd.change("x", 0, [put("x", b"1", lease)])
    assert await waits and etcd.revision == since + 2
    assert await etcd.changed("x", since, 10.0)  # it was before anybody watched
    waits = asyncio.create_task(etcd.changed("x", etcd.revision, 10.0))
    await asyncio.sleep(0.05)
    cluster.pass_time(6.0)
    assert await waits  # its lease has run out
    assert not await etcd.changed("x", etcd.revision + 9, 0.1)
    cluster.watches = False
    assert not await etcd.changed("x", since, 10.0)
    cluster.close()
    assert not await etcd.changed("x", since, 10.0)


@in_a_loop
async def test_where_etcd_does_not_tell_of_changes_its_keys_are_read_again() -> None:
    cluster = Pretended()
    cluster.watches = False
    lost = Member("lost").by_etcd(cluster.url)
    lost.at.stand(None)
    lost.run()
    await asyncio.sleep(1.1)
    assert 4 <= cluster.asked["/v3/watch"] <= 6  # four times a second, not as fast as it can
    a = Member("a").by_etcd(cluster.url).run()
    await until(lambda: generation(a, lost))
    await close(a, lost)
    cluster.close()


def test_a_job_whose_nodes_all_died_goes_on_with_its_journal(url: str, monkeypatch) -> None:
    monkeypatch.setattr(etcd_election, "LEASE", 2)

    @in_a_loop
    async def job() -> None:
        a = Member("a").by_etcd(url).run()
        await until(lambda: generation(a) == 1)
        await a.die()
        again = Member("a").by_etcd(url).run()
        await until(lambda: generation(again) == 2)
        assert "a coordinates in place" not in again.said[0]
        other = Member("b").by_etcd(url, run_dir="/elsewhere")
        with pytest.raises(UserError, match=r"belongs to the job in /, not to /elsewhere: give another prefix"):
            await other.supervisor.run()
        stranger = Member("c").by_etcd(url, key=b"another secret")
        with pytest.raises(UserError, match=r"in use by another job, .* etcdctl del --prefix /jobs/one/"):
            await stranger.supervisor.run()
        assert generation(again) == 2
        await close(again)

    job()


OWN = Candidate("a", "127.0.0.1", 4001)
OTHER = Candidate("b", "127.0.0.1", 4002)
EVENTS = [Joined(1.0, "a", "x1", 2, "127.0.0.1", 4001), Draining(2.0, "a")]


async def elected(url: str, own: Candidate, ended: tuple[str, ...] = ()) -> Office | None:
    election = EtcdElection(Etcd(parse(url)), KEY, "/run")
    found = await election.whom_to_ask(own.name)
    assert found[-1] is None
    return await election.take_over(own, ended, 0.0)


@in_a_loop
async def test_of_two_that_would_coordinate_one_does_and_the_other_waits_for_its_lease_or_its_end() -> None:
    cluster = Pretended()
    elections = [EtcdElection(Etcd(parse(cluster.url)), KEY, "/run") for _ in range(8)]
    for each in elections:
        assert await each.whom_to_ask("a") == [None]
    offices = await asyncio.gather(*(each.take_over(OWN, (), 0.0) for each in elections))
    assert sum(each is not None for each in offices) == 1
    assert len(cluster.leases) == 1  # those of the others are revoked
    assert await elected(cluster.url, OTHER) is None
    office = await elected(cluster.url, OTHER, ("a",))  # its port refuses
    assert office is not None and office.event is None  # nothing has happened yet
    cluster.pass_time(etcd_election.LEASE + 0.1)
    assert cluster.names() == [f"{PREFIX}job"]
    assert await elected(cluster.url, OWN) is not None
    cluster.close()


@in_a_loop
async def test_a_coordinator_that_has_lost_its_key_writes_no_line_more() -> None:
    cluster = Pretended()
    first = await elected(cluster.url, OWN)
    journal = Journal()
    journal.append(EVENTS[:1])
    await first.tenure.keep(journal.lines)
    cluster.pass_time(etcd_election.LEASE + 0.1)  # it stood still meanwhile, and notices nothing
    second = await elected(cluster.url, OTHER)
    assert second.lines == journal.lines and second.machine.roster.members.keys() == {"a"}
    assert (second.event.name, second.event.former, second.event.proven) == ("b", "a", False)

    async def decide() -> None:
        journal.append(EVENTS[1:])
        await first.tenure.keep(journal.lines)
        raise AssertionError("it may not decide")

    end = await first.tenure.hold(decide())  # which the renewal of its lease may notice first
    assert isinstance(end, StepDown) and end.why.startswith("another node coordinates by now")
    assert [name.rpartition("/")[2] for name in cluster.names()] == ["coordinator", "job", "000000000000"]

    async def finish() -> Finish:
        return Finish(0, "")

    assert await second.tenure.hold(finish()) == Finish(0, "")
    assert cluster.names() == []
    cluster.close()


@in_a_loop
async def test_a_journal_of_many_lines_and_one_that_somebody_has_changed() -> None:
    cluster = Pretended()
    office = await elected(cluster.url, OWN)
    journal = Journal()
    journal.append(Joined(float(each), f"n{each}", "x", 1, "127.0.0.1", 9) for each in range(501))
    await office.tenure.keep(journal.lines[:450])
    await office.tenure.keep(journal.lines)
    again = await elected(cluster.url, OTHER, ("a",))
    assert again.lines == journal.lines and len(again.machine.roster.members) == 501
    etcd = Etcd(parse(cluster.url))
    key = f"{PREFIX}journal/000000000200"
    value, _ = await etcd.get(key)
    coordinator = await etcd.get(f"{PREFIX}coordinator")
    await etcd.change(f"{PREFIX}coordinator", coordinator[1], [put(key, value.replace(b'"n201"', b'"n999"'))])
    with pytest.raises(LaunchError, match="journal/000000000200 is not signed by the job's secret"):
        await elected(cluster.url, OWN, ("b",))
    cluster.close()


@in_a_loop
async def test_an_etcd_that_is_silent_for_a_moment_costs_nothing() -> None:
    cluster = Pretended()
    a = Member("a").by_etcd(cluster.url).run()
    await until(lambda: generation(a) == 1)
    cluster.silent = True
    a.starts[-1].end("failed", 1, 5, "KeyError: 'x'")
    await asyncio.sleep(1.0)
    assert a.runs is None  # what follows is not decided before it is written
    cluster.silent = False
    await until(lambda: generation(a) == 2)
    assert a.at._coordinator is not None and not any("steps" in line for line in a.said)
    await close(a)
    cluster.close()


@pytest.mark.parametrize(
    ("url", "environ", "expected"),
    [
        ("etcd://h/p", {}, Address((("h", 2379),), "/p/")),
        ("etcd://h:1,[::1]:2,h3/a/b/", {}, Address((("h", 1), ("::1", 2), ("h3", 2379)), "/a/b/")),
        ("etcds://u:p%40:x@h/p", {"ETCDCTL_USER": "v:w"}, Address((("h", 2379),), "/p/", True, "u", "p@:x")),
        ("etcd://h/p", {"ETCDCTL_USER": "v:w:x"}, Address((("h", 2379),), "/p/", False, "v", "w:x")),
        ("etcd://h/p", {"ETCDCTL_USER": "v", "ETCDCTL_PASSWORD": "w"}, Address((("h", 2379),), "/p/", False, "v", "w")),
    ],
)
def test_addresses(url: str, environ: dict[str, str], expected: Address) -> None:
    assert parse(url, environ) == expected
    assert "p@:x" not in f"{expected} {expected!r}"


@pytest.mark.parametrize(
    ("url", "said"),
    [
        ("http://h/p", "is no address of an etcd cluster. Write it like etcd://host:2379/prefix"),
        ("etcd://u:secret@/p", "is no address"),
        ("etcd://h:x/p", "is no address"),
        ("etcd://h:70000/p", "is no address"),
        ("etcd://h:0/p", "is no address"),
        ("etcd://u:secret@h", "names no prefix"),
        ("etcd://h:1//", "names no prefix"),
    ],
)
def test_addresses_that_are_none(url: str, said: str) -> None:
    with pytest.raises(UserError) as caught:
        parse(url, {})
    assert said in str(caught.value) and "secret" not in str(caught.value)


@in_a_loop
async def test_no_etcd_another_server_and_a_wrong_password_are_said() -> None:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    alone = Member("a").by_etcd(f"etcd://127.0.0.1:{port}/p")
    alone.at.patience = 0.3
    with pytest.raises(LaunchError, match=rf"at etcd://127.0.0.1:{port}/p \(no etcd answers: .*refused"):
        await alone.supervisor.run()
    web = HTTPServer(("127.0.0.1", 0), BaseHTTPRequestHandler)
    threading.Thread(target=web.serve_forever, args=(0.02,), daemon=True).start()
    with pytest.raises(UserError, match=r"is no etcd of version 3\.4 or newer .HTTP 501"):
        await Etcd(parse(f"etcd://127.0.0.1:{web.server_address[1]}/p")).get("x")
    web.shutdown()
    web.server_close()
    cluster = Pretended("root", "right")
    assert await Etcd(parse(cluster.url)).get("x") == (None, 0)
    for wrong, said in ((":wrong@", "refuses user 'root'"), ("", "refuses user ''")):
        login = "root" * bool(wrong) + wrong
        bad = Member("a").by_etcd(cluster.url.replace("root:right@", login))
        with pytest.raises(UserError, match=said) as caught:
            await bad.supervisor.run()
        assert "Give the user and password" in str(caught.value) and "wrong" not in str(caught.value)
    cluster.close()


@pytest.mark.fast
@in_a_loop
async def test_a_cluster_that_hangs_up_may_speak_tls_however_it_does_so() -> None:
    """With bytes of the request unread the line is reset, which is another error than its end."""

    def hang_up(server: socket.socket, reads: int) -> None:
        end, _ = server.accept()
        end.recv(reads)
        end.close()

    for reads in (1, 1 << 16):
        with socket.create_server(("127.0.0.1", 0)) as server:
            thread = threading.Thread(target=hang_up, args=(server, reads))
            thread.start()
            with pytest.raises(Unreachable, match=r"it hung up; if it speaks TLS, write etcds://"):
                await Etcd(parse(f"etcd://127.0.0.1:{server.getsockname()[1]}/x")).get("x")
            thread.join()


@in_a_loop
async def test_the_next_endpoint_is_asked_and_remembered() -> None:
    cluster = Pretended()
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    etcd = Etcd(parse(cluster.url.replace("//", f"//127.0.0.1:{port},")))
    assert await etcd.get("x") == (None, 0)
    assert etcd._endpoints[1] == ("127.0.0.1", port)
    cluster.silent = True
    with pytest.raises(Unreachable, match=r"no leader; 127.0.0.1:.*refused"):
        await etcd.get("x")
    cluster.close()
