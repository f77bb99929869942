"""Documents for Kubernetes: an Indexed Job with its headless Service, a JobSet, or a TrainJob of Kubeflow."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from shoal.errors import UserError
from shoal.jobs.cluster import pods
from shoal.jobs.cluster.pods import Document
from shoal.jobs.cluster.request import Request

RETRIES = 10
"""How often a job begins anew after failures that are not its own; each attempt resumes from the newest checkpoint."""
SET, CONTAINER, NODE = "ranks", "train", "node"
"""Names: of the JobSet's only replicated job, of the container, and of both in the runtime of a TrainJob."""
RUNTIME = "torch-distributed"


def indexed_job(request: Request) -> list[Document]:
    """Returns an Indexed Job, one pod a host, with what its pods need."""
    pods.check(request)
    first = f"{request.name}-0.{request.name}"
    spec = {**_job_spec(request, first, CONTAINER), "backoffLimit": RETRIES * request.cluster.hosts}
    if request.cluster.seconds is not None:
        spec["activeDeadlineSeconds"] = request.cluster.seconds
    service: list[Document] = []
    if request.cluster.hosts > 1:
        spec["template"]["spec"]["subdomain"] = request.name
        service = [_service(request)]
    job = {"apiVersion": "batch/v1", "kind": "Job", "metadata": pods.metadata(request), "spec": spec}
    return [*pods.job_file(request), *service, job]


def job_set(request: Request) -> list[Document]:
    """Returns a JobSet, which begins anew as a whole where a pod fails."""
    pods.check(request)
    spec = {**_job_spec(request, f"{request.name}-{SET}-0-0.{request.name}", CONTAINER), "backoffLimit": 0}
    if request.cluster.seconds is not None:
        spec["activeDeadlineSeconds"] = request.cluster.seconds
    mistakes = {"name": "mistakes", "action": "FailJobSet", "onJobFailureReasons": ["PodFailurePolicy"]}
    whole = {
        "apiVersion": "jobset.x-k8s.io/v1alpha2",
        "kind": "JobSet",
        "metadata": pods.metadata(request),
        "spec": {
            "network": {"enableDNSHostnames": True, "publishNotReadyAddresses": True},
            "failurePolicy": {"maxRestarts": RETRIES, "rules": [mistakes]},
            "replicatedJobs": [{"name": SET, "replicas": 1, "template": {"spec": spec}}],
        },
    }
    return [*pods.job_file(request), whole]


def train_job(request: Request) -> list[Document]:
    """Returns a TrainJob of Kubeflow's runtime for torch, which gives each pod the variables of torchrun."""
    pods.check(request)
    trainer: Document = {
        "image": request.cluster.image,
        "command": pods.command(request, torchrun=True),
        "env": pods.variables(request),
        "numNodes": request.cluster.hosts,
        "numProcPerNode": request.ranks,
        "resourcesPerNode": pods.resources(request),
    }
    patched = {
        "terminationGracePeriodSeconds": pods.GRACE,
        "containers": [{"name": NODE, "volumeMounts": pods.mounts(request)}],
        "volumes": pods.volumes(request),
    }
    replicated = {"name": NODE, "template": {"spec": {"template": {"spec": patched}}}}
    runtime = {"template": {"spec": {"replicatedJobs": [replicated]}}}
    spec: Document = {
        "runtimeRef": {"apiGroup": "trainer.kubeflow.org", "kind": "ClusterTrainingRuntime", "name": RUNTIME},
        "trainer": trainer,
        "runtimePatches": [{"manager": "shoal", "trainingRuntimeSpec": runtime}],
    }
    if request.cluster.seconds is not None:
        spec["activeDeadlineSeconds"] = request.cluster.seconds
    meta = pods.metadata(request)
    job = {"apiVersion": "trainer.kubeflow.org/v1alpha1", "kind": "TrainJob", "metadata": meta, "spec": spec}
    return [*pods.job_file(request), job]


KINDS: dict[str, Callable[[Request], list[Document]]] = {
    "kubernetes": indexed_job,
    "jobset": job_set,
    "trainjob": train_job,
}


def to_yaml(documents: Sequence[Document]) -> str:
    """Returns the documents as YAML; a text of several lines is written as such."""
    try:
        import yaml
    except ImportError:
        raise UserError("YAML needs a package that is not installed: pip install 'shoal[kubernetes]'") from None

    class Dumper(yaml.SafeDumper):
        def ignore_aliases(self, data: Any) -> bool:
            return True

    def text(dumper: yaml.SafeDumper, value: str) -> yaml.ScalarNode:
        return dumper.represent_scalar("tag:yaml.org,2002:str", value, style="|" if "\n" in value else None)

    Dumper.add_representer(str, text)
    return str(yaml.dump_all(documents, Dumper=Dumper, sort_keys=False, allow_unicode=True, width=120))


def secret_command(request: Request) -> str:
    """Returns the command that makes the Secret that the pods read."""
    return f"kubectl create secret generic {pods.secret_name(request)} --from-literal=secret=$(openssl rand -hex 32)"


def _service(request: Request) -> Document:
    """Returns the headless Service that gives pods their host names, from before they are ready."""
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {"name": request.name, "labels": pods.labels(request)},
        "spec": {
            "clusterIP": "None",
            "publishNotReadyAddresses": True,
            "selector": {"batch.kubernetes.io/job-name": request.name},
        },
    }


def _job_spec(request: Request, first: str, container: str) -> Document:
    hosts = request.cluster.hosts
    hopeless = {"containerName": container, "operator": "In", "values": pods.HOPELESS}
    evicted = [{"type": "DisruptionTarget", "status": "True"}]
    return {
        "completionMode": "Indexed",
        "completions": hosts,
        "parallelism": hosts,
        "podFailurePolicy": {
            "rules": [
                {"action": "Ignore", "onPodConditions": evicted},
                {"action": "FailJob", "onExitCodes": hopeless},
            ]
        },
        "template": {
            "metadata": {"labels": pods.labels(request)},
            "spec": pods.pod_spec(request, first, container),
        },
    }
