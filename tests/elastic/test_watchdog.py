"""Who hangs, by what ranks show; and the board on which they show it."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path

import pytest

from shoal.elastic.watchdog import Watchdog
from shoal.launch.board import BUSY, EVALUATION, SAVE, STEP, VARIABLE, Board, Progress, open_board, read_board

pytestmark = pytest.mark.fast


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
    assert watchdog.limit == 30.0
    assert watchdog.look(boards, set(), now + 29) is None and watchdog.look(boards, set(), now + 31).here
    watchdog = Watchdog()
    assert watchdog.look({0: Progress(1, STEP, 5.0, 5.0)}, set(), 500.0) is None


def test_who_builds_is_not_late():
    watchdog, boards, now = trained(0.1)
    boards[1] = replace(boards[1], phase=BUSY)
    assert watchdog.look(boards, set(), now + 100) is None


def test_an_evaluation_that_comes_no_further_is_found_by_its_own_pace():
    watchdog, boards, now = trained(0.1)
    boards[0] = replace(boards[0], waits=now, where="all_reduce for the evaluation")
    boards[1] = replace(boards[1], phase=EVALUATION, stepped=now)
    assert watchdog.look(boards, set(), now + 500) is None  # its first microbatch may take any time
    boards = {rank: replace(board, stepped=now + 500) for rank, board in boards.items()}
    assert watchdog.look(boards, set(), now + 500) is None
    boards[1] = replace(boards[1], phase=STEP, stepped=now + 501)
    assert watchdog.look(boards, set(), now + 501) is None
    boards = {rank: replace(board, phase=EVALUATION, stepped=now + 502) for rank, board in boards.items()}
    assert watchdog.look(boards, set(), now + 502 + 2499) is None
    hang = watchdog.look(boards, set(), now + 502 + 2501)
    assert hang.ranks == (1,) and hang.text == (
        "rank 1 came no further in an evaluation for 2501 s; rank 0 is in all_reduce for the evaluation for 3003 s, "
        "rank 1 is in an evaluation after step 8"
    )


def test_microbatches_of_an_evaluation_that_are_quick_have_ten_seconds_or_five_steps():
    for seconds, limit in ((0.1, 10.0), (6.0, 30.0)):
        watchdog, boards, now = trained(seconds)
        for more in (0.0, 0.2, 0.4):
            boards = {rank: replace(board, phase=EVALUATION, stepped=now + more) for rank, board in boards.items()}
            assert watchdog.look(boards, set(), now + more) is None
        assert watchdog.look(boards, set(), now + 0.4 + limit - 0.1) is None
        assert watchdog.look(boards, set(), now + 0.4 + limit + 0.1).ranks == (0, 1)


def test_a_save_has_a_minute_or_five_times_as_long_as_the_longest_before():
    for took, limit in ((0.5, 60.0), (20.0, 100.0)):
        watchdog, boards, now = trained(0.1)
        boards = {rank: replace(board, phase=SAVE) for rank, board in boards.items()}
        assert watchdog.look(boards, set(), now + 1000) is None  # the first one
        boards = {rank: Progress(9, STEP, now + took, now) for rank in boards}
        assert watchdog.look(boards, set(), now + took) is None
        boards[1] = replace(boards[1], phase=SAVE)
        boards[0] = replace(boards[0], waits=now, where="all_gather")
        assert watchdog.look(boards, set(), now + took + limit - 0.1) is None
        hang = watchdog.look(boards, set(), now + took + limit + 0.1)
        assert hang.ranks == (1,) and hang.text.startswith(f"rank 1 has not completed a save for {limit:.0f} s; rank 0")
        assert hang.text.endswith("rank 1 is in a save after step 9")


def test_a_host_whose_ranks_all_wait_leaves_it_to_the_others_for_a_moment():
    watchdog, boards, now = trained(0.1)
    boards = {rank: replace(board, waits=now, where="barrier") for rank, board in boards.items()}
    assert watchdog.look(boards, set(), now + 11) is None
    assert not watchdog.look(boards, set(), now + 12.5).here


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
    board.close()
    assert (found.step, found.phase, found.where) == (7, SAVE, "")
    assert open_board({}, lambda: None) is None
    opened = open_board({VARIABLE: str(tmp_path / "other")}, lambda: None)
    opened.close()
    assert read_board(tmp_path / "other").step == -1
