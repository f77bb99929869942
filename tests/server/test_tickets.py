"""Tickets of a job's samples: each dealt to one client, and again where it is lost."""

from __future__ import annotations

import pytest

from shoal.server.messages import END, EVALUATE, TRAIN, WAIT, Work
from shoal.server.tickets import Tickets

pytestmark = pytest.mark.fast

BOTH = {0, 1}


def finish(tickets: Tickets, rank: int, version: int = 0) -> int:
    """Deals a ticket to a client that brings its gradient; returns its number."""
    work = tickets.next(rank, version, BOTH)
    assert work.what == TRAIN
    tickets.take(work.ticket, used=True)
    return work.ticket


def test_each_ticket_is_dealt_once_and_the_same_one_to_a_client_that_asks_again():
    tickets = Tickets(2, 2, gated=False, eval_every=None)
    dealt = [tickets.next(rank, 0, BOTH) for rank in (0, 1, 0)]
    assert dealt == [Work(TRAIN, 0), Work(TRAIN, 1), Work(TRAIN, 0)]
    for number in (1, 0):
        tickets.take(number, used=True)
    assert [finish(tickets, 1), finish(tickets, 0)] == [2, 3]
    assert tickets.done == 4 and tickets.is_over(BOTH) and tickets.next(0, 0, BOTH).what == END


def test_what_a_lost_client_had_and_what_was_dropped_is_dealt_again():
    tickets = Tickets(1, 2, gated=False, eval_every=None)
    tickets.next(0, 0, BOTH)
    assert finish(tickets, 1) == 1
    assert tickets.next(1, 0, BOTH).what == WAIT
    assert tickets.next(1, 0, {1}) == Work(TRAIN, 0)
    tickets.take(0, used=False)
    assert not tickets.is_over({1}) and tickets.next(1, 0, {1}) == Work(TRAIN, 0)


def test_a_gated_step_waits_for_the_update_before_it():
    tickets = Tickets(2, 2, gated=True, eval_every=None)
    assert [finish(tickets, 0), finish(tickets, 1)] == [0, 1]
    assert tickets.next(0, 0, BOTH).what == WAIT
    assert tickets.next(0, 1, BOTH) == Work(TRAIN, 2)


def test_no_step_is_dealt_while_rows_are_evaluated():
    tickets = Tickets(2, 1, gated=True, eval_every=1, rests=True)
    assert tickets.next(0, 0, BOTH).what == EVALUATE and tickets.next(1, 0, BOTH).what == WAIT
    assert tickets.next(1, 0, {1}).what == EVALUATE  # the first one is lost
    assert tickets.evaluated(1, 0) and tickets.next(0, 0, BOTH) == Work(TRAIN, 0)


def test_one_client_evaluates_first_every_n_updates_and_last():
    tickets = Tickets(3, 1, gated=False, eval_every=2)
    seen = []
    for version in range(4):
        if tickets.next(0, version, BOTH).what == EVALUATE:
            assert tickets.next(1, version, BOTH).what == (TRAIN if version < 3 else WAIT)
            assert not tickets.evaluated(1, version) and tickets.evaluated(0, version)
            tickets.forget(1)
            seen.append(version)
        if version < 3:
            finish(tickets, 0, version)
            tickets.updated(version + 1)
    assert seen == [0, 2, 3] and tickets.is_over(BOTH)


def test_the_last_weights_are_evaluated_also_where_an_evaluation_outlasts_the_training():
    tickets = Tickets(2, 1, gated=False, eval_every=1)
    assert tickets.next(0, 0, BOTH).what == EVALUATE
    for version in (0, 1):
        finish(tickets, 1, version)
        tickets.updated(version + 1)
    assert tickets.evaluated(0, 0) and not tickets.is_over(BOTH)
    assert tickets.next(1, 2, BOTH).what == EVALUATE
    assert tickets.evaluated(1, 2) and tickets.is_over(BOTH)


def test_an_end_completes_the_step_that_is_begun():
    tickets = Tickets(None, 2, gated=False, eval_every=0)
    assert tickets.next(0, 0, BOTH).what == EVALUATE and tickets.evaluated(0, 0)
    finish(tickets, 0)
    tickets.end(evaluate=True)
    assert not tickets.is_over(BOTH) and finish(tickets, 1) == 1
    assert tickets.next(0, 1, BOTH).what == EVALUATE
    assert tickets.evaluated(0, 1) and tickets.is_over(BOTH) and tickets.next(1, 1, BOTH).what == END


def test_accounts_come_back_also_for_others_where_no_step_is_begun():
    tickets = Tickets(4, 2, gated=False, eval_every=None)
    for rank in (0, 1):
        finish(tickets, rank)
    again = Tickets(4, 2, gated=False, eval_every=None)
    assert again.restore(tickets.state(), 1, lambda: False) and finish(again, 0) == 2
    others = Tickets(4, 3, gated=False, eval_every=None)
    assert not others.restore(tickets.state(), 1, lambda: False)
    assert others.restore(tickets.state(), 1, lambda: True) and finish(others, 0) == 3


@pytest.mark.parametrize(
    "eval_every, version, seen, evaluates",
    [(0, 3, 0, True), (0, 3, 3, False), (0, 0, -1, True), (2, 2, 0, True), (2, 2, 2, False), (2, 1, 0, False)],
)
def test_an_evaluation_that_a_killed_server_was_waiting_for_is_made_once(eval_every, version, seen, evaluates):
    """Of a checkpoint of `version`, after which nothing was pushed; the run's newest evaluation is of `seen`."""
    state = {"shares": 1, "below": version, "beyond": []}
    tickets = Tickets(3, 1, gated=False, eval_every=eval_every, seen=seen)
    assert tickets.restore(state, version, lambda: True)
    assert (tickets.next(0, version, BOTH).what == EVALUATE) == evaluates
    assert tickets.is_over(BOTH) == (version == 3 and not evaluates)
