"""The lane: order, errors, and what it records."""

from __future__ import annotations

import threading
import time

import pytest
import torch

from shoal.comm import Lane, Ledger
from shoal.device import stand_in
from tests.device.recorder import Recorder

CPU = torch.device("cpu")


def test_work_runs_in_order_beside_the_caller():
    lane, seen = Lane(CPU), []
    for i in range(50):
        lane.submit(lambda i=i: seen.append((i, threading.current_thread().name)))
    lane.wait()
    assert seen == [(i, "shoal-lane") for i in range(50)]
    lane.close()


def test_wait_waits():
    lane, seen = Lane(CPU), []
    lane.submit(lambda: (time.sleep(0.1), seen.append(1)))
    assert seen == []
    lane.wait()
    assert seen == [1]
    lane.close()


def test_the_first_error_is_raised_once_and_what_followed_it_is_dropped():
    lane, seen = Lane(CPU), []

    def fail():
        raise KeyError("first")

    lane.submit(fail)
    lane.submit(lambda: seen.append("dropped"))
    with pytest.raises(KeyError, match="first"):
        lane.wait()
    lane.submit(lambda: seen.append("next"))
    lane.wait()
    assert seen == ["next"]
    lane.close()


@pytest.mark.fast
def test_a_recording_ledger_gets_queue_and_wait():
    """The second piece lies in the queue while the first one runs; the trainer waits for both."""
    ledger = Ledger()
    lane, started, go = Lane(CPU, ledger), threading.Event(), threading.Event()
    ledger.recording = True
    lane.submit(lambda: (started.set(), go.wait()), "first")
    started.wait()
    lane.submit(lambda: None, "second")
    threading.Timer(0.1, go.set).start()
    lane.wait()
    lane.close()
    spans = {(span.phase, span.name): span for span in ledger.take()}
    assert set(spans) == {("queue", "first"), ("queue", "second"), ("wait", "exchange")}
    assert spans["queue", "second"].seconds >= 0.1 > spans["queue", "first"].seconds
    assert spans["wait", "exchange"].seconds >= 0.05
    assert {span.lane for span in spans.values()} == {"queue", "wait"}  # not work: neither compute nor comm


def test_nothing_is_recorded_otherwise():
    ledger = Ledger()
    lane = Lane(CPU, ledger)
    lane.submit(lambda: None)
    lane.wait()
    lane.close()
    assert ledger.take() == []


def test_beside_an_accelerator_a_stream_keeps_the_order():
    """Work comes behind what the caller's stream has; whoever waits, waits for the work on the device, and the host
    goes on."""
    recorder = Recorder()
    with stand_in("cuda", recorder):
        lane = Lane(torch.device("cuda", 0))
        ticket = lane.submit(lambda: recorder.calls.append(f"work on {recorder.current_stream().name}"))
        ticket.wait()
        lane.wait()
        lane.drain()
        lane.close()
    assert recorder.calls == [
        "stream 1 waits for main",
        "work on stream 1",
        "event 0 on stream 1",
        "main waits for event 0",
        "main waits for stream 1",
        "main waits for stream 1",
        "main waits for stream 1",
    ]


def test_a_lane_may_wait_for_another_one():
    """What is waited for inside a piece of work is waited for by the stream of that work."""
    recorder = Recorder()
    with stand_in("cuda", recorder):
        one, other = Lane(torch.device("cuda", 0)), Lane(torch.device("cuda", 0))
        ticket = one.submit(lambda: None)
        del recorder.calls[:]
        other.submit(ticket.wait)
    assert recorder.calls[:2] == ["stream 2 waits for main", "stream 2 waits for event 0"]
