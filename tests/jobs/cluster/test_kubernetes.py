"""Documents for Kubernetes: what is in them, and that the published schemas take them."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from shoal.errors import UserError
from shoal.jobs.cluster import pods
from shoal.jobs.cluster.kubernetes import KINDS, indexed_job, job_set, secret_command, to_yaml, train_job
from shoal.jobs.cluster.render import render
from shoal.jobs.cluster.request import Request
from shoal.jobs.cluster.table import Cluster
from shoal.launch import discover
from tests.launch.packages import modules, wheel

MODULE = Request(
    "m",
    Cluster(nodes=2, image="lab/t", cpus=0.5, memory="1GiB"),
    1,
    Path("runs/m"),
    Path("/"),
    module=("trainer.task",),
)
fast = pytest.mark.fast


def container(documents: list[dict[str, Any]]) -> dict[str, Any]:
    (found,) = documents[-1]["spec"]["template"]["spec"]["containers"]
    return found


def environment(documents: list[dict[str, Any]], index: int) -> dict[str, str]:
    """The variables of a pod: Kubernetes fills in its index."""
    found = {"JOB_COMPLETION_INDEX": str(index)}
    for each in container(documents)["env"]:
        if "fieldRef" in each.get("valueFrom", {}):
            assert each["valueFrom"]["fieldRef"]["fieldPath"] == pods._INDEX
            found[each["name"]] = str(index)
        else:
            found[each["name"]] = each.get("value", "")
    return found


@fast
@pytest.mark.parametrize("kind", KINDS)
def test_yaml_is_read_back_as_it_was_meant(request_of, kind: str) -> None:
    documents = KINDS[kind](request_of(env='{ON = "on", NUMBER = "1e3", LINES = "a\\nb"}'))
    assert list(yaml.safe_load_all(to_yaml(documents))) == documents


@fast
def test_the_job_file_travels_and_the_secret_does_not(request_of, job_file: Path) -> None:
    request = request_of()
    text = render(request, "kubernetes")
    config, service, job = yaml.safe_load_all(text)
    assert config["data"]["job.toml"] == job_file.read_text() and "job.toml: |" in text
    assert service["spec"]["clusterIP"] == "None" and job["spec"]["template"]["spec"]["subdomain"] == "my-job"
    secret = next(each for each in container([job])["env"] if each["name"] == "SHOAL_SECRET")
    assert secret["valueFrom"] == {"secretKeyRef": {"name": "my-job", "key": "secret"}}
    assert "kubectl create secret generic my-job " in secret_command(request)
    assert not re.search("[0-9a-f]{32}", text)


@fast
def test_a_pod_with_one_rank_is_that_rank(request_of) -> None:
    documents = indexed_job(replace(request_of(setup="[]", finish="[]"), ranks=1))
    assert container(documents)["command"][:3] == ["shoal", "train", "/etc/shoal/job.toml"]
    identity = discover(environment(documents, 1))
    assert (identity.rank, identity.size, identity.store_url) == (1, 2, "tcp://my-job-0.my-job:29500")


@fast
def test_torchrun_starts_the_ranks_of_a_pod(request_of) -> None:
    documents = indexed_job(request_of(setup="[]", finish="[]"))
    assert container(documents)["command"][:4] == ["torchrun", "--no-python", "shoal", "train"]
    variables = {key: value for key, value in environment(documents, 1).items() if key.startswith("PET_")}
    assert variables == {
        "PET_NNODES": "2",
        "PET_NPROC_PER_NODE": "2",
        "PET_NODE_RANK": "1",
        "PET_MASTER_ADDR": "my-job-0.my-job",
        "PET_MASTER_PORT": "29500",
    }
    assert container(indexed_job(replace(MODULE, ranks=2)))["command"] == ["torchrun", "-m", "trainer.task"]


@fast
def test_a_single_pod_starts_its_ranks_itself(request_of) -> None:
    documents = indexed_job(request_of(nodes=1, setup="[]", finish="[]"))
    assert [each["kind"] for each in documents] == ["ConfigMap", "Job"]
    command = container(documents)["command"]
    assert command[:2] == ["shoal", "train"] and command[-2:] == ["--nproc", "2"]
    assert not {"RANK", "PET_NNODES"} & set(environment(documents, 0))


@fast
def test_set_up_and_finish_run_in_the_container(request_of) -> None:
    shell, option, script = container(indexed_job(request_of()))["command"]
    assert (shell, option) == ("bash", "-c") and script.endswith("\necho finished\n")
    assert -1 < script.index("\necho set up\n") < script.index(" torchrun --no-python shoal train ")
    assert "timeout" not in script and "GREETING" not in script  # Kubernetes has both


@fast
@pytest.mark.parametrize("kind", KINDS)
def test_dollars_come_through_what_kubernetes_puts_in_their_place(request_of, kind: str) -> None:
    odd = "a$$b $(PAID) $$(PAID) $ $$$ $HOME $(date)"
    request = request_of(env=f"{{PAID = '2', ODD = '{odd}'}}", setup=f'["echo {odd}"]')
    spec = KINDS[kind](request)[-1]["spec"]
    inside = {"jobset": lambda: spec["replicatedJobs"][0]["template"]["spec"], "kubernetes": lambda: spec}
    pod = spec["trainer"] if kind == "trainjob" else inside[kind]()["template"]["spec"]["containers"][0]
    values = {each["name"]: each["value"] for each in pod["env"] if "value" in each}
    assert expanded(values["ODD"], values) == odd
    assert f"\necho {odd}\n" in expanded(pod["command"][2], values)


def expanded(text: str, variables: dict[str, str]) -> str:
    """What Kubernetes makes of a value or a word of a command: one $ of $$, and variables of $(NAME) that it knows."""
    return re.sub(r"\$\$|\$\(([^)]*)\)", lambda m: "$" if m[1] is None else variables.get(m[1], m[0]), text)


@fast
def test_what_a_pod_asks_for(request_of) -> None:
    documents = indexed_job(request_of())
    asked = {"cpu": "9000m", "memory": "16384Mi", "nvidia.com/gpu": "2"}
    assert container(documents)["resources"] == {"requests": asked, "limits": asked}
    spec = documents[-1]["spec"]
    assert (spec["completions"], spec["parallelism"], spec["activeDeadlineSeconds"]) == (2, 2, 129600)
    assert documents[-1]["metadata"]["labels"]["kueue.x-k8s.io/queue-name"] == "gpu"
    mounted = {each["mountPath"]: each["name"] for each in container(documents)["volumeMounts"]}
    assert set(mounted) == {"/data", "/etc/shoal", "/dev/shm"}
    assert set(mounted.values()) == {each["name"] for each in spec["template"]["spec"]["volumes"]}


@fast
def test_the_others_differ_in_where_rank_0_is(request_of) -> None:
    (replicated,) = job_set(request_of())[-1]["spec"]["replicatedJobs"]
    variables = replicated["template"]["spec"]["template"]["spec"]["containers"][0]["env"]
    assert {"name": "PET_MASTER_ADDR", "value": "my-job-ranks-0-0.my-job"} in variables
    trainer = train_job(request_of())[-1]["spec"]["trainer"]
    assert (trainer["numNodes"], trainer["numProcPerNode"]) == (2, 2)
    assert not [each for each in trainer["env"] if each["name"].startswith("PET_")]  # the runtime sets them


@fast
@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"volumes": '{"my data" = "/data"}'}, "cluster.volumes: 'my data' is no name in Kubernetes"),
        ({"volumes": '{Training = "/data"}'}, "cluster.volumes: 'Training' is no name in Kubernetes"),
        ({"secret": '"a_b"'}, "cluster.secret = 'a_b' is no name in Kubernetes"),
        ({"queue": '"the queue"'}, "cluster.queue = 'the queue' is no name in Kubernetes"),
        ({"image": '"lab/shoal :1"'}, "cluster.image = 'lab/shoal :1'"),
        ({"volumes": '{a = "/data", b = "/data/"}'}, "cluster.volumes.b = '/data/': it is that of a, too"),
        ({"volumes": '{a = "/data", b = "/dev/shm"}'}, "cluster.volumes.b = '/dev/shm': it is that of the job"),
        ({"volumes": '{a = "/data", b = "/x:y"}'}, "cluster.volumes.b = '/x:y': a path with : is refused"),
        ({"env": '{PET_NPROC_PER_NODE = "1"}'}, "cluster.env.PET_NPROC_PER_NODE: the pods find each other by it"),
    ],
)
@pytest.mark.parametrize("kind", KINDS)
def test_what_kubernetes_would_refuse_is_named_by_its_key(
    request_of, kind: str, values: dict[str, str], message: str
) -> None:
    with pytest.raises(UserError) as caught:
        KINDS[kind](request_of(**values))
    assert message in str(caught.value)


@fast
@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"image": '""'}, "cluster.image is missing"),
        ({"volumes": "{}"}, "cluster.volumes = {training ="),
        ({"volumes": '{training = "/elsewhere"}'}, 'give a run.dir below it, "/data/first"'),
    ],
)
def test_pods_that_would_lose_what_they_train_are_refused(request_of, values: dict[str, str], message: str) -> None:
    with pytest.raises(UserError) as caught:
        indexed_job(request_of(**values))
    assert message in str(caught.value)


@fast
def test_yaml_is_an_extra(request_of, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "yaml", None)
    with pytest.raises(UserError, match=r"pip install 'shoal\[kubernetes\]'"):
        render(request_of(), "kubernetes")


@pytest.fixture(scope="module")
def validate() -> Callable[[str], list[str]]:
    """Returns the kinds of documents that the schemas take."""
    found = os.pathsep.join(modules(wheel(*names)) for names in (("kubernetes-validate",), ("kubeflow-trainer-api",)))

    def run(text: str) -> list[str]:
        command = [sys.executable, str(Path(__file__).with_name("validate.py"))]
        environ = {**os.environ, "PYTHONPATH": found}
        done = subprocess.run(command, input=text, capture_output=True, text=True, env=environ, check=False)
        assert done.returncode == 0, done.stderr[-3000:]
        return done.stdout.split()

    return run


@pytest.mark.matrix
def test_the_published_schemas_take_the_documents(request_of, validate: Callable[[str], list[str]]) -> None:
    requests = [request_of(), request_of(nodes=1), replace(request_of(setup="[]", finish="[]"), ranks=1), MODULE]
    documents = [each for request in requests for make in KINDS.values() for each in make(request)]
    assert validate(to_yaml(documents)) == [each["kind"] for each in documents]


@pytest.mark.matrix
@pytest.mark.parametrize("kind", KINDS)
def test_the_validation_finds_a_wrong_field(request_of, validate: Callable[[str], list[str]], kind: str) -> None:
    documents = KINDS[kind](request_of())
    documents[-1]["spec"]["completionMod"] = "Indexed"
    with pytest.raises(AssertionError, match="completionMod"):
        validate(to_yaml(documents))
