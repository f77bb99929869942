"""The embeddings of a job that parameter servers keep by rows."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial

import torch

from shoal.errors import UserError, in_section
from shoal.jobs.choose import Settled
from shoal.jobs.optimizers import optimizer_named
from shoal.models import ModelSpec
from shoal.module.build import build, without_values
from shoal.optim.groups import make_optimizer, moves_untouched
from shoal.precision import Precision, precision
from shoal.server.embeddings import RowsInUse, embeddings_of, without_tables
from shoal.server.served_table import ServedTable
from shoal.server.shares import Share


@dataclass(frozen=True)
class Tables:
    """The tables of a job: the weights of embeddings, by `names`.

    others: the bytes of every other parameter of the model, by name.
    numbers: the precision of the run.
    """

    settled: Settled
    names: frozenset[str]
    others: Mapping[str, int]
    numbers: Precision

    def left_out(self, rows: RowsInUse | None = None) -> ModelSpec:
        """Returns the job's model without its tables; `rows`: what its forwards pull, None where it runs none."""
        model = self.settled.model
        if not self.names:
            return model
        made = without_tables(model.factory, self.names, rows, self.numbers.model)
        return replace(model, factory=made)

    def served(self, share: Share, device: torch.device) -> list[ServedTable]:
        """Returns what server `share` has of each table, on `device`, with the values that a run begins with."""
        if not self.names:
            return []
        train = self.settled.job.train
        built = build(self.settled.model.factory, train.seed)
        optimizer = partial(make_optimizer, optimizer_named(train.optimizer, train.lr))
        return [
            ServedTable(name, built.value(name, weight).to(self.numbers.master), optimizer, share, device)
            for name, weight in built.module.named_parameters()
            if name in self.names
        ]


def tables_of(settled: Settled) -> Tables:
    """Finds the tables of a job: what `server.tables` names, else the embeddings of sparse gradients.

    Raises UserError for a table, an optimizer or a precision that does not go with updates by rows.
    """
    train = settled.job.train
    module = without_values(settled.model.factory) or settled.model.factory()
    names = frozenset(embeddings_of(module, settled.job.server.tables))
    with in_section("train"):
        numbers = precision(train.precision)
    others = {name: each.nbytes for name, each in module.named_parameters() if name not in names}
    found = Tables(settled, names, others, numbers)
    if not names:
        return found
    if not any(each.requires_grad and name not in names for name, each in module.named_parameters()):
        raise UserError("server.tables: all that is trained would be served by rows. Leave one out of server.tables")
    some = f"with {sorted(names)[0]} served by rows"
    if numbers.scaling is not None:
        raise UserError(
            f'train.precision = "{numbers.name}" {some}: a gradient of rows that overflows is not seen by the loss '
            'scale. Give "bf16" or "fp32", or server.tables = []'
        )
    factory = optimizer_named(train.optimizer, train.lr)
    if moves_untouched(factory, {"weight_decay": train.weight_decay}):
        remedy = "train.weight_decay = 0"
        if moves_untouched(factory, {"weight_decay": 0.0}):
            remedy = 'train.optimizer = "adagrad" or "sgd" without momentum, with train.weight_decay = 0'
        raise UserError(
            f"train.optimizer = {train.optimizer!r} with weight_decay = {train.weight_decay}, {some}: it would change "
            f"rows that no sample of a step has, which are not touched. Give {remedy}; or server.tables = [], which "
            "serves the whole"
        )
    return found
