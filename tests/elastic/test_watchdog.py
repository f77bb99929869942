"""Who hangs, by what ranks show; and the board on which they show it."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path

import pytest

from shoal.elastic.watchdog import Watchdog
from shoal.launch.board import (
    BUSY,
    EVALUATION,
    FIRST,
    SAMPLE,
    SAVE,
    STEP,
    VARIABLE,
    Board,
    Progress,
    open_board,
    read_board,
)

pytestmark = pytest.mark.fast

WHERE = "all_reduce (loss), collective 7 of group world"


def trained(seconds: float, steps: int = 8, ranks: int = 2) -> tuple[Watchdog, dict[int, Progress], float]:
    """A watchdog that has seen steps of so many seconds, the last boards, and the time of the last step."""
    watchdog, now = Watchdog(), 100.0
    for step in range(1, steps + 1):
        now += seconds
        boards = {rank: Progress(step, STEP, now, now) for rank in range(ranks)}
        assert watchdog.look(boards, set(), now) is None
    return watchdog, boards, now


def test_a_rank_that_does_not_come_to_a_collective_is_named_with_what_the_others_are_in():
    watchdog, boards, now = trained(0.1)
    boards[0] = replace(boards[0], waits=now + 1, where="all_reduce for the gradients, collective 7 of group dp")
    assert watchdog.look(boards, set(), now + 9.9) is None
    hang = watchdog.look(boards, set(), now + 10.5)
    assert hang.here and hang.text == (
        "rank 1 committed no step for 10 s; rank 0 is in all_reduce for the gradients, collective 7 of group dp for "
        "10 s, rank 1 is after step 8"
    )


def test_slow_steps_have_more_time_and_the_first_one_has_all():
    watchdog, boards, now = trained(6.0)
    assert watchdog.look(boards, set(), now + 29) is None and watchdog.look(boards, set(), now + 31).here
    watchdog = Watchdog()
    assert watchdog.look({0: Progress(1, STEP, 5.0, 5.0)}, set(), 500.0) is None


@pytest.mark.parametrize("patience", [1.0, 2.0])
def test_the_first_step_after_a_resize_has_the_time_that_the_job_gives_and_the_next_generation_twice_as_long(patience):
    watchdog = Watchdog(patience)  # a new generation: nothing is known of its steps
    limit = 1800 * patience
    builds = {rank: Progress(-1, BUSY, 100.0, 100.0, first=1800.0) for rank in range(2)}
    assert watchdog.look(builds, set(), 1e6) is None
    boards = {rank: replace(board, phase=FIRST) for rank, board in builds.items()}
    boards[0] = replace(boards[0], waits=101.0, where="all_reduce for the gradients")
    assert watchdog.look(boards, set(), 100 + limit - 1) is None
    assert watchdog.look({0: boards[0], 1: builds[1]}, set(), 1e6) is None  # the other one still builds
    hang = watchdog.look(boards, set(), 100 + limit + 1)
    assert (hang.ranks, hang.stopped, hang.first) == ((1,), False, True) and hang.text == (
        f"rank 1 has not completed the first step for {limit + 1:.0f} s (run.first_within; give more if it does not "
        "hang: the next generation has twice as long); rank 0 is in all_reduce for the gradients for "
        f"{limit:.0f} s, rank 1 is in its first step"
    )
    waits = dict.fromkeys(range(2), boards[0])
    assert watchdog.look(waits, set(), 100 + limit + 1) is None
    elsewhere = watchdog.look(waits, set(), 100 + limit + 3)
    assert elsewhere.first and not elsewhere.here
    assert elsewhere.text.startswith("all ranks here wait for others (run.first_within; ")


def test_the_second_step_has_as_long_as_the_first_and_none_has_a_limit_where_the_job_gives_none():
    watchdog = Watchdog()
    one = {0: Progress(7, STEP, 100.0, 100.0, first=1800.0)}
    assert watchdog.look(one, set(), 1899.0) is None and watchdog.look(one, set(), 1901.0).ranks == (0,)
    for phase in (FIRST, STEP, EVALUATION, SAVE, SAMPLE):
        assert Watchdog().look({0: Progress(7, phase, 100.0, 100.0)}, set(), 1e9) is None


def test_under_a_new_plan_what_steps_took_before_does_not_count():
    watchdog, boards, now = trained(0.1)
    boards = {rank: replace(board, first=1800.0) for rank, board in boards.items()}
    boards = {rank: replace(board, phase=FIRST, stepped=now + 1) for rank, board in boards.items()}
    assert watchdog.look(boards, set(), now + 1800) is None
    assert watchdog.look(boards, set(), now + 1802).text.startswith("rank 0, 1 has not completed the first step for 18")
    boards = {rank: replace(board, phase=STEP, step=9, stepped=now + 41) for rank, board in boards.items()}
    assert watchdog.look(boards, set(), now + 41 + 199) is None  # five times as long as the first one, which took 40 s
    assert not watchdog.look(boards, set(), now + 41 + 201).first
    boards = {rank: replace(board, phase=EVALUATION) for rank, board in boards.items()}
    assert watchdog.look(boards, set(), now + 41 + 1799) is None


def test_steps_that_are_over_before_anybody_looks_are_timed():
    watchdog = Watchdog()
    for look, step in enumerate((3, 40, 75)):
        board = Progress(step, STEP, 100.0 + 0.2 * look, 100.0 + 0.2 * look, first=1800.0)
        assert watchdog.look({0: board}, set(), board.stepped) is None
    assert watchdog.median == pytest.approx((0.2 / 37 + 0.2 / 35) / 2)
    assert watchdog.look({0: board}, set(), board.stepped + 10.1).ranks == (0,)


def test_a_rank_measures_its_evaluations_and_saves_from_the_first_step_of_a_plan(tmp_path: Path, monkeypatch):
    """A save before the first step ends with the call, others with the next step, which may take more than a minute."""
    now = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    board, found = Board(tmp_path / "board", lambda: None), []
    for phase, seconds in ((SAVE, 30.0), (FIRST, 40.0), (SAMPLE, 3.0), (EVALUATION, 0.02), (EVALUATION, 0.05)):
        board.show(phase)
        now[0] += seconds
        found.append(read_board(tmp_path / "board"))
    assert [(each.evaluation, each.save) for each in found[:4]] == [(0.0, 0.0)] * 4
    assert (found[4].evaluation, found[4].sample) == pytest.approx((0.02, 3.0))
    board.show(BUSY)
    assert read_board(tmp_path / "board").evaluation == pytest.approx(0.05)
    board.show(SAVE)
    now[0] += 7.0
    board.show(STEP, 9)
    assert read_board(tmp_path / "board").save == pytest.approx(7.0)
    board.show(SAVE, timed=False)  # which waits for the one before
    found = read_board(tmp_path / "board")
    assert (found.save, found.evaluation) == (0.0, pytest.approx(0.05))
    board.show(STEP, 10)
    assert read_board(tmp_path / "board").save == pytest.approx(7.0)
    board.show(FIRST)
    board.close()
    assert (read_board(tmp_path / "board").evaluation, read_board(tmp_path / "board").save) == (0.0, 0.0)


def test_who_builds_is_not_late():
    watchdog, boards, now = trained(0.1)
    boards = {0: replace(boards[0], waits=now, where=WHERE, first=60.0), 1: replace(boards[1], phase=BUSY, first=60.0)}
    assert watchdog.look(boards, set(), now + 100) is None and watchdog.standstill is None
    hang = watchdog.look({**boards, 0: replace(boards[0], waits=0.0)}, set(), now + 100)
    assert hang.ranks == (0,), "it waits for nobody"


def test_who_builds_and_waits_is_late_after_the_time_that_the_job_gives():
    """One rank hangs in a collective of the others, which wait in another one: of a change of the plan, say."""
    watchdog, boards, now = trained(0.1)
    boards = {rank: replace(board, waits=now, where=WHERE, first=60.0) for rank, board in boards.items()}
    boards[1] = replace(boards[1], phase=BUSY)
    assert watchdog.look(boards, set(), now + 59) is None and watchdog.standstill is None
    assert watchdog.look(boards, set(), now + 61) is None and watchdog.standstill.first
    assert watchdog.look({**boards, 1: replace(boards[1], first=0.0)}, set(), 1e6) is None
    assert watchdog.standstill is None


def test_an_evaluation_that_comes_no_further_is_found_by_its_own_pace():
    watchdog, boards, now = trained(0.1)
    boards[0] = replace(boards[0], waits=now, where="all_reduce for the evaluation")
    boards[1] = replace(boards[1], phase=EVALUATION, stepped=now)
    assert watchdog.look(boards, set(), now + 500) is None  # its first microbatch may take any time
    bound = {rank: replace(board, first=1800.0) for rank, board in boards.items()}
    hang = watchdog.look(bound, set(), now + 1801)
    assert hang.first and hang.text.startswith("rank 1 came no further in an evaluation for 1801 s (run.first_within")
    boards = {rank: replace(board, stepped=now + 500) for rank, board in boards.items()}
    boards[1] = replace(boards[1], phase=EVALUATION, evaluation=500.0)  # the longest of any rank counts
    assert watchdog.look(boards, set(), now + 500 + 2499) is None
    hang = watchdog.look(boards, set(), now + 500 + 2501)
    assert (hang.first, hang.ranks) == (False, (1,)) and hang.text == (
        "rank 1 came no further in an evaluation for 2501 s; rank 0 is in all_reduce for the evaluation for 3001 s, "
        "rank 1 is in an evaluation after step 8"
    )


def test_microbatches_of_an_evaluation_that_are_quick_have_ten_seconds_or_five_steps():
    for seconds, limit in ((0.1, 10.0), (6.0, 30.0)):
        watchdog, boards, now = trained(seconds)
        boards = {rank: replace(board, phase=EVALUATION, evaluation=0.02) for rank, board in boards.items()}
        assert watchdog.look(boards, set(), now + limit - 0.1) is None
        assert watchdog.look(boards, set(), now + limit + 0.1).ranks == (0, 1)


@pytest.mark.parametrize(
    ("phase", "field", "does", "at"),
    [
        (SAVE, "save", "has not completed a save", "in a save"),
        (SAMPLE, "sample", "has not written a sample", "writing a sample"),
    ],
)
def test_a_save_or_a_sample_has_a_minute_or_five_times_as_long_as_the_longest_before(phase, field, does, at):
    for took, limit in ((0.5, 60.0), (20.0, 100.0)):
        watchdog, boards, now = trained(0.1)
        boards = {rank: replace(board, phase=phase) for rank, board in boards.items()}
        assert watchdog.look(boards, set(), now + 1000) is None  # the first one
        boards = {rank: Progress(9, phase, now, now, **{field: took}) for rank in boards}
        boards[0] = replace(boards[0], waits=now, where="all_gather")
        assert watchdog.look(boards, set(), now + limit - 0.1) is None
        hang = watchdog.look(boards, set(), now + limit + 0.1)
        assert hang.ranks == (1,) and hang.text.startswith(f"rank 1 {does} for {limit:.0f} s; rank 0")
        assert hang.text.endswith(f"rank 1 is {at} after step 9")


def test_a_host_whose_ranks_all_wait_leaves_it_to_the_others_for_a_moment():
    watchdog, boards, now = trained(0.1)
    boards = {rank: replace(board, waits=now, where="barrier") for rank, board in boards.items()}
    assert watchdog.look(boards, set(), now + 11) is None
    assert not watchdog.look(boards, set(), now + 12.5).here


@pytest.mark.parametrize("phase, limit, at", [(EVALUATION, 10.0, "in an evaluation"), (SAVE, 60.0, "in a save")])
def test_ranks_that_all_wait_in_an_evaluation_or_a_save_are_no_hang_unless_nobody_comes_further(phase, limit, at):
    watchdog, boards, now = trained(0.1)
    boards = {
        rank: replace(board, phase=phase, evaluation=0.02, save=0.5, waits=now, where=WHERE)
        for rank, board in boards.items()
    }
    assert watchdog.look(boards, set(), now + limit - 0.1) is None and watchdog.standstill is None
    assert watchdog.look(boards, set(), now + limit + 0.1) is None
    hang = watchdog.standstill
    assert (hang.here, hang.stopped, hang.first) == (False, False, False)
    in_it = f"is in {WHERE} for {limit:.0f} s"
    assert hang.text == f"all ranks here wait for others; rank 0 {in_it}, rank 1 {in_it}"
    late = hang.of([0])
    assert late.here and late.text == f"rank 0 does not leave what it is in: {hang.text}"
    works = {**boards, 1: replace(boards[1], waits=0.0, where="")}
    assert watchdog.look(works, set(), now + limit + 0.3).text.endswith(f"rank 1 is {at} after step 8")
    assert watchdog.standstill is None  # it is missing
    for other in (
        {"stepped": now + limit, "waits": now + limit},  # it comes further, as one with more microbatches
        {"phase": SAMPLE, "first": 1800.0},  # it writes a sample
        {"phase": BUSY},
    ):
        watchdog.look(boards, set(), now + limit + 0.5)
        assert watchdog.standstill is not None
        assert watchdog.look({**boards, 1: replace(boards[1], **other)}, set(), now + limit + 0.7) is None
        assert watchdog.standstill is None


def test_what_nobody_has_timed_is_a_standstill_after_the_time_that_the_job_gives():
    watchdog, boards, now = trained(0.1)
    boards = {
        rank: replace(board, phase=SAVE, first=1800.0, waits=101.0, where=WHERE) for rank, board in boards.items()
    }
    watchdog.look(boards, set(), now + 1799)
    assert watchdog.standstill is None
    watchdog.look(boards, set(), now + 1801)
    assert watchdog.standstill.first and "(run.first_within; " in watchdog.standstill.text
    boards = {rank: replace(board, first=0.0) for rank, board in boards.items()}
    watchdog.look(boards, set(), 1e9)
    assert watchdog.standstill is None


def test_one_rank_in_an_evaluation_while_others_are_already_in_the_next_step_is_a_standstill():
    """It hangs in the last collective of the evaluation, out of which the others have come."""
    watchdog, boards, now = trained(0.1)
    boards = {rank: replace(board, evaluation=0.02, waits=101.0, where=WHERE) for rank, board in boards.items()}
    boards[0] = replace(boards[0], phase=EVALUATION)
    assert watchdog.look(boards, set(), now + 20) is None and watchdog.standstill is not None


def test_a_stopped_process_is_found_after_a_second_whatever_it_does():
    watchdog, boards, now = trained(0.1)
    assert watchdog.look(boards, {1}, now) is None
    assert watchdog.look(boards, set(), now + 0.9) is None  # it goes on
    assert watchdog.look(boards, {1}, now + 1.0) is None
    hang = watchdog.look(boards, {1}, now + 2.0)
    assert hang.here and hang.text.startswith("rank 1: the process is stopped (SIGSTOP)")


def test_what_a_rank_shows_is_read(tmp_path: Path):
    assert read_board(tmp_path / "none") == Progress()
    calls = [(3.5, "barrier, group wörld" + "x" * 400)]
    board = Board(tmp_path / "board", lambda: calls[0] if calls else None)
    assert read_board(tmp_path / "board").step == -1 and read_board(tmp_path / "board").phase == BUSY
    before = time.monotonic()
    board.show(STEP, 7)
    found = read_board(tmp_path / "board")
    assert (found.step, found.training) == (7, True) and before <= found.stepped <= time.monotonic()
    while not (found := read_board(tmp_path / "board")).waits:
        time.sleep(0.02)
    assert found.waits == 3.5 and found.where.startswith("barrier, group wörld") and found.alive > found.stepped
    calls.clear()
    board.show(SAVE)
    while (found := read_board(tmp_path / "board")).waits:
        time.sleep(0.02)
    assert (found.step, found.phase, found.where, found.first) == (7, SAVE, "", 0.0)
    calls.append((3.5, "barrier"))
    while not read_board(tmp_path / "board").waits:
        time.sleep(0.02)
    board.close()
    assert not read_board(tmp_path / "board").waits, "it is in no collective of its next generation"
    assert open_board({}, lambda: None) is None
    opened = open_board({VARIABLE: str(tmp_path / "other")}, lambda: None, 60.0)
    opened.close()
    assert (read_board(tmp_path / "other").step, read_board(tmp_path / "other").first) == (-1, 60.0)
