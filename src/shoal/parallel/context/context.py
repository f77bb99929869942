"""Cuts the tokens of each row of a microbatch among the ranks along cp; attention sees all of them.

`plan.context = "ulysses"` (DeepSpeed-Ulysses, arXiv 2309.14509): the heads are dealt out while attention runs, by the
usual kernel over whole rows. A rank sends (1 - 1/cp) of its queries, keys, values and results; cp divides the heads.

    tokens of rank r [B, H, T / cp, K]  --all-to-all-->  heads of rank r [B, H / cp, T, K]  --attention-->  back again

`plan.context = "ring"`: keys and values are sent round the ranks (see ring), for any number of heads; a rank sends its
keys and values cp - 1 times.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
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
    check_joined,
    check_labels,
    check_model,
    check_padding,
    check_tokens,
)
from shoal.parallel.context.documents import check_learned, is_causal_mask, window_of
from shoal.parallel.context.longest import tell_the_longest
from shoal.parallel.context.neighbours import Neighbours
from shoal.parallel.context.ring import Ring, of_one_width, ring_attention
from shoal.parallel.context.told import Rows, Told

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
        self._rows: Rows | None = None
        self._known: tuple[Tensor, bool] | None = None
        self._window: int | None = None
        self._calls: list[bool] = []  # of attention in the running forward: whether they were causal
        self._agreed = False
        self._neighbours, self.apart, self._told = Neighbours(self.size), Apart(group), Told(group)

    def watch(self, module: nn.Module) -> None:
        """Registers hooks that give `module` the positions of this rank's tokens. Raises UserError for a model that
        takes none, or looks at several tokens elsewhere than in attention."""
        self._neighbours.know(module)
        module = unadapted(module)
        check_model(module, self.size)
        module.register_forward_pre_hook(self._tell, with_kwargs=True)
        module.register_forward_hook(self._neighbours.out_of_model, always_call=True)
        self._told.know(module, lambda: self._rows)
        tell_the_longest(module, self.group, lambda: self.is_open)
        self._window = window_of(getattr(module, "config", None))

    def _tell(self, module: nn.Module, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]] | None:
        """Tells the model of this rank's tokens (see Told)."""
        if self._rows is None:
            return None
        self._neighbours.into_model()
        check_labels(module, kwargs, self.size)
        return self._told.tell(self._rows, args, kwargs)

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
        whole, places = dict(microbatch), self._told.positions(ids)
        whole.setdefault("position_ids", places.expand(ids.shape))
        found = {key: self.own(value) if value.shape[:2] == ids.shape else value for key, value in whole.items()}
        self._rows = self._told.rows(microbatch, found, self.own(places))
        return found

    def check_padding(self, rows: Mapping[str, Tensor]) -> None:
        """Raises UserError where an attention_mask says that `rows`, or a sample, are padded."""
        check_padding(rows, self._told.takes_documents)

    def state(self) -> Any:
        """Returns the state of the running microbatch."""
        return self._rows

    def recall(self, state: Any) -> None:
        """Continues with the microbatch whose `state` is given."""
        self._rows, self._known = state, None
        self._whole = 0 if state is None else state.tokens

    def close(self) -> None:
        """Ends the microbatch: a forward outside of one is of whole rows."""
        self._whole, self._rows, self._known = 0, None, None

    @contextmanager
    def looking(self) -> Iterator[None]:
        """Wraps a loss of the running microbatch: UserError where it picks tokens by their place in a row."""
        assert self._rows is not None
        with self._neighbours.looking_at(self._rows.shape), self._told.seeing(lambda: self.is_open):
            yield

    def attended(self, count: float | None) -> None:
        """Called after the forward of a loss, which has counted `count` (None: no plain number). Raises UserError if it
        has called no attention, and, of the first one, for what ranks have not alike (see check_first)."""
        check_attended(self._calls, self.size)
        if (
            self._rows is not None
            and not (self._agreed or self.apart.is_on)
            and torch._C._functorch.peek_interpreter_stack() is None
        ):
            check_first(self.group.all_gather_object((self._calls, count)), self._rows.shape)
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
        if self._rows is None:
            return self._attention(
                query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
            )
        self._neighbours.check_places()
        if self.apart.is_on:
            self._calls.append(False)
            return self.apart.attend(query, value)
        if query.shape[-1] != value.shape[-1]:
            return of_one_width(self.attend, (query, key, value), (attn_mask, dropout_p, is_causal), scale, enable_gqa)
        documents = self._told.documents(self._rows, attn_mask)
        if attn_mask is not None:
            is_causal = self._is_causal(attn_mask, documents)
        if is_causal:
            check_joined((query.shape[-2], key.shape[-2]), self._whole // self.size, self.size)
        self._calls.append(bool(is_causal))
        if self._lane is None:
            return self._by_heads(query, key, value, self._mask(documents, is_causal), dropout_p, is_causal, scale)
        if dropout_p:
            raise UserError(
                'plan.context = "ring" has no dropout inside attention: take "ulysses", or a model without it'
            )
        if torch._C._functorch.peek_interpreter_stack() is not None:  # forward mode or higher derivatives
            return self._gathered(query, key, value, documents, is_causal, scale)
        scale = scale if scale is not None else 1 / math.sqrt(query.shape[-1])
        by_rank = None
        if documents is not None:
            by_rank = tuple(self.own(documents, rank=rank) for rank in range(self.size))
        return ring_attention(query, key, value, Ring(self.group, self._lane, is_causal, scale, by_rank))

    def _by_heads(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: Tensor | None,
        dropout_p: float,
        is_causal: bool,
        scale: float | None,
    ) -> Tensor:
        heads, keys = query.shape[1], key.shape[1]
        if heads % self.size or (keys % self.size and self.size % keys):
            raise UserError(
                f"plan.cp = {self.size} deals out {heads} heads, and {keys} of keys and values, which does not come "
                'out even: take plan.context = "ring", or a cp that divides the heads'
            )
        if keys < self.size:
            key, value = (each.repeat_interleave(self.size // keys, 1) for each in (key, value))
        each, keys = heads // self.size, key.shape[1] // self.size
        if query.shape[2] == key.shape[2]:
            by_rank = zip(*(each.chunk(self.size, 1) for each in (query, key, value)), strict=True)
            together = swap(torch.cat([part for parts in by_rank for part in parts], 1), self.group, 1, 2, PURPOSE)
            query, key, value = together.split([each, keys, keys], 1)
        else:  # keys of what all ranks have, beside the row
            query, key, value = (swap(each, self.group, 1, 2, PURPOSE) for each in (query, key, value))
        self.attending = True
        try:
            causal = is_causal and mask is None
            out = self._attention(query, key, value, mask, dropout_p, causal, scale=scale, enable_gqa=each != keys)
        finally:
            self.attending = False
        return swap(out, self.group, 2, 1, PURPOSE)

    def _gathered(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        documents: Tensor | None,
        is_causal: bool,
        scale: float | None,
    ) -> Tensor:
        """Computes attention over the gathered keys and values, by operations that can be differentiated repeatedly."""
        keys, values = (gather_from(each, self.group, 2, purpose=PURPOSE) for each in (key, value))
        every = torch.arange(self._whole, device=query.device)
        mine, theirs = self.own(every, 0), torch.cat([self.own(every, 0, rank) for rank in range(self.size)])
        mask = theirs <= mine[:, None] if is_causal else torch.ones_like(theirs <= mine[:, None])
        if documents is not None:
            mask = mask & (documents[:, None, mine, None] == documents[:, None, None, theirs])
        return self._attention(
            query, keys, values, mask, 0.0, False, scale=scale, enable_gqa=query.shape[1] != key.shape[1]
        )

    def _mask(self, documents: Tensor | None, causal: bool) -> Tensor | None:
        """Returns the mask [B, 1, T, T] of whole rows by `documents`: which tokens a token may see; None without."""
        if documents is None:
            return None
        assert self._rows is not None
        if causal not in self._rows.masks:
            self._rows.masks[causal] = document_mask(documents, causal)
        return self._rows.masks[causal]

    def _is_causal(self, mask: Tensor, documents: Tensor | None) -> bool:
        """True if the model's mask of this rank's tokens is causal; false if all tokens of a document see each
        other."""
        if self._known is not None and self._known[0] is mask:
            return self._known[1]
        check_learned(mask, self.size)
        if isinstance(mask, FakeTensor):
            return True  # in a dry run nothing has values
        assert self._rows is not None
        if documents is None:
            documents = torch.zeros(1, self._whole, dtype=torch.int64, device=mask.device)
        causal = is_causal_mask(mask, self.own(documents), self._rows.begins, self.size)
        self._known = mask, causal
        return causal
