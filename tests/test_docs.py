"""What the README and the docs show is run, and the names in them exist."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from dataclasses import fields
from pathlib import Path

import pytest

from shoal.doors import deepspeed_keys, patrickstar
from shoal.exchange import algorithm
from shoal.exchange.named import ALGORITHMS
from shoal.jobs.cluster.render import TARGETS, render
from shoal.jobs.cluster.request import read_request
from shoal.jobs.cluster.table import Cluster
from shoal.jobs.config import SECTIONS
from shoal.jobs.read import load_job
from shoal.models import PRESETS
from shoal.plan import Plan

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def blocks(page: Path, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", page.read_text(), re.S | re.M)


def shortened(code: str) -> str:
    """The same program with fewer steps, of one microbatch each."""
    return (
        code.replace("steps=100", "steps=3").replace("steps=20", "steps=3").replace("global_batch=32", "global_batch=8")
    )


@pytest.mark.parametrize("page", ["README.md", "docs/guide.md"])
def test_the_python_of_a_page_runs(page, tmp_path):
    (code,) = blocks(ROOT / page, "python")
    done = subprocess.run([sys.executable, "-c", shortened(code)], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "loss" in done.stdout and list(tmp_path.glob("runs/*/step-00000003"))


@pytest.mark.fast
def test_the_readme_starts_with_the_two_commands_and_its_example_is_short():
    lines = (ROOT / "README.md").read_text().splitlines()
    assert [line.split("#")[0].strip() for line in lines[2:4]] == ["make demo", "make test"]
    (code,) = blocks(ROOT / "README.md", "python")
    assert len([line for line in code.splitlines() if line.strip()]) <= 20


@pytest.mark.fast
def test_the_job_file_of_the_readme_and_those_of_the_examples_are_valid(tmp_path, monkeypatch):
    monkeypatch.chdir(ROOT)
    (text,) = blocks(ROOT / "README.md", "toml")
    job = tmp_path / "job.toml"
    job.write_text(text)
    for path in [job, *sorted((ROOT / "examples").glob("*.toml"))]:
        assert load_job(path, [])[0].model["name"] in ("gpt", "hf", "mlp", "resnet", "chess")


@pytest.mark.fast
def test_the_page_of_the_job_file_names_every_key():
    page = (ROOT / "docs" / "job-file.md").read_text()
    for section, kind in SECTIONS.items():
        part = page.split(f"## `[{section}]`")[1].split("\n## ")[0]
        if kind is not Plan:
            assert set(
                re.findall(
                    r"`(\w+)`", "\n".join(line.split("|")[1] for line in part.splitlines() if line.startswith("| `"))
                )
            ) == {each.name for each in fields(kind)}
    assert '"1m" to "13b"' in page and {"1m", "13b"} <= set(PRESETS)


@pytest.mark.fast
@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_and_paths_exist(page):
    text = page.read_text()
    for target in re.findall(r"\]\((?!http)([^)#]+)\)", text):
        assert (page.parent / target).exists(), target
    for name in re.findall(r"`((?:tests|examples|benchmarks|docs|src)/[\w./-]+)`", text):
        assert (ROOT / name).exists(), name


@pytest.mark.fast
def test_the_rooms_of_the_design_page_are_those_of_the_layers():
    layers = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"][0]["layers"]
    rooms = {room for layer in layers for room in layer.split(" | ")}
    there = {
        path.stem
        for path in (ROOT / "src" / "shoal").iterdir()
        if path.name not in ("__init__.py", "__pycache__", "py.typed")
    }
    assert rooms == there
    page = (ROOT / "docs" / "design.md").read_text()
    for room in rooms:
        assert f"`{room}/`" in page or f"`{room}.py`" in page, room


@pytest.mark.fast
def test_the_page_of_communication_has_every_algorithm_and_its_parameters():
    page = (ROOT / "docs" / "communication.md").read_text()
    rows = {
        name: line
        for line in page.splitlines()
        if line.startswith("| `")
        for name in re.findall(r"`(\w+)`", line.split("|")[1])
    }
    assert set(rows) == set(ALGORITHMS)
    for name in ALGORITHMS:
        alike = [other for other in ALGORITHMS if type(algorithm(other)) is type(algorithm(name))]
        said = " ".join(rows[other].split("|")[-2] for other in alike)
        for field in fields(algorithm(name)):
            assert field.name in ("chunk_bytes", "make") or not field.init or f"`{field.name}`" in said, (
                f"{name} has {field.name}"
            )


@pytest.mark.fast
@pytest.mark.parametrize(
    ("section", "keys"), [("PatrickStar's configuration", patrickstar.KEYS), ("DeepSpeed's JSON", deepspeed_keys.KEYS)]
)
def test_the_page_of_the_doors_says_of_every_key_what_becomes_of_it(section, keys):
    part = (ROOT / "docs" / "doors.md").read_text().split(f"## {section}")[1].split("\n## ")[0]
    rows = [
        [cell.strip() for cell in line.strip("|").split(" | ")] for line in part.splitlines() if line.startswith("| `")
    ]
    said = {name: (fate, why.strip("| ")) for names, fate, why in rows for name in re.findall(r"`([\w.]+)`", names)}
    assert said == {name: (key.fate, key.why) for name, key in keys.items()}


@pytest.mark.fast
def test_the_page_of_jobs_has_a_job_for_every_target_and_every_key(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    page = ROOT / "docs" / "jobs.md"
    for language, suffix in (("toml", "toml"), ("json", "json")):
        (text,) = blocks(page, language)
        (tmp_path / f"job.{suffix}").write_text(text)
    job = read_request(tmp_path / "job.toml")
    for target in TARGETS:
        one_host = ["cluster.nodes=1"] if target == "local" else []
        assert render(read_request(tmp_path / "job.toml", one_host), target)
    module = read_request(tmp_path / "job.json")
    assert (job.ranks, module.ranks, module.cluster.hosts) == (8, 2, 3)
    table = page.read_text().split("## Which target")[1].split("\n## ")[0]
    named = {
        name
        for line in table.splitlines()
        for name in re.findall(r"`(\w+)`", line.split("|")[1] if "|" in line else "")
    }
    assert {each.name for each in fields(Cluster)} == named
