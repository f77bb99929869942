"""Folding of tracebacks, the Failure file, and the verdict over all ranks."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from shoal.comm import Group
from shoal.comm.alone import Alone
from shoal.errors import LaunchError, TrainingError, UserError
from shoal.launch.environment import discover
from shoal.launch.failure import Failure, failure_of, read_failure, write_failure
from shoal.launch.store import rank_list
from shoal.launch.verdict import Ending, verdict

pytestmark = pytest.mark.fast


def caught(function) -> BaseException:
    try:
        function()
    except BaseException as error:
        return error
    raise AssertionError("it did not raise")


def shape_error() -> None:
    torch.nn.Linear(3, 2)(torch.zeros(1, 4))


def test_frames_of_torch_are_folded_and_those_of_the_user_stay() -> None:
    failure = failure_of(caught(shape_error), 2)
    assert "in shape_error\n    torch.nn.Linear(3, 2)(torch.zeros(1, 4))" in failure.traceback
    assert " frames in torch\n" in failure.traceback and "torch/nn/modules" not in failure.traceback
    assert failure.traceback.rstrip().endswith(failure.message)
    assert "shapes cannot be multiplied" in failure.message and (
        failure.rank,
        failure.exit_code,
        failure.lost_peer,
    ) == (
        2,
        1,
        False,
    )


def test_the_cause_is_folded_too() -> None:
    def wrap() -> None:
        try:
            shape_error()
        except RuntimeError as error:
            raise KeyError("while wrapping") from error

    text = failure_of(caught(wrap), 0).traceback
    assert "direct cause" in text and "in shape_error" in text and "in wrap" in text and "torch/nn/modules" not in text


def test_a_user_function_called_by_shoal_shows_the_user_s_frames_only() -> None:
    class Environ(dict):
        def __contains__(self, name: object) -> bool:
            raise ZeroDivisionError("the user's")

    text = failure_of(caught(lambda: discover(Environ())), 0).traceback
    assert "in __contains__" in text and "  ... 1 frame in shoal\n" in text and "environment.py" not in text


def test_a_fault_of_shoal_s_own_is_shown_in_full() -> None:
    text = failure_of(caught(lambda: discover(None)), 0).traceback
    assert "environment.py" in text and "..." not in text


def test_an_error_of_shoal_is_its_message_alone_with_its_notes() -> None:
    error = TrainingError("the loss is nan")
    error.add_note("at step 12")
    failure = failure_of(error, 0)
    assert (failure.message, failure.traceback, failure.exit_code) == ("the loss is nan\nat step 12", "", 3)


@pytest.mark.parametrize(
    "error, lost",
    [
        (RuntimeError("[...pair.cc:547] Connection closed by peer [127.0.0.1]:3"), True),
        (LaunchError("collective 3 failed"), True),
        (ConnectionResetError("Connection reset by peer"), True),
        (RuntimeError("wait timeout after 300000ms, keys: /shoal/gen0/world0/host/1"), True),
        (RuntimeError("mat1 and mat2 shapes"), False),
        (UserError("Connection closed by peer"), False),
    ],
)
def test_a_lost_peer_is_told_from_an_own_fault(error: Exception, lost: bool) -> None:
    assert failure_of(error, 0).lost_peer is lost


def test_a_lost_device_is_told_with_what_to_do() -> None:
    """It is this rank's own failure, in a collective too."""
    lost = torch.AcceleratorError("CUDA error: unspecified launch failure")

    class Failing(Alone):
        def all_reduce(self, flat: torch.Tensor, op: str) -> None:
            raise lost

    with pytest.raises(torch.AcceleratorError) as caught:
        Group.of(Failing()).all_reduce(torch.ones(1))
    found = failure_of(caught.value, 0)
    assert not found.lost_peer and "unspecified launch failure" in found.message
    assert "`nvidia-smi` say so: leave it, or its host, out and go on from the last checkpoint" in found.message


def test_a_failure_survives_its_file(tmp_path: Path) -> None:
    failure = failure_of(caught(shape_error), 1)
    assert read_failure(tmp_path / "rank1.json") is None
    write_failure(failure, tmp_path / "rank1.json")
    assert read_failure(tmp_path / "rank1.json") == failure
    assert [path.name for path in tmp_path.iterdir()] == ["rank1.json"]


@pytest.mark.parametrize("ranks, text", [([], ""), ([4], "4"), ([0, 2, 3, 4, 9], "0, 2-4, 9"), ([0, 1], "0-1")])
def test_rank_list(ranks: list[int], text: str) -> None:
    assert rank_list(ranks) == text


def failure(
    rank: int,
    seconds: float,
    message: str = "ValueError: bad",
    traceback: str = "",
    exit_code: int = 1,
    lost_peer: bool = False,
) -> Failure:
    return Failure(rank, "h", seconds, message, traceback, exit_code, lost_peer)


def ending(
    rank: int,
    returncode: int = 0,
    seconds: float = 9.0,
    stopped: bool = False,
    failure: Failure | None = None,
    log: Path | None = None,
) -> Ending:
    return Ending(rank, "h", returncode, seconds, stopped, failure, log)


VERDICTS = {
    "a rank that left before the others were done": (
        [
            ending(0, 4, failure=failure(0, 5.0, "gone", exit_code=4, lost_peer=True)),
            ending(1, 0, seconds=4.0),
            ending(2, stopped=True),
            ending(3, 0, seconds=6.0),
        ],
        "error: rank 1 on host h ended with exit code 0 while the others were still at work: every rank runs the "
        "script to its end "
        "(look for sys.exit or return)\nrank 0: lost its peer: gone\nrank 2: stopped by the launcher",
        4,
    ),
    "all well": ([ending(0), ending(1)], "", 0),
    "the first by time, the second in a line": (
        [
            ending(0, 1, failure=failure(0, 2.0, "KeyError: late\nmore", "Traceback\nKeyError: late")),
            ending(1, 1, failure=failure(1, 1.0, "ValueError: early", "Traceback\nValueError: early\n")),
        ],
        "error: rank 1 on host h failed:\nTraceback\nValueError: early\nrank 0: failed: KeyError: late",
        1,
    ),
    "an own fault before an earlier loss of the peer": (
        [
            ending(0, 4, failure=failure(0, 1.0, "gone", exit_code=4, lost_peer=True)),
            ending(1, 1, failure=failure(1, 2.0, "ValueError: x", "T")),
        ],
        "error: rank 1 on host h failed:\nT\nrank 0: lost its peer: gone",
        1,
    ),
    "a killed rank before those that lost it": (
        [
            ending(0, 4, failure=failure(0, 1.0, "gone", exit_code=4, lost_peer=True)),
            ending(1, -9, seconds=1.5),
            ending(2, -15, stopped=True),
        ],
        "error: rank 1 on host h was killed by signal 9 (SIGKILL): often the kernel's out-of-memory killer: look at "
        "`dmesg`, "
        "take a smaller microbatch or fewer ranks\nrank 0: lost its peer: gone\nrank 2: stopped by the launcher",
        4,
    ),
    "only lost peers": (
        [
            ending(0, 4, failure=failure(0, 2.0, "late", exit_code=4, lost_peer=True)),
            ending(1, 4, failure=failure(1, 1.0, "early", "", 4, True)),
        ],
        "error: rank 1 on host h: early\nrank 0: lost its peer: late",
        4,
    ),
    "the same mistake on every rank is said once": (
        [ending(rank, 2, failure=failure(rank, rank, "no file x", exit_code=2)) for rank in range(3)],
        "error: no file x",
        2,
    ),
    "the same mistake on some ranks": (
        [ending(0), *(ending(rank, 2, failure=failure(rank, rank, "no file x", exit_code=2)) for rank in (1, 2))],
        "error: rank 1-2 on host h: no file x",
        2,
    ),
    "an exit code of its own": ([ending(0), ending(1, 7)], "error: rank 1 on host h ended with exit code 7", 7),
    "failed, but stuck in its exit handlers": (
        [ending(0, -9, stopped=True), ending(1, -9, stopped=True, failure=failure(1, 1.0, "x", "T"))],
        "error: rank 1 on host h failed:\nT\nrank 0: stopped by the launcher",
        1,
    ),
}


@pytest.mark.parametrize("endings, report, exit_code", VERDICTS.values(), ids=VERDICTS)
def test_verdict(endings: list[Ending], report: str, exit_code: int) -> None:
    assert verdict(endings) == (report, exit_code)


def test_the_end_of_the_output_of_the_rank_at_fault_is_shown(tmp_path: Path) -> None:
    log = tmp_path / "rank1.log"
    log.write_text("".join(f"line {i}\n" for i in range(25)))
    report, _ = verdict([ending(0), ending(1, -11, log=log)])
    lines = report.splitlines()
    assert lines[1:4] == ["the last output of rank 1:", "[rank 1] ... 5 lines before", "[rank 1] line 5"]
    assert lines[-1] == "[rank 1] line 24"
