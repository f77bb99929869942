"""Which layer of a model is cut how: tables from patterns of module names to what a layer becomes.

    "vocabulary"  an embedding, its rows cut            "head"    the last linear layer, its rows cut; its logits stay cut
    "column"      a linear layer, its rows cut          "row"     the linear layer behind it, its columns cut
    "qkv"         queries, keys and values in one linear layer: the rows of each cut by heads
    "packed"      two linear layers in one (gate and up): the rows of each cut
    "attention"   a module that keeps numbers of heads: they are set to what is here. Linear layers in it are cut by heads
    "experts"     a mixture's matrices [experts, out, in] in one module: cut inside each expert for tp, experts dealt out for ep
    "tokens"      an embedding of positions: of what it gives each rank takes its tokens ("sequence")
    "sequence"    of the whole model (the name ""): between its layers each rank has its tokens of [B, T, D], from the vocabulary to the head
    "overlap"     the same, and tokens are multiplied while others travel: for links that take about as long as the products
    "inside"      a layer between column and row whose weights all ranks have (a norm of each head)
    "whole"       left as it is

The tables of our own models and of GPT-2 stand here, those of other models of `transformers` come with them (`tp_plan`), a user's own are laid over
them. Of the patterns that match a name the last one counts; `*` stands for one part of a name.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping

from torch import nn

from shoal.errors import UserError, did_you_mean
from shoal.models.adapted import unadapted

Rules = Mapping[str, str]
KINDS = (
    "vocabulary",
    "head",
    "column",
    "row",
    "qkv",
    "packed",
    "attention",
    "experts",
    "tokens",
    "sequence",
    "overlap",
    "inside",
    "whole",
)

_BLOCK = {"attention": "attention", "attention.qkv": "qkv", "attention.out": "row"}
TABLES: dict[str, Rules] = {
    "GPT": {
        "": "sequence",
        "token_embedding": "vocabulary",
        "position_embedding": "tokens",
        "head": "head",
        **{f"blocks.*.{name}": kind for name, kind in _BLOCK.items()},
        "blocks.*.mlp.up": "column",
        "blocks.*.mlp.gate": "column",
        "blocks.*.mlp.down": "row",
        "blocks.*.mlp.experts": "experts",
        **{
            f"blocks.*.mlp.{beside}.{name}": kind
            for beside in ("shared", "residual")
            for name, kind in (("up", "column"), ("gate", "column"), ("down", "row"))
        },
    },
    "Bert": {
        "": "sequence",
        "token_embedding": "vocabulary",
        "position_embedding": "tokens",
        "head.decoder": "head",
        **{f"blocks.*.{name}": kind for name, kind in _BLOCK.items()},
        "blocks.*.up": "column",
        "blocks.*.down": "row",
    },
    "GPT2LMHeadModel": {
        "transformer.wte": "vocabulary",
        "lm_head": "head",
        "transformer.h.*.attn": "attention",
        "transformer.h.*.attn.c_attn": "qkv",
        "transformer.h.*.attn.c_proj": "row",
        "transformer.h.*.mlp.c_fc": "column",
        "transformer.h.*.mlp.c_proj": "row",
    },
    "CLIPModel": {
        f"{side}_model.encoder.layers.*.{name}": kind
        for side in ("text", "vision")
        for name, kind in (
            ("self_attn", "attention"),
            ("self_attn.q_proj", "column"),
            ("self_attn.k_proj", "column"),
            ("self_attn.v_proj", "column"),
            ("self_attn.out_proj", "row"),
            ("mlp.fc1", "column"),
            ("mlp.fc2", "row"),
        )
    },
}

_STYLES = {
    "colwise": "column",
    "rowwise": "row",
    "packed_colwise": "packed",
    "embedding_rowwise": "vocabulary",
    "colwise_gather_output": "head",
    "colwise_rep": "head",
    "moe_tp_experts": "experts",
    "replicated_with_grad_allreduce": "inside",
    "replicate": "whole",
}
"""The styles of `transformers` that mean the same."""


def rules_for(module: nn.Module, given: Rules | None = None) -> Rules:
    """The rules of `module`, with those `given` behind them, which are checked by `check_rules`. UserError if there are none."""
    if unadapted(module) is not module and not given:
        raise UserError(
            "plan.tp > 1 does not cut the adapters of peft by itself: take plan.tp = 1 (zero = 3, pp or offload for a model that is too large), or "
            "train without model.lora"
        )
    own, given = TABLES.get(type(module).__name__), given or {}
    found = {**(own if own is not None else _of_transformers(module)), **given}
    if not found:
        raise UserError(
            f"plan.tp > 1, and nothing is known of how to cut {type(module).__name__}: give Engine(tensor_rules={{pattern of module names: "
            f"one of {', '.join(KINDS)}}})"
        )
    return found


def check_rules(module: nn.Module, given: Rules) -> None:
    """UserError for a rule of a kind that is not known, or of a module that is not there."""
    for pattern, kind in given.items():
        if kind not in KINDS:
            raise UserError(
                f"tensor_rules[{pattern!r}] = {kind!r} is none of {', '.join(KINDS)}.{did_you_mean(kind, list(KINDS))}"
            )
        if kind in ("sequence", "overlap") and pattern:
            raise UserError(f'tensor_rules[{pattern!r}] = "{kind}": it is said of the whole model, tensor_rules[""]')
        if not any(matches(pattern, name) for name, _ in module.named_modules()):
            raise UserError(f"tensor_rules[{pattern!r}]: the model has no module of such a name")


def kind_of(name: str, rules: Rules) -> str:
    """What the rules make of the module `name`; "whole" where none matches."""
    kind = "whole"
    for pattern, each in rules.items():
        if matches(pattern, name):
            kind = each
    return kind


def matches(pattern: str, name: str) -> bool:
    """Whether `pattern`, with `*` for one part, is the whole of `name`."""
    return re.fullmatch(re.escape(pattern).replace(r"\*", r"[^.]+"), name) is not None


def _of_transformers(module: nn.Module) -> Rules:
    """From the plan that a model of `transformers` brings. Its embeddings are cut too where the head is, which it mostly leaves whole."""
    plan = getattr(module, "tp_plan", None)
    if not isinstance(plan, Mapping):
        return {}
    names = [name for name, _ in module.named_modules()]
    parameters = {name for name, _ in module.named_parameters(remove_duplicate=False)}
    rules: dict[str, str] = {}
    output: Callable[[], nn.Module | None] | None = getattr(module, "get_output_embeddings", None)
    head = output() if output is not None else None
    for pattern, style in plan.items():
        of_parameters = not any(matches(pattern, name) for name in names) and any(matches(pattern, name) for name in parameters)
        if of_parameters:
            continue  # of experts, which are cut as one module
        if style not in _STYLES:
            raise UserError(
                f"the plan of {type(module).__name__} cuts {pattern} as {style!r}, which Shoal does not do: give tensor_rules with another kind, or "
                "plan.tp = 1"
            )
        if _STYLES[style] == "head" and not any(matches(pattern, name) for name, each in module.named_modules() if each is head):
            raise UserError(
                f"the plan of {type(module).__name__} gathers what {pattern} gives, which is not its head: give tensor_rules, or plan.tp = 1"
            )
        rules[pattern] = _STYLES[style]
        owner, _, last = pattern.rpartition(".")
        if last in ("q_proj", "k_proj", "v_proj", "qkv_proj"):
            rules[owner] = "attention"
    find: Callable[[], nn.Module] | None = getattr(module, "get_input_embeddings", None)
    embedding = find() if find is not None and "head" in rules.values() else None  # not every model without a head has just one
    if isinstance(embedding, nn.Embedding):
        rules[next(name for name, each in module.named_modules() if each is embedding)] = "vocabulary"
    return rules
