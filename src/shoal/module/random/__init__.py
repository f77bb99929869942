"""Keyed randomness: draws depend on the seed, the step, the sample and the module, never on rank or microbatch."""

from shoal.module.random.functional import attention, dropout_of, keyed_functional
from shoal.module.random.host import host_draws, host_state
from shoal.module.random.keyed import Drawn, KeyedDropout, Randomness
from shoal.module.random.philox import keep_fallback, keyed_dropout_mask, mix, name_key

__all__ = [
    "Drawn",
    "KeyedDropout",
    "Randomness",
    "attention",
    "dropout_of",
    "host_draws",
    "host_state",
    "keep_fallback",
    "keyed_dropout_mask",
    "keyed_functional",
    "mix",
    "name_key",
]
