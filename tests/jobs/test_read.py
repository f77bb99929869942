"""The job file: types, unknown keys, precedence, origins, and the way back to TOML."""

from __future__ import annotations

import tomllib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.errors import UserError
from shoal.jobs.config import Data, Job, Run, Train, describe
from shoal.jobs.read import load_job, parse_job
from shoal.jobs.write import to_toml

pytestmark = pytest.mark.fast
MODEL = {"name": "gpt", "preset": "1m"}
SMALL = {"model": MODEL, "train": {"steps": 5}}


@pytest.mark.parametrize(
    ("section", "table", "message"),
    [
        ("train", {"learning_rat": 1.0, "steps": 1}, 'unknown key "train.learning_rat"'),
        ("train", {"stepz": 1}, 'Did you mean "steps"?'),
        ("train", {"steps": 1, "save_every": 5}, '"train.save_every" in the job. It is a key of [run]. Keys: steps'),
        ("data", {"eval_every": 5}, '"data.eval_every" in the job. It is a key of [run] and [federated]. Keys:'),
        ("train", {"steps": 1, "lr": "fast"}, "train.lr in the job: expected a number, not the text 'fast'"),
        ("train", {"steps": 1.5}, "train.steps in the job: expected a whole number, not the number 1.5"),
        ("train", {"steps": True}, "train.steps in the job: expected a whole number, not true or false True"),
        (
            "train",
            {"steps": 1, "sync_bn": 1},
            "train.sync_bn in the job: expected true or false, not the whole number 1",
        ),
        (
            "train",
            {"steps": 1, "optimizer": ["sgd"]},
            "train.optimizer in the job: expected a text or a table, not the list",
        ),
        ("run", {"trackers": "wandb"}, "run.trackers in the job: expected a list of texts, not the text 'wandb'"),
        (
            "plan",
            {"ep": 2, "dp": 3},
            "plan.ep = 2: experts are spread over dp x cp = 3 x 1 = 3 ranks, so it is one of [1, 3]",
        ),
        ("plan", {"measur": 3}, 'Did you mean "measure"? Keys: pp'),
        ("plan", {"zero": 4}, "plan.zero = 4 (ZeRO sharding) is not one of 0, 1, 2, 3"),
        ("plan", {"dp": "2"}, "plan.dp in the job: expected a whole number"),
        ("train", {}, "nothing says when to stop"),
        ("train", {"steps": 0}, "train.steps = 0: give a number above 0"),
        ("run", {"keep": 0}, "run.keep = 0: give at least 1"),
        ("trian", {}, 'unknown table "trian" in the job. Did you mean "train"?'),
        ("run", {"dir": "a\0b"}, "run.dir = 'a\\x00b': no path has a zero byte"),
        ("run", {"resume": "a\0b"}, "run.resume = 'a\\x00b': no path has a zero byte"),
        ("model", {"name": {}}, 'model.name = {}: expected a text, e.g. name = "gpt"'),
        ("model", {"preset": "1m"}, "does not say which model to train"),
        ("model", 3, "model = 3 in the job: expected a table, [model]"),
    ],
)
def test_a_wrong_job_is_refused_with_key_value_and_remedy(section, table, message):
    with pytest.raises(UserError) as caught:
        parse_job({**SMALL, section: table})
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("content", "message"),
    [(None, "no such job file"), ("steps = = 3", "is not TOML"), (b"\xff\xfe", "cannot be read")],
)
def test_a_file_that_cannot_be_read_is_named(tmp_path, content, message):
    path = tmp_path / "job.toml"
    if content is not None:
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(UserError, match=message) as caught:
        load_job(path)
    assert str(path) in str(caught.value)


def test_the_command_line_wins_over_the_file_and_every_value_has_an_origin(tmp_path):
    path = tmp_path / "first.toml"
    path.write_text('[model]\nname = "gpt"\npreset = "1m"\n[train]\nsteps = 5\nlr = 1e-3\n')
    job, origins = load_job(
        path,
        ["train.lr=2e-3", "train.precision=bf16", "model.layers=3", 'run.sample="def x"', "plan.exchange.name=none"],
    )
    assert (job.train.steps, job.train.lr, job.train.precision, job.model["layers"]) == (5, 2e-3, "bf16", 3)
    assert job.plan.exchange == {"name": "none"}
    assert job.run.dir == "runs/first"
    found = describe(job, origins)
    assert found["train.steps"] == {"value": 5, "origin": "file"}
    assert found["train.lr"] == {"value": 2e-3, "origin": "cli"}
    assert found["train.seed"] == {"value": 0, "origin": "default"}
    assert "train.microbatch" not in found, "None is a value to be chosen"


def test_a_run_of_the_user_s_own_home(monkeypatch):
    monkeypatch.setenv("HOME", "/home/me")
    job, _ = parse_job(SMALL, ["run.dir=~/runs/first", 'run.resume="~/runs/zeroth"'])
    assert (job.run.dir, job.run.resume) == ("/home/me/runs/first", "/home/me/runs/zeroth")
    with pytest.raises(UserError, match=r"run\.dir is empty"):
        parse_job(SMALL, ["run.dir="])


def test_an_empty_source_is_not_the_current_directory():
    with pytest.raises(UserError, match=r"data\.source is empty: give a file"):
        parse_job(SMALL, ["data.source= "])


@pytest.mark.parametrize("text", ["train.lr", "lr=1", "=1", "train.=1", "train..lr=1"])
def test_an_assignment_is_written_with_table_key_and_value(text):
    with pytest.raises(UserError, match=r"table\.key=value"):
        parse_job(SMALL, [text])


def test_an_assignment_is_checked_like_the_file():
    with pytest.raises(UserError, match=r"train.lr in --set train.lr=fast: expected a number"):
        parse_job(SMALL, ["train.lr=fast"])
    with pytest.raises(UserError, match="not a table"):
        parse_job(SMALL, ["train.steps.first=3"])


VALUES = st.recursive(
    st.booleans()
    | st.integers(-(2**60), 2**60)
    | st.floats(allow_nan=False)
    | st.text(st.characters(exclude_categories=["Cs"])),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.text(st.characters(exclude_categories=["Cs"]), min_size=1), inner, max_size=3)
    ),
    max_leaves=6,
)


@given(
    st.dictionaries(st.text(st.characters(exclude_categories=["Cs"]), min_size=1), VALUES, max_size=4),
    st.floats(1e-9, 1e9),
)
def test_what_is_written_as_toml_reads_back(model, lr):
    job = Job(
        model={**model, "name": "gpt"},
        train=Train(steps=3, lr=lr, optimizer={"name": "sgd", "momentum": 0.9}),
        run=Run(trackers=[]),
    )
    again, origins = parse_job(tomllib.loads(to_toml(job, {"train.lr": "cli"})))
    assert again == job
    assert set(origins.values()) == {"file"}


def test_a_line_of_the_written_job_says_where_its_value_comes_from():
    lines = to_toml(Job(MODEL, Train(steps=3), Data(source=object())), {"train.steps": "cli"}).splitlines()
    assert "steps = 3  # cli" in lines
    assert "seed = 0  # default" in lines
    assert 'source = "(a object given in Python)"  # default' in lines


@pytest.mark.fast
@pytest.mark.parametrize(
    ("assignment", "message"),
    [
        ("run.nproc=2147483648", "run.nproc = 2147483648: .*at most 4096"),
        ("train.clip=18446744073709551616", r"train.clip is a number of 65 bits: give one below 2\*\*63"),
        ("train.lr=inf", "train.lr = inf: give a finite number"),
        ("train.clip=nan", "train.clip = nan"),
        ("train.optimizer.momentum=nan", "train.optimizer.momentum = nan: give a finite number"),
        ("plan.dp=2147483647", "plan.dp = 2147483647: .*at most 1048576"),
    ],
)
def test_numbers_that_nothing_holds_are_refused(assignment, message):
    job = {"model": {"name": "gpt", "preset": "1m"}, "train": {"steps": 3, "optimizer": {"name": "sgd"}}}
    with pytest.raises(UserError, match=message):
        parse_job(job, [assignment])
