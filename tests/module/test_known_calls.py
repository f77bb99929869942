"""Operations on fake tensors that are not run again: what they give is as if they were."""

from __future__ import annotations

import pytest
import torch
from torch._subclasses.fake_tensor import DynamicOutputShapeException, FakeTensorMode

from shoal import Plan
from shoal.module import known_calls
from shoal.module.known_calls import KnownCalls
from shoal.planner import Subject, dry_run, prepare
from shoal.planner.finite import FiniteCalls
from shoal.precision import precision
from tests.parity.cases import CASES

pytestmark = pytest.mark.fast

KEPT = {
    "a product": lambda x, whole: x @ x,
    "whole by a whole number": lambda x, whole: whole * 2,
    "whole by a fraction": lambda x, whole: whole * 2.0,
    "a view": lambda x, whole: x.t(),
    "a part": lambda x, whole: x[1:, 1],
    "parts": lambda x, whole: x.split(2),
    "itself": lambda x, whole: x.add_(1),
    "two results": lambda x, whole: x.max(dim=0),
    "a copy": lambda x, whole: x.t().contiguous(),
    "another dtype": lambda x, whole: x.to(torch.float64),
    "rows by number": lambda x, whole: torch.nn.functional.embedding(whole, x),
    "joined": lambda x, whole: torch.cat([x, x.t()]),
}


def look(out: object, x: torch.Tensor) -> list[tuple[object, ...]]:
    """What is to be seen of results: what they are, and whose storage they have."""
    outs = [out] if isinstance(out, torch.Tensor) else list(out)  # type: ignore[call-overload]
    return [
        (
            type(each), each.shape, each.stride(), each.storage_offset(), each.dtype, each.device, each is x,
            each.untyped_storage()._cdata == x.untyped_storage()._cdata, each.untyped_storage().nbytes(),
        )
        for each in outs
    ]  # fmt: skip


@pytest.fixture
def asked(monkeypatch):
    """The operations that torch was asked for."""
    found, dispatch = [], FakeTensorMode.dispatch

    def noted(self, func, types, args=(), kwargs=None):
        found.append(func)
        return dispatch(self, func, types, args, kwargs)

    monkeypatch.setattr(FakeTensorMode, "dispatch", noted)
    return found


@pytest.mark.parametrize("operation", KEPT.values(), ids=KEPT)
def test_a_known_call_gives_what_the_first_did(operation, asked):
    with FakeTensorMode() as fakes:
        x, whole = torch.empty(4, 4), torch.empty(3, dtype=torch.int64)
        plain = look(operation(x, whole), x)
        with KnownCalls(fakes):
            first = look(operation(x, whole), x)
            asked.clear()
            again = look(operation(x, whole), x)
    assert plain == first == again and not asked


def test_a_parameter_that_is_filled_is_itself(asked):
    with FakeTensorMode() as fakes, KnownCalls(fakes), torch.no_grad():
        weight = torch.nn.Parameter(torch.empty(4, 4))
        weight.uniform_(-1, 1)
        asked.clear()
        assert weight.uniform_(-1, 1) is weight and weight.requires_grad and weight._version == 2 and not asked


def test_calls_on_other_shapes_are_made(asked):
    with FakeTensorMode() as fakes, KnownCalls(fakes):
        torch.empty(4, 4).exp()
        assert torch.empty(2, 8).exp().shape == (2, 8) and torch.empty(4, 4).t().exp().stride() == (1, 4)
        one, other = torch.empty(3, dtype=torch.int64) + 1, torch.empty(3, dtype=torch.int64) + 1.0
    assert (one.dtype, other.dtype) == (torch.int64, torch.float32)


def test_tensors_are_made_as_torch_makes_them(asked):
    """Constants keep the one value that can be read of them; what is filled with NaN is known again too."""
    with FakeTensorMode() as fakes, KnownCalls(fakes):
        for _ in range(2):
            asked.clear()
            made = torch.full((2, 3), float("nan")), torch.empty(5, dtype=torch.int64), torch.tensor([[1.0, 2.0]])
            assert [(each.shape, each.stride(), each.dtype, each.device.type) for each in made] == [
                ((2, 3), (3, 1), torch.float32, "cpu"), ((5,), (1,), torch.int64, "cpu"),
                ((1, 2), (2, 1), torch.float32, "cpu"),
            ]  # fmt: skip
            assert type(made[2]) is type(made[0]) and [each.data_ptr() for each in made] == [0, 0, 0]
        assert not asked
        one = torch.tensor(3)
        assert one.item() == 3
        one.fill_(5)
        assert one.item() == 5


def test_counts_of_numbers_below_a_length_have_that_length():
    with FakeTensorMode() as fakes, KnownCalls(fakes):
        numbers = torch.zeros(5, dtype=torch.int64)
        counts = torch.bincount(numbers, minlength=4)
        with pytest.raises(DynamicOutputShapeException):
            torch.bincount(numbers)
    real = torch.bincount(torch.tensor([3, 0, 3]), minlength=4)
    assert (counts.shape, counts.dtype) == (real.shape, real.dtype)


def test_what_changes_an_argument_is_done_each_time():
    with FakeTensorMode() as fakes, KnownCalls(fakes):
        for _ in range(2):
            x = torch.empty(4, 2)
            x.t_()
            assert x.shape == (2, 4)


@pytest.mark.filterwarnings("ignore:An output with one or more elements was resized")
def test_a_given_result_gets_its_shape_each_time():
    with FakeTensorMode() as fakes, KnownCalls(fakes):
        for _ in range(2):
            result = torch.empty(1)
            torch.sum(torch.empty(4, 2), dim=0, out=result)
            assert result.shape == (2,)


class Forgetful(FiniteCalls):
    """Runs all operations."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))

    def recall(self, func, args, kwargs):
        return known_calls.NEW


def recorded(case, mode, monkeypatch):
    monkeypatch.setattr(prepare, "FiniteCalls", mode)
    given = CASES[case]
    return dry_run(Subject(given.factory, given.loss, given.data()[0], 2, precision("bf16"), Plan()))


@pytest.mark.parametrize("case", ["gpt-rotary-dropout", "resnet-batchnorm", "moe"])
def test_a_dry_run_sees_the_same(case, monkeypatch):
    assert recorded(case, FiniteCalls, monkeypatch) == recorded(case, Forgetful, monkeypatch)


def test_a_tensor_that_is_given_twice_stays_one(monkeypatch):
    """OneDNN's LSTM gives its two biases one gradient, of which torch's own cache makes two."""
    monkeypatch.setattr(known_calls, "_KNOWN", {})
    FakeTensorMode.cache_clear()
    assert recorded("lstm", FiniteCalls, monkeypatch) == recorded("lstm", FiniteCalls, monkeypatch)
