"""How much of a prompt can be loaded, and which of its chunks are worth storing.

A layer with full attention needs every chunk of the prefix. One with a sliding window needs only
the chunks inside the window at the point where the computation continues; these chunks are stored
only at such points: at the end of a prompt, where it diverged from another one, and where a later
one may diverge, see `branches`. So a hit ends where every group has what it needs.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from vua.connector.cache_spec import Group, Model
from vua.format.keys import KeyChain, Keys
from vua.format.layout import longest_prefix
from vua.store.store import Store
from vua.store.writer import Run

_MAX_PROBES: Final = 1000
"""Probes for windows per lookup, a few ms locally; a prompt that needs more counts as not stored
there."""


@dataclass(slots=True)
class PrefixMatch:
    """The result of looking up a prompt."""

    keys: KeyChain
    """The prompt's chunks; later possibly those of generated tokens, too."""
    tokens: int
    """Tokens from its start on that can be loaded; ends with a block of every cache group."""
    stored: int
    """Leading chunks whose files exist in the leading groups."""
    windows: tuple[frozenset[int], ...]
    """Per group of layers, the chunks to store: only needed for groups with a window."""
    prompt_chunks: int
    """How many chunks of the prompt are worth storing, see `Model.useful_chunks`."""
    writers: tuple[Run, ...] = ()
    """Who wrote the chunks of the first group; empty if writers are not read."""
    beside: frozenset[bytes] = frozenset()
    """Who wrote the required chunks of the other groups."""
    kind: tuple[str, ...] = ("",)
    """What is compared separately: the adapter's digest or "", then the inputs besides text."""
    most: int = 0
    """Tokens from its start on that could be loaded if all were stored, and the client permits."""


def find(
    model: Model,
    stores: Sequence[Store],
    keys: KeyChain,
    num_tokens: int,
    *,
    window_every_tokens: int | None,
) -> PrefixMatch:
    """Look a prompt up. Touches the storage; raises StorageError, OSError.

    Args:
        model: the engine's KV cache.
        stores: one per group; none: nothing is known to be stored.
        keys: the prompt's chunks.
        num_tokens: tokens of the request; at least one of them is left to compute.
        window_every_tokens: the largest distance of the points at which windows are stored; None:
            at the end and where prompts diverged only.
    """
    size, align = model.chunk_tokens, model.align
    leading, stored, tokens = model.leading, 0, 0
    most = min(len(keys) * size, num_tokens - 1) // align * align
    if stores:
        stored = min(
            store.lookup(keys, group.written)
            for group, store in zip(model.groups, stores, strict=True)
            if group in leading
        )
        tokens = longest(model, stores, keys, stored, most)
    ends = {len(keys)}
    if window_every_tokens is not None:
        every = max(1, window_every_tokens // size)
        ends |= {*branches(len(keys), 8, every), *range(0, len(keys), every)}
    if tokens < min(stored * size, most) // align * align:
        # another prompt diverged here, more may follow
        ends.add(stored)
    windows = tuple(_window_chunks(model, group, ends) for group in model.groups)
    useful = model.useful_chunks(len(keys))
    return PrefixMatch(keys, tokens, stored, windows, useful, most=most)


def branches(stop: int, parts: int, every: int) -> Iterator[int]:
    """Yield numbers from 1 up to ``stop``, ``parts`` in each doubling, at least each ``every``.

    Where nothing is known of later prompts: a hit loses at most one part of ``parts``.

    >>> list(branches(40, 4, 6))
    [1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 14, 16, 20, 24, 28, 32, 38]
    """
    at = 1
    while at < stop:
        yield at
        at += max(1, min(every, (1 << at.bit_length() - 1) // parts))


def longest(model: Model, stores: Sequence[Store], keys: Keys, stored: int, most: int) -> int:
    """Return how many tokens can be loaded: every window after them is stored.

    Touches the storage; raises StorageError, OSError.

    Args:
        model: the engine's KV cache.
        stores: one per group.
        keys: the prompt's chunks.
        stored: how many of them, from the first on, the leading groups have.
        most: tokens to load at most.
    """
    seen: dict[tuple[int, int], bool] = {}

    def is_there(number: int, chunk: int) -> bool:
        known = seen.get((number, chunk))
        if known is None:
            known = len(seen) < _MAX_PROBES
            known = known and stores[number].holds(keys[chunk], model.groups[number].written)
            seen[number, chunk] = known
        return known

    def missing(number: int, chunks: Sequence[int]) -> int | None:
        if (search := stores[number].search) is not None:  # all at once
            held = search.holds([keys[chunk] for chunk in chunks], model.groups[number].written)
            seen.update(zip(((number, chunk) for chunk in chunks), held, strict=True))
        return next((one for one in chunks if not is_there(number, one)), None)

    return longest_prefix(model.kinds, stored, most, missing, model.align)


def _window_chunks(model: Model, group: Group, ends: set[int]) -> frozenset[int]:
    """The chunks that hold the group's window before each of the given chunk counts."""
    if group in model.leading:
        return frozenset()
    size, wanted = model.chunk_tokens, set[int]()
    for end in ends:
        # one chunk more: a request that ends with this chunk has to compute its last token, and
        # continues at the end of a block, which may be longer than a chunk
        hit = min((end - 1) * size, (end * size - 1) // model.align * model.align)
        first = model.first_loaded(group, max(0, hit))
        wanted.update(range(first // size, end))
    return frozenset(wanted)
