"""The local training of clients: all of a round in groups, in the way that model and optimizer allow."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from shoal.device import seed_generators
from shoal.errors import UserError
from shoal.federated.clients import Clients, rows_of_batches
from shoal.federated.flat import Flat, initial_module
from shoal.federated.one_by_one import OneByOne
from shoal.federated.recipe import Recipe, Trained
from shoal.federated.schedule import Task
from shoal.federated.together import Together, together_or_why
from shoal.module.random import host_draws


class LocalTraining:
    """Trains clients of `recipe`.

    asked: how many train in a round. mu: see Strategy. module, flat: the model, and where it lies in a vector.
    size: number of clients that train at once; why: they train one by one, "" for together.
    """

    def __init__(self, recipe: Recipe, clients: Clients, asked: int, mu: float, device: torch.device) -> None:
        empty = [client for client, count in enumerate(clients.train.counts) if not count]
        if empty:
            raise UserError(f"client {empty[0]} has no sample to train on: give fewer clients")
        self.recipe, self.clients, self.device = recipe, clients, device
        self.module = initial_module(recipe.model, recipe.seed).to(device)
        self.flat = Flat(self.module)
        found = together_or_why(self.module, self.flat, recipe, clients.train.tensors, asked, mu)
        self.why = found if isinstance(found, str) else ""
        self._local: Together | OneByOne
        if isinstance(found, str):
            self._local = OneByOne(self.module, self.flat, recipe, clients.train.tensors, mu)
        else:
            self._local = found
        self.size = self._local.size

    def start(self) -> Tensor:
        """Returns the vector of the module as it is now."""
        return self.flat.vector(self.module.state_dict())

    def train(self, group: Sequence[Task], starts: Tensor, rate: float) -> Trained:
        """Trains a group of at most `size` clients, those of most steps first.

        starts: the weights that they begin from, [size of the model], or of each one. rate: see Recipe.
        """
        drawn = hash((self.recipe.seed, group[0].client, group[0].turn))
        seed_generators(self.device, drawn)
        clients, turns = [task.client for task in group], [task.turn for task in group]
        held, batch, seed = self.clients.train, self.recipe.batch, self.recipe.seed
        rows = rows_of_batches(held, clients, turns, group[0].steps, batch, seed)
        with host_draws(drawn):
            return self._local.train(starts, rows, [task.steps for task in group], rate)

    @torch.no_grad()
    def put(self, weights: Tensor) -> None:
        """Sets the module to a vector of weights."""
        state = self.module.state_dict()
        for name, value in self.flat.named(weights).items():
            state[name].copy_(value)
