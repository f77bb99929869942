"""Data-parallel algorithms, one a file; the reducer that feeds them full chunks; adapters for DDP and FSDP2."""

from shoal.exchange.algorithm import Algorithm, Holds, Replica, State
from shoal.exchange.as_ddp_hook import as_ddp_hook
from shoal.exchange.as_fsdp2 import as_fsdp2
from shoal.exchange.named import algorithm

__all__ = ["Algorithm", "Holds", "Replica", "State", "algorithm", "as_ddp_hook", "as_fsdp2"]
