"""A trace of requests through lookup, load and save, with small payloads.

A trace is a file of JSON lines with `hash_ids` (one id per block of the prompt, the id standing for
the whole prefix up to its block, the last block perhaps partial) and `input_length`: the published
format of Mooncake's FAST'25 traces. Block ids become blocks of synthetic tokens. A trace is read
with the size of its blocks in tokens, or refused: with another size parts of it would be cut off.
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from lab.simulation import leading
from speed import expect
from vua.capacity.limits import Limits
from vua.capacity.spaces import Show
from vua.device.buffers import StagingBuffer
from vua.errors import InputError
from vua.format.entry import EntryCodec
from vua.format.identity import Identity
from vua.format.keys import KeyChain, token_ids
from vua.format.layout import KVLayout
from vua.storage.base import WRITTEN
from vua.store.namespace import Namespace
from vua.store.store import Loader
from vua.store.writer import EntryWriter

BLOCK_TOKENS: Final = 512
"""Of Mooncake's traces."""
_ROOM: Final = 64
"""Chunks that are loaded by one call."""


@dataclass(frozen=True, slots=True)
class Request:
    """One prompt."""

    blocks: tuple[int, ...]
    """Ids of its blocks, each standing for the whole prefix."""
    tokens: int
    time_s: float = 0.0
    """When it came, since the first; 0 where the trace does not say."""
    block_tokens: int = BLOCK_TOKENS
    session: str | None = None
    """Which agent's, or conversation's; None where the trace does not say."""

    @property
    def whole(self) -> tuple[int, ...]:
        """The ids of its complete blocks."""
        return self.blocks[: self.tokens // self.block_tokens]


@dataclass(frozen=True, slots=True)
class Replayed:
    """What a replay found."""

    requests: int
    tokens: int
    blocks: int
    """Whole blocks asked for."""
    hit_blocks: int
    """Of them, found stored and loaded, verified."""
    vanished_blocks: int
    """Found by the lookup, but evicted before they were loaded: misses."""
    refused_blocks: int
    """Not stored, since there was no room for them, and what followed them in their prompts."""
    ideal_blocks: int
    """What an unbounded store holds at that moment."""
    written_blocks: int
    block_tokens: int
    written_nbytes: int
    """Bytes of files written, headers included."""
    loaded_nbytes: int
    lookup_ms: tuple[float, float, float]
    """p50, p90 and p99, hashing included."""
    seconds: float

    @property
    def hit_ratio(self) -> float:
        """Hit blocks over blocks."""
        return self.hit_blocks / self.blocks

    @property
    def token_hit_ratio(self) -> float:
        """Hit tokens over all tokens, those of partial blocks included."""
        return self.hit_blocks * self.block_tokens / self.tokens

    @property
    def ideal_ratio(self) -> float:
        """What an unbounded store would reach, in blocks."""
        return self.ideal_blocks / self.blocks

    def describe(self) -> dict[str, Any]:
        """Return the fields and ratios as plain values."""
        names = ("hit_ratio", "token_hit_ratio", "ideal_ratio")
        return asdict(self) | {name: getattr(self, name) for name in names}


def read(
    path: Path, limit: int | None = None, *, block_tokens: int = BLOCK_TOKENS
) -> list[Request]:
    """Read a trace's first ``limit`` requests, whose blocks hold ``block_tokens`` tokens each.

    Raises:
        InputError: a line is no request, has other blocks than its tokens fill, or has a block
            after another one than before: its id does not stand for its whole prefix.
        OSError: the file cannot be read.
    """
    found: list[Request] = []
    parents: dict[int, int] = {}
    with path.open(encoding="utf-8") as stream:
        for number, line in enumerate(stream, 1):
            if limit is not None and len(found) == limit:
                break
            try:
                one = json.loads(line)
                blocks = tuple(map(int, one["hash_ids"]))
                time_s = float(one.get("timestamp", 0)) / 1e3
                session = None if one.get("session") is None else str(one["session"])
                request = Request(blocks, int(one["input_length"]), time_s, block_tokens, session)
            except (ValueError, KeyError, TypeError) as problem:
                raise InputError(
                    f"{path}, line {number}: {problem!r}; expected JSON lines with hash_ids and "
                    "input_length, as in Mooncake's traces"
                ) from problem
            if len(blocks) - request.tokens // block_tokens not in (0, 1):
                raise InputError(f"{path}, line {number}: {_other_blocks(request)}")
            for before, block in pairwise((-1, *blocks)):
                if parents.setdefault(block, before) != before:
                    raise InputError(
                        f"{path}, line {number}: block {block} follows {before}, and "
                        f"{parents[block]} in an earlier line; expected ids that stand for the "
                        "whole prefix up to their block"
                    )
            found.append(request)
    if not any(request.whole for request in found):
        raise InputError(f"{path}: no request has a whole block of {block_tokens} tokens")
    return found


def _other_blocks(request: Request) -> str:
    has, tokens, size = len(request.blocks), request.tokens, request.block_tokens
    fills = tokens / size
    guess = f"about {tokens / has:.0f} tokens" if has else "no tokens"
    return (
        f"{has} blocks for {tokens} tokens, which are {fills:.1f} blocks of {size}; the trace's "
        f"blocks hold {guess}: give their size by --block-tokens"
    )


def replay(
    root: Path,
    requests: Sequence[Request],
    show: Show,
    *,
    max_bytes: int | str | None = None,
    interval_s: float = 0.0,
) -> Replayed:
    """Send requests through a store below ``root``: look up, load what is there, save the rest.

    The payload of a block is its id, which is compared when it is loaded. ``max_bytes`` bounds the
    store (of files of :func:`block_file_nbytes`); without it nothing is evicted. A lookup is a
    hint: what is evicted between it and the load is a miss, counted, as in an engine.

    Requests are due ``interval_s`` apart; a late one is sent when the one before it is served. So
    chunks grow as old between two requests in a run that stores many as in one that stores few.

    Raises:
        ConfigError: ``max_bytes`` is no size.
        MeasurementError: a load brought another block, or less than the lookup found for another
            reason than eviction.
    """
    block_tokens = requests[0].block_tokens
    session = Session(root, max_bytes, block_tokens)
    seen: set[int] = set()
    hit = ideal = written = vanished = refused = 0
    lookups, start = [], time.perf_counter()
    for number, request in enumerate(requests):
        time.sleep(max(0.0, start + number * interval_s - time.perf_counter()))
        prompt = _prompt(request)
        began = time.perf_counter()
        chain = session.namespace.keys(token_ids(prompt))
        found = session.store.lookup(chain)
        lookups.append(time.perf_counter() - began)
        loaded = session.load(request, chain, found)
        new, left = session.save(request, chain, loaded)
        written, refused = written + new, refused + left
        hit, vanished = hit + loaded, vanished + found - loaded
        ideal += leading(seen, request.whole)
        seen.update(request.whole)
        show("", number + 1, len(requests), amount=number + 1, unit="requests")
    session.close()
    file_nbytes = block_file_nbytes(block_tokens)
    blocks = sum(len(request.whole) for request in requests)
    p50, p90, p99 = (np.percentile(lookups, (50, 90, 99)) * 1e3).tolist()
    return Replayed(
        requests=len(requests), tokens=sum(request.tokens for request in requests), blocks=blocks,
        hit_blocks=hit, vanished_blocks=vanished, refused_blocks=refused, ideal_blocks=ideal,
        written_blocks=written, block_tokens=block_tokens, written_nbytes=written * file_nbytes,
        loaded_nbytes=hit * file_nbytes, lookup_ms=(p50, p90, p99),
        seconds=time.perf_counter() - start,
    )  # fmt: skip


class Session:
    """A store of blocks, and the memory that they pass through. For one thread."""

    def __init__(
        self, root: Path, max_bytes: int | str | None, block_tokens: int = BLOCK_TOKENS
    ) -> None:
        """Open, or make, a store below ``root`` of at most ``max_bytes``; None: without a bound."""
        self._bounded = max_bytes is not None
        bounds = Limits(max_bytes=max_bytes if self._bounded else "100%", min_free_bytes=0)
        identity = Identity(model="replay", chunk_tokens=block_tokens)
        self._layout = _layout(block_tokens)
        self.namespace = Namespace.create(root, identity, [self._layout], bounds=bounds)
        (self.store,) = self.namespace.stores
        self._id, one = _staged(self._layout, 1)
        self._ids, many = _staged(self._layout, _ROOM)
        self._saver = EntryWriter(self.store, one.memory)
        self._loader = Loader(self.store, many.memory)

    def close(self) -> None:
        """Finish what is still to be done."""
        self.store.close()

    def ask(self, request: Request) -> tuple[int, int]:
        """Serve a request: load the chunks that are stored, and save the others.

        Returns how many were loaded, and how many saved.
        """
        chain = self.namespace.keys(token_ids(_prompt(request)))
        loaded = self.load(request, chain, self.store.lookup(chain))
        return loaded, self.save(request, chain, loaded)[0]

    def load(self, request: Request, chain: KeyChain, found: int) -> int:
        """Note the use of the blocks that were found, load and compare them; return how many."""
        self.store.used(chain, found, wait=True)
        for at in range(0, found, _ROOM):
            keys = [chain[n] for n in range(at, min(found, at + _ROOM))]
            done = self._loader.load(keys)
            ids = request.whole[at : at + done.chunks]
            expect("the loaded blocks", holds=(self._ids[: done.chunks] == ids).all())
            if done.chunks < len(keys):
                evicted = self._bounded and done.reason == "missing"
                expect(f"a load after a hit ({done.reason})", holds=evicted)
                return at + done.chunks
        return found

    def save(self, request: Request, chain: KeyChain, loaded: int) -> tuple[int, int]:
        """Save what follows the blocks that were loaded; return how many were, and were not."""
        written = 0
        for place in range(loaded, len(chain)):
            self._id[0] = request.whole[place]
            if self._saver.save([chain[place]]) == [WRITTEN]:
                written += 1
            elif not self.store.holds(chain[place], [self._layout.full]):
                return written, len(chain) - place  # what follows would not be found without it
        return written, 0


def block_file_nbytes(block_tokens: int = BLOCK_TOKENS) -> int:
    """Return the size of a block's file. Raises InputError for no multiple of 8 tokens."""
    layout = _layout(block_tokens)
    return EntryCodec("0" * 64, layout, layout.full).file_nbytes


def _layout(block_tokens: int) -> KVLayout:
    if block_tokens % 8:  # the bytes of an id
        raise InputError(f"blocks of {block_tokens} tokens: expected a multiple of 8")
    return KVLayout(1, 1, 1, 0, "U8", block_tokens)


def _staged(layout: KVLayout, chunks: int) -> tuple[npt.NDArray[np.uint64], StagingBuffer]:
    """Return the first word of each chunk's place, ``[chunks]``, and the buffer they lie in."""
    buffer = StagingBuffer(layout, layout.full, chunks)
    return buffer.bytes.view(np.uint64).reshape(chunks, -1)[:, 0], buffer


def _prompt(request: Request) -> np.ndarray[tuple[int, ...], np.dtype[np.uint32]]:
    """Return synthetic tokens: block id times the block's tokens and up, in 32 bits."""
    size = request.block_tokens
    first = np.array(request.blocks, dtype=np.uint32)[:, None] * np.uint32(size)
    tokens = first + np.arange(size, dtype=np.uint32)
    return tokens.reshape(-1)[: request.tokens]
