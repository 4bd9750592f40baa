"""Which weights and which adapter have computed what lies in the engine's blocks.

The engine's own prefix cache knows an adapter by its name, and weights not at all: after either was
replaced it goes on offering blocks of before, unless somebody resets it. A request that begins with
such blocks computes on top of them, so nothing of it may be stored as if it were of now. Blocks are
told apart by their numbers; those that nobody has written since the start, or since then only with
the first weights and no adapter, take no memory here.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from vua.connector.adapters import Adapter

__all__ = ["MIXED", "Origin", "Origins"]


class Origin(NamedTuple):
    """What computed a block."""

    epoch: int = 0
    """How often the cache was reset before."""
    adapter: Adapter | None = None


MIXED = Origin(-1)
"""More than one of them, or nobody knows: like nothing else, not even like another one."""
_FIRST = Origin()


class Origins:
    """For the scheduler's thread."""

    def __init__(self, block_sizes: Sequence[int]) -> None:
        """Know the blocks of cache groups with so many tokens per block."""
        self._block_sizes = block_sizes
        self._of: dict[int, Origin] = {}

    def begins(self, tables: Sequence[Sequence[int]], cached_tokens: int, origin: Origin) -> bool:
        """Note a request with its first blocks; whether what it begins with is of its ``origin``.

        Args:
            tables: its block table per cache group; 0 where there is no block.
            cached_tokens: tokens at its start that the engine's own prefix cache had.
            origin: what computes the rest.
        """
        if not self._of and origin == _FIRST:
            return True
        pure = origin != MIXED and all(
            self._of.get(block, _FIRST) == origin
            for table, size in zip(tables, self._block_sizes, strict=True)
            for block in table[: cached_tokens // size]
            if block
        )
        for table, size in zip(tables, self._block_sizes, strict=True):
            self.computes(table[cached_tokens // size :], origin if pure else MIXED)
        return pure

    def spoils(self, tables: Sequence[Sequence[int]], first_token: int) -> None:
        """Note that nothing from a token on, in these block tables, is what it should be."""
        for table, size in zip(tables, self._block_sizes, strict=False):  # empty: it begins now
            self.computes(table[first_token // size :], MIXED)

    def computes(self, blocks: Iterable[int], origin: Origin) -> None:
        """Note blocks that are written now."""
        if origin != _FIRST:
            self._of.update(dict.fromkeys(blocks, origin))
        elif self._of:
            for block in blocks:
                self._of.pop(block, None)
