"""The stages of a GPT for torch.distributed.pipelining, cut between the same blocks as ours."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from shoal.pipeline import Schedule


class TorchStage(nn.Module):
    """Some blocks of a GPT, the first with the embeddings before them, the last with norm and head behind."""

    token: nn.Module | None
    position: nn.Module | None
    norm: nn.Module | None
    head: nn.Module | None

    def __init__(self, model: Any, blocks: range, first: bool, last: bool, clones: bool) -> None:
        super().__init__()
        self.clones = clones  # torch's halves of a backward detach results in place, which views refuse
        self.blocks = nn.ModuleList(model.blocks[place] for place in blocks)
        self.token, self.position = (model.token_embedding, model.position_embedding) if first else (None, None)
        self.norm, self.head = (model.norm, model.head) if last else (None, None)

    def forward(self, x: Tensor) -> Tensor:
        if self.token is not None:
            x = self.token(x)
            if self.position is not None:
                x = x + self.position(torch.arange(x.shape[1], device=x.device)[None])
        for block in self.blocks:
            x = block(x)
        x = x if self.head is None or self.norm is None else self.head(self.norm(x))
        return x.clone() if self.clones else x


def torch_stages(
    model: Any,
    blocks: Sequence[int],
    ours: Schedule,
    rank: int,
    device: torch.device,
    dtype: torch.dtype = torch.float32,
) -> list[Any]:
    """torch's PipelineStages of `rank` in a schedule placed as `ours`, of so many `blocks` each."""
    from torch.distributed import pipelining

    starts = [0, *itertools.accumulate(blocks)]
    found = []
    for stage in ours.stages_of(rank):
        part = TorchStage(
            model, range(starts[stage], starts[stage + 1]), stage == 0, stage == ours.stages - 1, ours.name == "zbv"
        )
        found.append(pipelining.PipelineStage(part.to(device, dtype), stage, ours.stages, device))
    return found
