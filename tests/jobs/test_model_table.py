"""What `shoal plan` knows of a `[model]` table before any data is opened: it is refused as training would refuse it."""

from __future__ import annotations

from typing import Any

import pytest

from shoal.errors import UserError
from shoal.jobs.config import Job
from shoal.jobs.model_table import check_model
from shoal.jobs.read import parse_job

GIVEN: list[tuple[dict[str, Any], dict[str, object], str]] = [
    ({"name": "gpt", "preset": "1m"}, {"n_layers": 3}, "model.n_layers is not a setting of gpt"),
    ({"name": "bert"}, {"heads": 7}, "model.heads = 7 .* does not divide"),
    ({"name": "lstm"}, {"tied": 1}, "model.tied = 1 of lstm must be true or false"),
    ({"name": "resnet", "depth": 20}, {"depht": 18}, 'model.depht is not a setting of resnet .*"depth"'),
    ({"name": "mlp", "sizes": [2, 8, 3]}, {"sizes": "8"}, "model.sizes = '8' of mlp must be a list of integers"),
    ({"name": "chess"}, {"layers": 2}, "model 'chess' has no settings; remove layers"),
]


def job(table: dict[str, Any]) -> Job:
    """A job whose data are not there."""
    return parse_job({"model": table, "train": {"steps": 1}, "data": {"source": "/nowhere"}})[0]


@pytest.mark.parametrize(("table", "wrong", "said"), GIVEN, ids=[table["name"] for table, *_ in GIVEN])
def test_what_follows_from_data_may_be_left_out_and_what_is_wrong_is_told(
    table: dict[str, Any], wrong: dict[str, object], said: str
) -> None:
    check_model(job(table))
    with pytest.raises(UserError, match=said):
        check_model(job({**table, **wrong}))


def test_fields_of_a_configuration_of_transformers_are_checked() -> None:
    pytest.importorskip("transformers")
    table = {"name": "hf", "config": {"model_type": "gpt2", "n_layer": 2}}
    check_model(job(table))
    with pytest.raises(UserError, match=r'n_layers is no field of the configuration of a gpt2 .*"n_layer"'):
        check_model(job({**table, "n_layers": 3}))
