"""Tables that say how each layer is cut: from patterns of module names to the kind that a layer becomes.

    "vocabulary"  an embedding, its rows cut
    "head"        the last linear layer, its rows cut; its logits stay cut
    "column"      a linear layer, its rows cut
    "row"         the linear layer behind it, its columns cut
    "gathered"    a linear layer, its rows cut; its output is gathered, and all ranks continue with the whole
    "split"       a linear layer with the same whole input on all ranks, its columns cut: each takes its part of it
    "qkv"         queries, keys and values in one linear layer: the rows of each cut by heads
    "packed"      two linear layers in one (gate and up): the rows of each cut
    "attention"   a module that keeps numbers of heads: they are set to those of a rank. Linear layers in it are cut
                  by heads
    "experts"     a mixture's matrices [experts, out, in] in one module: cut inside each expert for tp, experts dealt
                  out for ep
    "tokens"      an embedding of positions: each rank takes its tokens of the output ("sequence")
    "sequence"    for the whole model (the name ""): between its layers each rank has its tokens of [B, T, D], from
                  the vocabulary to the head
    "overlap"     as "sequence", and tokens are multiplied while others travel: for links on which a transfer takes
                  about as long as a product
    "inside"      a layer between column and row whose weights all ranks have (a norm of each head)
    "whole"       left as it is

The tables of our own models, of GPT-2, Phi-3 and CLIP are in this file; those of other models of `transformers` come
with them (`tp_plan`); a user's rules are laid over them. The last pattern that matches a name counts. A name is parts
with dots between them (`blocks.0.attention`). In a pattern `*` stands for one part, or some of its characters
(`*_proj`), and `**` for any number of whole parts, also none: `**.attention` is every module of that name, at any
depth.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from functools import lru_cache

from torch import nn

from shoal.errors import UserError, check_choice
from shoal.models.adapted import unadapted
from shoal.module.closest import closest
from shoal.module.stand_in import whole_model
from shoal.parallel.tensor.between import mixes_features

Rules = Mapping[str, str]
KINDS = (
    "vocabulary",
    "head",
    "column",
    "row",
    "gathered",
    "split",
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
    "Phi3ForCausalLM": {
        "model.embed_tokens": "vocabulary",
        "lm_head": "head",
        "model.layers.*.self_attn": "attention",
        "model.layers.*.self_attn.qkv_proj": "qkv",
        "model.layers.*.self_attn.o_proj": "row",
        "model.layers.*.mlp.gate_up_proj": "packed",
        "model.layers.*.mlp.down_proj": "row",
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
    "colwise_gather_output": "gathered",
    "rowwise_split_input": "split",
    "colwise_rep": "gathered",
    "moe_tp_experts": "experts",
    "replicated_with_grad_allreduce": "inside",
    "replicate": "whole",
}
"""The kind for each style of `transformers`."""


class UnknownStyle(UserError):
    """A model of `transformers` brings a plan that cuts layers in a way that Shoal does not know."""


def rules_for(module: nn.Module, given: Rules | None = None) -> Rules:
    """Returns the rules of `module`, with those `given` by the user behind them (see `check_rules` for their check);
    none where nothing is known of the model."""
    given = given or {}
    own = table_of(module)
    known = own if own is not None else {} if unadapted(module) is not module else _of_transformers(module, given)
    # the last matching pattern counts, so those given come last
    found = {**{pattern: kind for pattern, kind in known.items() if pattern not in given}, **given}
    return found if any(matches(pattern, name) for pattern in found for name, _ in whole_model(module)) else {}


def table_of(module: nn.Module) -> Rules | None:
    """Returns the table of `module`; None for a model of another origin, whose class may have the name of one here."""
    origin = type(module).__module__.partition(".")[0]
    return TABLES.get(type(module).__name__) if origin in ("shoal", "transformers") else None


def check_sequence(module: nn.Module, rules: Rules) -> None:
    """Raises UserError for rules by which ranks have tokens of their own, and nothing deals these out."""
    of_all, names = kind_of("", rules), [name for name, _ in whole_model(module)]
    if of_all in ("sequence", "overlap") and all(kind_of(name, rules) != "vocabulary" for name in names):
        raise UserError(
            f'tensor_rules[""] = "{of_all}" gives each rank its own tokens from an embedding on that is "vocabulary", '
            f'and no rule names one of {type(module).__name__}: name it, or give tensor_rules={{"": "whole"}}'
        )


def check_rules(module: nn.Module, given: Rules) -> None:
    """Raises UserError for a rule with an unknown kind, or with a pattern that matches no module."""
    names = [name for name, _ in whole_model(module)]
    for pattern, kind in given.items():
        check_choice(f"tensor_rules[{pattern!r}] = {kind!r} is none of", kind, KINDS)
        if kind in ("sequence", "overlap") and pattern:
            raise UserError(f'tensor_rules[{pattern!r}] = "{kind}": it is said of the whole model, tensor_rules[""]')
        check_pattern("tensor_rules", pattern, names)


def check_pattern(where: str, pattern: str, names: list[str]) -> None:
    """Raises UserError for a pattern of the table `where` that matches none of `names`, those of all modules."""
    if any("**" in part and part != "**" for part in pattern.split(".")):
        raise UserError(f"{where}[{pattern!r}]: ** stands for whole parts of a name, with dots around it: **.name")
    if not any(matches(pattern, name) for name in names):
        raise UserError(
            f"{where}[{pattern!r}]: the model has no module of such a name (* is one part of a name, ** any "
            f"number of them).{closest(pattern, names, matches)}"
        )


def kind_of(name: str, rules: Rules) -> str:
    """Returns the kind that the rules give the module `name`; "whole" if none matches."""
    kind = "whole"
    for pattern, each in rules.items():
        if matches(pattern, name):
            kind = each
    return kind


def matches(pattern: str, name: str) -> bool:
    """True if `pattern` (`*`: one part or some of its characters, `**`: any number of parts) matches all of `name`."""
    return pattern == name or bool(name and _compiled(pattern).fullmatch(f"{name}."))


@lru_cache(maxsize=1024)
def _compiled(pattern: str) -> re.Pattern[str]:
    """Returns the regular expression of a pattern, for names with a dot behind each part."""
    parts = [
        r"([^.]+\.)*" if part == "**" else re.escape(part).replace(r"\*", r"[^.]+") + r"\."
        for part in pattern.split(".")
    ]
    return re.compile("".join(parts))


def _of_transformers(module: nn.Module, given: Rules) -> Rules:
    """Returns the rules made of the plan that a model of `transformers` brings, except for modules that `given` names.

    The embedding is cut too if the head is; the plans mostly leave it whole.
    """
    plan = getattr(module, "tp_plan", None)
    if not isinstance(plan, Mapping):
        return {}
    names = [name for name, _ in whole_model(module)]
    rules: dict[str, str] = {}
    output: Callable[[], nn.Module | None] | None = getattr(module, "get_output_embeddings", None)
    head = output() if output is not None and plan else None
    at = {id(each): name for name, each in module.named_modules()}
    for pattern, style in plan.items():
        named = [name for name in names if matches(pattern, name)]
        if all(any(matches(own, name) for own in given) for name in named):
            # the user's rules name it, or it is a parameter of experts (cut as one module), or not in this model
            continue
        if style not in _STYLES:
            raise UnknownStyle(
                f"the plan of {type(module).__name__} cuts {pattern} as {style!r}, which Shoal does not do: give "
                f"tensor_rules={{{pattern!r}: another kind}} ({', '.join(KINDS)}), or plan.tp = 1"
            )
        is_head = head is not None and matches(pattern, at.get(id(head), ""))
        kind = rules[pattern] = "head" if is_head and _STYLES[style] == "gathered" else _STYLES[style]
        owner, _, last = pattern.rpartition(".")
        if last in ("q_proj", "k_proj", "v_proj", "qkv_proj") and kind == "column":
            rules[owner] = "attention"
    find: Callable[[], nn.Module] | None = getattr(module, "get_input_embeddings", None)
    embedding = find() if find is not None and "head" in rules.values() else None
    if isinstance(embedding, nn.Embedding):
        rules[next(name for name, each in module.named_modules() if each is embedding)] = "vocabulary"
    inside = dict.fromkeys(_trained_activations(module, rules), "inside")
    return {**rules, **inside, **dict.fromkeys(_around_mixtures(module, rules), "whole")}


def _trained_activations(module: nn.Module, rules: Rules) -> list[str]:
    """Returns the activations of `transformers` that are trained, each by numbers for all features (xIELU), beside a
    column and its row: ranks use them on different features. The plans leave them out."""
    found = []
    for name, each in whole_model(module):
        owner, sizes = name.rpartition(".")[0], [own.numel() for own in each.parameters()]
        if type(each).__module__ == "transformers.activations" and sizes and max(sizes) == 1:
            beside = {kind_of(f"{owner}.{key}", rules) for key, _ in module.get_submodule(owner).named_children()}
            found += [name] if {"column", "row"} <= beside else []
    return found


def _around_mixtures(module: nn.Module, rules: Rules) -> list[str]:
    """Returns the layers that the plan cuts by columns and by rows, and that stay whole as what lies between takes all
    features together (the cutoff of Gemma 3n's sparse activations)."""
    found: list[str] = []
    judged: dict[object, bool] = {}
    for name, each in whole_model(module):
        own = {key: kind_of(f"{name}.{key}".lstrip("."), rules) for key, _ in each.named_children()}
        if "row" not in own.values() or not {"column", "packed"} & set(own.values()) or kind_of(name, rules) != "whole":
            continue
        numbers = [(key, value) for key, value in each.__dict__.items() if isinstance(value, int | float | str)]
        signature = (type(each), repr(numbers), *own.items())
        if signature not in judged:
            judged[signature] = mixes_features(each, own)
        found += [f"{name}.{key}" for key, kind in own.items() if kind != "whole" and judged[signature]]
    return found
