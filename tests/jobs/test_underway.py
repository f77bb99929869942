"""What a person sees of a run before its first step."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from shoal.data.cache import DOING, build_once
from shoal.jobs.attempt import FIRST_LOOK
from shoal.jobs.train import train
from shoal.jobs.underway import shown_by, tell_what_is_under_way
from tests.jobs.conftest import records_of

pytestmark = pytest.mark.fast


def test_each_thing_is_told_as_it_begins(quick, make_job, alone, tmp_path, monkeypatch, capsys) -> None:
    """In the order in which it comes; a second run finds the corpus tokenised."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    job = make_job(data={"tokenizer": "bpe:270"}, steps=1)
    with tell_what_is_under_way(True):
        train(job, world=alone)
    said = capsys.readouterr().out
    expected = [
        "training a tokenizer of 270 ids on",
        "tokenising",
        "building the model",
        "evaluating",
        "the first step",
    ]
    assert sorted(expected, key=said.index) == expected
    with tell_what_is_under_way(True):
        train(job, world=alone)
    assert "tokenising" not in capsys.readouterr().out


def test_the_loggers_of_a_script_stay_as_they_are() -> None:
    logger, seen = logging.getLogger("shoal"), list[str]()
    before = (logger.level, list(logger.handlers))
    with tell_what_is_under_way(True), shown_by(seen.append):
        logging.getLogger("shoal.data").info("reading %d%%", 3)
        logging.getLogger("shoal.data").warning("damaged")
        logging.getLogger("other").info("not ours")
    assert seen == ["reading 3%", "warning: damaged"]
    assert (logger.level, list(logger.handlers)) == before
    with tell_what_is_under_way(False), shown_by(seen.append):
        logging.getLogger("shoal.data").info("of a rank that is not the first")
    assert len(seen) == 2


def test_who_waits_for_a_build_hears_what_it_is_at(tmp_path: Path) -> None:
    target, seen, told = tmp_path / "made", list[str](), threading.Event()

    def build(unfinished: Path) -> None:
        (unfinished / DOING).write_text("tokenising: 3 of 4")
        assert told.wait(60)

    def hear(text: str) -> None:
        seen.append(text)
        told.set()

    with tell_what_is_under_way(True), shown_by(hear):
        builder = threading.Thread(target=build_once, args=(target, build, Path.exists))
        builder.start()
        while not (tmp_path / "made.tmp" / DOING).exists():
            assert builder.is_alive()
        build_once(target, lambda unfinished: pytest.fail("built twice"), Path.exists)
        builder.join()
    assert seen == ["tokenising: 3 of 4 (another process does)"]
    assert list(target.iterdir()) == []


def test_the_look_before_the_first_step_is_a_short_one(quick, make_job, alone) -> None:
    job = make_job(steps=1, data={"sequence": 4})
    train(job, world=alone)
    first, last = records_of(job).evals
    assert first.tokens <= 4 * FIRST_LOOK < last.tokens


def test_a_line_comes_before_torch_does() -> None:
    code = (
        "import sys\nsys.modules['torch'] = None\nsys.argv = ['shoal', 'train', 'job.toml']\n"
        "from shoal.cli import main\nmain()"
    )
    for rank, said in (("0", "job.toml: importing torch\n"), ("1", "")):
        ended = subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, env={**os.environ, "RANK": rank}
        )
        assert ended.stdout == said and "torch" in ended.stderr
