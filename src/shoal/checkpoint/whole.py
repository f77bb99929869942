"""The weights by name, whole on every rank, as `module.state_dict()` of one process has them, for any plan."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor, nn

from shoal.chunks import Chunk
from shoal.comm import Group
from shoal.errors import ShoalError, UserError
from shoal.models.export import export_whole
from shoal.module.stand_in import parts_in_place
from shoal.parallel.layout import Layout


@torch.no_grad()
def whole_state(module: nn.Module, chunks: Sequence[Chunk]) -> dict[str, Tensor]:
    """Returns masters and buffers on the CPU, under the names of `module.state_dict()`. Collective, between steps."""
    masters: dict[str, Tensor] = {}
    for chunk in chunks:
        flat = chunk.gathered(chunk.owned.master_to_read, "masters")
        masters.update({slot.name: slot.view(flat).to("cpu", copy=True) for slot in chunk.slots})
    names = _first_names(module)
    return {
        name: masters[names[name]] if name in names else value.detach().to("cpu", copy=True)
        for name, value in module.state_dict().items()
    }


@torch.no_grad()
def put_whole(
    module: nn.Module, chunks: Sequence[Chunk], state: Mapping[str, Tensor], strict: bool
) -> tuple[list[str], list[str]]:
    """Sets the weights and buffers to those in `state`, which is the same on every rank. Collective, between steps.

    Returns the names that `state` lacks and those that `module` lacks. Raises UserError, before anything is changed,
    for another shape and, if `strict`, for such names.
    """
    there = module.state_dict()
    missing, unexpected = [name for name in there if name not in state], [name for name in state if name not in there]
    if strict and (missing or unexpected):
        raise UserError(
            f"the state lacks {missing or 'nothing'}, and has {unexpected or 'nothing'} that the model does not know"
        )
    for name in there.keys() & state.keys():
        if tuple(state[name].shape) != tuple(there[name].shape):
            raise UserError(
                f"{name} has shape {tuple(state[name].shape)} in the state, the model wants {tuple(there[name].shape)}"
            )
    names = _first_names(module)
    values = {names[name]: state[name] for name in state if name in names}
    for chunk in chunks:
        owned = chunk.owned
        if chunk.group is not None:
            chunk.group.barrier()  # another rank may still read weights in shared memory
        for slot in owned.slots:
            if slot.name in values:
                part = values[slot.name].flatten()[slot.start :][: slot.numel]
                slot.view(owned.master).copy_(part.view(slot.shape))
        chunk.publish()
    for name in there.keys() & state.keys() - names.keys():
        there[name].copy_(state[name])
    return missing, unexpected


def exported(module: nn.Module, weights: Mapping[str, Tensor], directory: Path) -> ShoalError | None:
    """Calls `export_whole` for a module that looks as before its cut: peft takes the weights of the parts it finds."""
    with parts_in_place(module):
        return export_whole(module, weights, directory)


def whole_parameters(own: Mapping[str, Tensor], layouts: Mapping[str, Layout], beside: Group) -> dict[str, Tensor]:
    """Returns all parameters whole on the first rank of `beside`; on the others their `own`. Collective.

    own: this rank's parameters
    layouts: of all parameters
    beside: the ranks that have the parts of a model
    """
    everywhere = beside.all_gather_object({name: layouts[name] for name in own})
    first, whole = beside.rank == 0, dict(own)
    for name, value in own.items():
        if layouts[name].alike:
            continue
        if not first:
            beside.send(value.contiguous(), 0, f"export {name}")
            continue
        whole[name] = value.new_empty(layouts[name].shape)
        layouts[name].put_into(whole[name], value)
        for rank in range(1, beside.size):
            layout = everywhere[rank][name]
            part = beside.recv(value.new_empty(layout.own_shape), rank, f"export {name}")
            layout.put_into(whole[name], part)
    return whole


def of_all_stages(own: Mapping[str, Tensor], across: Group) -> dict[str, Tensor]:
    """Returns the tensors of all stages by name on the first rank of `across`; on the others their `own`. Collective.

    own: this stage's tensors
    across: the ranks of a pipeline
    """
    shapes = across.all_gather_object({name: (tuple(value.shape), value.dtype) for name, value in own.items()})
    found, device = dict(own), next(iter(own.values())).device
    for place in range(1, across.size):
        for name, (shape, dtype) in shapes[place].items():
            if any(name in earlier for earlier in shapes[:place]):
                continue
            if across.rank == place:
                across.send(own[name].contiguous(), 0, f"export {name}")
            elif across.rank == 0:
                found[name] = across.recv(torch.empty(shape, dtype=dtype, device=device), place, f"export {name}")
    return found


def _first_names(module: nn.Module) -> dict[str, str]:
    """Returns the name of each parameter's chunk slot: a tied parameter is known by its first name."""
    first = {id(parameter): name for name, parameter in module.named_parameters()}
    return {name: first[id(parameter)] for name, parameter in module.named_parameters(remove_duplicate=False)}
