"""The coordinator by a key in etcd, which ends with its lease; the journal is in etcd, too.

    PREFIX/coordinator      who coordinates and where it listens; under the coordinator's lease
    PREFIX/job              the run directory, and who coordinated last
    PREFIX/journal/NUMBER   lines of the journal from that number on

A supervisor takes over by a transaction that fails if another was quicker: when the key is gone, because its lease has
run out, or when the process that it names is proven to have ended. Every line of the journal is written on condition
that the key is still as its writer wrote it. So whoever has lost it, and does not know it yet, decides nothing more;
and since the cluster has the majority, the members need none. All values are signed by the job's secret.
"""

from __future__ import annotations

import asyncio
import hmac
import time
from collections.abc import Collection, Coroutine, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from shoal.comm.signed import derived
from shoal.elastic.election import Candidate, End, Office, free_name
from shoal.elastic.etcd import Etcd, Unreachable, put, remove
from shoal.elastic.events import Event, Finish, Limits, StepDown, TookOver
from shoal.elastic.journal import Journal, replay
from shoal.elastic.membership import OVER, Membership
from shoal.elastic.records import Malformed, decode, encode, kinds
from shoal.errors import LaunchError, UserError

LEASE = 4
"""Seconds after which a coordinator that does not renew its lease is replaced; longer than the members of an etcd
cluster take to agree on another leader."""
RETRY, WATCH = 0.25, float(LEASE)
"""Seconds between two looks for a coordinator that does not answer; and after which etcd's keys are read again, though
it has told of no change: a watch whose endpoint is gone may hang."""
BATCH = 200
"""Lines of the journal in one value, which may have 1.5 MB."""
_PROOF = 64
T = TypeVar("T")


@dataclass(frozen=True)
class Job:
    """The job whose keys these are, and who coordinated it last."""

    run_dir: str
    name: str
    host: str
    port: int


_KINDS = kinds((Candidate, Job))


class EtcdElection:
    """An election below the prefix of `etcd`.

    key: of the job; other values are refused.
    run_dir: of the job, where this supervisor may found it.
    limits: the job's; the cluster takes the place of a majority of the members.
    """

    def __init__(self, etcd: Etcd, key: bytes, run_dir: str = "", limits: Limits | None = None) -> None:
        self._keys = Keys(etcd, key)
        self._run_dir, self._limits = run_dir, limits or Limits()
        self._leader: Candidate | None = None
        self._revision = self._since = 0  # of the coordinator's key, and of the cluster when it was read
        self._watch: asyncio.Task[bool] | None = None
        self._was_member = False

    def __str__(self) -> str:
        return str(self._keys.etcd.address)

    def begin(self, limits: Limits) -> None:
        """See Election."""
        self._read_again()
        self._limits = replace(self._limits, minimum=limits.minimum, maximum=limits.maximum)
        self._was_member = True

    async def whom_to_ask(self, name: str) -> list[Candidate | None]:
        """See Election. Raises UserError where the keys are those of another job, Unreachable."""
        if self._watch is None or self._watch.done():
            self._read_again()
            self._leader, self._revision = await self._keys.read(COORDINATOR, Candidate)
            since = self._keys.etcd.revision
            await self._former()
            self._since = since
        return [self._leader, None] if self._leader is not None else [None]

    async def pause(self) -> None:
        """See Election. Etcd is asked again once the coordinator's key has changed, until then only nodes are. Where it
        does not tell of changes it is asked each time."""
        if self._watch is None and self._since:
            self._watch = asyncio.create_task(self._keys.changed(COORDINATOR, self._since, WATCH))
        if self._watch is not None:
            await asyncio.wait([self._watch], timeout=RETRY)
            if not self._watch.done() or self._watch.result():
                return
        await asyncio.sleep(RETRY)

    def _read_again(self) -> None:
        """Has the keys read before anybody is asked."""
        if self._watch is not None:
            self._watch.cancel()
        self._watch, self._since = None, 0

    async def take_over(self, own: Candidate, ended: Collection[str], quiet: float) -> Office | None:
        """See Election. The coordinator is the one that `whom_to_ask` has found. Raises LaunchError where the job has
        ended."""
        leader, etcd = self._leader, self._keys.etcd
        if leader is not None and leader.name not in ended:
            return None
        former = await self._former()
        if former is None and self._was_member:
            raise LaunchError(f"the job at {self} has ended, or its keys were removed")
        if not self._was_member:
            machine = replay(self._rules(), (await self._journal())[1])
            own = replace(own, name=free_name(own.name, machine.roster.members, machine.named))
        run_dir = self._run_dir or (former.run_dir if former is not None else "")
        sent = time.monotonic()
        lease, seconds = await etcd.grant(LEASE)
        job = Job(run_dir, own.name, own.host, own.port)
        changes = [self._keys.put(COORDINATOR, own, lease), self._keys.put(JOB, job)]
        revision = await self._keys.change(self._revision, changes)
        self._read_again()
        if not revision:
            await etcd.revoke(lease)
            return None
        self._was_member = True
        tenure = EtcdTenure(self._keys, lease, revision, sent + seconds)
        lines, events = await self._journal()  # nobody else can add to it any more
        machine = replay(self._rules(), events)
        if machine.phase == OVER:  # who coordinated could not remove it
            await tenure.forget()
            lines, machine = [], Membership(self._rules())
        tenure.kept = len(lines)
        if not lines or former is None:
            return Office(own.name, machine, lines, None, tenure)
        proven = leader is not None or (former.host, former.port) == (own.host, own.port)
        return Office(own.name, machine, lines, TookOver(time.time(), own.name, former.name, proven, 0), tenure)

    def _rules(self) -> Limits:
        return replace(self._limits, quorum=False)

    async def _former(self) -> Job | None:
        job, _ = await self._keys.read(JOB, Job)
        if job is not None and self._run_dir and job.run_dir != self._run_dir:
            raise UserError(f"{self} belongs to the job in {job.run_dir}, not to {self._run_dir}: give another prefix")
        return job

    async def _journal(self) -> tuple[list[str], list[Event]]:
        journal = Journal()
        try:
            texts = await self._keys.texts(JOURNAL)
            events = [journal.take(line) for text in texts for line in text.splitlines()]
        except Malformed as error:
            raise LaunchError(f"the journal of the membership at {self} is damaged: {error}. {_REMEDY}") from error
        return journal.lines, events


COORDINATOR, JOB, JOURNAL = "coordinator", "job", "journal/"
_REMEDY = "Give another prefix; if no job uses this one any more, remove its keys by etcdctl del --prefix"


class Keys:
    """The signed values of a job below the prefix of `etcd`."""

    def __init__(self, etcd: Etcd, key: bytes) -> None:
        self.etcd, self._key, self._prefix = etcd, key, etcd.address.prefix

    def put(self, name: str, value: Any, lease: str = "0") -> dict[str, Any]:
        """Returns the change that writes a record, or a text of the journal."""
        data = value.encode("ascii") if isinstance(value, str) else encode(value)
        return put(self._prefix + name, self._proof(name, data) + data, lease)

    def remove(self, prefix: str) -> dict[str, Any]:
        """Returns the change that removes the values whose names begin so."""
        return remove(self._prefix + prefix)

    async def change(self, revision: int, changes: Sequence[dict[str, Any]]) -> int:
        """Makes changes if the coordinator is the one that was written at `revision`; see `Etcd.change`."""
        return await self.etcd.change(self._prefix + COORDINATOR, revision, changes)

    async def read(self, name: str, kind: type[T]) -> tuple[T | None, int]:
        """Returns a record and its revision; None and 0 where there is none. Raises UserError for that of another
        job."""
        value, revision = await self.etcd.get(self._prefix + name)
        if value is None:
            return None, 0
        try:
            found = decode(self._opened(name, value), _KINDS)
        except Malformed:
            found = None
        if not isinstance(found, kind):
            raise UserError(
                f"{self.etcd.address} is in use by another job, or by one with another secret (docs/elastic.md). "
                f"{_REMEDY} {self._prefix}"
            )
        return found, revision

    async def changed(self, name: str, since: int, seconds: float) -> bool:
        """See `Etcd.changed`."""
        return await self.etcd.changed(self._prefix + name, since, seconds)

    async def texts(self, prefix: str) -> list[str]:
        """Returns the texts whose names begin so, in order. Raises Malformed for those of others."""
        found = await self.etcd.below(self._prefix + prefix)
        return [self._opened(key.removeprefix(self._prefix), value).decode("ascii") for key, value in found]

    def _proof(self, name: str, data: bytes) -> bytes:
        return derived(self._key, name, data).hex().encode()

    def _opened(self, name: str, value: bytes) -> bytes:
        proof, data = value[:_PROOF], value[_PROOF:]
        if not hmac.compare_digest(proof, self._proof(name, data)):
            raise Malformed(f"{name} is not signed by the job's secret")
        return data


class _Lost(Exception):
    """Another coordinates, or may."""


class EtcdTenure:
    """The tenure of who wrote the coordinator's key at `revision`, under `lease`, which lasts at least until the time
    `until` (time.monotonic). `kept`: the number of lines of the journal that are in etcd."""

    def __init__(self, keys: Keys, lease: str, revision: int, until: float) -> None:
        self._keys, self._lease, self._revision, self._until = keys, lease, revision, until
        self.kept = 0

    async def keep(self, lines: Sequence[str]) -> None:
        """See Tenure. Raises _Lost, which `hold` turns into StepDown."""
        while self.kept < len(lines):
            batch = lines[self.kept : self.kept + BATCH]
            await self._change([self._keys.put(f"{JOURNAL}{self.kept:012}", "\n".join(batch))])
            self.kept += len(batch)

    async def hold(self, coordinating: Coroutine[Any, Any, End]) -> End:
        """See Tenure. Afterwards the key is gone, and with a job that is over all of its keys."""
        work, renewing = asyncio.create_task(coordinating), asyncio.create_task(self._renew())
        try:
            await asyncio.wait([work, renewing], return_when=asyncio.FIRST_COMPLETED)
            if renewing.done():
                renewing.result()
            end = await work
        except _Lost as lost:
            return StepDown(str(lost))
        finally:
            for task in (work, renewing):
                task.cancel()
            await asyncio.gather(work, renewing, return_exceptions=True)
        with suppress(_Lost, UserError, LaunchError, Unreachable):  # else the lease runs out
            if isinstance(end, Finish):
                await self.forget()
            await self._keys.etcd.revoke(self._lease)
        return end

    async def forget(self) -> None:
        """Removes the job and its journal."""
        await self._change([self._keys.remove(JOURNAL), self._keys.remove(JOB)])

    async def _change(self, changes: list[dict[str, Any]]) -> None:
        """Makes changes, again and again while no endpoint answers: to write the same twice does no harm."""
        while (now := time.monotonic()) < self._until:
            with suppress(Unreachable, TimeoutError):
                async with asyncio.timeout(self._until - now):
                    if await self._keys.change(self._revision, changes):
                        return
                    raise _Lost("another node coordinates by now, or its key in etcd was removed")
            await asyncio.sleep(0.1)
        raise _Lost("its lease in etcd has run out")

    async def _renew(self) -> None:
        """Renews the lease until it is lost: raises _Lost."""
        while (now := time.monotonic()) < self._until:
            with suppress(Unreachable, TimeoutError):
                async with asyncio.timeout(self._until - now):
                    seconds = await self._keys.etcd.renew(self._lease)
                    _, revision = await self._keys.read(COORDINATOR, Candidate)
                if not seconds or revision != self._revision:
                    raise _Lost("another node coordinates by now, or its lease in etcd has run out")
                self._until = now + seconds
            await asyncio.sleep(min(LEASE / 4, max(0.0, self._until - time.monotonic())))
        raise _Lost("etcd has not renewed its lease")
