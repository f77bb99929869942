"""Cuts a built module by its rules: chooses the parts of parameters that this rank keeps, and sets the sizes that
modules keep as attributes."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

from torch import nn

from shoal.errors import UserError
from shoal.module.build import Built
from shoal.parallel.expert import Dispatched, Spread
from shoal.parallel.layout import Layout
from shoal.parallel.tensor.cut import CutLayer, CutLayers
from shoal.parallel.tensor.graph.found import Found
from shoal.parallel.tensor.head_counts import HeadCounts
from shoal.parallel.tensor.inside_experts import cut_inside
from shoal.parallel.tensor.layers import Column, Experts, Gathered, Head, Inside, Row, Split, Tokens, Vocabulary, become
from shoal.parallel.tensor.own_parts import OwnParts
from shoal.parallel.tensor.region import Region
from shoal.parallel.tensor.rules import Rules, kind_of, matches
from shoal.parallel.tensor.sizes import first_shape, set_sizes
from shoal.parallel.tensor.spans import Span, even, heads


@dataclass(frozen=True)
class Sliced:
    """A module with parameters of this rank's shapes, whose values `built.value` gives; `layouts` are by first name."""

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
    found: Found | None = None,
) -> Sliced:
    """Cuts the layers of the whole module in `built` among the ranks of `region`, those along tp.

    rules: the kind of each layer, see rules
    spread: how the modules named in `experts` are spread over the ranks along ep; None: they are not
    elsewhere: names of the modules that are not on this rank, which are left alone
    found: what is cut beside the rules, as found from the model's graph

    Raises UserError, on every rank alike, for a model that cannot be cut so.
    """
    return _Slicing(built, region, rules, spread, experts, elsewhere).run(found or Found())


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
        self._module, self._region, self._rules, self._spread = built.module, region, rules, spread
        self._own = OwnParts(built)

    def run(self, graph: Found) -> Sliced:
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
        self._attentions = {
            name: HeadCounts(name, module, self._region.size)
            for name, module in modules
            if kind_of(name, self._rules) == "attention"
        }
        for name, module in modules:
            kind = kind_of(name, self._rules)
            if name in self._mixtures and kind != "experts":
                self._experts(name, module, inside=False)
            elif kind in cuts:
                cuts[kind](name, module)
            graph.put_on(name, module, self._own, self._region)
        if not self._region.sequence:
            self._check_inside(modules)
        for found in self._attentions.values():
            found.set_to(self._region)
        kinds = {name: kind_of(name, self._rules) for name, _ in modules}
        kinds |= {name: "experts" for name in self._mixtures if name in kinds}
        kinds |= {name: kind for name, module in modules if (kind := graph.kind(name, module))}
        before = {name: first_shape(module) for name, module in modules}
        # in sequence parallel a replicated parameter sees only this rank's tokens: gradients are summed over tp too
        built, layouts = self._own.built(), self._own.replace(("tp",) if self._region.sequence else ())
        attentions = {name: (found.numbers, found.own) for name, found in self._attentions.items()}
        layers = [
            CutLayer(
                name, kinds[name], *attentions.get(name, (before[name], first_shape(module))), graph.whole.get(name, "")
            )
            for name, module in modules
            if name in attentions or kinds[name] != "whole" or before[name]
        ]
        return Sliced(built, layouts, CutLayers(tuple(layers)))

    def _check_inside(self, modules: Sequence[tuple[str, nn.Module]]) -> None:
        """Raises UserError for parameters inside attention that no rule names: their gradients would differ by rank,
        unsummed."""
        for name, module in modules:
            own = next(iter(module.named_parameters(recurse=False)), None)
            named = any(matches(pattern, name) for pattern in self._rules)
            if own is not None and not named and self._attention_of(name) is not None:
                raise UserError(
                    f'{name} lies inside attention that is cut, and no rule names it: give tensor_rules={{"{name}": '
                    '"inside"} if it works on what is cut, "whole" if on what all ranks have'
                )

    # one method for each kind of layer

    def _vocabulary(self, name: str, module: nn.Module) -> None:
        if not isinstance(module, nn.Embedding):
            raise self._cannot(name, module, "nn.Embedding")
        if module.sparse or module.max_norm is not None or module.scale_grad_by_freq:
            raise UserError(
                f"{name}: an embedding with sparse, max_norm or scale_grad_by_freq is not cut among tp ranks yet"
            )
        span = even(module.num_embeddings, self._region.size, self._region.rank, f"the vocabulary of {name}")
        self._own.cut(name, module, "weight", 0, [span])
        padding = module.padding_idx
        whole = module.num_embeddings
        become(module, Vocabulary, _region=self._region, _start=span.start, _rows=span.length, _whole=whole)
        module.padding_idx = padding - span.start if padding is not None and span.start <= padding < span.stop else None

    def _head(self, name: str, module: nn.Module) -> None:
        rows = self._rows(name, module)
        lengths = [
            even(rows, self._region.size, rank, f"the vocabulary of {name}").length for rank in range(self._region.size)
        ]
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
                f'{name} is "qkv" by the rules, and no module around it is "attention", which says how many heads it '
                "has"
            )
        keys = attention.keys or attention.queries
        size = attention.size or rows // (attention.queries + 2 * keys)
        attention.size = size
        if rows != (attention.queries + 2 * keys) * size:
            raise UserError(
                f"{name} has {rows} rows, which are not those of {attention.queries} queries and {keys} keys and "
                f"values of {size} rows each"
            )
        spans, offset = [], 0
        for number in (attention.queries, keys, keys):
            spans.append(self._by_heads(name, number, attention).after(offset))
            offset += number * size
        self._columns(name, module, spans)

    def _row(self, name: str, module: nn.Module) -> None:
        inputs_first = self._inputs_first(name, module)
        dim = 0 if inputs_first else 1
        width, attention = module.get_parameter("weight").shape[dim], self._attention_of(name)
        if attention is not None and attention.size and width % attention.size == 0:
            span = self._by_heads(name, width // attention.size, attention)
        else:
            span = even(width, self._region.size, self._region.rank, f"the width of {name}")
        self._own.cut(name, module, "weight", dim, [span])
        become(module, Row, _region=self._region, _inputs_first=inputs_first)
        set_sizes(module, span.length, "in_features", "nx")

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
        span = even(
            module.get_parameter("weight").shape[dim], self._region.size, self._region.rank, f"the width of {name}"
        )
        self._own.cut(name, module, "weight", dim, [span])
        become(module, Split, _region=self._region, _inputs_first=inputs_first, _start=span.start)

    def _check_all_tokens(self, name: str) -> None:
        if self._region.sequence:
            raise UserError(
                f"{name} is {kind_of(name, self._rules)!r} by the rules, behind which all ranks compute the same of "
                f'all tokens: give tensor_rules={{"": "whole"}} too'
            )

    def _experts(self, name: str, module: nn.Module, inside: bool = True) -> None:
        """Gives this rank some of the experts (ep), a part of each (tp, if they are cut `inside`), or both."""
        if not inside and self._spread is not None and self._region.size > 1:
            raise UserError(
                f"{name}: experts that ranks along ep share are cut along tp too, and these stay whole: the norm of "
                "gradients would count them more than once. Take plan.ep = 1 or plan.tp = 1, or give Engine "
                'tensor_rules that call them "experts"'
            )
        shapes = {key: tuple(parameter.shape) for key, parameter in module.named_parameters()}
        layouts = {key: Layout.cut(shape, 0, [(0, shape[0])]) for key, shape in shapes.items()}
        if inside:
            layouts = cut_inside(name, module, shapes, self._region)
        if self._spread is not None:
            number = next(iter(shapes.values()))[0]
            start, stop = self._spread.share(name, number)
            layouts = {key: layout.within(0, start, stop) for key, layout in layouts.items()}
            become(module, Dispatched, _dispatch=self._spread.dispatch(number))
            set_sizes(module, stop - start, "num_experts")
        for key, layout in layouts.items():
            self._own.note(module.get_parameter(key), layout)
        if inside:
            become(module, Experts, _region=self._region)

    def _tokens(self, name: str, module: nn.Module) -> None:
        become(module, Tokens, _region=self._region)

    def _inside(self, name: str, module: nn.Module) -> None:
        if list(module.children()):
            raise UserError(f'{name} is "inside" by the rules, and has modules of its own: name those')
        become(module, Inside, _region=self._region)

    # helpers of these methods

    def _columns(self, name: str, module: nn.Module, spans: Sequence[Span]) -> None:
        self._cut_rows(name, module, spans)
        become(module, Column, _region=self._region, _spans=tuple(spans))

    def _cut_rows(self, name: str, module: nn.Module, spans: Sequence[Span]) -> None:
        self._own.cut(name, module, "weight", 1 if self._inputs_first(name, module) else 0, spans)
        if module.bias is not None:
            self._own.cut(name, module, "bias", 0, spans)
        set_sizes(module, sum(span.length for span in spans), "out_features", "nf")

    def _by_heads(self, name: str, number: int, attention: HeadCounts) -> Span:
        return heads(number, attention.size, self._region.size, self._region.rank, name)

    def _attention_of(self, name: str) -> HeadCounts | None:
        """Returns the head counts of the innermost attention module around `name`, if any."""
        while name:
            name = name.rpartition(".")[0]
            if name in self._attentions:
                return self._attentions[name]
        return None

    def _rows(self, name: str, module: nn.Module) -> int:
        return module.get_parameter("weight").shape[1 if self._inputs_first(name, module) else 0]

    def _inputs_first(self, name: str, module: nn.Module) -> bool:
        """True if the weight of a linear layer is [in, out]. Raises UserError for any other layer."""
        if type(module) is nn.Linear:
            return False
        if type(module).__name__ == "Conv1D" and type(module).__module__.startswith("transformers."):
            return True
        raise self._cannot(name, module, "nn.Linear")

    def _cannot(self, name: str, module: nn.Module, wanted: str) -> UserError:
        inside = [f"{name}.{key}" for key, each in module.named_modules() if isinstance(each, nn.Linear | nn.Embedding)]
        more = f'; name what is in it ({", ".join(inside)}), and the module itself "whole"' if inside else ""
        return UserError(
            f"{name} is {kind_of(name, self._rules)!r} by the rules, which is for {wanted}: it is a "
            f"{type(module).__name__}{more}"
        )
