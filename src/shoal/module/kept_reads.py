"""Backends of `torch.compile` for blocks that change a tensor which they read, such as a running mean by which they
divide.

Torch's compiler computes cheap values again in backward instead of keeping them. Of an input that the forward has
changed meanwhile they come out other ones: gradients are silently wrong (pytorch/pytorch#197039, as of torch 2.13).
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from functools import cache
from typing import Any

from torch import Tensor
from torch.fx import GraphModule, Node

Backend = Callable[..., Callable[..., Any]]
READ = "shoal_reads_what_changes"
"""Of a node of a graph: it reads an input that the graph changes."""


@cache
def keeping_reads(name: str) -> Backend:
    """Returns the backend of that name, which keeps for backward what is read of inputs that a graph changes. One and
    the same each time: blocks that are alike share what is compiled with it.

    Raises torch's InvalidBackend for an unknown name.
    """
    from torch._dynamo.backends.registry import lookup_backend  # imported here because it takes seconds

    if name != "inductor":  # which is there, and takes long to import: at the first call
        lookup_backend(name)

    def compiled(graph: GraphModule, inputs: list[Any], **options: Any) -> Callable[..., Any]:
        # a graph from torch's cache may have been made of the same operations without these marks
        with _without_cache() if _keep_reads(graph) else nullcontext():
            return lookup_backend(name)(graph, inputs, **options)

    compiled.__name__ = f"{name}_keeping_reads"
    return compiled


def _keep_reads(graph: GraphModule) -> bool:
    """Marks what reads an input that `graph` changes as not to be computed again; whether there is any.

    Dynamo has run the graph once, on tensors without values, whose versions tell what was changed. BatchNorm's own
    statistics are none of these: nothing of a training forward is computed from them.
    """
    from torch.utils.checkpoint import CheckpointPolicy

    nodes = [node for part in graph.modules() if isinstance(part, GraphModule) for node in part.graph.nodes]
    given = [node for node in nodes if node.op == "placeholder"]
    changed = {_storage(node) for node in given if getattr(node.meta.get("example_value"), "_version", 0)} - {None}
    reads = [node for node in nodes if changed & {_storage(each) for each in node.all_input_nodes}]
    for node in reads:
        node.meta["recompute"], node.meta[READ] = CheckpointPolicy.MUST_SAVE, True
    return bool(reads)


def _storage(node: Node) -> int | None:
    """Names the storage of what a node gives: views have that of their tensor."""
    value = node.meta.get("example_value")
    return value.untyped_storage()._cdata if isinstance(value, Tensor) else None


def _without_cache() -> Any:
    import torch._functorch.config

    return torch._functorch.config.patch(enable_autograd_cache=False)
