"""The membership as a state machine: worked examples, and random histories that never break its rules."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from signal import SIGINT, SIGTERM

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.elastic.events import (
    END,
    HALT,
    INTERRUPT,
    NOW,
    SAVE,
    UNABLE,
    Asked,
    Decision,
    Draining,
    Drop,
    Ended,
    Event,
    Finish,
    Form,
    Generation,
    Joined,
    Left,
    Limits,
    Place,
    Ready,
    Release,
    Say,
    StepDown,
    Stop,
    Tick,
    TookOver,
)
from shoal.elastic.journal import replay
from shoal.elastic.limits import node_limits
from shoal.elastic.membership import DEPOSED, OVER, RUNNING, STOPPING, Membership
from shoal.elastic.quorum import outnumbered
from shoal.elastic.waiting import why_it_waits
from shoal.errors import UserError

pytestmark = pytest.mark.fast


def joined(time: float, name: str, ranks: int = 1, running: int = 0, holds: bool = False) -> Joined:
    return Joined(time, name, "id", 0 if running else ranks, "10.0.0.1", 4000, running, holds)


def ended(
    time: float,
    name: str,
    generation: int,
    outcome: str = "stopped",
    code: int = 0,
    step: int = -1,
    ranks: int = 1,
    holds: bool = False,
) -> Ended:
    message = "it failed" if outcome in ("failed", "killed") else ""
    return Ended(time, name, generation, outcome, code, step, message, ranks, holds)


def apply(machine: Membership, *events: Event) -> list[Decision]:
    """All decisions, without what is only said."""
    return [each for event in events for each in machine.apply(event) if not isinstance(each, Say)]


def formed(decisions: list[Decision]) -> Generation:
    (found,) = [each.generation for each in decisions if isinstance(each, Form)]
    return found


def running(*names: str, limits: Limits | None = None) -> Membership:
    machine = Membership(limits or Limits())
    apply(machine, *(joined(0.0, name) for name in names), Tick(1.0))
    assert machine.phase == RUNNING
    return machine


def test_processes_get_places_once_they_are_ready_and_a_replaced_one_comes_in_at_a_step_boundary():
    machine = Membership(Limits())
    assert apply(machine, joined(0.0, "a", 0), Tick(5.0)) == []  # they import torch
    assert apply(machine, Ready(6.0, "a", 4)) == []
    first = formed(apply(machine, Tick(7.0)))
    assert first.places == (Place("a", 4, 0),) and not first.live
    generation = formed(apply(machine, ended(8.0, "a", 1, "killed", 4, step=9, ranks=3, holds=True)))
    assert (generation.places, generation.live, generation.step) == ((Place("a", 3, 0),), True, 9)
    assert apply(machine, Ready(11.0, "a", 1)) == []
    assert apply(machine, Tick(12.0)) == [Stop(2, HALT, "a has another rank")]
    generation = formed(apply(machine, ended(12.1, "a", 2, "stopped", step=20, ranks=4, holds=True)))
    assert (generation.size, generation.live) == (4, True)


def test_a_killed_rank_puts_nobody_aside_but_one_that_comes_no_further_ends_the_job():
    machine = running("a", limits=Limits(fruitless=3))
    for number in range(1, 4):
        killed = ended(2.0, "a", number, "killed", 4, step=number, ranks=2, holds=True)
        assert formed(apply(machine, killed)).live
        assert machine.roster.backoff.left("a", 2.0) <= 0
    for number in range(4, 7):
        decisions = apply(machine, ended(2.0, "a", number, "killed", 4, step=3, ranks=2, holds=True))
    assert decisions == [Finish(4, "3 generations in a row failed without a further step. The last: it failed")]


def test_who_makes_the_ranks_too_many_waits_until_the_others_are_more_or_some_time_has_passed():
    def unable(time: float, name: str, holds: bool = True) -> Ended:
        return Ended(time, name, machine.generation.number, UNABLE, 0, 9, "3 cannot go on", 1, holds)

    machine = running("a", "b")
    assert apply(machine, joined(2.0, "c"), Tick(3.0)) == [Stop(1, HALT, "c joins")]
    stopped = (ended(3.0, name, 1, step=9, holds=True) for name in "ab")
    assert formed(apply(machine, *stopped)).names == ["a", "b", "c"]
    assert apply(machine, unable(4.0, "a")) == [Stop(2, NOW, "ranks of a ended: 3 cannot go on")]
    generation = formed(apply(machine, unable(4.0, "b"), ended(4.0, "c", 2)))
    assert generation.names == ["a", "b"] and generation.live and generation.step == 9
    assert why_it_waits(machine, "c").startswith("3 rank(s) with those of c could not go on")
    assert apply(machine, Tick(6.0), Tick(200.0)) == [], "it is not asked again"
    assert apply(machine, joined(201.0, "d"), Tick(202.0)) == [Stop(3, HALT, "c joins, d joins")]
    stopped = (ended(202.0, name, 3, step=20, holds=True) for name in "ab")
    assert formed(apply(machine, *stopped)).size == 4
    assert apply(machine, Left(203.0, "d", "it broke", True)) == [Stop(4, NOW, "d is gone")]
    lost = (ended(203.0, name, 4, "lost", step=30, holds=True) for name in "abc")
    assert formed(apply(machine, *lost)).names == ["a", "b", "c"], "who has the state goes on, if only to wait"
    alone = running("a", limits=Limits(minimum=1))
    assert apply(alone, joined(2.0, "b"), Tick(3.0)) == [Stop(1, HALT, "b joins")]
    apply(alone, ended(3.0, "a", 1, step=9, holds=True))
    machine = alone
    assert formed(apply(alone, unable(4.0, "a"), ended(4.0, "b", 2))).names == ["a"]
    assert alone.due(305.0) and apply(alone, Tick(305.0)) == [Stop(3, HALT, "b joins")]


def test_a_node_whose_own_further_rank_is_too_many_goes_on_without_it():
    for others in ([], ["b"]):
        machine = running("a", *others)
        apply(machine, Ready(2.0, "a", 1))
        assert apply(machine, Tick(3.0)) == [Stop(1, HALT, "a has another rank")]
        left = [ended(3.0, name, 1, step=9, ranks=1 + (name == "a"), holds=True) for name in ("a", *others)]
        assert formed(apply(machine, *left)).size == 2 + len(others)
        unable = [Ended(4.0, name, 2, UNABLE, 0, 9, "too many", 1 + (name == "a"), True) for name in ("a", *others)]
        generation = formed(apply(machine, *unable))
        assert [each.ranks for each in generation.places] == [1] * (1 + len(others)) and generation.live
        assert why_it_waits(machine, "a").startswith(f"{2 + len(others)} rank(s) with those of a could not go on")
        assert apply(machine, Ready(5.0, "a", 1), Tick(200.0)) == [], "it is not asked again"
        assert apply(machine, Tick(305.0)) == [Stop(3, HALT, "a has another rank")]


def test_a_generation_knows_whether_ranks_of_the_one_before_failed_or_only_lost_others():
    machine = running("a", "b")
    lost = formed(apply(machine, Left(2.0, "b", True, "killed"), ended(2.1, "a", 1, "lost", holds=True)))
    assert lost.names == ["a"] and not lost.failed
    for outcome, failed in (("killed", True), ("failed", True), ("lost", False)):
        machine = running("a", "b")
        found = formed(apply(machine, ended(2.0, "a", 1, outcome, 1), ended(2.1, "b", 1, "lost", holds=True)))
        assert found.failed == failed
    machine = running("a", "b")  # the other node goes down of the same
    both = apply(machine, ended(2.0, "a", 1, "killed", 1, holds=True), Left(2.1, "b", True, "killed"))
    assert formed(both).failed


def test_who_has_failed_is_named_not_who_lost_others_because_of_it():
    for outcome in ("killed", "failed"):
        machine = running("a", "b", "c")
        apply(machine, ended(2.0, "b", 1, "lost", holds=True), ended(2.1, "c", 1, outcome))
        decisions = [*apply(machine, ended(2.2, "a", 1, "lost", holds=True), Tick(8.0))]
        assert formed(decisions).why == "ranks of c ended: it failed"
    machine = running("a", "b")
    apply(machine, Left(2.0, "b", "silent", True))
    assert formed(apply(machine, ended(2.2, "a", 1, "lost", holds=True), Tick(8.0))).why == "b is gone"


def test_state_in_memory_counts_only_while_its_member_stays():
    machine = running("a", "b")
    assert apply(machine, ended(2.0, "a", 1, "lost", step=5, holds=True)) == [Stop(1, NOW, "ranks of a ended: ")]
    assert apply(machine, Left(2.1, "a", True, "it was killed")) == []
    assert not formed(apply(machine, ended(2.2, "b", 1, "lost", ranks=1))).live
    machine = running("a", "b")
    apply(machine, ended(2.0, "a", 1, "lost", holds=True), TookOver(2.1, "b", "b", True, 1))
    assert formed(apply(machine, joined(2.2, "a", holds=True))).live  # its report and the coordinator went together


def test_a_job_that_is_told_to_end_while_ranks_only_wait_trains_them_once_more_for_the_checkpoint():
    machine = running("a", "b")
    apply(machine, ended(2.0, "a", 1, "killed", 4, ranks=0), Asked(2.1, 2))
    decisions = apply(machine, ended(2.2, "b", 1, "lost", holds=True))
    assert formed(decisions).live and decisions[-1] == Stop(2, INTERRUPT, "the job was told to end")
    assert apply(machine, ended(3.0, "b", 2, "stopped", ranks=0)) == [Finish(130, "the job was told to end")]


def test_members_that_come_together_form_one_generation_with_unequal_sizes():
    machine = Membership(Limits(minimum=2, maximum=4))
    assert apply(machine, joined(0.0, "a", 3), Tick(5.0)) == []  # one is too few, however long it waits
    assert apply(machine, joined(6.0, "b", 1), joined(6.5, "c", 2), Tick(7.0)) == []
    generation = formed(apply(machine, Tick(7.5)))
    assert generation.places == (Place("a", 3, 0), Place("b", 1, 3), Place("c", 2, 4))
    assert (generation.number, generation.size) == (1, 6)


def test_the_largest_number_of_nodes_is_not_waited_for_longer():
    machine = Membership(Limits(maximum=2))
    assert formed(apply(machine, joined(0.0, "a"), joined(0.0, "b"))).names == ["a", "b"]
    assert apply(machine, joined(3.0, "c"), Tick(9.0)) == []  # kept in reserve
    assert apply(machine, Left(10.0, "a", True, "")) == [Stop(1, NOW, "a is gone")]
    assert formed(apply(machine, ended(11.0, "b", 1, "lost"))).names == ["b", "c"]
    assert apply(machine, joined(12.0, "a"), Tick(20.0)) == []  # who trains goes on


def test_a_late_joiner_comes_in_at_a_step_boundary():
    machine = running("a")
    assert apply(machine, joined(5.0, "b")) == []
    assert apply(machine, Tick(6.0)) == [Stop(1, HALT, "b joins")]
    generation = formed(apply(machine, ended(6.2, "a", 1, step=40)))
    assert (generation.number, generation.names, generation.step) == (2, ["a", "b"], 40)


def test_a_member_that_drains_is_released_and_the_others_go_on():
    machine = running("a", "b")
    assert apply(machine, Draining(5.0, "a")) == [Stop(1, SAVE, "a leaves")]
    assert apply(machine, ended(6.0, "a", 1)) == []
    decisions = apply(machine, ended(6.1, "b", 1))
    assert decisions[0] == Release("a") and formed(decisions).names == ["b"]
    assert apply(machine, Draining(7.0, "b")) == [Stop(2, END, "b leaves")]
    assert apply(machine, ended(8.0, "b", 2)) == [Release("b"), Finish(143, "no node is left")]


@pytest.mark.parametrize("before", [SIGINT, SIGTERM])
@pytest.mark.parametrize(("number", "how"), [(SIGINT, INTERRUPT), (SIGTERM, END)])
def test_a_run_is_ended_by_the_signal_of_the_last_node_that_leaves(before: int, number: int, how: str):
    """As its record says it, also where the others leave at the same time."""
    machine = running("a", "b")
    assert apply(machine, Draining(5.0, "a", before)) == [Stop(1, SAVE, "a leaves")]
    assert apply(machine, Draining(5.1, "b", number)) == [Stop(1, how, "a leaves")]
    assert apply(machine, Draining(5.2, "a", before), Tick(5.3)) == [], "a node that comes back says it again"
    alone = running("a")
    assert apply(alone, Draining(5.0, "a", number), Tick(5.1)) == [Stop(1, how, "a leaves")]
    assert apply(alone, ended(6.0, "a", 1)) == [Release("a"), Finish(143, "no node is left")]


@pytest.mark.parametrize("outcome", ["stopped", "finished"])
def test_where_all_members_drain_the_run_ends_as_after_a_signal(outcome: str):
    """Also where a scheduler has sent the signal to the ranks, too, which then have finished by themselves."""
    machine = running("a", "b")
    assert apply(machine, Draining(5.0, "a")) == [Stop(1, SAVE, "a leaves")]
    assert apply(machine, Draining(5.1, "b")) == [Stop(1, END, "a leaves")]
    assert apply(machine, ended(6.0, "a", 1, outcome)) == []
    released = [Release("a"), Release("b"), Finish(143, "no node is left")]
    assert apply(machine, ended(6.1, "b", 1, outcome)) == released


def test_a_failure_while_draining_ends_the_others_at_once():
    machine = running("a", "b", "c")
    assert apply(machine, Draining(5.0, "a")) == [Stop(1, SAVE, "a leaves")]
    assert apply(machine, ended(6.0, "b", 1, "failed", 1)) == [Stop(1, NOW, "a leaves")]


def test_ranks_that_do_not_end_cost_their_member_its_place():
    machine = running("a", "b", "c", limits=Limits(kill=5.0))
    apply(machine, ended(5.0, "a", 1, "failed", 1, step=3), ended(5.1, "b", 1, "lost", step=3))
    decisions = apply(machine, Tick(10.0))
    assert decisions[0] == Drop("c", "its ranks do not end") and formed(decisions).names == ["a", "b"]


def test_a_drain_that_takes_too_long_is_not_waited_for():
    machine = running("a", "b")
    assert apply(machine, Draining(5.0, "a"), Tick(604.0)) == [Stop(1, SAVE, "a leaves")]  # a large checkpoint
    assert apply(machine, Tick(605.0)) == [Stop(1, NOW, "a leaves")]


def test_a_member_that_fails_again_is_put_aside_longer_each_time():
    machine = running("a", "b", limits=Limits(fruitless=99))
    time, times = 10.0, []
    for number in range(1, 5):
        decisions = apply(
            machine, ended(time, "a", number, "failed", 1, step=number), ended(time, "b", number, "lost", step=number)
        )
        generation = formed(decisions)
        times.append(machine.roster.backoff.left("a", time))
        if number > 1:
            assert generation.names == ["b"]
            time += times[-1]
            assert machine.due(time)
            apply(machine, Tick(time), ended(time, "b", machine.generation.number, step=number))
            assert machine.generation.names == ["a", "b"]
            machine.generation = Generation(number + 1, machine.generation.places, "")
            machine._number = machine._newest = number + 1
        time += 1
    assert times == [0, 4, 8, 16]


def test_mistakes_of_the_user_and_training_that_comes_no_further_end_the_job():
    machine = running("a", "b")
    mistakes = [ended(2.0, name, 1, "failed", 2) for name in "ab"]
    assert apply(machine, *mistakes)[-1] == Finish(2, "it failed")
    machine = running("a", limits=Limits(longest=0.0, fruitless=3))
    for number in (1, 2):
        assert formed(apply(machine, ended(2.0, "a", number, "failed", 1, step=7))).number == number + 1
    apply(machine, ended(2.0, "a", 3, "failed", 1, step=7))
    (end,) = apply(machine, ended(2.0, "a", 4, "failed", 1, step=7))
    assert isinstance(end, Finish) and end.code == 1 and machine.phase == OVER


def test_a_complete_training_and_one_that_is_told_to_end():
    machine = running("a", "b")
    assert apply(machine, ended(2.0, "a", 1, "finished")) == []
    assert apply(machine, ended(2.1, "b", 1, "finished")) == [Finish(0, "the training is complete")]
    for number, how in ((SIGINT, INTERRUPT), (SIGTERM, END)):  # as the record of the run says it
        machine = running("a")
        assert apply(machine, Asked(3.0, number)) == [Stop(1, how, "the job was told to end")]
        assert apply(machine, ended(4.0, "a", 1)) == [Finish(128 + number, "the job was told to end")]


def test_a_lost_connection_alone_ends_nothing_but_lost_ranks_do():
    machine = running("a", "b")
    assert apply(machine, joined(3.0, "b", running=1), Tick(9.0)) == []
    assert apply(machine, joined(10.0, "b", running=0))[0] == Stop(
        1, NOW, "ranks of b ended: it was cut off, and its ranks have left"
    )


def test_silence_leaves_only_the_larger_side_and_a_tie_to_who_coordinated():
    names = ["a", "b", "c", "d"]
    assert outnumbered(names, {}, False) == ""
    assert outnumbered(names, {"b": True, "c": True, "d": True}, False) == ""  # those have ended
    assert outnumbered(names, {"c": False, "d": False}, False) == ""
    assert "no more than half" in outnumbered(names, {"a": False, "b": False}, True)
    assert "less than half" in outnumbered(names, {"b": False, "c": False, "d": False}, False)
    for sides in range(1, 15):  # every cut in two, with the coordinator on either side: one side goes on at most
        here = {name for bit, name in enumerate(names) if sides >> bit & 1}
        there = set(names) - here
        goes_on = [not outnumbered(names, dict.fromkeys(there, False), False)]
        goes_on.append(not outnumbered(names, dict.fromkeys(here, False), True))
        assert sum(goes_on) <= 1


def test_a_coordinator_with_the_smaller_side_steps_down():
    machine = running("a", "b", "c")
    apply(machine, Left(5.0, "b", False, "silent"), Left(5.0, "c", False, "silent"))
    (decision,) = apply(machine, ended(5.1, "a", 1, "lost"))
    assert isinstance(decision, StepDown) and machine.phase == DEPOSED
    assert apply(machine, joined(6.0, "b")) == []
    apply(machine, TookOver(9.0, "b", "a", False, 1), joined(9.1, "b"))  # a standby that has followed so far
    assert formed(apply(machine, joined(9.2, "c"))).names == ["b", "c"]


def test_a_standby_goes_on_with_those_that_find_it():
    machine = running("a", "b", "c", "d")
    (stop,) = apply(machine, TookOver(5.0, "b", "a", True, 1))
    assert isinstance(stop, Stop) and machine.phase == STOPPING
    assert apply(machine, joined(5.1, "b", running=1), joined(5.1, "c")) == [stop]
    assert apply(machine, ended(5.5, "b", 1, "lost", step=9)) == []  # d may still run ranks
    generation = formed(apply(machine, Tick(7.0)))
    assert (generation.number, generation.names, generation.step) == (2, ["b", "c"], 9)


def test_two_standbys_that_both_take_over_do_not_both_go_on():
    """Each has heard that it is the next one, and found half of the members. With three of four one goes on."""
    for here, goes_on in ((["b", "c"], False), (["b", "c", "e"], True)):
        machine = running("a", "b", "c", "d", "e")
        apply(machine, TookOver(5.0, "b", "a", True, 1))
        apply(machine, *(joined(5.1, name) for name in here))
        decided = apply(machine, Tick(7.0))
        assert any(isinstance(each, StepDown) for each in decided) != goes_on
        assert any(isinstance(each, Form) for each in decided) == goes_on


def test_a_standby_that_knows_of_a_newer_generation_does_not_use_its_number():
    machine = running("a", "b")
    assert formed(apply(machine, TookOver(5.0, "b", "a", True, 7), joined(5.1, "b"))).number == 8


def test_how_many_nodes():
    assert node_limits("1:4") == (1, 4) and node_limits("3") == (3, 3) and node_limits("2:")[0] == 2
    for wrong in ("", "0", "4:1", "a:b", "1:2:3", "-1", "1:99999999"):
        with pytest.raises(UserError, match="--nodes"):
            node_limits(wrong)


@dataclass
class Node:
    """A node as it really is: it has so many processes.

    running: the generation of its ranks. waiting: processes that wait for a place. holds: whether they have the state
    of the run in memory.
    """

    ranks: int
    connected: bool = False
    running: int = 0
    waiting: int = 0
    holds: bool = False

    def begin_anew(self) -> None:
        self.running, self.waiting, self.holds = 0, self.ranks, False

    def joined(self, time: float, name: str) -> Joined:
        return Joined(time, name, "id", self.waiting, "10.0.0.1", 4000, self.running, self.holds)


@dataclass
class History:
    """A machine among nodes that do at random what nodes do."""

    seed: int
    limits: Limits
    nodes: dict[str, Node] = field(default_factory=dict)
    events: list[Event] = field(default_factory=list)
    decisions: list[Decision] = field(default_factory=list)
    time: float = 0.0

    def __post_init__(self) -> None:
        self.random = random.Random(self.seed)
        self.machine = Membership(self.limits)
        self.nodes = {f"n{i}": Node(self.random.randint(1, 5)) for i in range(self.random.randint(1, 6))}
        for node in self.nodes.values():
            node.begin_anew()

    def tell(self, event: Event) -> None:
        self.events.append(event)
        before = self.machine.generation.number if self.machine.generation else 0
        for decision in self.machine.apply(event):
            self.decisions.append(decision)
            if isinstance(decision, Form):
                self.check(decision.generation, before)
                for name in decision.generation.names:
                    node = self.nodes[name]
                    node.running, node.waiting, node.holds = decision.generation.number, 0, False
            elif isinstance(decision, Drop):
                self.nodes[decision.name].connected = False
                self.nodes[decision.name].running = 0  # it ends its ranks once it is cut off
            elif isinstance(decision, Release):
                self.nodes[decision.name].connected = False

    def check(self, generation: Generation, before: int) -> None:
        assert generation.number > before
        assert not any(node.running for node in self.nodes.values()), "two generations at once"
        assert self.limits.minimum <= len(generation.places) <= self.limits.maximum
        assert all(self.nodes[name].connected for name in generation.names)
        assert [place.ranks for place in generation.places] == [self.nodes[name].waiting for name in generation.names]
        assert all(place.ranks for place in generation.places)
        assert generation.live == any(self.nodes[name].holds for name in generation.names)
        assert [place.first for place in generation.places] == [
            sum(each.ranks for each in generation.places[:i]) for i in range(len(generation.places))
        ]
        for name in generation.names:
            assert self.machine.roster.backoff.left(name, self.time) <= 0

    def step(self) -> None:
        self.time += self.random.choice([0.0, 0.1, 0.5, 2.0, 70.0])
        name = self.random.choice(list(self.nodes))
        node, chance = self.nodes[name], self.random.random()
        if self.machine.due(self.time) and chance < 0.6:
            self.tell(Tick(self.time))
        elif not node.connected:
            node.connected = True
            self.tell(node.joined(self.time, name))
        elif chance < 0.25 and node.running:
            self.leave(name, self.random.choice(["failed", "killed", "lost", "stopped", "stopped", "finished"]))
        elif chance < 0.35 and node.waiting < node.ranks:  # a process that has ended is replaced
            node.waiting += 1
            self.tell(Ready(self.time, name, node.waiting))
        elif chance < 0.45:
            node.connected = False
            node.begin_anew()
            self.tell(Left(self.time, name, self.random.random() < 0.7, "its connection was closed"))
        elif chance < 0.55:
            self.tell(Draining(self.time, name, self.random.choice([SIGINT, SIGTERM])))
        elif chance < 0.62:  # the connection breaks for a moment
            self.tell(node.joined(self.time, name))
        elif chance < 0.66:
            for each in self.nodes.values():
                each.connected = False
            newest = self.machine.generation.number if self.machine.generation else 0
            node.begin_anew()
            other = self.random.choice(list(self.nodes))
            self.tell(TookOver(self.time, other, name, True, newest + self.random.randint(0, 1)))
            for each, late in self.nodes.items():  # who does not come in time has ended its ranks by then
                if each != name and self.random.random() < 0.7:
                    late.connected = True
                    self.tell(late.joined(self.time, each))
                elif late.running:
                    late.begin_anew()
        else:
            self.tell(Tick(self.time))

    def leave(self, name: str, outcome: str, step: int | None = None) -> None:
        """The ranks of a node leave their generation; some of their processes end."""
        node = self.nodes[name]
        running, node.running = node.running, 0
        node.waiting = self.random.randint(0, node.ranks) if step is None else node.ranks
        node.holds = node.waiting > 0 and self.random.random() < 0.7
        code = 1 if outcome in ("failed", "killed") else 0
        step = len(self.events) if step is None else step
        self.tell(ended(self.time, name, running, outcome, code, step, node.waiting, node.holds))


@settings(max_examples=150)
@given(st.integers(0, 2**32), st.integers(1, 3), st.integers(0, 3))
def test_no_history_runs_two_generations_at_once_and_a_journal_gives_the_same_machine(seed, minimum, more):
    history = History(seed, Limits(minimum=minimum, maximum=minimum + more))
    for _ in range(120):
        if history.machine.phase in (OVER, DEPOSED):
            break
        history.step()
    assert vars(replay(history.limits, history.events)) == vars(history.machine)
    half = Membership(history.limits)
    said = [each for event in history.events for each in half.apply(event)]
    assert said == history.decisions


@settings(max_examples=150)
@given(st.integers(0, 2**32))
def test_whatever_happened_the_job_goes_on_once_members_behave(seed):
    history = History(seed, Limits(minimum=1, maximum=3))
    for _ in range(60):
        history.step()
    for _ in range(200):
        if history.machine.phase in (OVER, DEPOSED, RUNNING):
            break
        history.time += 5.0
        for name, node in history.nodes.items():
            if not node.connected:
                node.connected = True
                history.tell(node.joined(history.time, name))
            if history.machine.phase == STOPPING and node.running:
                history.leave(name, "stopped", 10**6 + int(history.time))
            elif not node.running and node.waiting < node.ranks:
                node.waiting = node.ranks
                history.tell(Ready(history.time, name, node.waiting))
        history.tell(Tick(history.time))
    assert history.machine.phase in (OVER, DEPOSED, RUNNING)


def test_a_member_that_comes_back_while_a_generation_forms_is_counted_with_what_waits_there():
    """Its place crosses its return, so it counts as cut off, and still says that its processes wait again."""
    machine = Membership(Limits(minimum=2, settle=0.0))
    for name in "ab":
        machine.apply(joined(0.0, name))
    machine.apply(Tick(1.0))
    machine.apply(ended(2.0, "a", 1, "failed", 9))
    machine.apply(ended(2.0, "b", 1, "lost"))
    assert machine.generation.number == 2
    machine.apply(Joined(2.0, "b", "id", 0, "10.0.0.1", 4000, 1, False))  # it knows of the first one only
    machine.apply(ended(2.1, "a", 2, "lost"))
    assert machine.phase != RUNNING
    machine.apply(ended(2.1, "b", 2, "lost"))
    assert machine.phase == RUNNING and machine.generation.number == 3
