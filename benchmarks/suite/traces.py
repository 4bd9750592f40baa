"""C7, C11: a trace of requests through a store that holds all of its blocks, or a tenth."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from lab.policies import compare
from lab.replay import BLOCK_TOKENS, Request, block_file_nbytes, read, replay
from suite.context import Bench
from suite.measure import Row
from vua.capacity.spaces import silent

_SUITE_REQUESTS: Final = {"C7": 1000, "C11": 300}
"""Requests of a trace that the suite replays; evictions take their time."""
_INTERVAL_S: Final = 0.1
"""Between two requests of C11, more than one takes that stores many chunks. Eviction learns after
how long chunks are used again; unpaced, a run that stores more is slower and learns other times."""


def multi_round(users: int, rounds: int, blocks: int) -> list[Request]:
    """Return a generated chat: each round repeats the user's history and adds ``blocks``."""
    history: list[list[int]] = [[0] for _ in range(users)]  # one block that all have in common
    ids, found = iter(range(1, 1 << 31)), list[Request]()
    for _ in range(rounds):
        for one in history:
            one += [next(ids) for _ in range(blocks)]
            found.append(Request(tuple(one), len(one) * BLOCK_TOKENS))
    return found


def _requests(bench: Bench, number: str) -> tuple[str, list[Request]]:
    trace = bench.settings.trace
    if trace is None or bench.tiny:
        size = (4, 3, 2) if bench.tiny else (40, 8, 4)
        return "generated chat", multi_round(*size)
    count = _SUITE_REQUESTS[number]
    return f"first {count} requests of {trace.name}", read(trace, count)


def hits(bench: Bench) -> Iterator[Row]:
    """C7: hit blocks over those of a perfect unbounded store."""
    name, requests = _requests(bench, "C7")
    root = bench.place("replay")
    done = replay(root, requests, silent)
    bench.drop(root)
    ratio = done.hit_blocks / max(1, done.ideal_blocks)
    case = f"{name}: {done.token_hit_ratio:.1%} of {done.tokens:,} tokens hit"
    yield Row(
        "C7", case, "hit blocks", "ideal", ratio, ratio, ratio, ms=done.lookup_ms[0], target=0.97
    )


def bounded(bench: Bench) -> Iterator[Row]:
    """C11: with room for a tenth of the blocks, against LRU with as much room."""
    name, requests = _requests(bench, "C11")
    unique = len({block for request in requests for block in request.whole})
    room = max(8, unique // 10)
    root = bench.place("bounded")
    interval_s = 0.0 if bench.tiny else _INTERVAL_S
    done = replay(
        root, requests, silent, max_bytes=room * block_file_nbytes(), interval_s=interval_s
    )
    bench.drop(root)
    lru = next(one for one in compare(requests, [], [room]) if one.policy == "LRU")
    ratio = done.hit_ratio / max(1e-9, lru.hit_ratio)
    case = f"{name}: room for {room:,} of {unique:,} blocks, {done.hit_ratio:.1%} hit"
    yield Row("C11", case, "hit ratio", "LRU's", ratio, ratio, ratio, target=0.98)
