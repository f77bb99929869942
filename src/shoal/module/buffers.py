"""Keeps buffers that a forward changes equal on all replicas after each step, where their update rule is not known in
advance.

BatchNorm's statistics compose exactly (see batchnorm). So do other buffers that a forward writes as keep * old + a term
of the microbatch, and does not use otherwise (see affine): moving averages, sums, counters, the last value. With n
microbatches in sequence, cut into the ranks' runs, x_n = keep^n x_0 + sum over ranks r of keep^(microbatches after r)
(y_r - keep^(microbatches of r) x_0), where y_r is the value that rank r arrived at from x_0. For any other buffer (a
codebook, the vectors of a power iteration) the value of one process cannot be computed: it is refused, or on request
becomes the mean over microbatches if it is floating, else the largest.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from shoal.comm import Group
from shoal.errors import UserError
from shoal.module.affine import Affine, Rule
from shoal.module.attributes import Kept
from shoal.module.compiling import as_written
from shoal.module.counted import Counted
from shoal.module.reads import Reads
from shoal.module.written import Written


class OtherBuffers:
    """The buffers of `root` outside BatchNorm.

    Non-persistent ones that are re-bound are left out where they are tables that follow shapes: what takes their place
    is not made of them, and the forward has not used what was there.

    replicas: number of ranks that have them
    averages: those without a rule are averaged instead of refused
    whole_shares: why the microbatches of a step are not the same under every plan; "" if they are
    graphs: the parts of `root` that run compiled
    """

    def __init__(
        self, root: nn.Module, replicas: int, averages: bool, whole_shares: str, graphs: Iterable[nn.Module] = ()
    ) -> None:
        self._averages, self._whole_shares, self._written = averages, whole_shares, Written(graphs)
        self._places = {
            f"{prefix}.{name}".lstrip("."): (owner, name)
            for prefix, owner in root.named_modules()
            if not isinstance(owner, _BatchNorm)
            for name, buffer in owner._buffers.items()
            if buffer is not None and replicas > 1
        }
        self._kept = Kept(root) if replicas > 1 else None
        self._numbers = Counted(root, replicas) if replicas > 1 else None
        self._before: dict[str, tuple[Tensor, int]] = {}
        self._start: dict[str, Tensor] = {}
        self._rules: dict[str, Rule | str] = {}
        self._agreed = self._news = self._muted = False
        self._forwards = self._observed = 0

    def __len__(self) -> int:
        return len(self._places)

    def begin(self) -> None:
        """Stores the buffers at the start of the step."""
        self._observed = 0
        self._before = {name: (buffer, buffer._version) for name, buffer in self._now().items()}
        known = self._rules if self._agreed else self._before
        self._start = {name: self._before[name][0].clone() for name in known}

    @torch.no_grad()
    def restore(self) -> None:
        """Puts back the buffers that the start of the step stored, for a step that was cut short."""
        for name, start in self._start.items():
            owner, attribute = self._places[name]
            owner._buffers[attribute] = self._before[name][0].copy_(start)

    @contextmanager
    def watching(self) -> Iterator[Callable[[Any], None]]:
        """Observes a forward, inside the context, which passes its results to the function that this yields.

        The first two forwards are observed, and later ones ever more rarely.
        """
        self._forwards += not self._muted
        if self._muted or self._forwards & (self._forwards - 1):
            yield _nothing
            return
        with nullcontext() if self._numbers is None else self._numbers.watching(), self._observing() as gave:
            yield gave

    @contextmanager
    def _observing(self) -> Iterator[Callable[[Any], None]]:
        kept = {} if self._kept is None else self._kept.now()
        if not (self._places or kept):
            yield _nothing
            return
        before, failed = self._now(), False
        values = {} if self._kept is None else self._kept.values()
        try:
            with as_written(), Affine({**kept, **before}) as affine, Reads(affine.read):
                yield affine.leaves
        except Exception:
            failed = True
            raise
        # pipeline.split.Left, which ends the forward of a stage, is no Exception: the stage's buffers have been seen
        finally:
            if not failed:
                self._observed += 1
                self._learn(affine, before)
                if self._kept is not None:
                    self._kept.check(values, affine.odd)

    @contextmanager
    def mute(self) -> Iterator[None]:
        """Switches observation off inside the context: for a microbatch that does not count, or a forward on
        placeholders."""
        before, self._muted = self._muted, True
        try:
            yield
        finally:
            self._muted = before

    def _learn(self, affine: Affine, before: Mapping[str, Tensor]) -> None:
        """Adds the rules that a forward has shown."""
        now = self._now()
        for name, rule in affine.rules(now).items():
            if self._is_table(name) and _is_anew(now[name], before[name], rule, name in affine.odd):
                continue
            if (known := self._rules.get(name, None if self._agreed else rule)) != rule and not isinstance(known, str):
                self._rules[name], self._news = "forwards write it by different rules", self._agreed
            else:
                self._rules.setdefault(name, rule)

    def changed(self) -> list[str]:
        """Returns the names of buffers that this rank's forwards wrote or re-bound since the step began. What is
        written by way of `buffer.data` is no new version of it: of such a one the rule alone tells."""
        unseen = {name for name, rule in self._rules.items() if isinstance(rule, Rule) and rule.writes == 0}
        return [
            name
            for name, buffer in self._now().items()
            if name in unseen
            or (
                buffer._version != self._before[name][1]
                if buffer is self._before[name][0]
                else name in self._rules or not self._is_table(name)
            )
        ]

    def flags(self, microbatches: int) -> list[bool]:
        """Returns this rank's flags of a step: whether any buffer changed, and whether one deviated from the agreed
        rules."""
        changed = self.changed()
        for name in self._rules.keys() | set(changed):
            rule = self._rules.get(name, "some forwards write it and others do not")
            if (
                isinstance(rule, Rule)
                and rule.writes is not None
                and not self._follows(name, rule.writes, microbatches)
            ):
                rule = "some forwards write it more often than others"
            if self._rules.get(name) != rule:
                self._rules[name], self._news = rule, True
        return [bool(changed), self._news]

    def _follows(self, name: str, rule: int, microbatches: int) -> bool:
        owner, (_, version) = self._places[name][0], self._before[name]
        made, others = self._now()[name]._version - version, microbatches - self._observed
        return self._written.follow(name, owner, rule, made, self._observed, others)

    @property
    def rules(self) -> dict[str, Rule | str]:
        """Rules of the buffers that have been written on this rank; as text, why one has none."""
        return self._rules

    def agree(
        self,
        told: Sequence[Mapping[str, Rule | str]],
        ranks: int,
        streams: int,
        everywhere: Sequence[Mapping[str, Rule | str]] = (),
    ) -> None:
        """Merges the rules that all replicas have seen, which then hold on all of them.

        told: the `rules` of each replica
        ranks: number of replicas
        streams: number of ranks that share the tokens of a row
        everywhere: the `rules` of the ranks of other stages too, which write other buffers and must raise the same
            error

        Raises UserError for a buffer that several replicas cannot keep as one process would.
        """
        for theirs in told:
            for name, rule in theirs.items():
                if name in self._places and self._rules.setdefault(name, rule) != rule:
                    self._rules[name] = rule if isinstance(rule, str) else "forwards write it by different rules"
        self._agreed, self._news = True, False
        every = dict(self._rules)
        for theirs in everywhere or told:
            for name, rule in theirs.items():
                if every.setdefault(name, rule) != rule:
                    every[name] = rule if isinstance(rule, str) else "forwards write it by different rules"
        if ranks == 1 or self._averages or not every:
            return
        name, rule = next(
            ((name, rule) for name, rule in every.items() if isinstance(rule, str)), next(iter(every.items()))
        )
        alone = "plan.dp = 1" if streams == 1 else "plan.dp = 1 with plan.cp = 1"
        if isinstance(rule, str):
            why = (
                f"one process would have it otherwise than several ranks: {rule}, so microbatches depend on those "
                "before them"
            )
        elif self._whole_shares:
            why = f"how often depends on the number of ranks: {self._whole_shares}"
        elif streams > 1:
            why, alone = f"with plan.cp = {streams} each rank sees a part of the rows", "plan.cp = 1"
        else:
            return
        raise UserError(
            f'a forward writes the buffer {name}, and {why}. Engine(buffers="averaged") (train.buffers in a job) makes '
            f"it the mean over microbatches, or the largest of whole numbers, or take {alone}"
        )

    def merge(self, group: Group, microbatches: int, after: int, exact: bool) -> None:
        """Makes the buffers equal over `group`.

        group: the replicas
        microbatches: run on this rank
        after: run by the ranks of `group` behind this one
        exact: merge by the rules; else average
        """
        total = float(group.all_reduce(torch.tensor(float(microbatches)), purpose="buffers"))
        for name, buffer in self._now().items():
            rule = self._rules.get(name)
            if rule is None:
                continue
            wide = torch.complex128 if buffer.is_complex() else torch.float64
            whole_numbers = not (buffer.is_floating_point() or buffer.is_complex())
            if isinstance(rule, Rule) and exact and not self._whole_shares:
                first = self._start[name].to(wide)
                term = rule.keep**after * (buffer.to(wide) - rule.keep**microbatches * first)
                merged = _sum(group, term) + rule.keep**total * first
                buffer.copy_(merged.round() if whole_numbers else merged)
            elif not whole_numbers:
                buffer.copy_(_sum(group, buffer.to(wide) * microbatches) / total)
            else:
                buffer.copy_(group.all_reduce(buffer.to(torch.int64), "max", purpose="buffers"))

    def _is_table(self, name: str) -> bool:
        owner, attribute = self._places[name]
        return attribute in owner._non_persistent_buffers_set

    def _now(self) -> dict[str, Tensor]:
        return {name: cast(Tensor, owner._buffers[attribute]) for name, (owner, attribute) in self._places.items()}


def _is_anew(now: Tensor, before: Tensor, rule: Rule | str, used: bool) -> bool:
    """Whether a table has been made anew: nothing of what was there goes on in it, or into the forward. `used`: the
    forward has computed with what was there."""
    if now is before:
        return False
    if isinstance(rule, Rule):
        return not rule.keep
    same = now.shape == before.shape and now.dtype == before.dtype
    return not used or not same or torch.equal(now, before)


def _sum(group: Group, term: Tensor) -> Tensor:
    """Sums over `group`; complex numbers as pairs of real ones, which all transports add."""
    if not term.is_complex():
        return group.all_reduce(term, purpose="buffers")
    return torch.view_as_complex(group.all_reduce(torch.view_as_real(term).contiguous(), purpose="buffers"))


def _nothing(outputs: Any) -> None:
    pass
