"""How an error ends a script that plain `python` runs, and the names that a job gives arguments."""

from __future__ import annotations

import pickle
import subprocess
import sys
from pathlib import Path

import pytest

from shoal.errors import ArgumentError, UserError, did_you_mean, in_section

pytestmark = pytest.mark.fast

HOOK = "import sys\nsys.excepthook = lambda kind, error, trace: print('mine:', kind.__name__)\n"
SCRIPTS = {
    "a user's mistake": ("import shoal\nraise shoal.UserError('bad key')", 2, "error: bad key\n"),
    "with a note": (
        "import shoal\nerror = shoal.TrainingError('not finite')\nerror.add_note('in step 3')\nraise error",
        3,
        "error: not finite\nin step 3\n",
    ),
    "an error of the script": ("import shoal\n1 / 0", 1, "Traceback (most recent call last):"),
    "an error of the script for one of ours": (
        "import shoal\ntry:\n    raise shoal.UserError('bad')\nexcept shoal.UserError as error:\n    raise "
        "KeyError('own') from error",
        1,
        "Traceback (most recent call last):",
    ),
    "a hook of the script's own": (HOOK + "import shoal\nraise shoal.UserError('bad')", 1, ""),
}


@pytest.mark.parametrize(("text", "code", "said"), SCRIPTS.values(), ids=SCRIPTS)
def test_how_a_script_ends(text: str, code: int, said: str, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(text)
    ended = subprocess.run([sys.executable, str(script)], capture_output=True, text=True)
    assert ended.returncode == code
    if said.startswith("Traceback"):
        assert ended.stderr.startswith(said) and str(script) in ended.stderr
    else:
        assert ended.stderr == said
    assert ended.stdout == ("mine: UserError\n" if "mine" in text else "")


def test_a_prompt_stays_open() -> None:
    said = "import shoal\nraise shoal.UserError('bad')\nprint('still here')\n"
    ended = subprocess.run([sys.executable, "-i", "-q"], input=said, capture_output=True, text=True)
    assert "still here" in ended.stdout and "error: bad" in ended.stderr


def test_an_argument_is_called_as_the_job_calls_it_and_crosses_processes() -> None:
    error = pickle.loads(pickle.dumps(ArgumentError("clip", " = -1: give more")))
    assert isinstance(error, UserError) and str(error) == "clip = -1: give more"
    with pytest.raises(UserError, match=r"^train\.clip = -1: give more$"), in_section("train"):
        raise error
    with pytest.raises(UserError, match=r"^plan\.dp = 3$"), in_section("train"):
        raise UserError("plan.dp = 3")


@pytest.mark.parametrize(
    ("word", "meant"),
    [
        ("zero_stage", "zero"),
        ("save", "save_every"),
        ("batch", "global_batch"),
        ("stage", "stages"),
        ("dpp", "dp"),
        ("ZERO", "zero"),
        ("ppp", "pp"),
        ("checkpoint_every", None),
        ("mesh", None),
    ],
)
def test_what_a_user_may_have_meant(word: str, meant: str | None) -> None:
    known = ["pp", "dp", "stages", "sample", "zero", "save_every", "verify_every", "microbatch", "global_batch"]
    assert did_you_mean(word, known) == (f' Did you mean "{meant}"?' if meant else "")
