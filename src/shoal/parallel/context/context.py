"""Cuts the tokens of each row of a microbatch among the ranks along cp; attention sees all of them.

`plan.context = "ulysses"` (DeepSpeed-Ulysses, arXiv 2309.14509): the heads are dealt out while attention runs, by the
usual kernel over whole rows. A rank sends (1 - 1/cp) of its queries, keys, values and results; cp divides the heads.

    tokens of rank r [B, H, T / cp, K]  --all-to-all-->  heads of rank r [B, H / cp, T, K]  --attention-->  back again

`plan.context = "ring"`: keys and values are sent round the ranks (see ring), for any number of heads; a rank sends its
keys and values cp - 1 times.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from shoal.comm import Group, Lane
from shoal.comm.functional import gather_from, swap
from shoal.errors import UserError
from shoal.models.adapted import unadapted
from shoal.models.attention import document_mask
from shoal.parallel.context.apart import Apart
from shoal.parallel.context.asked import (
    check_attended,
    check_first,
    check_labels,
    check_model,
    check_padding,
    check_tokens,
    in_order,
    positions_of,
)
from shoal.parallel.context.documents import check_learned, documents_of, is_causal_mask, stretches, window_of
from shoal.parallel.context.neighbours import Neighbours
from shoal.parallel.context.ring import Ring, of_one_width, ring_attention

PURPOSE = "attention"


class Context:
    """The tokens of a microbatch that this rank has, and attention over those of all ranks of `group`.

    group: the ranks along cp
    attention: of one device, with the signature of `F.scaled_dot_product_attention`
    lane: on it keys and values are sent round the ring; None: heads are dealt out
    """

    def __init__(self, group: Group, attention: Callable[..., Tensor], lane: Lane | None = None) -> None:
        self.group, self._attention, self._lane = group, attention, lane
        self.size, self.rank = group.size, group.rank
        self.attending = False
        self._whole = 0  # tokens of a whole row; 0: no microbatch is open
        self._documents: Tensor | None = None  # [B, T], of whole rows
        self._masks: dict[bool, Tensor] = {}
        self._begins = self._places = self._nothing_padded = torch.empty(0)
        self._known: tuple[Tensor, bool] | None = None
        self._window: int | None = None
        self._takes_padding = self._takes_documents = False
        self._places_in: dict[str, int] = {}  # among the arguments of the model
        self._calls: list[bool] = []  # of attention in the running forward: whether they were causal
        self._agreed = False
        self._positions: Callable[[Tensor], Tensor] = in_order
        self._neighbours, self.apart = Neighbours(self.size), Apart(group)

    def watch(self, module: nn.Module) -> None:
        """Registers hooks that give `module` the positions of this rank's tokens. Raises UserError for a model that
        takes none, or looks at several tokens elsewhere than in attention."""
        self._neighbours.know(module)
        module = unadapted(module)
        check_model(module, self.size)
        parameters = list(inspect.signature(module.forward).parameters)
        self._takes_padding, self._takes_documents = "attention_mask" in parameters, "document_ids" in parameters
        self._places_in = {name: at for at, name in enumerate(parameters) if name in ("position_ids", "document_ids")}
        self._positions = positions_of(module)
        module.register_forward_pre_hook(self._tell, with_kwargs=True)
        module.register_forward_hook(self._neighbours.out_of_model, always_call=True)
        if self._takes_padding:
            inner: nn.Module = getattr(module, "base_model", module)
            inner.register_forward_pre_hook(self._say_nothing_is_padded, with_kwargs=True)
        self._window = window_of(getattr(module, "config", None))

    def _tell(self, module: nn.Module, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]] | None:
        """Gives the model the position_ids of this rank's tokens in the whole rows, unless the loss gives some."""
        if not self._whole:
            return None
        self._neighbours.into_model()
        check_labels(module, kwargs, self.size)
        told = dict(kwargs)
        passed = {name: len(args) > at or kwargs.get(name) is not None for name, at in self._places_in.items()}
        if not passed["position_ids"]:
            told["position_ids"] = self._places
        if not passed["document_ids" if self._takes_documents else "position_ids"]:
            self._documents = None  # the model, which the loss has not told of them, does not mask by them
        if self._takes_padding:
            # it covers this rank's tokens, none of them padding; the model would use it for all tokens
            told.pop("attention_mask", None)
        return args, told

    def _say_nothing_is_padded(
        self, module: nn.Module, args: Any, kwargs: dict[str, Any]
    ) -> tuple[Any, dict[str, Any]] | None:
        """Gives the model a mask of ones.

        Without one, transformers would look for documents in a rank's positions, and only some ranks would find some.
        """
        if not self._whole or len(args) > 1 or kwargs.get("attention_mask") is not None:
            return None
        return args, {**kwargs, "attention_mask": self._nothing_padded}

    @property
    def is_open(self) -> bool:
        """True while forwards are of this rank's tokens, and not of whole rows."""
        return self._whole > 0

    def runs(self, rank: int | None = None) -> list[tuple[int, int]]:
        """Returns the tokens of a row that a rank has, this one by default, as stretches (first, number), in order.

        With a ring there are two, so that a causal mask is equally much work for each rank.
        """
        rank, pieces = self.rank if rank is None else rank, self.size if self._lane is None else 2 * self.size
        each = self._whole // pieces
        return [(place * each, each) for place in ((rank,) if self._lane is None else (rank, pieces - 1 - rank))]

    def own(self, x: Tensor, dim: int = 1, rank: int | None = None) -> Tensor:
        """Returns the tokens of this rank, or of `rank`, of a tensor `x` of whole rows with the tokens along `dim`."""
        return torch.cat([x.narrow(dim, start, number) for start, number in self.runs(rank)], dim)

    def cut(self, microbatch: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Opens a microbatch: returns this rank's tokens of each tensor [B, T, ..] in it, with `position_ids`.

        Raises UserError if the rows cannot be cut evenly, or hold something that does not go with plan.cp.
        """
        ids = microbatch.get("input_ids")
        if ids is None or ids.dim() != 2:
            raise UserError(
                f"plan.cp = {self.size} cuts rows of tokens, input_ids [B, T]; this batch has {', '.join(microbatch)}"
            )
        T, pieces = ids.shape[1], self.size if self._lane is None else 2 * self.size
        check_tokens(T, pieces, self.size)
        if self._window is not None and self._window < T:
            raise UserError(
                f"plan.cp > 1 has no sliding window of {self._window} tokens yet: take rows of at most so many, or "
                "plan.cp = 1"
            )
        self.check_padding(microbatch)
        for key in ("labels", "targets"):
            given = microbatch.get(key)
            if given is not None and given.shape[:2] != ids.shape:
                raise UserError(
                    f"plan.cp = {self.size}: {key} {tuple(given.shape)} are not of tokens {tuple(ids.shape)}; each "
                    "rank, which has a part of a row, would count them"
                )
        self.close()
        self._whole, self._calls = T, []
        self._documents = documents_of(microbatch, self._takes_documents, self._takes_padding)
        whole, places = dict(microbatch), self._positions(ids)
        whole.setdefault("position_ids", places.expand(ids.shape))
        found = {key: self.own(value) if value.shape[:2] == ids.shape else value for key, value in whole.items()}
        self._begins = stretches(found["position_ids"])
        self._places = self.own(places)
        self._nothing_padded = torch.ones_like(found["input_ids"])
        return found

    def check_padding(self, rows: Mapping[str, Tensor]) -> None:
        """Raises UserError where an attention_mask says that `rows`, or a sample, are padded."""
        check_padding(rows, self._takes_documents)

    def state(self) -> Any:
        """Returns the state of the running microbatch: the length of its rows, their documents and masks."""
        return self._whole, self._documents, self._begins, self._places, self._nothing_padded, self._masks

    def recall(self, state: Any) -> None:
        """Continues with the microbatch whose `state` is given."""
        self._whole, self._documents, self._begins, self._places, self._nothing_padded, self._masks = state
        self._known = None

    def close(self) -> None:
        """Ends the microbatch: a forward outside of one is of whole rows."""
        self._whole, self._documents, self._masks, self._known = 0, None, {}, None

    def looking(self) -> AbstractContextManager[None]:
        """Wraps a loss of the running microbatch: UserError where it picks tokens by their place in a row."""
        return self._neighbours.looking_at(self._nothing_padded.shape)

    def attended(self, count: float | None) -> None:
        """Called after the forward of a loss, which has counted `count` (None: no plain number). Raises UserError if it
        has called no attention, and, of the first one, for what ranks have not alike (see check_first)."""
        check_attended(self._calls, self.size)
        if not (self._agreed or self.apart.is_on) and torch._C._functorch.peek_interpreter_stack() is None:
            check_first(self.group.all_gather_object((self._calls, count)), self._nothing_padded.shape)
            self._agreed = True

    @torch.compiler.disable
    def attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Tensor:
        """Computes F.scaled_dot_product_attention of this rank's queries [B, H, T / cp, K] over whole rows.

        The model's mask covers this rank's tokens; it is recognized as causal, by documents, or both. Raises UserError
        for any other mask.
        """
        if not self._whole:
            return self._attention(
                query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
            )
        self._neighbours.check_places()
        if self.apart.is_on:
            self._calls.append(False)
            return self.apart.attend(query, value)
        if query.shape[-1] != value.shape[-1]:
            return of_one_width(self.attend, (query, key, value), (attn_mask, dropout_p, is_causal), scale, enable_gqa)
        if attn_mask is not None:
            is_causal = self._is_causal(attn_mask)
        self._calls.append(bool(is_causal))
        if self._lane is None:
            return self._by_heads(query, key, value, dropout_p, is_causal, scale)
        if dropout_p:
            raise UserError(
                'plan.context = "ring" has no dropout inside attention: take "ulysses", or a model without it'
            )
        if torch._C._functorch.peek_interpreter_stack() is not None:  # forward mode or higher derivatives
            return self._gathered(query, key, value, is_causal, scale)
        scale = scale if scale is not None else 1 / math.sqrt(query.shape[-1])
        documents = None
        if self._documents is not None:
            documents = tuple(self.own(self._documents, rank=rank) for rank in range(self.size))
        return ring_attention(query, key, value, Ring(self.group, self._lane, is_causal, scale, documents))

    def _by_heads(
        self, query: Tensor, key: Tensor, value: Tensor, dropout_p: float, is_causal: bool, scale: float | None
    ) -> Tensor:
        heads, keys = query.shape[1], key.shape[1]
        if heads % self.size or (keys % self.size and self.size % keys):
            raise UserError(
                f"plan.cp = {self.size} deals out {heads} heads, and {keys} of keys and values, which does not come "
                'out even: take plan.context = "ring", or a cp that divides the heads'
            )
        if keys < self.size:
            key, value = (each.repeat_interleave(self.size // keys, 1) for each in (key, value))
        by_rank = zip(*(each.chunk(self.size, 1) for each in (query, key, value)), strict=True)
        together = swap(torch.cat([part for parts in by_rank for part in parts], 1), self.group, 1, 2, PURPOSE)
        each, keys = heads // self.size, key.shape[1] // self.size
        query, key, value = together.split([each, keys, keys], 1)
        mask = None if self._documents is None else self._mask(is_causal)
        self.attending = True
        try:
            causal = is_causal and mask is None
            out = self._attention(query, key, value, mask, dropout_p, causal, scale=scale, enable_gqa=each != keys)
        finally:
            self.attending = False
        return swap(out, self.group, 2, 1, PURPOSE)

    def _gathered(self, query: Tensor, key: Tensor, value: Tensor, is_causal: bool, scale: float | None) -> Tensor:
        """Computes attention over the gathered keys and values, by operations that can be differentiated repeatedly."""
        keys, values = (gather_from(each, self.group, 2, purpose=PURPOSE) for each in (key, value))
        every = torch.arange(self._whole, device=query.device)
        mine, theirs = self.own(every, 0), torch.cat([self.own(every, 0, rank) for rank in range(self.size)])
        mask = theirs <= mine[:, None] if is_causal else torch.ones_like(theirs <= mine[:, None])
        if self._documents is not None:
            mask = mask & (self._documents[:, None, mine, None] == self._documents[:, None, None, theirs])
        return self._attention(
            query, keys, values, mask, 0.0, False, scale=scale, enable_gqa=query.shape[1] != key.shape[1]
        )

    def _mask(self, causal: bool) -> Tensor:
        """Returns the mask [B, 1, T, T] of whole rows: which tokens a token may see."""
        if causal not in self._masks:
            assert self._documents is not None
            self._masks[causal] = document_mask(self._documents, causal)
        return self._masks[causal]

    def _is_causal(self, mask: Tensor) -> bool:
        """True if the model's mask of this rank's tokens is causal; false if all tokens of a document see each
        other."""
        if self._known is not None and self._known[0] is mask:
            return self._known[1]
        check_learned(mask, self.size)
        if isinstance(mask, FakeTensor):
            return True  # in a dry run nothing has values
        documents = self._documents
        if documents is None:
            documents = torch.zeros(1, self._whole, dtype=torch.int64, device=mask.device)
        causal = is_causal_mask(mask, self.own(documents), self._begins, self.size)
        self._known = mask, causal
        return causal
