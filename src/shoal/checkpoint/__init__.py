"""Checkpoints: boxes of global tensors, written atomically and in the background, readable under any other cut.

A checkpoint is a directory `step-00000100/` with the files of a plain `torch.distributed.checkpoint` (`.metadata`,
`__R_0.distcp`) and `manifest.json` (step, sizes and hashes of the files, JSON state). `pieces` describes what a rank
writes and reads, `writer` saves, `reader` loads, `verify` checks a checkpoint on disk.
"""

from shoal.checkpoint.manifest import read_manifest
from shoal.checkpoint.pieces import Piece, Want, share
from shoal.checkpoint.reader import load, newest, tensor_names
from shoal.checkpoint.verify import listing, verify
from shoal.checkpoint.writer import Writer

__all__ = ["Piece", "Want", "Writer", "listing", "load", "newest", "read_manifest", "share", "tensor_names", "verify"]
