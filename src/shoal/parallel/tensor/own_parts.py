"""The parts of parameters that a rank keeps: noted while layers are cut, then substituted for the whole parameters."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from shoal.errors import UserError
from shoal.module.build import Built
from shoal.parallel.layout import Layout
from shoal.parallel.tensor.spans import Span


class OwnParts:
    """Notes which part of each parameter of a built module this rank has; `replace` then substitutes the parts.

    built: the module as it was built, whole
    """

    def __init__(self, built: Built) -> None:
        self._built, self._module = built, built.module
        self._layouts: dict[int, Layout] = {}  # by id of the built parameter
        self._new: dict[int, nn.Parameter] = {}

    def note(self, parameter: nn.Parameter, layout: Layout) -> None:
        """Notes the `layout` of a parameter that only one module uses."""
        self._layouts[id(parameter)] = layout

    def cut(self, name: str, module: nn.Module, attribute: str, dim: int, spans: Sequence[Span]) -> None:
        """Notes that this rank has the `spans` of `dim` of a parameter, adjacent in its own tensor.

        Raises UserError for a tied parameter that is cut in another way elsewhere.
        """
        parameter = getattr(module, attribute)
        layout = Layout.cut(tuple(parameter.shape), dim, [(span.start, span.stop) for span in spans])
        if self._layouts.setdefault(id(parameter), layout) != layout:
            raise UserError(f"{name}.{attribute} is tied to a parameter that the rules cut otherwise: cut both alike")

    def replace(self, axes: tuple[str, ...]) -> dict[str, Layout]:
        """Replaces the built parameters by ones of this rank's shapes; returns all layouts, by first name.

        axes: along which the gradients of parameters that are not cut are summed, beside their replicas
        """
        layouts: dict[str, Layout] = {}
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

    def built(self) -> Built:
        """Returns the module with values that are this rank's parts."""
        before, layouts = self._built.value, self._layouts
        originals = {id(parameter): parameter for parameter in self._module.parameters() if id(parameter) in layouts}
        new = self._new

        def value(name: str, tensor: Tensor) -> Tensor:
            for was, now in new.items():
                if now is tensor:
                    return layouts[was].own_part(before(name, originals[was]))
            return before(name, tensor)

        return Built(self._module, value, self._built.how)
