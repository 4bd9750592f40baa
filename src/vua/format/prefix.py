"""Which prefix of a prompt can be used, given the stored chunks: the one rule for all callers.

Layers with full attention need every chunk of the prefix. Layers with a sliding window need the
chunks that hold the window at the prefix's end, from the first token of a block on: an engine fills
whole blocks.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

from vua.format.layout import KVLayout


class Kind(NamedTuple):
    """Layers of one kind, as an engine holds them."""

    layout: KVLayout
    block_tokens: int
    """Tokens per block: the least common multiple if an engine has several sizes; 1 without
    blocks."""


def first_needed(layout: KVLayout, tokens: int) -> int:
    """Return the first token whose K/V are needed to continue after ``tokens`` tokens.

    >>> first_needed(KVLayout(1, 1, 4, 4, "U8", 8, "w20"), 64)
    45
    """
    return 0 if layout.window is None else max(0, tokens - layout.window + 1)


def first_token(kind: Kind, tokens: int) -> int:
    """Return the first token to load of layers in order to continue after ``tokens`` tokens.

    A window's first block counts as a whole: the engine's own prefix cache offers it to other
    requests, whose windows may begin earlier.

    >>> layout = KVLayout(1, 1, 4, 4, "U8", 8, "w20")
    >>> first_token(Kind(layout, 1), 64), first_token(Kind(layout, 16), 64)
    (45, 32)
    """
    first = first_needed(kind.layout, tokens)
    return first - first % kind.block_tokens


def alignment(kinds: Sequence[Kind]) -> int:
    """Return a number that divides a prefix's length: it ends with a block of every kind."""
    return math.lcm(*(kind.block_tokens for kind in kinds))


def leading(layouts: Sequence[KVLayout]) -> list[int]:
    """Return the indices of the layouts of which every chunk is stored.

    These have full attention; if none has, they are those with windows.
    """
    full = [at for at, layout in enumerate(layouts) if layout.window is None]
    return full or [*range(len(layouts))]


def longest_prefix(
    kinds: Sequence[Kind],
    stored: int,
    most: int,
    missing: Callable[[int, Sequence[int]], int | None],
    align: int = 1,
) -> int:
    """Return how many tokens of a prompt can be used: every window after them is stored.

    Args:
        kinds: the model's, in any order.
        stored: how many of the prompt's chunks, from the first on, the :func:`leading` kinds have.
        most: tokens to use at most.
        missing: returns, for a kind's index and some chunks, the first of these that is not stored;
            None: all are. It is called for the other kinds only.
        align: divides the answer, besides :func:`alignment`.
    """
    lead = set(leading([kind.layout for kind in kinds]))
    others = [(at, kind) for at, kind in enumerate(kinds) if at not in lead]
    size, align = kinds[0].layout.chunk_tokens, math.lcm(align, alignment(kinds))
    while (tokens := min(stored * size, most) // align * align) > 0:
        gap = None
        for at, kind in others:
            first, stop = first_token(kind, tokens) // size, -(-tokens // size)
            # The lowest first: without it no prefix that ends inside the window can be used either.
            gap = missing(at, (first, *range(stop - 1, first, -1)))
            if gap is not None:
                break
        if gap is None:
            return tokens
        stored = gap  # it is needed for every prefix from there up to `tokens`
    return 0
