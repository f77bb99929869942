"""Validates Kubernetes documents from stdin, YAML, against the published schemas; prints the kind of each good one.

Job, Service and ConfigMap against Kubernetes' own schemas, strictly, of several versions; JobSet and TrainJob by the
models that their projects generate from theirs. A field that a model does not know would be lost, and is an error.
"""

from __future__ import annotations

import sys
from typing import Any

import kubernetes_validate
import yaml
from kubeflow_trainer_api import models

VERSIONS = ("1.31", "1.34", "1.37")
MODELS = {"JobSet": models.JobsetV1alpha2JobSet, "TrainJob": models.TrainerV1alpha1TrainJob}


def plain(value: Any) -> Any:
    """Returns a document without what is empty, and with each quantity as the text that it stands for."""
    if isinstance(value, dict):
        return {key: plain(each) for key, each in value.items() if each not in (None, {}, [])}
    return [plain(each) for each in value] if isinstance(value, list) else value


for document in yaml.safe_load_all(sys.stdin):
    model = MODELS.get(document["kind"])
    if model is None:
        for version in VERSIONS:
            kubernetes_validate.validate(document, version, strict=True)
    else:
        known = plain(model.from_dict(document).to_dict())
        assert known == plain(document), f"unknown fields:\n{known}\n{plain(document)}"
        if document["kind"] == "JobSet":
            for job in document["spec"]["replicatedJobs"]:
                whole = {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": "job"}, **job["template"]}
                for version in VERSIONS:
                    kubernetes_validate.validate(whole, version, strict=True)
    print(document["kind"])
