"""How far a prompt's chunks are stored in one namespace, and why no further. Reads headers only.

Nothing is changed, nothing counts as used, and what others write or delete meanwhile is seen or
not. K and V are not read: `vua inspect` and `vua verify` do.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import numpy as np

from vua.capacity.prefix_tree import PrefixTree
from vua.errors import CorruptEntryError, ForeignEntryError
from vua.format.keys import ChunkKey, KeyChain
from vua.format.layout import KVLayout, Shard, cover
from vua.format.prefix import Kind, leading, longest_prefix
from vua.io.header_plan import header_plan
from vua.native import Transfer
from vua.store.entry_reader import EntryReader
from vua.store.store import Store

if TYPE_CHECKING:
    from vua.security.seal import Seal  # needs an optional package

__all__ = [
    "ChunkState",
    "Continuations",
    "GroupState",
    "continuations",
    "loadable",
    "look",
    "usable",
]

State = Literal["stored", "absent", "partial", "damaged"]
"""``stored``: files that cover the group, sound by size and header. ``partial``: sound files that
do not cover it. ``damaged``: at least one file is not what it has to be."""


@dataclass(frozen=True, slots=True)
class ChunkState:
    """One chunk of the prompt, in the files of one group of layers."""

    index: int
    key: ChunkKey
    state: State
    files: tuple[str, ...] = ()
    """Shards that are there."""
    reasons: tuple[str, ...] = ()
    """Why it is not stored."""


@dataclass(frozen=True, slots=True)
class GroupState:
    """What is stored of a prompt for one group of layers."""

    layout: KVLayout
    galloping: int
    """Leading chunks as a lookup sees them: by names, in O(log n) probes."""
    chunks: tuple[ChunkState, ...]

    @property
    def leading(self) -> int:
        """Leading chunks that are stored, counted one by one."""
        gap = self.first_missing
        return len(self.chunks) if gap is None else gap.index

    @property
    def first_missing(self) -> ChunkState | None:
        """The first chunk that is not stored, None where all are."""
        return next((chunk for chunk in self.chunks if chunk.state != "stored"), None)

    @property
    def damaged(self) -> list[ChunkState]:
        """The chunks with files that are not what they have to be."""
        return [chunk for chunk in self.chunks if chunk.state == "damaged"]

    @property
    def runs(self) -> list[tuple[int, int]]:
        """The stored chunks as half-open ranges; more than one: there are holes."""
        found: list[tuple[int, int]] = []
        for chunk in self.chunks:
            if chunk.state != "stored":
                continue
            if found and found[-1][1] == chunk.index:
                found[-1] = (found[-1][0], chunk.index + 1)
            else:
                found.append((chunk.index, chunk.index + 1))
        return found


def look(store: Store, keys: KeyChain, seal: Seal | None) -> GroupState:
    """Look at every chunk of a prompt for one group of layers: one listing, one header per file."""
    states = tuple(_state(store, seal, index, keys[index]) for index in range(len(keys)))
    return GroupState(store.layout, store.lookup(keys), states)


def _state(store: Store, seal: Seal | None, index: int, key: ChunkKey) -> ChunkState:
    full = store.layout.full
    found = [one for one in store.shards(key.name) if one.group == store.layout.group]
    problems = {one: _problem(store, seal, key, one) for one in sorted(found, key=_order)}
    there = [one for one, text in problems.items() if text is not None]
    if not there:
        return ChunkState(index, key, "absent")
    names = tuple(shard.name for shard in there)
    bad = tuple(f"{shard.name}: {text}" for shard, text in problems.items() if text)
    if bad:
        return ChunkState(index, key, "damaged", names, bad)
    if cover(full, there) is None:
        text = f"they do not cover {full.name}; was a writer's part lost?"
        return ChunkState(index, key, "partial", names, (text,))
    return ChunkState(index, key, "stored", names)


def _problem(store: Store, seal: Seal | None, key: ChunkKey, shard: Shard) -> str | None:
    """Why a file is not the one it is named as; "" if it is, None if it vanished meanwhile."""
    if not store.layout.full.contains(shard):
        return f"lies outside the layout's {store.layout.full.name}"
    codec = store.codec(shard, "" if seal is None else seal.kind)
    plan = header_plan(codec.file_nbytes, codec.header_nbytes, codec.table_offset)
    header_only = Transfer(plan, (), (), ())
    problem = EntryReader(store.storage, codec, header_only).read([key], seal=seal).problem
    if isinstance(problem, FileNotFoundError):
        return None
    return "" if problem is None else _explained(problem)


def _order(shard: Shard) -> tuple[int, int]:
    return shard.layer_start, shard.head_start


def _explained(problem: Exception) -> str:
    if isinstance(problem, ForeignEntryError):
        return f"foreign: {problem}"
    if isinstance(problem, CorruptEntryError):
        return f"corrupt: {problem}"
    return f"unreadable: {getattr(problem, 'strerror', None) or problem}"


def usable(groups: Sequence[GroupState]) -> int:
    """Return the leading chunks after which a computation can go on, given what is stored.

    An engine loads no more than that, see :func:`loadable`.
    """
    size = groups[0].layout.chunk_tokens
    count = len(groups[0].chunks)
    return _longest(groups, count * size, 1, size) // size


def loadable(groups: Sequence[GroupState], prompt_tokens: int, block_tokens: int) -> int:
    """Return how many tokens of a prompt vLLM can load: whole blocks, and never the last token."""
    return _longest(groups, prompt_tokens - 1, block_tokens, block_tokens)


def _longest(groups: Sequence[GroupState], most: int, block_tokens: int, align: int) -> int:
    """Return how many tokens can be used that are a multiple of ``align``, by the engines' rule."""

    def missing(number: int, chunks: Sequence[int]) -> int | None:
        states = groups[number].chunks
        return next((one for one in chunks if states[one].state != "stored"), None)

    kinds = [Kind(group.layout, block_tokens) for group in groups]
    lead = leading([group.layout for group in groups])
    stored = min((groups[at].leading for at in lead), default=len(groups[0].chunks))
    return longest_prefix(kinds, stored, most, missing, align)


@dataclass(frozen=True, slots=True)
class Continuations:
    """Stored chunks that follow the last common chunk in place of the missing one."""

    others: int
    """Other chunks that directly follow it (or are first chunks, where none is common)."""
    with_extras: int
    """How many of these first chunks have extras: a salt, a LoRA adapter, an image."""


def continuations(tree: PrefixTree, gap: ChunkKey, before: str) -> Continuations:
    """Return what follows chunk ``before`` ("": what begins prompts) in place of ``gap``."""
    count = len(tree.names)
    own = np.arange(count)
    if before:
        above = np.flatnonzero(tree.names == np.frombuffer(bytes.fromhex(before), "V32"))
        place = int(above[0]) if len(above) else -1
        follows = np.flatnonzero((tree.parent == place) & (tree.parent != own))
    else:
        follows = np.flatnonzero(tree.parent == own)
    others = [int(one) for one in follows if tree.name(int(one)) != gap.name]
    return Continuations(len(others), sum(one in tree.salts for one in others))
