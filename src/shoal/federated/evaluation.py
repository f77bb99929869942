"""The loss and the accuracy of the global model on what each client holds out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.func import functional_call, vmap

from shoal.federated.clients import Held
from shoal.federated.together import WithLoss, spread_or_refused
from shoal.models.losses import Loss

PIECE = 512
"""Samples evaluated at a time."""


@dataclass(frozen=True)
class Measured:
    """Means over `counts`: the loss, and the accuracy where there is a measure; of all clients and of each, NaN for a
    client that holds nothing out."""

    loss: float
    counts: int
    accuracy: float | None
    client_losses: NDArray[np.float64]
    client_accuracies: NDArray[np.float64] | None


class Evaluation:
    """Measures a module on the samples of `held`, each by itself, so that any number of clients is one pass."""

    def __init__(self, module: nn.Module, held: Held, loss: Loss, measure: Loss | None) -> None:
        self._module, self._held = module, held
        self._measures = [WithLoss(module, each) for each in (loss, measure) if each is not None]
        self._spread = True

    @torch.no_grad()
    def __call__(self) -> Measured | None:
        """Returns what is measured now; None where no client holds anything out."""
        if not len(self._held):
            return None
        was_training = self._module.training
        self._module.eval()
        try:
            pieces = [self._piece(first) for first in range(0, len(self._held), PIECE)]
        finally:
            self._module.train(was_training)
        values = torch.cat(pieces).double().cpu().numpy()
        owners, clients = self._held.owners(), len(self._held.counts)
        sums = np.stack([np.bincount(owners, column, clients) for column in values.T], axis=1)
        with np.errstate(invalid="ignore", divide="ignore"):
            means = sums[:, 0::2] / sums[:, 1::2]
        totals = sums.sum(axis=0)
        accuracy = float(totals[2] / totals[3]) if len(totals) > 2 else None
        return Measured(
            float(totals[0] / totals[1]),
            int(totals[1]),
            accuracy,
            means[:, 0],
            means[:, 1] if accuracy is not None else None,
        )

    def _piece(self, first: int) -> Tensor:
        """Returns (sum, count) of each measure for each sample of a piece: [samples, 2 * measures]."""
        samples = {key: values[first : first + PIECE] for key, values in self._held.tensors.items()}
        samples = {key: values[: len(self._held) - first] for key, values in samples.items()}
        if self._spread:
            try:
                return self._at_once(samples)
            except Exception:  # a model may do anything that vmap cannot spread: then one sample after the other
                self._spread = False
        number = len(next(iter(samples.values())))
        rows = [self._of_one({key: values[index] for key, values in samples.items()}) for index in range(number)]
        return torch.stack(rows)

    def _at_once(self, samples: dict[str, Tensor]) -> Tensor:
        states = [dict(each.named_parameters()) | dict(each.named_buffers()) for each in self._measures]

        def one(sample: dict[str, Tensor]) -> Tensor:
            return self._row(
                [
                    functional_call(each, state, ({key: value[None] for key, value in sample.items()},))
                    for each, state in zip(self._measures, states, strict=True)
                ]
            )

        with spread_or_refused():
            return vmap(one)(samples)

    def _of_one(self, sample: dict[str, Tensor]) -> Tensor:
        mb = {key: value[None] for key, value in sample.items()}
        return self._row([each(mb) for each in self._measures])

    @staticmethod
    def _row(found: Sequence[tuple[Tensor, Tensor, Tensor]]) -> Tensor:
        return torch.stack([value.float() for total, count, _ in found for value in (total, count)])
