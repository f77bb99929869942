"""Commands in one process: what they print, and how a mistake is told."""

from __future__ import annotations

import errno
import json
import subprocess
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path

import pytest

import shoal as package
from shoal.cli import doctor
from shoal.comm import Link
from shoal.jobs.read import load_job
from shoal.report.metrics import read_metrics

pytestmark = pytest.mark.fast


def test_help_does_not_import_torch():
    """What makes `shoal --help` slow."""
    code = "import sys; import shoal.cli; print('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "False\n"


def test_the_version(shoal):
    assert shoal("--version").out == f"shoal {version('shoal')}\n"
    assert package.__version__ == version("shoal")
    assert "__version__" in dir(package)


def test_a_reason_is_listed_whole(shoal, tmp_path):
    """Wider than any terminal, and with what rich would take for its own markup."""
    damaged = tmp_path / ("[red]run[/red] " + "x" * 150) / "step-00000004"
    damaged.mkdir(parents=True)
    (damaged / "manifest.json").write_text("{")
    (line,) = shoal("ckpt", "ls", damaged.parent).out.splitlines()[1:]
    assert line.split()[0] == "4" and "damaged" in line and str(damaged) in line
    itself = shoal("ckpt", "ls", damaged)
    assert itself.code == 2 and "is one checkpoint: give the directory around it" in itself.err


def test_values_in_brackets_are_printed_as_they_are(shoal, job_file, monkeypatch):
    monkeypatch.setattr(doctor, "_missing", lambda package: True)
    doctor.show(doctor._versions(), [], {}, as_json=False)
    run_dir = job_file.parent / "[red]run[/]"
    answer = shoal(
        "train",
        job_file,
        "--nproc",
        1,
        "--set",
        f"run.dir={run_dir}",
        "--set",
        "run.sample=[/]",
        "--set",
        "train.steps=1",
    )
    assert "pip install 'shoal[hf]'" in answer.out.replace("\n", "").replace("  ", "")
    assert answer.code == 0 and answer.out.splitlines()[-1] == f"report: {run_dir / 'report.html'}"
    assert '"[/]"' in answer.out and "─ sample ─" in answer.out


def test_help_lists_the_commands(shoal):
    answer = shoal("--help")
    assert answer.code == 0
    for command in ("train", "plan", "run", "demo", "chaos", "doctor", "report", "top", "jobs", "ckpt"):
        assert command in answer.out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["train", "nowhere.toml"], "no such job file: nowhere.toml"),
        (["train", "{job}", "--set", "train.stepz=3"], 'Did you mean "steps"?'),
        (["train", "{job}", "--set", "train.lr=fast"], "expected a number, not the text 'fast'"),
        (["train", "{job}", "--set", "plan.stages=[1,1]"], "plan.stages with plan.pp = 1"),
        (["train", "{job}", "--set", "plan.dp=3", "--nproc", "2"], "dp = 2 works here"),
        (["train", "{job}", "--nproc", "0"], "run.nproc = 0: give at least 1"),
        (
            ["train", "{job}", "--nproc", "1", "--set", "data.source=/nowhere.txt"],
            "no such file, directory or glob: /nowhere.txt",
        ),
        (
            ["train", "{job}", "--nproc", "1", "--set", f"data.source={'a b' * 1000}"],
            "no such file, directory or glob: a ba b",
        ),
        (["train", "{job}", "--nproc", "1", "--set", f"data.tokenizer={'ab' * 1000}"], "there is none at abab"),
        (["train", "{job}", "--nproc", "1", "--set", f"run.resume={'ab' * 1000}"], "no such directory"),
        (
            ["train", "{job}", "--nproc", "1", "--set", "data.source=~nobody-at-all/a.txt"],
            "no such file, directory or glob: ~nobody-at-all/a.txt",
        ),
        (
            ["train", "{job}", "--nproc", "1", "--set", "data.tokenizer=~nobody-at-all"],
            "error: data.tokenizer: there is none at ~nobody-at-all",
        ),
        (["train", "{job}", "--nproc", "1", "--set", "data.validation=1.5"], "error: data.validation is 1.5: give"),
        (["train", "{job}", "--nproc", "1", "--set", "data.tokenizer=bpe:3"], "error: data.tokenizer is 'bpe:3': give"),
        (["train", "{job}", "--nproc", "1", "--set", "data.attend=all"], "error: data.attend is 'all': give"),
        (["train", "{job}", "--nproc", "1", "--set", "train.microbatch=9"], "error: train.microbatch = 9: give"),
        (
            ["train", "{job}", "--nproc", "1", "--set", "train.precision=bf61"],
            'error: train.precision = "bf61" is not one',
        ),
        (["plan", "{job}", "--memory", "--set", "train.microbatch=9"], "error: train.microbatch = 9: give 1 to global"),
        (["plan", "{job}", "--memory", "--set", "train.precision=bf61"], 'error: train.precision = "bf61" is not one'),
        (
            ["train", "{job}", "--set", 'run.trackers=["wand"]'],
            'run.trackers: unknown tracker "wand". Did you mean "wandb"?',
        ),
        (["train", "{job}", "--nproc", "1", "--set", "model.name=llama"], 'is written name = "hf", config ='),
        (["plan", "nowhere.toml", "--memory"], "no such job file: nowhere.toml"),
        (["plan", "{job}", "--memory", "--host", "lots"], "--host = 'lots': give at least 1 byte"),
        (["plan", "{job}", "--set", "model.n_layers=3"], "model.n_layers is not a setting of gpt (preset, vocab_size"),
        (["plan", "{job}", "--json", "--set", "model.heads=3"], "error: model.heads = 3 of GPT does not divide"),
        (["plan", "{job}", "--set", "model.layers=x"], "error: model.layers = 'x' of gpt must be an integer, not str"),
        (["plan", "{job}", "--set", "model.name=llama"], 'is written name = "hf", config ='),
        (["plan", "{job}", "--set", "model.sequence=0"], "error: model.sequence = 0 of GPT must be greater"),
        (["plan", "{job}", "--device", "80GiB"], "--device and --host are of --memory: give it too"),
        (["plan", "{job}", "--host", "80GiB"], "--device and --host are of --memory: give it too"),
        (["demo", "--dir", "{job}"], "it is there already, and not an empty folder. Give another --dir"),
        (["demo", "--dir", "{job.parent}"], "it is there already, and not an empty folder. Give another --dir"),
        (["train", "{job}", "--nproc", "1", "--set", 'run.dir="{job}"'], "Choose another run.dir"),
        (["train", "{job}", "--nproc", "2", "--set", 'run.dir="{job}"'], "Choose another run.dir"),
        (
            ["plan", "{job}", "--memory", "--set", "model.heads=3"],
            "error: model.heads = 3 of GPT does not divide",
        ),
        (["run", "nowhere.py"], "the script nowhere.py does not exist"),
        (["generate", "/nowhere", "--prompt", "a"], "no such directory: /nowhere"),
        (["eval", "/nowhere"], "no such directory: /nowhere"),
        (["report", "/nowhere"], "is not the directory of a run"),
        (["ckpt", "ls", "/nowhere"], "no such directory: /nowhere"),
        (["ckpt", "verify", "/nowhere"], "no such directory: /nowhere"),
        (["ckpt", "verify", "/nowhere/step-00000001"], "no such directory: /nowhere/step-00000001"),
        (["train", "{job}", "--set", "run.dir="], "run.dir is empty"),
        (["train", "{job}", "--resume", ""], 'run.resume is empty: give "auto", "never", or the directory'),
        (["train"], "error: give a job file, or --join HOST:PORT"),
        (["ckpt", "export", "/nowhere", "out"], "no such directory: /nowhere"),
    ],
)
def test_a_mistake_is_its_message_alone(shoal, job_file, arguments, message):
    answer = shoal(*[argument.format(job=job_file) for argument in arguments])
    assert answer.code == 2
    assert answer.err.startswith("error: ")
    assert message in answer.err
    assert "Traceback" not in answer.err + answer.out
    assert not (job_file.parent / "run").exists()


def test_faults_are_spread_over_a_number_of_steps_that_is_known(shoal, job_file):
    job_file.write_text(job_file.read_text().replace("steps = 6", "epochs = 1"))
    answer = shoal("chaos", job_file)
    assert (answer.code, answer.err) == (2, "error: the end of the job has to be known: give train.steps\n")


def test_a_module_runs_on_a_rank(shoal, tmp_path, monkeypatch):
    (tmp_path / "trainer").mkdir()
    (tmp_path / "trainer/task.py").write_text(
        "import os, pathlib, sys\npathlib.Path(sys.argv[1] + os.environ['RANK']).write_text(' '.join(sys.argv[2:]))"
    )
    monkeypatch.chdir(tmp_path)
    assert shoal("run", "--nproc", 1, "-m", "trainer.task", "--", "rank", "--steps", "3").code == 0
    assert (tmp_path / "rank0").read_text() == "--steps 3"


def test_a_file_that_may_not_be_read_is_no_traceback(shoal, tmp_path, monkeypatch):
    def locked(path):
        raise PermissionError(errno.EACCES, "Permission denied", str(path))

    monkeypatch.setattr("shoal.checkpoint.listing", locked)
    answer = shoal("ckpt", "ls", tmp_path)
    assert (answer.code, answer.err) == (2, f"error: [Errno 13] Permission denied: '{tmp_path}'\n")
    monkeypatch.setattr("shoal.checkpoint.listing", lambda path: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        shoal("ckpt", "ls", tmp_path)


def test_an_unknown_option_is_a_usage_error(shoal):
    answer = shoal("train", "job.toml", "--ste=1")
    assert answer.code == 2
    assert "--ste" in answer.err


@pytest.mark.parametrize(
    "arguments",
    [
        ("demo", "--nproc", 0),
        ("demo", "--nproc", 10**5),
        ("chaos", "job.toml", "--pace", -1),
        ("chaos", "job.toml", "--tolerance", -1),
        ("top", "run", "--interval", 0),
        ("top", "run", "--interval", 1e30),
        ("generate", "run", "--prompt", "a", "--seed", 2**63),
        ("generate", "run", "--prompt", "a", "--seed", -1),
        ("fed", "keys", "keys", "--clients", -1),
    ],
)
def test_a_number_out_of_its_range_is_a_usage_error(shoal, arguments):
    answer = shoal(*arguments)
    assert answer.code == 2 and "Invalid value" in answer.err and arguments[-2] in answer.err


def test_from_a_job_to_its_checkpoints_and_weights(shoal, job_file):
    run_dir = job_file.parent / "run"
    trained = shoal("train", job_file, "--nproc", 1, "--set", "train.lr=2e-2", "--set", "run.sample=3 + ")
    assert trained.code == 0
    assert trained.out.splitlines()[-1] == f"report: {run_dir / 'report.html'}"
    assert "sample" in trained.out and "plan: one rank (its memory is enough)" in trained.out
    job, _ = load_job(run_dir / "resolved.toml")
    assert (job.train.lr, job.run.nproc) == (2e-2, 1)

    listed = shoal("ckpt", "ls", run_dir)
    assert [line.split()[0] for line in listed.out.splitlines()[1:]] == ["6", "4", "2"]
    assert shoal("ckpt", "verify", run_dir).out == "".join(f"step-0000000{step}: ok\n" for step in (6, 4, 2))

    once, again = (shoal("generate", run_dir, "--prompt", "3 + ", "--tokens", 20) for _ in range(2))
    assert once.code == 0 and once.out == again.out and once.out.startswith("3 + ") and len(once.out) > 5
    assert shoal("generate", run_dir, "--prompt", "3 + ", "--tokens", 20, "--seed", 5).out != once.out
    own = json.loads(shoal("eval", run_dir, "--json").out)
    assert (
        own["loss"] == pytest.approx(read_metrics(run_dir / "metrics.jsonl").evals[-1].loss, rel=1e-6)
        and own["accuracy"] is None
    )
    other = shoal("eval", run_dir, "--data", job_file.parent / "corpus", "--samples", 3)
    assert other.code == 0 and other.out.startswith("loss ") and other.out.endswith(f"a mean of {3 * 16}\n")

    report = run_dir / "report.html"
    report.unlink()
    assert shoal("report", run_dir).out == f"{report}\n"
    assert report.exists()

    report.unlink()
    report.mkdir()  # stands for a directory that this user may not write
    refused = shoal("report", run_dir)
    assert refused.code == 2 and "cannot be drawn" in refused.err and "Traceback" not in refused.err
    report.rmdir()

    damaged = run_dir / "checkpoints" / "step-00000006"
    victim = max(damaged.iterdir(), key=lambda path: path.stat().st_size)
    victim.write_bytes(b"\0" + victim.read_bytes()[1:])
    verified = shoal("ckpt", "verify", damaged)
    assert verified.code == 5
    assert victim.name in verified.out and verified.err == "error: damaged: step-00000006\n"

    with pytest.warns(UserWarning, match="step-00000004 is used"):
        exported = shoal("ckpt", "export", run_dir, job_file.parent / "out")
    assert exported.out.splitlines()[-1] == str(job_file.parent / "out"), (
        "an import of transformers may say something before"
    )
    assert (job_file.parent / "out" / "model.safetensors").exists()


def test_a_loss_that_is_not_finite_ends_with_code_3(shoal, job_file):
    answer = shoal(
        "train",
        job_file,
        "--nproc",
        1,
        "--set",
        "train.optimizer=sgd",
        "--set",
        "train.lr=1e30",
        "--set",
        "train.clip=0",
    )
    assert answer.code == 3
    assert answer.err.startswith("error: step ")
    assert "Traceback" not in answer.err


def test_a_machine_without_a_folder_for_temporary_files_is_told_so(shoal, tmp_path):
    """Where the only disk is full, `import torch` fails so, too, if it brings dill along."""
    with pytest.MonkeyPatch.context() as away:
        away.setattr(tempfile, "tempdir", None)
        away.setenv("TMPDIR", str(tmp_path / "nowhere"))
        (wrong,) = doctor._temporary()
        said = f"TMPDIR = {tmp_path / 'nowhere'} cannot be written, {tempfile.gettempdir()} is used"
        assert (wrong.state, wrong.found) == ("WARN", said)
        away.setattr(tempfile, "tempdir", None)
        away.setattr(tempfile, "_candidate_tempdir_list", lambda: ["/proc/nowhere"])
        (none,), (ranks, _) = doctor._temporary(), doctor._two_ranks()
        assert none.state == ranks.state == "FAIL" and "set TMPDIR" in none.fix
        away.setattr(doctor, "examine", tempfile.gettempdir)
        answer = shoal("doctor")
    assert answer.code == 2 and "Traceback" not in answer.err
    assert answer.err.startswith("error: [Errno 2] No usable temporary directory found in ['/proc/nowhere']. ")
    assert "set TMPDIR" in answer.err


def test_the_doctor_names_what_is_missing_and_what_to_do(monkeypatch, capsys):
    monkeypatch.setattr(doctor.shutil, "which", lambda name: None)
    (compiler,) = doctor._compiler()
    assert (compiler.state, compiler.fix) == ("WARN", "install gcc or clang, or set CC")
    monkeypatch.setattr(doctor.shutil, "which", lambda name: "/bin/gcc" if name == "gcc" else None)
    monkeypatch.setattr(doctor.native, "library", lambda: object())
    monkeypatch.setenv("CC", "gcc-99")
    (wrong,) = doctor._compiler()
    assert (wrong.state, wrong.found) == ("WARN", "CC = gcc-99 is no program, /bin/gcc is used")
    monkeypatch.setattr(doctor, "launch", lambda *arguments, **options: 4)
    ranks, links = doctor._two_ranks()
    assert (ranks.state, links) == ("FAIL", [])
    monkeypatch.setattr(doctor.torch, "__version__", "2.9.1+cu128")
    assert [check.state for check in doctor._versions()][:2] == ["OK", "FAIL"]
    doctor.show([compiler, ranks], [], {"fp32": 1e12}, as_json=True)
    assert [check["state"] for check in json.loads(capsys.readouterr().out)["checks"]] == ["WARN", "FAIL"]
    link = Link("loopback", 2, "sockets", ((1024, 5e-5), (2**20, 1e-3)))
    doctor.show([compiler], [link], {"fp32": 1e12, "bf16": 2e12}, as_json=False)
    shown = capsys.readouterr().out
    assert "-> install gcc" in shown
    rows = {line[:8]: line.split()[-1] for line in shown.splitlines() if "iB/s" in line}
    assert rows == {"1.00 KiB": "█", "1.00 MiB": "█" * 12}, "the slowest has the shortest bar, the fastest the longest"


def test_the_demo_and_the_examples_are_jobs():
    from shoal.cli.demo import DEMO

    assert load_job(DEMO)[0].train.seconds is not None
    examples = sorted((Path(__file__).parents[2] / "examples").glob("*.toml"))
    assert {path.stem for path in examples} >= {
        "gpt_stdlib",
        "llama_hf",
        "moe_stdlib",
        "stages_stdlib",
        "mlp_spirals",
        "resnet_shapes",
        "chess",
    }
    for path in examples:
        load_job(path)
