"""The ledger: every operation books its payload and the bytes of the formula, under its group, its name and its
purpose."""

from __future__ import annotations

import time

import pytest
import torch

from shoal.comm import Group, Ledger, Span
from shoal.comm.emulate import simulate
from shoal.comm.ledger import Flow, Traffic
from shoal.device import new_stream, on_stream, stand_in
from tests.device.recorder import Recorder

CUT = 12  # elements of a rank's cut, of 8 bytes


def call_each(group: Group) -> dict[str, Traffic]:
    """Each operation once, root 1 where there is one; what it booked."""
    rank, size = group.rank, group.size
    cut, whole = torch.ones(CUT, dtype=torch.float64), torch.ones(size * CUT, dtype=torch.float64)
    group.all_reduce(whole)
    group.reduce_scatter(cut, whole)
    group.all_gather(whole, cut)
    group.all_to_all(torch.empty_like(whole), whole)
    group.broadcast(whole, 1)
    group.scatter(cut, whole if rank == 1 else None, 1)
    group.gather(whole if rank == 1 else None, cut, 1)
    group.exchange(torch.empty_like(cut), (rank - 1) % size, cut, (rank + 1) % size)
    if rank == 0:
        group.send(cut, 1)
    if rank == 1:
        group.recv(cut, 0)
    group.barrier()
    return {flow.operation: traffic for flow, traffic in group.ledger.traffic.items()}


@pytest.mark.fast
@pytest.mark.parametrize("size", [2, 3, 4])
def test_every_operation_books_the_bytes_of_the_formula(size):
    """A cut has 96 bytes, the whole size x 96. A ring all-reduce sends 2 (size - 1) cuts, the other collectives size -
    1 or none."""
    one, whole, others = 96, size * 96, (size - 1) * 96
    for rank, booked in enumerate(simulate(size, call_each)):
        root = rank == 1
        want = {
            "all_reduce": Traffic(1, whole, 2 * others),
            "reduce_scatter": Traffic(1, whole, others),
            "all_gather": Traffic(1, whole, others),
            "all_to_all": Traffic(1, whole, others),
            "broadcast": Traffic(1, whole, size * others if root else 0),
            "scatter": Traffic(1, whole, others if root else 0),
            "gather": Traffic(1, whole, 0 if root else one),
            "exchange": Traffic(1, one, one),
            "barrier": Traffic(1, 0, 0),
        }
        want |= {"send": Traffic(1, one, one)} if rank == 0 else {"recv": Traffic(1, one, 0)} if rank == 1 else {}
        assert booked == want


def uneven(group: Group) -> int:
    """Rank r sends s + 1 floats to rank s."""
    splits = [1, 2, 3]
    group.all_to_all(torch.empty(3 * (group.rank + 1)), torch.ones(6), [group.rank + 1] * 3, splits)
    return group.ledger.total(operation="all_to_all").wire


def test_an_uneven_all_to_all_books_what_goes_to_others():
    assert simulate(3, uneven) == [4 * 5, 4 * 4, 4 * 3]


def test_totals_by_group_operation_and_class_of_purpose():
    ledger = Ledger()
    ledger.count("dp", "all_reduce", "gradients 0", 100, 50)
    ledger.count("dp", "all_reduce", "gradients 12", 10, 5)
    ledger.count("dp", "all_gather", "weights", 7, 3)
    ledger.count("tp", "all_reduce", "7", 1, 1)
    assert ledger.traffic == {
        Flow("dp", "all_reduce", "gradients"): Traffic(2, 110, 55),
        Flow("dp", "all_gather", "weights"): Traffic(1, 7, 3),
        Flow("tp", "all_reduce", "7"): Traffic(1, 1, 1),
    }
    assert ledger.total() == Traffic(4, 118, 59)
    assert ledger.total("dp") == Traffic(3, 117, 58)
    assert ledger.total(operation="all_reduce") == Traffic(3, 111, 56)
    assert ledger.total("dp", purpose="gradients") == Traffic(2, 110, 55)
    assert ledger.total("pp") == Traffic()


@pytest.mark.fast
def test_spans_only_while_recording_with_their_phase():
    ledger = Ledger()
    with ledger.span("compute", "unseen"):
        pass
    ledger.recording, ledger.step = True, 3
    before = time.time()
    with ledger.span("comm", "encode", 5, "encode"):
        time.sleep(0.01)
    with ledger.span("compute", "forward"):
        pass
    encode, forward = ledger.take()
    assert (encode.step, encode.lane, encode.name, encode.payload, encode.phase) == (3, "comm", "encode", 5, "encode")
    assert encode.seconds >= 0.01 and before <= encode.start <= time.time()
    assert forward.phase == "compute" and ledger.take() == []


def recorded(group: Group) -> list[Span]:
    group.ledger.recording = True
    group.all_reduce(torch.ones(4), purpose="gradients 7")
    group.barrier()
    return group.ledger.take()


def test_collectives_are_spans_of_the_comm_lane():
    for spans in simulate(2, recorded):
        assert [(span.lane, span.name, span.payload, span.phase) for span in spans] == [
            ("comm", "gradients 7", 16, "transfer"),
            ("comm", "barrier", 0, "transfer"),
        ]
        assert [(span.operation, span.peers[1:], span.aside) for span in spans] == [
            ("all_reduce", (0, 1, 2), False),
            ("barrier", (0, 1, 2), False),
        ]


def test_an_accelerator_times_its_spans_itself():
    """On the stream that is current; both clocks are compared once."""
    recorder, gpu = Recorder(), torch.device("cuda", 0)
    with stand_in("cuda", recorder):
        ledger = Ledger(gpu)
        with ledger.span("compute", "unseen"):
            pass
        ledger.recording = True
        before = time.time()
        with ledger.span("compute", "forward"), on_stream(new_stream(gpu)), ledger.span("comm", "sum", 8, "transfer"):
            pass
        assert [call for call in recorder.calls if "waits" in call] == ["host waits for event 0"]
        inner, outer = ledger.take()
    assert (inner.name, inner.seconds, inner.payload, inner.phase) == ("sum", 1.0, 8, "transfer")
    assert (outer.name, outer.seconds) == ("forward", 3.0)
    assert before <= outer.start <= time.time() and inner.start - outer.start == pytest.approx(1.0)
    assert recorder.calls[2:5] == ["event 1 on stream 1", "event 2 on stream 1", "event 3 on main"]
