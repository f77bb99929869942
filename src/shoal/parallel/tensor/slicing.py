"""Cutting a built module by its rules: which parts of which parameters this rank keeps, and the sizes that modules keep as attributes."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from copy import copy
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from shoal.errors import UserError
from shoal.module.build import Built
from shoal.parallel.expert import Dispatched, Spread
from shoal.parallel.layout import Layout
from shoal.parallel.tensor.cut import CutLayer, CutLayers
from shoal.parallel.tensor.layers import (
    Attention,
    Column,
    Experts,
    Gathered,
    Head,
    Inside,
    Row,
    Split,
    Tokens,
    Vocabulary,
    become,
)
from shoal.parallel.tensor.region import Region
from shoal.parallel.tensor.rules import Rules, kind_of, matches
from shoal.parallel.tensor.spans import Span, even, heads

_COUNTS = {"heads": "queries", "num_heads": "queries", "num_attention_heads": "queries"}
_COUNTS |= {"kv_heads": "keys", "num_kv_heads": "keys", "num_key_value_heads": "keys"}
"""Under which names modules keep numbers of heads."""


@dataclass(frozen=True)
class Sliced:
    """A module whose parameters have the shapes of this rank's parts; `built.value` gives these parts. `layouts`: of all parameters, by first name; `layers`: what became of each module."""

    built: Built
    layouts: dict[str, Layout]
    layers: CutLayers


def cut_among(
    built: Built,
    region: Region,
    rules: Rules,
    spread: Spread | None = None,
    experts: Sequence[str] = (),
    elsewhere: Collection[str] = (),
) -> Sliced:
    """Cuts the layers of `built.module` among the ranks of `region`, and spreads the modules `experts` as `spread` says; those `elsewhere` are not here. UserError, on every rank alike, for what
    cannot be cut so."""
    return _Slicing(built, region, rules, spread, experts, elsewhere).run()


class _Slicing:
    def __init__(
        self,
        built: Built,
        region: Region,
        rules: Rules,
        spread: Spread | None,
        experts: Sequence[str],
        elsewhere: Collection[str],
    ) -> None:
        self._elsewhere = elsewhere
        self._mixtures = experts if spread is not None else ()
        self._built, self._module, self._region, self._rules, self._spread = built, built.module, region, rules, spread
        self._layouts: dict[int, Layout] = {}  # by the parameter as it was built
        self._new: dict[int, nn.Parameter] = {}

    def run(self) -> Sliced:
        cuts: dict[str, Callable[[str, nn.Module], None]] = {
            "vocabulary": self._vocabulary,
            "head": self._head,
            "column": self._column,
            "row": self._row,
            "gathered": self._gathered,
            "split": self._split,
            "qkv": self._qkv,
            "packed": self._packed,
            "experts": self._experts,
            "tokens": self._tokens,
            "inside": self._inside,
        }
        gone = tuple(f"{name}." for name in self._elsewhere)
        modules = [(name, module) for name, module in self._module.named_modules() if not f"{name}.".startswith(gone)]
        of_all = kind_of("", self._rules)
        self._region.sequence, self._region.overlaps = of_all in ("sequence", "overlap"), of_all == "overlap"
        attentions = [(name, module) for name, module in modules if kind_of(name, self._rules) == "attention"]
        self._attentions = {name: _Heads(name, module, self._region.size) for name, module in attentions}
        for name, module in modules:
            kind = kind_of(name, self._rules)
            if name in self._mixtures and kind != "experts":
                self._experts(name, module, inside=False)
            elif kind in cuts:
                cuts[kind](name, module)
        if not self._region.sequence:
            self._check_inside(modules)
        for found in self._attentions.values():
            found.set_to(self._region)
        kinds = {name: kind_of(name, self._rules) for name, _ in modules}
        kinds |= {name: "experts" for name in self._mixtures if name in kinds}
        before = {name: _weight(module) for name, module in modules}
        built, layouts = self._built_anew(), self._replace()
        layers = [
            CutLayer(name, kinds[name], before[name], _weight(module))
            for name, module in modules
            if name not in self._attentions and (kinds[name] != "whole" or before[name])
        ]
        layers += [CutLayer(name, "attention", found.numbers, found.own) for name, found in self._attentions.items()]
        order = {name: place for place, name in enumerate(kinds)}
        return Sliced(built, layouts, CutLayers(tuple(sorted(layers, key=lambda each: order[each.name]))))

    def _check_inside(self, modules: Sequence[tuple[str, nn.Module]]) -> None:
        """UserError for parameters inside attention that no rule names: ranks would have other gradients of them, and nobody would sum those."""
        for name, module in modules:
            own = next(iter(module.named_parameters(recurse=False)), None)
            named = any(matches(pattern, name) for pattern in self._rules)
            if own is not None and not named and self._attention_of(name) is not None:
                raise UserError(
                    f'{name} lies inside attention that is cut, and no rule names it: give tensor_rules={{"{name}": "inside"}} if it works on what is cut, '
                    '"whole" if on what all ranks have'
                )

    # one kind of layer each

    def _vocabulary(self, name: str, module: nn.Module) -> None:
        if not isinstance(module, nn.Embedding):
            raise self._cannot(name, module, "nn.Embedding")
        if module.sparse or module.max_norm is not None or module.scale_grad_by_freq:
            raise UserError(f"{name}: an embedding with sparse, max_norm or scale_grad_by_freq is not cut among tp ranks yet")
        span = even(module.num_embeddings, self._region.size, self._region.rank, f"the vocabulary of {name}")
        self._cut(name, module, "weight", 0, [span])
        padding = module.padding_idx
        become(module, Vocabulary, _region=self._region, _start=span.start, _whole=module.num_embeddings)
        module.num_embeddings = span.length
        module.padding_idx = padding - span.start if padding is not None and span.start <= padding < span.stop else None

    def _head(self, name: str, module: nn.Module) -> None:
        rows = self._rows(name, module)
        lengths = [even(rows, self._region.size, rank, f"the vocabulary of {name}").length for rank in range(self._region.size)]
        self._cut_rows(name, module, [even(rows, self._region.size, self._region.rank)])
        become(module, Head, _region=self._region, _lengths=tuple(lengths))

    def _column(self, name: str, module: nn.Module) -> None:
        rows, attention = self._rows(name, module), self._attention_of(name)
        if attention is not None and attention.size and rows % attention.size == 0:
            self._columns(name, module, [self._by_heads(name, rows // attention.size, attention)])
        else:
            self._columns(name, module, [even(rows, self._region.size, self._region.rank, f"the width of {name}")])

    def _packed(self, name: str, module: nn.Module) -> None:
        rows = self._rows(name, module)
        if rows % 2:
            raise UserError(f"{name} has {rows} rows, which are not two layers of one width (packed)")
        half = even(rows // 2, self._region.size, self._region.rank, f"the width of {name}")
        self._columns(name, module, [half, half.after(rows // 2)])

    def _qkv(self, name: str, module: nn.Module) -> None:
        rows, attention = self._rows(name, module), self._attention_of(name)
        if attention is None:
            raise UserError(
                f'{name} is "qkv" by the rules, and no module around it is "attention", which says how many heads it has'
            )
        keys = attention.keys or attention.queries
        size = attention.size or rows // (attention.queries + 2 * keys)
        attention.size = size
        if rows != (attention.queries + 2 * keys) * size:
            raise UserError(
                f"{name} has {rows} rows, which are not those of {attention.queries} queries and {keys} keys and values of {size} rows each"
            )
        spans, offset = [], 0
        for number in (attention.queries, keys, keys):
            spans.append(self._by_heads(name, number, attention).after(offset))
            offset += number * size
        self._columns(name, module, spans)

    def _row(self, name: str, module: nn.Module) -> None:
        inputs_first = self._inputs_first(name, module)
        dim = 0 if inputs_first else 1
        width, attention = _shape(module, "weight")[dim], self._attention_of(name)
        if attention is not None and attention.size and width % attention.size == 0:
            span = self._by_heads(name, width // attention.size, attention)
        else:
            span = even(width, self._region.size, self._region.rank, f"the width of {name}")
        self._cut(name, module, "weight", dim, [span])
        become(module, Row, _region=self._region, _inputs_first=inputs_first)
        _set(module, span.length, "in_features", "nx")

    def _gathered(self, name: str, module: nn.Module) -> None:
        self._check_all_tokens(name)
        rows, region = self._rows(name, module), self._region
        spans = [even(rows, region.size, rank, f"the width of {name}") for rank in range(region.size)]
        self._cut_rows(name, module, [spans[region.rank]])
        become(module, Gathered, _region=region, _lengths=tuple(span.length for span in spans))

    def _split(self, name: str, module: nn.Module) -> None:
        self._check_all_tokens(name)
        inputs_first = self._inputs_first(name, module)
        dim = 0 if inputs_first else 1
        span = even(_shape(module, "weight")[dim], self._region.size, self._region.rank, f"the width of {name}")
        self._cut(name, module, "weight", dim, [span])
        become(module, Split, _region=self._region, _inputs_first=inputs_first, _start=span.start)

    def _check_all_tokens(self, name: str) -> None:
        if self._region.sequence:
            raise UserError(
                f'{name} is {kind_of(name, self._rules)!r} by the rules, behind which all ranks compute the same of all tokens: give tensor_rules={{"": "whole"}} too'
            )

    def _experts(self, name: str, module: nn.Module, inside: bool = True) -> None:
        """Some of the experts, for ep; or a part of each, for tp, where they are cut `inside`; or both."""
        if not inside and self._region.sequence:
            raise UserError(
                f"{name}: experts that are whole along tp see the tokens of one rank, where layers are sequence parallel"
            )
        shapes = {key: tuple(parameter.shape) for key, parameter in module.named_parameters()}
        layouts = {key: Layout.cut(shape, 0, [(0, shape[0])]) for key, shape in shapes.items()}
        if inside:
            layouts = self._cut_inside(name, module, shapes)
        if self._spread is not None:
            number = next(iter(shapes.values()))[0]
            start, stop = self._spread.share(name, number)
            layouts = {key: layout.within(0, start, stop) for key, layout in layouts.items()}
            become(module, Dispatched, _dispatch=self._spread.dispatch(number))
            _set(module, stop - start, "num_experts")
        for key, layout in layouts.items():
            self._layouts[id(module.get_parameter(key))] = layout
        if inside:
            become(module, Experts, _region=self._region)

    def _cut_inside(self, name: str, module: nn.Module, shapes: dict[str, tuple[int, ...]]) -> dict[str, Layout]:
        """Each expert's matrices among the ranks along tp: the first by rows, of gate and up together by the rows of each, the second by columns."""
        first = "gate_up_proj" if "gate_up_proj" in shapes else "up_proj"
        packed = 2 if first == "gate_up_proj" else 1
        wide = shapes.get(first, ())
        if shapes.keys() != {first, "down_proj"} or len(wide) != 3 or wide[1] % packed:
            raise UserError(
                f"{name}: experts are cut where they are gate_up_proj [experts, 2 width, in] or up_proj [experts, width, in], and down_proj [experts, out, "
                f"width], not {list(shapes)}"
            )
        width = wide[1] // packed
        part = even(width, self._region.size, self._region.rank, f"the width of {name}")
        _set(module, part.length, "intermediate_dim", "intermediate_size", "expert_dim")
        config = getattr(module, "config", None)
        if (
            part.length % 8 and config is not None and hasattr(config, "_experts_implementation")
        ):  # grouped products take rows of whole 16 bytes
            config._experts_implementation = "eager"
        stretches = [(part.start + at * width, part.stop + at * width) for at in range(packed)]
        return {
            first: Layout.cut(wide, 1, stretches),
            "down_proj": Layout.cut(shapes["down_proj"], 2, [(part.start, part.stop)]),
        }

    def _tokens(self, name: str, module: nn.Module) -> None:
        become(module, Tokens, _region=self._region)

    def _inside(self, name: str, module: nn.Module) -> None:
        if list(module.children()):
            raise UserError(f'{name} is "inside" by the rules, and has modules of its own: name those')
        become(module, Inside, _region=self._region)

    # what they share

    def _columns(self, name: str, module: nn.Module, spans: Sequence[Span]) -> None:
        self._cut_rows(name, module, spans)
        become(module, Column, _region=self._region, _spans=tuple(spans))

    def _cut_rows(self, name: str, module: nn.Module, spans: Sequence[Span]) -> None:
        self._cut(name, module, "weight", 1 if self._inputs_first(name, module) else 0, spans)
        if module.bias is not None:
            self._cut(name, module, "bias", 0, spans)
        _set(module, sum(span.length for span in spans), "out_features", "nf")

    def _by_heads(self, name: str, number: int, attention: _Heads) -> Span:
        return heads(number, attention.size, self._region.size, self._region.rank, name)

    def _attention_of(self, name: str) -> _Heads | None:
        """The innermost module around `name` that has heads."""
        while name:
            name = name.rpartition(".")[0]
            if name in self._attentions:
                return self._attentions[name]
        return None

    def _rows(self, name: str, module: nn.Module) -> int:
        return _shape(module, "weight")[1 if self._inputs_first(name, module) else 0]

    def _inputs_first(self, name: str, module: nn.Module) -> bool:
        """Whether the weight of a linear layer is [in, out]. UserError for any other layer."""
        if type(module) is nn.Linear:
            return False
        if type(module).__name__ == "Conv1D" and type(module).__module__.startswith("transformers."):
            return True
        raise self._cannot(name, module, "nn.Linear")

    def _cannot(self, name: str, module: nn.Module, wanted: str) -> UserError:
        inside = [f"{name}.{key}" for key, each in module.named_modules() if isinstance(each, nn.Linear | nn.Embedding)]
        more = f"; name what is in it ({', '.join(inside)}), and the module itself \"whole\"" if inside else ""
        return UserError(
            f"{name} is {kind_of(name, self._rules)!r} by the rules, which is for {wanted}: it is a {type(module).__name__}{more}"
        )

    def _cut(self, name: str, module: nn.Module, attribute: str, dim: int, spans: Sequence[Span]) -> None:
        """Notes that of a parameter this rank has `spans` of `dim`, one after the other. A tied one is cut the same everywhere."""
        parameter = getattr(module, attribute)
        layout = Layout.cut(tuple(parameter.shape), dim, [(span.start, span.stop) for span in spans])
        if self._layouts.setdefault(id(parameter), layout) != layout:
            raise UserError(f"{name}.{attribute} is tied to a parameter that the rules cut otherwise: cut both alike")

    def _replace(self) -> dict[str, Layout]:
        """Puts parameters of this rank's shapes where those that were built are."""
        layouts: dict[str, Layout] = {}
        axes = ("dp", "tp") if self._region.sequence else ("dp",)  # each rank has the gradient of its tokens alone
        for name, parameter in list(self._module.named_parameters(remove_duplicate=False)):
            layout = self._layouts.get(id(parameter))
            if layout is None:
                layouts.setdefault(name, Layout.replicated(tuple(parameter.shape), axes))
                continue
            if id(parameter) not in self._new:
                layouts[name] = layout
                own = torch.empty(layout.own_shape, dtype=parameter.dtype, device="meta")
                self._new[id(parameter)] = nn.Parameter(own, requires_grad=parameter.requires_grad)
                self._new[id(parameter)].__dict__.update(parameter.__dict__)
            owner, _, attribute = name.rpartition(".")
            setattr(self._module.get_submodule(owner), attribute, self._new[id(parameter)])
        first = {name for name, _ in self._module.named_parameters()}
        return {name: layout for name, layout in layouts.items() if name in first}

    def _built_anew(self) -> Built:
        """`built`, whose values are this rank's parts."""
        before, layouts = self._built.value, self._layouts
        originals = {id(parameter): parameter for parameter in self._module.parameters() if id(parameter) in layouts}
        new = self._new

        def value(name: str, tensor: Tensor) -> Tensor:
            for was, now in new.items():
                if now is tensor:
                    return layouts[was].own_part(before(name, originals[was]))
            return before(name, tensor)

        return Built(self._module, value, self._built.how)


class _Heads:
    """The numbers of heads that the module `name` keeps: `queries`, `keys` (of values too; 0: as many) and the rows of one, `size` (0: not said)."""

    def __init__(self, name: str, module: nn.Module, ranks: int) -> None:
        self._module, self._ranks = module, ranks
        numbers: dict[str, list[str]] = {"queries": [], "keys": []}
        for attribute, what in _COUNTS.items():
            if isinstance(getattr(module, attribute, None), int):
                numbers[what].append(attribute)
        self._names = numbers
        self.size = int(
            next((getattr(module, key) for key in ("head_dim", "head_size") if isinstance(getattr(module, key, None), int)), 0)
        )
        self.queries = getattr(module, numbers["queries"][0]) if numbers["queries"] else 0
        self.keys = getattr(module, numbers["keys"][0]) if numbers["keys"] else 0
        self._groups = getattr(module, "num_key_value_groups", None)
        config = getattr(module, "config", None)
        if not self.queries:
            self.queries = int(getattr(config, "num_attention_heads", 0))
        if not self.keys and self._groups:
            self.keys = self.queries // self._groups
        if not self.queries:
            raise UserError(f'{name} is "attention" by the rules, and keeps no number of heads ({", ".join(_COUNTS)})')
        if self.queries % ranks:
            fits = [degree for degree in range(1, self.queries + 1) if self.queries % degree == 0]
            raise UserError(
                f"{name} has {self.queries} heads, which do not come out even among tp = {ranks} ranks: take one of {fits}"
            )

    @property
    def numbers(self) -> tuple[int, ...]:
        """Of the whole: queries, and keys where they are other than those."""
        return (self.queries, self.keys) if self.keys not in (0, self.queries) else (self.queries,)

    @property
    def own(self) -> tuple[int, ...]:
        """Of a rank."""
        return (self.queries // self._ranks, *(max(1, keys // self._ranks) for keys in self.numbers[1:]))

    def set_to(self, region: Region) -> None:
        """Sets the numbers to those of a rank; where keys are fewer than ranks a rank has one."""
        ranks = region.size
        become(self._module, Attention, _region=region, _heads=self.queries // ranks)
        for attribute in self._names["queries"]:
            setattr(self._module, attribute, self.queries // ranks)
        keys = max(1, self.keys // ranks) if self.keys else 0
        for attribute in self._names["keys"]:
            setattr(self._module, attribute, keys)
        config = getattr(self._module, "config", None)
        if not self._names["queries"] and hasattr(config, "num_attention_heads"):  # its forward may look there
            own: Any = copy(config)
            self._module.config = own
            own.num_attention_heads = self.queries // ranks
            if keys and not self._names["keys"] and hasattr(own, "num_key_value_heads"):
                own.num_key_value_heads = keys
        if self._groups is not None and keys:
            self._module.num_key_value_groups = self.queries // ranks // keys  # type: ignore[assignment]
        if isinstance(getattr(self._module, "split_size", None), int):
            self._module.split_size = self.queries // ranks * self.size  # type: ignore[assignment]
        with suppress(AttributeError):
            self._module.inner_dim = self._module.inner_dim // ranks  # type: ignore[assignment,operator]


def _weight(module: nn.Module) -> tuple[int, ...]:
    """The shape of the first of a module's own parameters; () where it has none."""
    return next((tuple(each.shape) for each in module.parameters(recurse=False)), ())


def _shape(module: nn.Module, attribute: str) -> torch.Size:
    return module.get_parameter(attribute).shape


def _set(module: nn.Module, length: int, *names: str) -> None:
    """Sets those of the attributes `names` that `module` has."""
    for name in names:
        if hasattr(module, name):
            setattr(module, name, length)
