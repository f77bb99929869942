"""Parameter servers on the simulated accelerator."""

from __future__ import annotations

import pytest

from shoal.jobs.train import train
from shoal.models.registry import BUILDERS
from shoal.report.metrics import read_metrics
from tests.device import served, servers
from tests.device.simulator import simulate, simulate_ranks, why_not

pytestmark = pytest.mark.skipif(bool(why_not()), reason=why_not())


@pytest.mark.parametrize("codec", [None, "u8"])
@pytest.mark.parametrize("mode", ["lazy", pytest.param("eager", marks=pytest.mark.matrix)])
def test_weights_and_rows_go_from_accelerator_to_accelerator_and_are_those_of_the_cpu(mode, codec):
    runs = simulate_ranks(servers.both_ends, 2, codec, mode=mode)
    assert all(runs[1].result.values()), runs[1].result
    assert [run.trace.defects for run in runs] == [[], []]


def test_a_client_that_dies_in_the_middle_ends_its_session_alone():
    runs = simulate_ranks(servers.dies_in_the_middle, 2)
    assert all(runs[0].result.values()) and all(runs[1].result.values()), [run.result for run in runs]
    assert [run.trace.defects for run in runs] == [[], []]


def test_ends_that_share_an_accelerator_go_through_the_host():
    run = simulate(servers.one_device)
    assert all(run.result.values()), run.result
    assert run.trace.defects == []


@pytest.mark.parametrize("mode", ["lazy", pytest.param("eager", marks=pytest.mark.matrix)])
def test_a_job_with_embeddings_by_rows_trains_on_accelerators_what_one_process_trains(mode, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setitem(BUILDERS, "words", served.words)
    served.write_corpus(tmp_path)
    train(*served.job(tmp_path))
    expected = read_metrics(tmp_path / "run/metrics.jsonl")
    runs = simulate_ranks(served.both_ends, 2, mode=mode)
    found = runs[1].result
    assert [run.trace.defects for run in runs] == [[], []]
    assert found.run.device == "simulated" and found.run.parameters == expected.run.parameters
    for mine, theirs in zip(found.steps, expected.steps, strict=True):
        assert (mine.loss, mine.grad_norm) == pytest.approx((theirs.loss, theirs.grad_norm), rel=1e-4)
    assert [each.loss for each in found.evals] == pytest.approx([each.loss for each in expected.evals], rel=1e-4)


@pytest.mark.parametrize("name", ["cuda", "sim"])
def test_embeddings_have_on_the_device_the_gradients_of_the_cpu(name):
    run = simulate(served.gradients, name, name=name)
    assert all(run.result.values()), run.result
    assert run.trace.defects == []
