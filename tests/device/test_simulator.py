"""The simulated accelerator itself: programs with one defect each are reported in every mode, right ones never."""

from __future__ import annotations

import pytest
import torch

from tests.device import programs
from tests.device.simulator import LAZY_EAGER_AND_SEEDS, simulate, why_not

pytestmark = pytest.mark.skipif(bool(why_not()), reason=why_not())

every_mode = pytest.mark.parametrize("mode", LAZY_EAGER_AND_SEEDS)
WRONG = {
    "prefetch without a wait": (programs.prefetch, (False,), 12000.0, "race"),
    "no record_stream": (programs.copy_aside, (False,), 7000.0, "freed"),
    "an unfinished copy is read by an operation": (programs.read_back, (False, "operation"), 3000.0, "host"),
    "an unfinished copy is read by item": (programs.read_back, (False, "item"), 3000.0, "host"),
    "an unfinished copy is read by numpy": (programs.read_back, (False, "numpy"), 3000.0, "host"),
    "a buffer is written while it is read": (programs.reuse_of_a_buffer, (False,), 3000.0, "host"),
}
RIGHT = {
    "prefetch": (programs.prefetch, (True,), 12000.0),
    "record_stream": (programs.copy_aside, (True,), 7000.0),
    **{f"a copy is read by {reader}": (programs.read_back, (True, reader), 3000.0) for reader in programs.READERS},
    "a buffer is written again": (programs.reuse_of_a_buffer, (True,), 3000.0),
    "halves of a matrix": (programs.strided_halves, (), 3000.0),
}


@every_mode
@pytest.mark.parametrize("name", WRONG)
def test_a_defect_is_reported_whatever_the_schedule(name, mode):
    program, args, right, kind = WRONG[name]
    run = simulate(program, *args, mode=mode)
    assert kind in run.trace.kinds(), run.trace
    if mode == "lazy":
        assert run.result != right, "the most hostile schedule gives wrong numbers too"
    if mode == "eager":
        assert run.result == right, "the friendliest one hides the defect"


@every_mode
@pytest.mark.parametrize("name", RIGHT)
def test_a_right_program_is_not_reported(name, mode):
    program, args, right = RIGHT[name]
    run = simulate(program, *args, mode=mode)
    assert run.result == right and run.trace.defects == []
