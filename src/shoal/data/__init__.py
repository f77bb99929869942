"""Data: documents to tokens to packed rows, and the order in which steps take them.

`open_text` makes rows of text: corpus -> tokenizer -> shards -> split -> packed rows. For any map-style dataset of
dicts, a `Cursor` chooses the samples of a step and `map_batches` yields them; an `IterableSource` does both for a
stream.
"""

from .arrays import ArrayData, Samples, held_out, open_arrays
from .balanced import BalancedCursor, LoadBalancedBatchSampler, LoadBalancedSampler, sample_costs
from .cached import CachedDataset
from .corpus import Corpus, open_corpus
from .cursor import Cursor
from .iterable import IterableSource
from .loader import Batch, map_batches, stack_samples
from .pack import PackedText
from .sampler import ElasticSampler
from .shards import Shards, build_shards, damaged_files, open_shards
from .split import Split, split_documents
from .text import TextData, open_text
from .tokens import ByteTokenizer, Tokenizer, load_tokenizer, save_tokenizer

__all__ = [
    "ArrayData",
    "BalancedCursor",
    "Batch",
    "ByteTokenizer",
    "CachedDataset",
    "Corpus",
    "Cursor",
    "ElasticSampler",
    "IterableSource",
    "LoadBalancedBatchSampler",
    "LoadBalancedSampler",
    "PackedText",
    "Samples",
    "Shards",
    "Split",
    "TextData",
    "Tokenizer",
    "build_shards",
    "damaged_files",
    "held_out",
    "load_tokenizer",
    "map_batches",
    "open_arrays",
    "open_corpus",
    "open_shards",
    "open_text",
    "sample_costs",
    "save_tokenizer",
    "split_documents",
    "stack_samples",
]
