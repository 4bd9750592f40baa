"""Moves KV caches between an engine's paged blocks and chunks: the one package that knows CUDA.

`PagedCache` says where the engine's rows lie, `slots_of` which of them are a request's tokens,
`gather` and `scatter` copy them out of and into the cache, and `Staging` brings them to and from
pinned host memory beside the engine's own work. On a GPU the copies are one Triton kernel; without
Triton, or on the CPU, they are PyTorch indexing, and both give the same bytes. Everything works on
CPU tensors; CUDA is not touched unless a cache lies there.
"""

from vua.device.copies import Choice, choose, gather, scatter, synchronize
from vua.device.gds import DirectReader, Gds
from vua.device.movers import CuFileMover, Mover, PosixMover
from vua.device.pages import KNOWN_AXES, PagedCache, PagedLayout, Rows, slots_of
from vua.device.staging import Fence, StagedSlab, Staging

__all__ = [
    "KNOWN_AXES",
    "Choice",
    "CuFileMover",
    "DirectReader",
    "Fence",
    "Gds",
    "Mover",
    "PagedCache",
    "PagedLayout",
    "PosixMover",
    "Rows",
    "StagedSlab",
    "Staging",
    "choose",
    "gather",
    "scatter",
    "slots_of",
    "synchronize",
]
