"""The road of the GPU's benchmarks, on the CPU."""

from __future__ import annotations

import pytest
import torch

from benchmarks.gpu import exchange, records
from shoal.exchange.named import ALGORITHMS


def test_a_check_says_whether_it_holds(capsys):
    assert records.check("so much", 2.0, 3.0)["seen"] == 2.0
    assert capsys.readouterr().out.startswith("ok   so much: 2")
    bad = records.check("so much", 4.0, 3.0)
    assert capsys.readouterr().out.startswith("FAIL so much: 4")
    with pytest.raises(SystemExit):
        records.write("nothing", "cpu", {}, [bad])


@pytest.mark.parametrize("name", exchange.CODECS)
def test_codecs_are_compared_and_timed(name):
    assert exchange.check_codec(name, "cpu")["seen"] == 0
    row = exchange.time_codec(name, "cpu", 1, 1)
    assert row["codec"] == name and row["encode"] > 0 and row["decode"] > 0


@pytest.mark.parametrize("name", ALGORITHMS)
def test_every_algorithm_repeats_itself(name):
    """What the GPU is compared with is the same whenever it is run."""
    torch.set_num_threads(1)
    assert exchange.check_algorithm(name, "cpu")["seen"] == 0
