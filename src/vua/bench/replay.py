"""C7, C11: a trace of requests through the real lookup, load and save, with small payloads.

A trace is a file of JSON lines with `hash_ids` (one id per block of the prompt, the id standing for
the whole prefix up to its block, the last block perhaps partial) and `input_length`: the published
format of Mooncake's FAST'25 traces. Block ids become blocks of synthetic tokens.
"""

from __future__ import annotations

import json
import time
from collections import OrderedDict
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from vua.bench.measure import Row, expect, percentile
from vua.bench.suite import Bench
from vua.directory import create_store
from vua.errors import InputError
from vua.identity import Identity
from vua.keys import KeyChain, token_ids
from vua.layout import KVLayout
from vua.slab import Slab

__all__ = [
    "Replayed",
    "Request",
    "belady",
    "bounded",
    "hits",
    "lru",
    "multi_round",
    "read",
    "replay",
]

BLOCK_TOKENS: Final = 512
_SUITE_REQUESTS: Final = 1000
_ROOM: Final = 64
"""Chunks that are loaded by one call."""


@dataclass(frozen=True, slots=True)
class Request:
    """One prompt."""

    blocks: tuple[int, ...]
    """Ids of its blocks, each standing for the whole prefix."""
    tokens: int

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
                found.append(Request(tuple(map(int, one["hash_ids"])), int(one["input_length"])))
            except (ValueError, KeyError, TypeError) as problem:
                raise InputError(
                    f"{path}, line {number}: {problem!r}; expected JSON lines with hash_ids and "
                    "input_length, as in Mooncake's traces"
                ) from problem
    if not any(request.whole for request in found):
        raise InputError(f"{path}: no request has a whole block of {BLOCK_TOKENS} tokens")
    return found


def multi_round(users: int, rounds: int, blocks: int) -> list[Request]:
    """Return a generated chat: each round repeats the user's history and adds ``blocks``."""
    history: list[list[int]] = [[0] for _ in range(users)]  # one block that all have in common
    ids, found = iter(range(1, 1 << 31)), list[Request]()
    for _ in range(rounds):
        for one in history:
            one += [next(ids) for _ in range(blocks)]
            found.append(Request(tuple(one), len(one) * BLOCK_TOKENS))
    return found


def replay(root: Path, requests: Sequence[Request], show: Callable[[str], None]) -> Replayed:
    """Send requests through a store below ``root``: look up, load what is there, save the rest.

    The payload of a block is its id, which is compared when it is loaded.

    Raises:
        MeasurementError: a load brought another block, or less than the lookup found.
    """
    layout = KVLayout(1, 1, 1, 0, "U8", BLOCK_TOKENS)
    store = create_store(root, Identity(model="replay", chunk_tokens=BLOCK_TOKENS), layout)
    one, many = staged_ids(layout, 1), staged_ids(layout, _ROOM)
    loader, file_nbytes = store.loader(many[1].memory), store.codec(layout.full).file_nbytes
    seen: set[int] = set()
    hit = ideal = written = 0
    lookups, start = [], time.perf_counter()
    for number, request in enumerate(requests):
        prompt = _prompt(request)
        began = time.perf_counter()
        chain = KeyChain(token_ids(prompt), BLOCK_TOKENS)
        found = store.lookup(chain)
        lookups.append(time.perf_counter() - began)
        for at in range(0, found, _ROOM):
            keys = [chain[n] for n in range(at, min(found, at + _ROOM))]
            expect("a load after a hit", holds=loader.load(keys).chunks == len(keys))
            ids = request.whole[at : at + len(keys)]
            expect("the loaded blocks", holds=(many[0][: len(keys)] == ids).all())
        for place in range(found, len(chain)):
            one[0][0] = request.whole[place]
            written += store.save(chain[place], one[1].memory)
        hit, ideal = hit + found, ideal + _leading(seen, request.whole)
        seen.update(request.whole)
        show(f"request {number + 1} of {len(requests)}")
    blocks = sum(len(request.whole) for request in requests)
    p50, p90, p99 = (percentile(lookups, at) * 1e3 for at in (50, 90, 99))
    return Replayed(
        requests=len(requests), tokens=sum(request.tokens for request in requests), blocks=blocks,
        hit_blocks=hit, ideal_blocks=ideal, written_blocks=written,
        written_nbytes=written * file_nbytes, loaded_nbytes=hit * file_nbytes,
        lookup_ms=(p50, p90, p99), seconds=time.perf_counter() - start,
    )  # fmt: skip


def staged_ids(layout: KVLayout, chunks: int) -> tuple[npt.NDArray[np.uint64], Slab]:
    """Return the first word of each chunk's place, ``[chunks]``, and the slab they lie in."""
    slab = Slab(layout, layout.full, chunks)
    return slab.bytes.view(np.uint64).reshape(chunks, -1)[:, 0], slab


def _prompt(request: Request) -> np.ndarray[tuple[int, ...], np.dtype[np.uint32]]:
    """Return synthetic tokens: block id times 512 and up, in 32 bits."""
    first = np.array(request.blocks, dtype=np.uint32)[:, None] * np.uint32(BLOCK_TOKENS)
    tokens = first + np.arange(BLOCK_TOKENS, dtype=np.uint32)
    return tokens.reshape(-1)[: request.tokens]


def lru(requests: Sequence[Request], capacity: int) -> float:
    """Return the block hit ratio of LRU with room for ``capacity`` blocks, tails touched first."""
    held: OrderedDict[int, None] = OrderedDict()
    hit = total = 0
    for request in requests:
        hit += _leading(held, request.whole)
        total += len(request.whole)
        for block in reversed(request.whole):
            held[block] = None
            held.move_to_end(block)
        while len(held) > capacity:
            held.popitem(last=False)
    return hit / total


def _leading(held: Container[int], blocks: Iterable[int]) -> int:
    """Count the blocks before the first one that is not held."""
    count = 0
    for block in blocks:
        if block not in held:
            break
        count += 1
    return count


def belady(reference: Path, requests: int) -> dict[int, dict[str, float]]:
    """Return published hit ratios by capacity and policy, where they are of as many requests."""
    described = json.loads(reference.read_text(encoding="utf-8"))
    found: dict[int, dict[str, float]] = {}
    for trace in described.values():
        if trace.get("block_tokens") != BLOCK_TOKENS or trace.get("requests", requests) != requests:
            continue
        for policy, capacities in trace["policies"].items():
            for capacity, values in capacities.items():
                found.setdefault(int(capacity), {})[policy] = values["prefix_hit"]
    return found


def _requests(bench: Bench) -> tuple[str, list[Request]]:
    trace = bench.settings.trace
    if trace is None or bench.tiny:
        size = (4, 3, 2) if bench.tiny else (40, 8, 4)
        return "generated chat", multi_round(*size)
    return f"first {_SUITE_REQUESTS} requests of {trace.name}", read(trace, _SUITE_REQUESTS)


def hits(bench: Bench) -> Iterator[Row]:
    """C7: hit blocks over those of a perfect unbounded store; and whole prompts as one key."""
    name, requests = _requests(bench)
    root = bench.place("replay")
    done = replay(root, requests, lambda _line: None)
    bench.drop(root)
    ratio = done.hit_blocks / max(1, done.ideal_blocks)
    case = f"{name}: {done.token_hit_ratio:.1%} of {done.tokens:,} tokens hit"
    yield Row(
        "C7", case, "hit blocks", "ideal", ratio, ratio, ratio, ms=done.lookup_ms[0], target=0.97
    )


def bounded(bench: Bench) -> Iterator[Row]:
    """C11: needs a store with a byte budget."""
    bench.skip("C11", "hit ratio under a byte budget", "the store of this version has no budget")
    return
    yield
