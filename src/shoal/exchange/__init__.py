"""Data-parallel algorithms, one a file; the reducer that feeds them full chunks; the adapter for DDP. That for FSDP2
is not imported here: torch.distributed.fsdp takes a quarter of the time that torch takes."""

from shoal.exchange.algorithm import Algorithm, Holds, Replica, State
from shoal.exchange.as_ddp_hook import as_ddp_hook
from shoal.exchange.named import algorithm

__all__ = ["Algorithm", "Holds", "Replica", "State", "algorithm", "as_ddp_hook"]
