"""Servers and clients as processes, over Flower's links on loopback. Run by test_flower.py."""

from __future__ import annotations

import shutil
import signal
import socket
import stat
import time

import httpx
import psutil
import pytest
import torch
from typer.testing import CliRunner

from shoal.cli.app import app
from shoal.errors import LaunchError, UserError
from shoal.federated.flower import keys, node
from shoal.federated.flower.keys import make_keys, private_bytes, server_files
from shoal.federated.flower.link import OVER
from shoal.federated.flower.private import begin_run
from shoal.federated.flower.private.superlink import SuperLink
from shoal.federated.flower.private.supernode import Away, Node
from shoal.jobs.federated.serve import Serving, is_loopback, parse, serve
from shoal.jobs.federated.simulate import simulate
from shoal.jobs.read import load_job
from tests.federated.flower.processes import STEP, Federation

from flwr.app import Message, RecordDict  # isort: skip


def simulated(federation: Federation):
    """The weights that `shoal fed sim` comes to."""
    simulate(*load_job(federation.job, [f"run.dir={federation.folder / 'sim'}"]))
    return federation.weights("sim")


def test_clients_sign_in_over_tls_and_a_stranger_is_refused(tmp_path):
    with Federation(tmp_path, 2, rounds=2) as federation:
        server = federation.server(patience=30.0)
        stranger = tmp_path / "stranger"
        make_keys(stranger, 1, ["localhost"])
        clients = [federation.client(0), federation.client(1)]
        refused = federation.client(0, key=str(stranger / "clients" / "0.key"))
        assert server.ends() == 0 and [each.ends() for each in clients] == [0, 0]
        assert refused.ends() == UserError.exit_code and "does not know this client's key" in refused.said()
        rounds = federation.rounds()
        assert [(each["asked"], each["results"], each["applied"]) for each in rounds] == [(2, 2, True)] * 2
        assert all(len(each["accuracies"]) == 2 and each["simulated"] is None for each in rounds)
        page = (tmp_path / "run" / "report.html").read_text()
        assert "<h2>Clients</h2>" in page and "Accuracy by client" in page
        top = CliRunner().invoke(app, ["top", str(tmp_path / "run"), "--once"])
        assert "2 of 2" in top.output and "accuracy" in top.output


class Ending:
    """A server that tells a client that all is over, and is gone before it confirms the answer."""

    address = "a server of these tests"

    def sign_in(self) -> None:
        pass

    def receive(self) -> Message:
        begin_run()
        return Message(RecordDict({}), 1, f"query.{OVER}")

    def send(self, reply: Message, seconds: float) -> bool:
        raise Away("connection reset")


def test_a_client_that_has_heard_of_the_end_ends_well_though_the_server_is_gone_by_then():
    assert node.serve(Ending(), None, 0, lambda: False, 0.0, print)


def test_the_reply_of_a_client_that_leaves_at_once_is_not_lost():
    link = SuperLink("127.0.0.1", 0, None, None, patience=10.0)
    link.begin()
    try:
        client = Node(f"127.0.0.1:{link.port}", None, None)
        client.sign_in()
        asked = [link.push(Message(RecordDict({}), client.id, "query.one")) for _ in range(2)]
        assert client.send(Message(RecordDict({}), reply_to=client.receive()), 0.0)
        client.leave()
        replies = link.pull(asked)
        assert sorted(each.has_error() for each in replies) == [False, True], "the other one was never answered"
    finally:
        link.end()


def waits(client: Node) -> str:
    """What a client says of a server that it cannot sign in at."""
    said: list[str] = []
    with pytest.raises(LaunchError, match="has not answered"):
        node.serve(client, None, 0, lambda: False, 0.2, said.append)
    return "\n".join(said)


def test_a_client_is_told_at_once_why_it_cannot_come_in(tmp_path):
    """Nobody there; another name; one end with TLS and the other without."""
    make_keys(tmp_path / "here", 1, ["127.0.0.1"])
    make_keys(tmp_path / "there", 1, ["server.example"])
    key = private_bytes(tmp_path / "here" / "clients" / "0.key")
    roots = {name: tmp_path / name / "ca.crt" for name in ("here", "there")}
    for name in ("here", "there", None):
        tls = None if name is None else (tmp_path / name / "server.crt", tmp_path / name / "server.key")
        link = SuperLink("127.0.0.1", 0, None, tls, patience=10.0)
        address = f"127.0.0.1:{link.port}"
        link.begin()
        try:
            if name == "there":
                with pytest.raises(UserError, match=r"no certificate that this client trusts.*its certificate names"):
                    Node(address, key, roots[name]).sign_in()
            if name == "here":
                assert waits(Node(address, None, None)).count("hangs up on --insecure") == 1
            if name is None:
                with pytest.raises(UserError, match="started with --insecure"):
                    Node(address, key, roots["here"]).sign_in()
        finally:
            link.end()
    assert waits(Node(address, None, None)).count("refused") == 1


@pytest.mark.matrix
def test_a_refused_request_does_not_disturb_a_server_and_an_insecure_one_lets_anyone_in(tmp_path):
    with Federation(tmp_path, 1, rounds=2) as federation:
        server = federation.server(insecure=True)
        at = f"http://127.0.0.1:{federation.port}"
        federation.until(lambda: "listens at" in server.said())
        for path in ("/v1/control/start-run", "/docs", "/openapi.json", "/v1/runtime/push-messages"):
            assert httpx.post(at + path, content=b"x").status_code == 404
        fleet = f"{at}/v1/fleet/pull-messages"
        kind = {"content-type": "application/x-protobuf"}
        assert httpx.post(fleet, content=b"x" * 100, headers=kind).status_code >= 400
        assert httpx.post(fleet, content=iter([b"x"]), headers=kind).status_code == 413
        client = federation.client(0, insecure=True)
        assert server.ends() == 0 and client.ends() == 0
        assert [each["results"] for each in federation.rounds()] == [1, 1]


@pytest.mark.matrix
def test_nothing_is_read_of_who_has_not_signed(tmp_path):
    with Federation(tmp_path, 1, rounds=1) as federation:
        server = federation.server()
        federation.until(lambda: "listens at" in server.said())
        at = f"https://127.0.0.1:{federation.port}/v1/fleet/activate-node"
        with httpx.Client(verify=str(tmp_path / "keys" / "ca.crt")) as client:
            assert client.post(at, content=b"").status_code == 401
            assert client.post(at, content=b"", headers={"flwr-public-key": "!"}).status_code == 401
        with httpx.Client() as client, pytest.raises(httpx.ConnectError, match="certificate"):
            client.post(at, content=b"")
        (other := tmp_path / "other").mkdir()
        make_keys(other, 1, ["localhost"])
        wrong = federation.client(0, certificates=str(other))
        assert wrong.ends() == UserError.exit_code and "no certificate that this client trusts" in wrong.said()
        assert federation.client(0).ends() == 0 and server.ends() == 0


@pytest.mark.matrix
@pytest.mark.parametrize("secure", [{}, {"secure": 0.6}], ids=["plain", "secure"])
@pytest.mark.parametrize("plan", [[], ["plan.tp=2"], ["plan.dp=2", "plan.zero=3"]])
def test_clients_and_one_that_is_a_mesh_come_to_the_weights_of_a_simulation(tmp_path, plan, secure):
    """Under secure aggregation, too, whose sum is exact in multiples of 2**-24."""
    with Federation(tmp_path, 2, strategy={"name": "fedprox", "mu": 0.5}, **secure) as federation:
        wanted = simulated(federation)
        server, single = federation.server(patience=30.0), federation.client(0)
        mesh = federation.client(1, *plan)
        assert [each.ends() for each in (server, single, mesh)] == [0, 0, 0]
        assert f"on {2 if plan else 1} ranks" in mesh.said()
        assert [(each["asked"], each["results"]) for each in federation.rounds()] == [(2, 2)] * 3
        assert all((each["accuracies"] is None) is bool(secure) for each in federation.rounds())
        assert all(0 < each["loss"] < 3 and each["tokens"] > 0 for each in federation.records("step"))
        torch.testing.assert_close(federation.weights(), wanted, rtol=1e-4, atol=1e-6)


def kill_one_in_a_round(federation):
    """Has a slow third client come, kills it while it trains, and waits for three more rounds."""
    doomed = federation.client(2, slow=0.2)
    seen = federation.rounds()
    federation.until(lambda: any(each["asked"] == 3 for each in federation.rounds()[len(seen) :]))
    steps = doomed.said().count(STEP)
    federation.until(lambda: doomed.said().count(STEP) > steps)
    doomed.kill()
    doomed.process.join()
    killed = len(federation.rounds())
    federation.until(lambda: len(federation.rounds()) > killed + 2)


@pytest.mark.matrix
def test_a_client_killed_in_a_round_is_missed_and_the_round_completes_twenty_times(tmp_path):
    with Federation(tmp_path, 3, rounds=1000, eval_every=0) as federation:
        server = federation.server()
        clients = {number: federation.client(number) for number in (0, 1)}
        for _ in range(20):
            kill_one_in_a_round(federation)
        server.kill(signal.SIGTERM)
        assert server.ends() == 128 + signal.SIGTERM
        rounds = federation.rounds()
        assert [each["step"] for each in rounds] == list(range(1, len(rounds) + 1))
        assert all(each["applied"] and each["results"] >= 2 for each in rounds)
        assert all(each["asked"] == each["results"] + each["dropped"] + each["late"] for each in rounds)
        assert sum(each["dropped"] for each in rounds) >= 15
        for each in clients.values():
            each.kill(signal.SIGTERM)
            assert each.ends() == 128 + signal.SIGTERM


@pytest.mark.matrix
def test_a_masked_result_that_does_not_come_is_missed_and_below_the_threshold_nothing_is_opened(tmp_path):
    with Federation(tmp_path, 3, rounds=1000, eval_every=0, secure=0.6) as federation:
        server = federation.server()
        for number in (0, 1):
            federation.client(number)
        for _ in range(3):
            kill_one_in_a_round(federation)
        rounds = federation.rounds()
        assert all(each["applied"] and each["results"] >= 2 for each in rounds)
        assert any(each["asked"] == 3 and each["dropped"] == 1 for each in rounds)
        server.kill(signal.SIGTERM)
        assert server.ends() == 128 + signal.SIGTERM
        federation.job.write_text(federation.job.read_text().replace("secure = 0.6", "secure = 1.0"))
        again = federation.server(at_first=2)
        federation.until(lambda: len(federation.rounds()) > len(rounds) + 1)
        kill_one_in_a_round(federation)
        missed = [each for each in federation.rounds()[len(rounds) :] if not each["applied"]]
        assert missed and all(each["results"] == 2 for each in missed)
        assert "is not opened: 2 of 3 clients have sent results, and the threshold is 3" in again.said()


@pytest.mark.matrix
def test_a_client_gives_nothing_unmasked_to_a_server_that_asks_for_that(tmp_path):
    with Federation(tmp_path, 2, rounds=2, eval_every=0) as federation:
        server, plain = federation.server(), federation.client(0)
        hidden = federation.client(1, "federated.secure=0.6")
        assert [each.ends() for each in (server, plain, hidden)] == [0, 0, 0]
        assert all((each["results"], each["broken"]) == (1, 1) for each in federation.rounds())
        why = "this client answers only under secure aggregation: give the server's job federated.secure"
        assert (
            why in server.said() and f"this client has failed, and tells the server: ValueError: {why}" in hidden.said()
        )


@pytest.mark.matrix
@pytest.mark.parametrize("strategy", ["fedavg", "fedadam", {"name": "fedavgm", "momentum": 0.5}])
def test_a_server_that_was_killed_goes_on_with_its_clients(tmp_path, strategy):
    with Federation(tmp_path, 2, rounds=6, strategy=strategy) as federation:
        server = federation.server(patience=30.0)
        clients = [federation.client(0, slow=0.05), federation.client(1, slow=0.05)]
        federation.until(lambda: len(federation.rounds()) >= 2)
        server.kill()
        server.process.join()
        whole = federation.rounds()[-1]["step"]
        again = federation.server(patience=30.0)
        assert again.ends() == 0 and [each.ends() for each in clients] == [0, 0]
        assert f"goes on after round {whole}" in again.said() or f"goes on after round {whole - 1}" in again.said()
        assert sorted({each["step"] for each in federation.rounds()}) == [1, 2, 3, 4, 5, 6]
        if strategy == "fedavg":
            torch.testing.assert_close(federation.weights(), simulated(federation), rtol=1e-4, atol=1e-6)
        else:
            (other := tmp_path / "other").mkdir()
            with Federation(other, 2, rounds=6, strategy=strategy) as undisturbed:
                run = undisturbed.server(patience=30.0), undisturbed.client(0), undisturbed.client(1)
                assert [each.ends() for each in run] == [0, 0, 0]
                torch.testing.assert_close(federation.weights(), undisturbed.weights(), rtol=1e-4, atol=1e-6)


@pytest.mark.matrix
@pytest.mark.parametrize("late", ["drop", "partial"])
def test_a_straggler_is_left_behind_or_cut_short_at_the_deadline(tmp_path, late):
    with Federation(tmp_path, 2, rounds=3, eval_every=0, late=late) as federation:
        server = federation.server(deadline=10.0, patience=30.0)
        clients = [federation.client(0), federation.client(1, slow=3.0 if late == "drop" else 2.0)]
        assert server.ends() == 0 and clients[0].ends() == 0
        rounds = federation.rounds()
        if late == "drop":
            assert all((each["results"], each["late"]) == (1, 1) for each in rounds)
            federation.until(lambda: "came too late" in clients[1].said())
        else:
            assert sum(each["partial"] for each in rounds) >= 2 and sum(each["results"] for each in rounds) >= 5


@pytest.mark.matrix
def test_clients_work_on_old_weights_where_nobody_waits(tmp_path):
    with Federation(tmp_path, 3, rounds=8, buffer=2, eval_every=0) as federation:
        server = federation.server()
        clients = [federation.client(0), federation.client(1), federation.client(2, slow=0.1)]
        assert server.ends() == 0 and [each.ends() for each in clients] == [0, 0, 0]
        assert all(each["results"] == 2 for each in federation.rounds())
        assert any(len(each["stale"]) > 1 for each in federation.rounds())


@pytest.mark.matrix
def test_a_client_whose_training_fails_says_so_and_stays(tmp_path):
    with Federation(tmp_path, 2, rounds=3, eval_every=0) as federation:
        server, good = federation.server(), federation.client(0)
        bad = federation.client(1, "train.lr=1e38")
        assert [each.ends() for each in (server, good, bad)] == [0, 0, 0]
        assert all((each["results"], each["broken"]) == (1, 1) for each in federation.rounds())
        assert "client 1:" in server.said() and "not applied" in server.said()


@pytest.mark.matrix
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGKILL])
def test_nothing_is_left_of_a_mesh_or_a_server(tmp_path, number):
    with Federation(tmp_path, 1, rounds=1000, eval_every=0) as federation:
        server = federation.server()
        mesh = federation.client(0, "plan.dp=2")
        federation.until(lambda: len(federation.rounds()) > 1)
        ranks = psutil.Process(mesh.process.pid).children(recursive=True)
        assert len(ranks) == 2 and not psutil.Process(server.process.pid).children()
        mesh.kill(number)
        assert mesh.ends() == (-number if number == signal.SIGKILL else 128 + number)
        psutil.wait_procs(ranks, timeout=20)
        assert not any(each.is_running() and each.status() != "zombie" for each in ranks)
        server.kill(number)
        assert server.ends() == (-number if number == signal.SIGKILL else 128 + number)
        with socket.socket() as free:
            free.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            free.bind(("127.0.0.1", federation.port))


def test_keys_are_private_and_what_is_missing_is_said(tmp_path, monkeypatch):
    made = CliRunner().invoke(app, ["fed", "keys", str(tmp_path), "--clients", "2", "--host", "example.org"])
    assert made.exit_code == 0, made.output
    make_keys(tmp_path, 1, ["localhost"])  # one more, under the same certificate
    assert len(server_files(tmp_path)[2]) == 3
    again = CliRunner().invoke(app, ["fed", "keys", str(tmp_path), "--host", "other.example"])
    assert isinstance(again.exception, UserError) and "--host is of a new one" in str(again.exception)
    make_keys(tmp_path / "abroad", 0, ["b\u00fccher.example"])
    for host in ("", "a" * 64 + ".example"):
        with pytest.raises(UserError, match=r"--host.*give a name or an address"):
            make_keys(tmp_path / "nowhere", 1, [host])
    assert not (tmp_path / "nowhere").exists()
    for path in (*(tmp_path / "clients").glob("*.key"), tmp_path / "server.key", tmp_path / "ca.key"):
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
    (tmp_path / "clients" / "1.key").chmod(0o640)
    with pytest.raises(UserError, match=r"chmod 600"):
        private_bytes(tmp_path / "clients" / "1.key")
    with pytest.raises(UserError, match=r"9.key cannot be read.*shoal fed keys"):
        private_bytes(tmp_path / "clients" / "9.key")
    with pytest.raises(UserError, match="cannot be read"):
        server_files(tmp_path / "none")
    make_keys(tmp_path / "other", 1, ["localhost"])
    other = (tmp_path / "other" / "server.key").read_bytes()
    (tmp_path / "server.key").write_bytes(other)
    with pytest.raises(UserError, match=r"server.crt is no certificate of .*server.key"):
        server_files(tmp_path)
    (tmp_path / "server.crt").write_text("none")
    with pytest.raises(UserError, match=r"server.crt is no certificate of .*server.key"):
        server_files(tmp_path)
    monkeypatch.setattr(keys, "DAYS", 0)
    make_keys(tmp_path / "late", 1, ["localhost"])
    with pytest.raises(UserError, match=r"valid until 20.*another directory"):
        server_files(tmp_path / "late")
    shutil.copytree(tmp_path / "other", tmp_path, dirs_exist_ok=True)
    (tmp_path / "clients" / "0.pub").write_text("none")
    with pytest.raises(UserError, match="no public key in PEM"):
        server_files(tmp_path)


def test_without_certificates_nobody_listens_to_other_machines(tmp_path):
    with Federation(tmp_path, 1) as federation:
        given = load_job(federation.job)
        with pytest.raises(UserError, match="loopback alone"):
            serve(*given, Serving("0.0.0.0:0"))
        with pytest.raises(UserError, match="no address"):
            serve(*given, Serving("nowhere"))
        keys = federation.folder / "keys"
        with pytest.raises(UserError, match=rf"--begin-with 9: {keys} lets \d clients in"):
            serve(*given, Serving("127.0.0.1:0", keys, at_first=9))
        for options in ([], ["--insecure", "--certificates", str(tmp_path)]):
            for command in ("server", "client"):
                refused = CliRunner().invoke(app, ["fed", command, str(federation.job), *options])
                assert isinstance(refused.exception, UserError) and "--insecure for a test" in str(refused.exception)
        assert is_loopback("localhost") and is_loopback("::1") and not is_loopback("0.0.0.0")
        assert parse("[::1]:80") == ("::1", 80)


@pytest.mark.matrix
def test_a_mesh_that_loses_a_rank_tells_the_server_which_one(tmp_path):
    with Federation(tmp_path, 2, rounds=1000, eval_every=0) as federation:
        server, other = federation.server(patience=20.0), federation.client(0)
        mesh = federation.client(1, "plan.dp=2")
        federation.until(lambda: len(federation.rounds()) > 1)
        ranks = psutil.Process(mesh.process.pid).children(recursive=True)
        _, second = sorted(ranks, key=lambda each: (each.create_time(), each.pid))
        second.suspend()  # so that the other rank waits for it in a round, not between two
        time.sleep(2)
        second.kill()
        assert mesh.ends() == LaunchError.exit_code
        federation.until(lambda: "client 1:" in server.said())
        assert "rank 1" in server.said().partition("client 1:")[2].partition("step")[0]
        rounds = len(federation.rounds())
        federation.until(lambda: len(federation.rounds()) > rounds + 1)
        assert federation.rounds()[-1]["asked"] == 1 and other.process.is_alive()
