"""The table of formats against what numbers of them do, and fp8 where there is none."""

from __future__ import annotations

import pytest
import torch

from shoal import Engine, UserError
from shoal.models import regression
from shoal.precision import named
from shoal.precision.formats import FORMATS, multiplies
from tests.exchange import teacher

pytestmark = pytest.mark.fast


@pytest.mark.parametrize("kind", [kind for kind in FORMATS if kind.name != "tf32"], ids=lambda kind: kind.name)
def test_a_format_is_what_it_says(kind):
    """bits, range and step of the stored dtype, from conversions of fp64."""
    assert kind.bits == 8 * kind.stored.itemsize

    def rounded(value: float) -> float:
        return float(torch.tensor(value, dtype=torch.float64).to(kind.stored).double())

    assert rounded(kind.largest) == kind.largest and rounded(kind.smallest) == kind.smallest
    assert rounded(1 + kind.epsilon) == 1 + kind.epsilon and rounded(1 + kind.epsilon / 4) == 1
    assert kind.epsilon == 2.0**-kind.mantissa_bits


def test_tf32_has_fp32s_range_and_fp16s_step():
    tf32, fp32, fp16 = (next(kind for kind in FORMATS if kind.name == name) for name in ("tf32", "fp32", "fp16"))
    assert (tf32.smallest, tf32.epsilon) == (fp32.smallest, fp16.epsilon) and 0.999 < tf32.largest / fp32.largest < 1
    assert not multiplies(tf32, torch.device("cpu"))


def test_fp8_is_refused_by_name_where_there_is_none():
    with pytest.raises(UserError, match=r'precision = "fp8" needs a GPU with fp8 matrix products .* this is the CPU'):
        Engine(teacher.student, regression, teacher.ADAMW, global_batch=16, precision="fp8", world=None)


def test_tf32_on_a_cpu_is_fp32():
    losses = {}
    for name in ("fp32", "tf32"):
        running = Engine(teacher.student, regression, teacher.ADAMW, global_batch=16, precision=name)
        losses[name] = [running.step(batch).loss for batch in running.batches(teacher.data(), steps=3)]
    assert losses["tf32"] == losses["fp32"]


@pytest.mark.parametrize("name", ["tf32", "fp32", "bf16"])
def test_only_tf32_turns_its_products_on(name, monkeypatch):
    turned_on = list[torch.device]()
    monkeypatch.setattr(named, "allow_tf32", turned_on.append)
    running = Engine(teacher.student, regression, teacher.ADAMW, global_batch=16, precision=name)
    assert turned_on == ([running.device] if name == "tf32" else [])
