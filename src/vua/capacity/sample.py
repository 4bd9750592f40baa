"""A large namespace's prefix tree, estimated in a second from random chunks and their prefixes.

Names are hashes, so the chunks of one fan-out directory are a random sample of all.
"""

from __future__ import annotations

import random
import time
from dataclasses import replace
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

from vua.capacity.lru import mtime_ns_of
from vua.capacity.prefix_tree import ChunkNode, ChunkNodes, PrefixTree, read_node
from vua.capacity.scan import Space, fans_of, listed

__all__ = ["Sample", "sample_prefix_tree"]

_LONGEST_S: Final = 1.0
_MOST_READ: Final = 1 << 14
"""Chunks that are read at most, picked ones and those before them."""


class Sample(NamedTuple):
    """Picked chunks, and every chunk before them."""

    tree: PrefixTree
    """Its `nbytes` are those of all the chunks that a picked one stands for; 0 of the others."""
    stands_for: npt.NDArray[np.float64]
    """Chunks of the namespace for each in the tree: the same for picked ones, 0 for the others."""


def sample_prefix_tree(
    space: Space, longest_s: float = _LONGEST_S, most_read: int = _MOST_READ
) -> Sample:
    """Read random chunks and what comes before them, for ``longest_s`` at most (one at least).

    A prefix of which n of p picked chunks are descendants has about n/p of all chunks below it:
    the error is some sqrt(n)/p. Others may write and delete meanwhile.
    """
    until_s = time.monotonic() + longest_s
    fans = fans_of(space)
    with listed(space.fd, random.choice(fans) if fans else ".") as entries:  # noqa: S311
        names = [entry.name for entry in entries if len(entry.name) == 64]
    random.shuffle(names)
    found: dict[str, tuple[int, ChunkNode]] = {}
    picked: set[str] = set()
    for name in names:
        if picked and (time.monotonic() > until_s or len(found) >= most_read):
            break
        picked.add(name)
        chunk = name
        while chunk and chunk not in found:
            mtime_ns = mtime_ns_of(space.fd, chunk)
            if mtime_ns is None:
                break
            found[chunk] = mtime_ns, read_node(space, chunk)
            chunk = found[chunk][1].before
    each = len(names) * len(fans) / max(1, len(picked))
    nodes = ChunkNodes([], [], [], [], [], {}, [])
    for chunk, (mtime_ns, node) in found.items():
        nodes.add(chunk, mtime_ns, node)
    tree = nodes.tree()
    is_picked = [tree.name(index) in picked for index in range(len(tree.names))]
    stands_for = np.where(is_picked, each, 0)
    nbytes = (tree.nbytes * stands_for).astype(np.int64)
    return Sample(replace(tree, nbytes=nbytes), stands_for)
