"""A worker's end: pulls values from one or several parameter servers and pushes gradients to them."""

from __future__ import annotations

import math
import secrets
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from types import TracebackType
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from shoal.device import CPU, current_stream, is_accelerator, on_stream
from shoal.errors import UserError
from shoal.server.buffers import Buffers
from shoal.server.held import Given, named
from shoal.server.link import About, Link, TableForm
from shoal.server.messages import Taken, Work
from shoal.server.options import check_seconds
from shoal.server.served_table import Pushed
from shoal.server.sessions import Address, accelerator, key_of_token
from shoal.server.shares import Rows
from shoal.server.table import summed

T = TypeVar("T")
Version = int | tuple[int, ...]
"""The number of updates; of each of several servers."""


def connect(
    address: str | Sequence[str],
    token: str | None = None,
    *,
    rank: int | None = None,
    timeout: float = 60.0,
    shared: bool = True,
    device: torch.device | str | None = None,
) -> Client:
    """Connects to the parameter server at `address`, or to all servers that share the parameters, in their order.

    token: that of the servers; None for the user's secret (see docs/security.md).
    rank: this client's number, by which Sync orders its gradient and a server knows it again; None for a free one.
    timeout: seconds to wait for a server, also one that is started again, or for other clients.
    shared: use shared memory where server and client are on one host.
    device: an accelerator whose tensors go directly to those of servers (`Options(device=)`), where they have others of
        its kind. What a model elsewhere has is copied.

    Raises LaunchError where a server cannot be reached, or has another token.
    """
    addresses = [address] if isinstance(address, str) else list(address)
    key, incarnation, own = key_of_token(token), secrets.token_hex(8), accelerator(device)
    if not addresses:
        raise UserError("connect: give the address of at least one server")
    check_seconds("connect(timeout", timeout, above_0=True)
    links: list[Link] = []
    try:
        for each in addresses:
            links.append(Link(Address.read(each), key, incarnation, timeout, shared, own))
            rank = links[-1].join(-1 if rank is None else rank)
    except BaseException:
        for link in links:
            link.close()
        raise
    assert rank is not None
    return Client(links, rank)


class Client:
    """Connected to servers by `links`; for one thread at a time. Made by `connect`.

    A server that is lost is waited for, and what was asked of it is asked again: a push that it had taken already is
    not taken twice.
    """

    def __init__(self, links: Sequence[Link], rank: int) -> None:
        self._links, self.rank = links, rank
        self._threads = ThreadPoolExecutor(len(links), "shoal-client") if len(links) > 1 else None
        self._buffers = Buffers()
        self.tables: dict[str, tuple[Rows, TableForm]] = {}
        """Each table's rows among the servers, and their form."""
        for name, form in links[0].tables.items():
            self.tables[name] = Rows(form.rows, len(links), form.block), form

    def pull(self, model: Given) -> Version:
        """Copies the servers' weights into `model`, or a dict of tensors by name; returns their version. A model also
        gets BatchNorm's statistics.

        Waits until the policy gives them. Raises LaunchError that names for which clients it has waited in vain, or the
        server that cannot be reached; UserError for a model with other parameters.
        """
        parameters = self._checked(model)
        version = _version(self._each(lambda link: link.pull(parameters), parameters))
        if isinstance(model, nn.Module):
            self._buffers.pulled(model, self.statistics)
        return version

    @property
    def statistics(self) -> Tensor | None:
        """BatchNorm's statistics as they were pulled last (fp64, flat; see RunningStatistics); None where the servers
        have none."""
        return self._links[0].statistics

    def push(self, model: Given, version: Version, count: float = 1.0) -> list[Taken]:
        """Brings the gradients of `model` (`.grad`; those of a dict are its tensors) computed with the weights of
        `version`, and what its forwards since the pull have added to BatchNorm's statistics; returns what each server
        made of them, once they are safe there.

        count: their weight in the mean, where an update is made of several pushes: of samples, or of tokens.
        """
        if not 0 <= count < math.inf:
            raise UserError(f"push: count = {count}: give a number of samples or tokens")
        parameters, given = self._checked(model), self._versions(version)
        gradients = {name: value.grad if isinstance(model, nn.Module) else value for name, value in parameters.items()}
        if count and gradients and all(each is None for each in gradients.values()):
            raise UserError(
                "push: no parameter of the model has a gradient: call backward() after pull, and zero_grad() after push"
            )
        term = self._buffers.term(model) if isinstance(model, nn.Module) else None
        return self._each(lambda link: link.push(gradients, given[link], About(count), term), gradients)

    def ask(self, seconds: float, found: Mapping[str, Any]) -> Work:
        """Asks the server that deals the samples of a job for work; see messages.Ask."""
        return self._links[0].ask(seconds, found)

    def push_work(
        self,
        gradients: Mapping[str, Tensor | None],
        version: int,
        about: About,
        term: Tensor | None = None,
        rows: Mapping[str, Pushed] | None = None,
    ) -> Taken:
        """Brings the gradients of work that the first server has given, by name; None for those that are untouched.
        `term`: see Link.push. `rows`: of tables that are joined, those that have gradients. The other servers are its
        followers: they get theirs before it decides."""
        of, (first, *others) = self._dealt(rows or {}), self._links
        self._each(lambda link: link.push(gradients, version, About(about.count), rows=of[link]), gradients, others)
        taken = first.push(gradients, version, about, term, of[first])
        for link in others if not taken.weight else ():
            link.take_back()
        return taken

    def _dealt(self, rows: Mapping[str, Pushed]) -> dict[Link, list[Tensor]]:
        """Returns what each server gets of all joined tables, in their order."""
        found: dict[Link, list[Tensor]] = {link: [] for link in self._links}
        for name, (places, form) in self.tables.items():
            if not form.joined:
                continue
            once, total = rows.get(name, (torch.empty(0, dtype=torch.int64), form.empty(0)))
            for link, mine in self._chosen(once, places).items():
                values = total.index_select(0, mine.to(total.device))
                found[link] += [once[mine], values.to(form.empty(0).dtype)]
        return found

    def pull_work(self, parameters: Mapping[str, Tensor]) -> int:
        """Copies the weights into `parameters` for such work; returns the first server's version. What its followers
        have is at least as new."""
        version = self._links[0].pull(parameters)
        self._each(lambda link: link.pull(parameters), parameters, self._links[1:])
        return version

    def pull_rows(self, table: str, rows: Tensor) -> tuple[Tensor, Version]:
        """Returns the values of `rows` (integers [...], also repeated) as [..., width], and the version. They are on
        this client's accelerator where they come from one, else on the CPU."""
        _check_numbers(rows, "pull_rows")
        once, back = torch.unique(rows.to(self._device, torch.int64), return_inverse=True)
        found, version = self.pull_each(table, once.cpu())
        return found.index_select(0, back.view(-1)).view(*rows.shape, found.shape[1]), version

    def pull_each(self, table: str, numbers: Tensor) -> tuple[Tensor, Version]:
        """Returns what `pull_rows` does of rows that are each there once, ascending (int64 [n], on the CPU)."""
        (places, form), device = self._table(table), self._device
        _check_rows(numbers, places.count, table)
        if len(self._links) == 1:
            version, values = self._links[0].pull_rows(table, numbers)
            return values, version
        found = form.empty(len(numbers), device)
        chosen = self._chosen(numbers, places)

        def some(link: Link) -> int:
            version, values = link.pull_rows(table, numbers[chosen[link]])
            found[chosen[link].to(device)] = values.to(device)
            return version

        return found, _version(self._each(some, {table: found}))

    def push_rows(self, table: str, rows: Tensor, gradients: Tensor, version: Version) -> list[Taken]:
        """Brings gradients [..., width] of `rows` [...]; those of a repeated row are summed."""
        places, form = self._table(table)
        _check_numbers(rows, "push_rows")
        if gradients.shape != (*rows.shape, form.width):
            raise UserError(
                f"push_rows: gradients {tuple(gradients.shape)} for rows {tuple(rows.shape)} of width {form.width}: "
                f"give {(*rows.shape, form.width)}"
            )
        device, given = self._device, self._versions(version)
        flat = gradients.to(device).float().reshape(-1, form.width)
        once, total = summed(rows.to(device, torch.int64).reshape(-1), flat)
        _check_rows(numbers := once.cpu(), places.count, table)
        if len(self._links) == 1:
            return [self._links[0].push_rows(table, numbers, total, given[self._links[0]])]
        chosen = self._chosen(numbers, places)

        def some(link: Link) -> Taken:
            mine = chosen[link]
            return link.push_rows(table, numbers[mine], total.index_select(0, mine.to(device)), given[link])

        return self._each(some, {table: total})

    def close(self) -> None:
        """Leaves the servers."""
        if self._threads is not None:
            self._threads.shutdown()
        for link in self._links:
            link.close()

    def __enter__(self) -> Client:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @property
    def devices(self) -> list[torch.device]:
        """Where tensors of each server come and go: this client's accelerator, or the CPU."""
        return [link.device for link in self._links]

    @property
    def _device(self) -> torch.device:
        """Where rows come and go: the accelerator of this client, if there is a server whose tensors go there."""
        return next(filter(is_accelerator, self.devices), CPU)

    def _chosen(self, rows: Tensor, places: Rows) -> dict[Link, Tensor]:
        """Returns the places in `rows` of those that each server has."""
        server, _ = places.place(rows)
        return {link: torch.nonzero(server == index)[:, 0] for index, link in enumerate(self._links)}

    def _each(
        self, ask: Callable[[Link], T], used: Mapping[str, Tensor | None], links: Sequence[Link] | None = None
    ) -> list[T]:
        """Asks servers, by default all, at the same time. What other threads do with the tensors `used`, all on one
        device, comes behind this thread's work there."""
        asking = self._links if links is None else links
        if self._threads is None:
            return [ask(link) for link in asking]
        any_of_them = next((each for each in used.values() if each is not None), None)
        stream = None if any_of_them is None else current_stream(any_of_them.device)

        def asked(link: Link) -> T:
            with on_stream(stream):
                return ask(link)

        return list(self._threads.map(asked, asking))

    def _checked(self, model: Given) -> Mapping[str, Tensor]:
        """Returns the parameters of `model` by name. Raises UserError where they are not the servers'."""
        parameters = named(model)
        shapes = {name: shape for link in self._links for name, shape in link.shapes.items()}
        ours = {name: tuple(value.shape) for name, value in parameters.items() if name not in self.tables}
        if ours != shapes:
            every = ours.keys() | shapes.keys()
            other = sorted(name for name in every if ours.get(name) != shapes.get(name))
            raise UserError(
                f"the model's {other[0]} has shape {ours.get(other[0])}, on the servers it has {shapes.get(other[0])} "
                f"({len(other)} of {len(every)} parameters differ): give servers and clients the same model, and "
                "clients the addresses of all servers"
            )
        return parameters

    def _versions(self, version: Version) -> dict[Link, int]:
        versions = (version,) if isinstance(version, int) else version
        if not isinstance(versions, tuple) or len(versions) != len(self._links):
            raise UserError(f"version {version!r} is not what pull returned from {len(self._links)} servers")
        return dict(zip(self._links, versions, strict=True))

    def _table(self, name: str) -> tuple[Rows, TableForm]:
        if name not in self.tables:
            raise UserError(f"the servers have no table {name!r}: they have {', '.join(self.tables) or 'none'}")
        return self.tables[name]


def _version(versions: Sequence[int]) -> Version:
    return versions[0] if len(versions) == 1 else tuple(versions)


def _check_numbers(rows: Tensor, call: str) -> None:
    if rows.is_floating_point() or rows.is_complex() or rows.dtype == torch.bool:
        raise UserError(f"{call}: rows are {str(rows.dtype).removeprefix('torch.')}: give whole numbers, as of int64")


def _check_rows(rows: Tensor, count: int, table: str) -> None:
    if len(rows) and not 0 <= int(rows[0]) <= int(rows[-1]) < count:
        raise UserError(f"rows {int(rows[0])} to {int(rows[-1])} of table {table!r}: it has 0 to {count - 1:,}")
