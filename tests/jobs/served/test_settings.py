"""`[server]`: what it takes, what goes with a parameter server, and which samples a ticket has."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from shoal.data import Cursor
from shoal.errors import UserError
from shoal.jobs.config import Job, Run, Train
from shoal.jobs.read import load_job
from shoal.jobs.served import devices
from shoal.jobs.served.policy import policy_of, samples_of
from shoal.jobs.served.settings import check_served, shares
from shoal.jobs.served.table import Server
from shoal.launch.identity import SINGLE
from shoal.plan import Plan
from shoal.server import Async, Batch, BoundedStaleness, Sync

pytestmark = pytest.mark.fast

JOB = Job(model={"name": "mlp"}, train=Train(steps=1, global_batch=4))


@pytest.mark.parametrize(
    "server, policy, count",
    [
        (Server(), Async(), 1),
        (Server(policy="sync"), Sync(3), 3),
        (Server(policy="batch:2", scale="inverse", drop_above=4), Batch(2, scale="inverse", drop_above=4), 2),
        (Server(policy="staleness:0"), BoundedStaleness(0), 1),
    ],
)
def test_the_policy_that_is_named(server, policy, count):
    job = replace(JOB, server=server)
    assert policy_of(job, 3) == policy and shares(job, 3) == count


@pytest.mark.parametrize(
    "there, workers, expected",
    [
        (0, 2, ["cpu", "cpu"]),
        (2, 2, ["cpu", "cpu"]),
        (3, 2, ["cuda:2", "cpu"]),
        (8, 3, ["cuda:3", "cuda:4"]),
    ],
)
def test_servers_have_the_accelerators_that_workers_leave(monkeypatch, there, workers, expected):
    found = [torch.device("cuda", index) for index in range(there)]
    monkeypatch.setattr(devices, "accelerators", lambda: found)
    monkeypatch.setattr(devices, "own_device", lambda asked, index, count: (str(asked), index, count))
    places = [replace(SINGLE, size=workers, serves=index, servers=("a:1", "b:1")) for index in range(2)]
    assert [devices.device_of_server(JOB, place)[0] for place in places] == expected
    asked = replace(JOB, server=Server(device="cuda"))
    assert [devices.device_of_server(asked, place) for place in places] == [("cuda", 0, 2), ("cuda", 1, 2)]
    taken = {devices.device_of_worker(replace(SINGLE, rank=rank, size=workers)) for rank in range(workers)}
    assert taken == (set(found[:workers]) or {None}) and not {str(each) for each in taken} & {*expected} - {"cpu"}


def test_a_device_that_there_is_not_is_named():
    with pytest.raises(UserError, match=r'^server.device = "gpu": Expected one of'):
        devices.device_of_server(replace(JOB, server=Server(device="gpu")), replace(SINGLE, serves=0, servers=("a:1",)))


@pytest.mark.parametrize(
    "values, message",
    [
        ({"policy": "asynch"}, 'not one of async, sync, batch:k, staleness:s. Did you mean "async"'),
        ({"policy": "batch"}, 'give a number from 1 on after it, e.g. "batch:2"'),
        ({"policy": "staleness:-1"}, 'give a number from 0 on after it, e.g. "staleness:2"'),
        ({"policy": "sync", "drop_above": 1}, "no gradient lags. Leave server.drop_above out"),
        ({"scale": "invers"}, 'server.scale = .* is not one of.*Did you mean "inverse"'),
        ({"grace": -1.0}, "server.grace = -1.0: give 0 or more"),
        ({"timeout": 0.0}, "server.timeout = 0.0: give seconds above 0"),
    ],
)
def test_values_that_are_refused(values, message):
    with pytest.raises(UserError, match=message):
        Server(**values)


def test_an_unknown_key_is_refused_with_the_one_that_was_meant(tmp_path: Path):
    path = tmp_path / "job.toml"
    path.write_text('[model]\nname = "mlp"\n[train]\nsteps = 1\n[server]\npolice = "sync"\n')
    with pytest.raises(UserError, match=r'police.*Did you mean "policy"'):
        load_job(path)


@pytest.mark.parametrize(
    "job, message",
    [
        (replace(JOB, plan=Plan(tp=2)), "plan.tp = 2 with a parameter server.*Leave plan.tp out"),
        (replace(JOB, run=Run(verify_every=2)), "run.verify_every with a parameter server"),
        (replace(JOB, server=Server(policy="batch:5")), "a step has 5 shares.*Give at least 5"),
    ],
)
def test_jobs_that_are_refused(job, message):
    with pytest.raises(UserError, match=message):
        check_served(job, 2)


def test_tickets_share_out_the_samples_of_each_step():
    cursor = Cursor(20, 8, 0)
    for step in range(5):
        parts = [samples_of(cursor, step * 3 + share, 3) for share in range(3)]
        assert {at for at, _ in parts} == {step}
        assert [each for _, ids in parts for each in ids] == cursor.ids(step).tolist()
