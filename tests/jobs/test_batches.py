"""Votes between steps: where they are due, and none twice on the same state."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest

from shoal.jobs.batches import Votes
from shoal.plan import Plan
from shoal.training.vote import Vote


@dataclass
class Voting:
    """Stands for an engine: counts the steps after which its replicas vote."""

    step_index: int = 0
    plan: Plan = field(default_factory=Plan)
    voted: list[int] = field(default_factory=list)

    def verify(self) -> Vote:
        self.voted.append(self.step_index)
        return Vote({"weights": 8}, {"masters": 1 << 20})


@dataclass
class Numbered:
    step: int


def trained(engine: Voting, votes: Votes, first: int, steps: int, save_every: int) -> None:
    engine.step_index = first

    def batches() -> Any:
        while engine.step_index < first + steps:
            yield Numbered(engine.step_index)

    for _ in votes.between(batches()):
        engine.step_index += 1
        if engine.step_index % save_every == 0:
            votes.take()  # as before each checkpoint


@pytest.mark.fast
def test_votes_come_first_when_due_and_before_a_save_and_each_state_is_voted_on_once():
    engine, said = Voting(), list[str]()
    trained(engine, Votes(engine, 4, said.append), 2, 10, 6)
    assert engine.voted == [2, 4, 6, 8, 12]  # 12 is a save's, and would be due
    assert len(said) == 1 and "1.00 MiB of masters" in said[0]


@pytest.mark.fast
def test_no_votes_unless_asked_and_another_one_under_another_plan():
    engine = Voting()
    trained(engine, Votes(engine, 0, pytest.fail), 0, 6, 2)
    assert engine.voted == []
    votes = Votes(engine, 4, lambda line: None)
    votes.take()
    votes.take()
    engine.plan = Plan(dp=2)
    votes.take()
    assert len(engine.voted) == 2
