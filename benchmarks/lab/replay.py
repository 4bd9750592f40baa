"""A trace of requests through lookup, load and save, with small payloads.

A trace is a file of JSON lines with `hash_ids` (one id per block of the prompt, the id standing for
the whole prefix up to its block, the last block perhaps partial) and `input_length`: the published
format of Mooncake's FAST'25 traces. Block ids become blocks of synthetic tokens.
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from vua.capacity.limits import Limits
from vua.capacity.scan import Show
from vua.cli.advise import leading
from vua.cli.bench import expect
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
_LAYOUT: Final = KVLayout(1, 1, 1, 0, "U8", BLOCK_TOKENS)
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

    @property
    def whole(self) -> tuple[int, ...]:
        """The ids of its complete blocks."""
        return self.blocks[: self.tokens // BLOCK_TOKENS]


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
        return self.hit_blocks * BLOCK_TOKENS / self.tokens

    @property
    def ideal_ratio(self) -> float:
        """What an unbounded store would reach, in blocks."""
        return self.ideal_blocks / self.blocks

    def describe(self) -> dict[str, Any]:
        """Return the fields and ratios as plain values."""
        names = ("hit_ratio", "token_hit_ratio", "ideal_ratio")
        return asdict(self) | {name: getattr(self, name) for name in names}


def read(path: Path, limit: int | None = None) -> list[Request]:
    """Read a trace's first ``limit`` requests. Raises InputError, OSError."""
    found: list[Request] = []
    with path.open(encoding="utf-8") as stream:
        for number, line in enumerate(stream, 1):
            if limit is not None and len(found) == limit:
                break
            try:
                one = json.loads(line)
                blocks = tuple(map(int, one["hash_ids"]))
                time_s = float(one.get("timestamp", 0)) / 1e3
                found.append(Request(blocks, int(one["input_length"]), time_s))
            except (ValueError, KeyError, TypeError) as problem:
                raise InputError(
                    f"{path}, line {number}: {problem!r}; expected JSON lines with hash_ids and "
                    "input_length, as in Mooncake's traces"
                ) from problem
    if not any(request.whole for request in found):
        raise InputError(f"{path}: no request has a whole block of {BLOCK_TOKENS} tokens")
    return found


def replay(
    root: Path,
    requests: Sequence[Request],
    show: Show,
    *,
    max_bytes: int | str | None = None,
) -> Replayed:
    """Send requests through a store below ``root``: look up, load what is there, save the rest.

    The payload of a block is its id, which is compared when it is loaded. ``max_bytes`` bounds the
    store (of files of :func:`block_file_nbytes`); without it nothing is evicted. A lookup is a
    hint: what is evicted between it and the load is a miss, counted, as in an engine.

    Raises:
        ConfigError: ``max_bytes`` is no size.
        MeasurementError: a load brought another block, or less than the lookup found for another
            reason than eviction.
    """
    session = Session(root, max_bytes)
    seen: set[int] = set()
    hit = ideal = written = vanished = refused = 0
    lookups, start = [], time.perf_counter()
    for number, request in enumerate(requests):
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
    file_nbytes = block_file_nbytes()
    blocks = sum(len(request.whole) for request in requests)
    p50, p90, p99 = (np.percentile(lookups, (50, 90, 99)) * 1e3).tolist()
    return Replayed(
        requests=len(requests), tokens=sum(request.tokens for request in requests), blocks=blocks,
        hit_blocks=hit, vanished_blocks=vanished, refused_blocks=refused, ideal_blocks=ideal,
        written_blocks=written, written_nbytes=written * file_nbytes,
        loaded_nbytes=hit * file_nbytes, lookup_ms=(p50, p90, p99),
        seconds=time.perf_counter() - start,
    )  # fmt: skip


class Session:
    """A store of blocks, and the memory that they pass through. For one thread."""

    def __init__(self, root: Path, max_bytes: int | str | None) -> None:
        """Open, or make, a store below ``root`` of at most ``max_bytes``; None: without a bound."""
        self._bounded = max_bytes is not None
        bounds = Limits(max_bytes=max_bytes if self._bounded else "100%", min_free_bytes=0)
        identity = Identity(model="replay", chunk_tokens=BLOCK_TOKENS)
        self.namespace = Namespace.create(root, identity, [_LAYOUT], bounds=bounds)
        (self.store,) = self.namespace.stores
        self._id, one = _staged(1)
        self._ids, many = _staged(_ROOM)
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
            elif not self.store.holds(chain[place], [_LAYOUT.full]):
                return written, len(chain) - place  # what follows would not be found without it
        return written, 0


def block_file_nbytes() -> int:
    """Return the size of a block's file."""
    return EntryCodec("0" * 64, _LAYOUT, _LAYOUT.full).file_nbytes


def _staged(chunks: int) -> tuple[npt.NDArray[np.uint64], StagingBuffer]:
    """Return the first word of each chunk's place, ``[chunks]``, and the buffer they lie in."""
    buffer = StagingBuffer(_LAYOUT, _LAYOUT.full, chunks)
    return buffer.bytes.view(np.uint64).reshape(chunks, -1)[:, 0], buffer


def _prompt(request: Request) -> np.ndarray[tuple[int, ...], np.dtype[np.uint32]]:
    """Return synthetic tokens: block id times 512 and up, in 32 bits."""
    first = np.array(request.blocks, dtype=np.uint32)[:, None] * np.uint32(BLOCK_TOKENS)
    tokens = first + np.arange(BLOCK_TOKENS, dtype=np.uint32)
    return tokens.reshape(-1)[: request.tokens]
