"""`[server]`: how the parameter server of a job updates. Nothing here imports torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from shoal.errors import UserError, check_choice, did_you_mean

POLICIES = ("async", "sync", "batch:k", "staleness:s")
ASYNC, SYNC, BATCH, STALENESS = "async", "sync", "batch", "staleness"


@dataclass(frozen=True)
class Server:
    """The table of that name; a run without parameter servers ignores it. None is the default of each.

    policy: "async", "sync", "batch:4" or "staleness:2" (see docs/server.md); "async".
    scale, drop_above: what the lag of a gradient does, but under "sync".
    codec: of gradients, a name or a table with parameters.
    grace: seconds for which a lost worker is waited for before its samples are dealt again; 5.
    timeout: seconds for which a worker tries to reach the server; 300.
    restarts: how often the launcher starts a server, or each worker, again that was killed or has crashed; 3.
    durable: wait for the disk before a gradient is acknowledged, so that it also survives the host; false.
    tables: weights of embeddings that are served by rows, by name; those of sparse gradients.
    device: "cpu", or an accelerator that has the weights; one that is left when each worker has its own, else "cpu".
    """

    policy: str | None = None
    scale: str | None = None
    drop_above: int | None = None
    codec: str | dict[str, Any] | None = None
    grace: float | None = None
    timeout: float | None = None
    restarts: int | None = None
    durable: bool | None = None
    tables: list[str] | None = None
    device: str | None = None

    def __post_init__(self) -> None:
        kind, _ = self.kind
        if self.scale is not None:
            check_choice(f'server.scale = "{self.scale}" is not one of', self.scale, ["none", "inverse"])
        for key in ("drop_above", "grace", "restarts"):
            value = getattr(self, key)
            if value is not None and value < 0:
                raise UserError(f"server.{key} = {value}: give 0 or more")
        if self.timeout is not None and not self.timeout > 0:
            raise UserError(f"server.timeout = {self.timeout}: give seconds above 0")
        for key in ("scale", "drop_above"):
            if kind == SYNC and getattr(self, key) is not None:
                raise UserError(
                    f'server.{key} = {getattr(self, key)!r}: under server.policy = "sync" no gradient lags. Leave '
                    f"server.{key} out, or give another policy"
                )

    @property
    def kind(self) -> tuple[str, int]:
        """The policy's name and number, 0 where it has none. Raises UserError for another text."""
        text = ASYNC if self.policy is None else self.policy
        name, colon, number = text.partition(":")
        least = {BATCH: 1, STALENESS: 0}.get(name)
        if name in (ASYNC, SYNC) and not colon:
            return name, 0
        if least is not None and number.isdecimal() and int(number) >= least:
            return name, int(number)
        if least is not None:
            raise UserError(f'server.policy = "{text}": give a number from {least} on after it, e.g. "{name}:2"')
        meant = did_you_mean(text, [ASYNC, SYNC, "batch:2", "staleness:2"])
        raise UserError(f'server.policy = "{text}" is not one of {", ".join(POLICIES)}.{meant}')
