"""W&B and MLflow are stood in for by fakes that keep their calls, so that nothing here needs the packages or a
server."""

from __future__ import annotations

import sys
import threading
import time
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from shoal.errors import UserError
from shoal.report import trackers as trackers_module
from shoal.report.metrics import EvalRecord, MetricsLog, Record, RunRecord, SampleRecord, WarningRecord, read_metrics
from shoal.report.trackers import Trackers, check_trackers, make_trackers
from tests.report.synthetic import run_record, step_record

Calls = list[tuple[str, Any]]


class Fake(ModuleType):
    """A module whose every function keeps its name and arguments."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.calls: Calls = []

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)

        def call(*args: Any, **kwargs: Any) -> Fake:
            self.calls.append((name, (*args, kwargs)))
            return self

        return call


def drive(trackers: Trackers) -> None:
    trackers.start(run_record())
    trackers.log(EvalRecord(step=0, loss=5.5, tokens=1))
    trackers.log(replace(step_record(1), norms={"blocks.0": 0.25}))
    trackers.log(SampleRecord(step=1, prompt="def ", text="main():\n    pass"))
    trackers.log(WarningRecord(message="nothing to draw"))
    trackers.close()


def test_tensorboard_gets_curves_text_and_configuration(tmp_path: Path) -> None:
    drive(Trackers(make_trackers(["tensorboard"], tmp_path), pytest.fail))
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(tmp_path / "events"))
    events.Reload()
    assert [(event.step, event.value) for event in events.Scalars("validation/loss")] == [(0, 5.5)]
    assert events.Scalars("train/loss")[0].value == pytest.approx(step_record(1).loss)
    assert events.Scalars("norms/blocks.0")[0].value == 0.25
    text = [events.Tensors(tag)[0].tensor_proto.string_val[0].decode() for tag in sorted(events.Tags()["tensors"])]
    assert "| train.lr | 0.003 |" in text[0]
    assert text[1] == "    def main():\n        pass"


def test_tensorboard_hides_what_a_killed_attempt_wrote_after_the_resumed_step(tmp_path: Path) -> None:
    for first, last in ((1, 5), (3, 4)):
        trackers = Trackers(make_trackers(["tensorboard"], tmp_path), pytest.fail)
        trackers.start(run_record())
        for number in range(first, last + 1):
            trackers.log(step_record(number))
        trackers.close()
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(tmp_path / "events"))
    events.Reload()
    assert [event.step for event in events.Scalars("train/loss")] == [1, 2, 3, 4]


@pytest.mark.fast
def test_wandb(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake = Fake("wandb")
    monkeypatch.setitem(sys.modules, "wandb", fake)
    drive(Trackers(make_trackers(["wandb"], tmp_path), pytest.fail))
    assert [name for name, _ in fake.calls] == ["init", "log", "log", "finish"]
    assert fake.calls[0][1][0]["config"]["train.lr"] == 0.003
    assert fake.calls[1][1] == ({"validation/loss": 5.5}, {"step": 0})


@pytest.mark.fast
def test_mlflow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake = Fake("mlflow")
    monkeypatch.setitem(sys.modules, "mlflow", fake)
    drive(Trackers(make_trackers(["mlflow"], tmp_path), pytest.fail))
    assert [name for name, _ in fake.calls] == ["start_run", "log_params", "log_metrics", "log_metrics", "end_run"]
    assert fake.calls[2][1] == ({"validation/loss": 5.5}, {"step": 0, "synchronous": False})


@pytest.mark.fast
@pytest.mark.parametrize("name", ["wandb", "mlflow", "tensorboard"])
def test_a_missing_package_is_a_warning_with_its_remedy(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard" if name == "tensorboard" else name, None)
    said: list[str] = []
    drive(Trackers(make_trackers([name], tmp_path), said.append))
    (warning,) = said
    remedy = "pip install tensorboard" if name == "tensorboard" else "pip install 'shoal[trackers]'"
    assert warning.startswith(f'tracker {name} needs the package "{name}"') and remedy in warning
    assert warning.endswith("is switched off; training goes on")


class Away(ModuleType):
    """A tracker's package whose server does not answer until `answers`."""

    def __init__(self, answers: threading.Event) -> None:
        super().__init__("wandb")
        self.init = lambda **options: answers.wait(60)


@pytest.mark.fast
def test_a_server_that_does_not_answer_holds_up_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    answers, said = threading.Event(), list[str]()
    monkeypatch.setitem(sys.modules, "wandb", Away(answers))
    monkeypatch.setattr(trackers_module, "CLOSING", 0.2)
    began = time.monotonic()
    drive(Trackers(make_trackers(["wandb"], tmp_path), said.append))
    assert time.monotonic() - began < 30, "it would have answered after 60 s"
    answers.set()
    (warning,) = said
    assert "tracker wandb has not answered" in warning


@pytest.mark.fast
def test_a_tracker_that_does_not_keep_up_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    answers, said = threading.Event(), list[str]()
    monkeypatch.setitem(sys.modules, "wandb", Away(answers))
    monkeypatch.setattr(trackers_module, "BEHIND", 3)
    trackers = Trackers(make_trackers(["wandb"], tmp_path), said.append)
    trackers.start(run_record())
    for number in range(9):
        trackers.log(step_record(number))
    answers.set()
    trackers.close()
    assert said == ["tracker wandb does not keep up (3 records late) and is switched off; training goes on"]


@pytest.mark.fast
def test_an_unknown_tracker_is_refused_by_name() -> None:
    with pytest.raises(UserError, match=r'unknown tracker "tensorbord"\. Did you mean "tensorboard"'):
        check_trackers(["tensorbord"])


class Broken:
    def __init__(self, breaks_in: str) -> None:
        self.breaks_in = breaks_in
        self.calls: list[str] = []

    def start(self, run: RunRecord) -> None:
        self._call("start")

    def log(self, record: Record) -> None:
        self._call("log")

    def close(self) -> None:
        self._call("close")

    def _call(self, name: str) -> None:
        self.calls.append(name)
        if name == self.breaks_in:
            raise ConnectionError("no route to host")


@pytest.mark.fast
@pytest.mark.parametrize(
    "breaks_in, calls",
    [("start", ["start"]), ("log", ["start", "log"]), ("close", ["start", "log", "log", "log", "log", "close"])],
)
def test_a_tracker_that_raises_is_reported_once_and_left_alone(
    breaks_in: str, calls: list[str], tmp_path: Path
) -> None:
    log = MetricsLog(tmp_path / "metrics.jsonl")
    broken, working = Broken(breaks_in), Broken("never")

    def warn(message: str) -> None:
        log.write(WarningRecord(message=message))
        # A job hands its warnings to the trackers as well.
        if breaks_in != "close":
            trackers.log(WarningRecord(message=message))

    trackers = Trackers({"broken": broken, "working": working}, warn)
    drive(trackers)
    log.close()
    assert broken.calls == calls
    assert working.calls[0] == "start" or breaks_in == "start"
    assert working.calls[-1] == "close"
    (warning,) = read_metrics(tmp_path / "metrics.jsonl").warnings
    expected = (
        f"tracker broken failed in {breaks_in}() (ConnectionError: no route to host) and is switched off; "
        "training goes on"
    )
    assert warning.message == expected
