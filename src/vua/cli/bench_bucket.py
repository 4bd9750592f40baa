"""What a bucket can do, and from which prompt length on it pays to load from there.

A load from a bucket takes as many round trips as its objects and a lookup's questions need, many of
them at once. So whole loads are measured, of several lengths, by the requests that VUA sends.
"""

from __future__ import annotations

import math
import os
import secrets
import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import Any, Final

import numpy as np

from vua.capacity.scan import Show
from vua.cli.bench_path import LENGTHS, Demand
from vua.storage.bucket import Bucket
from vua.storage.bucket_path import BucketPath
from vua.storage.object import ObjectStorage

__all__ = ["BucketLoad", "load_seconds", "probe_bucket", "worth_from_tokens"]

_CHUNK_TOKENS: Final = 64
_COUNTS: Final = (1, 4, 16, 32, 64, 128)
_USUAL_NBYTES: Final = 2 << 20
"""Of an object, where no model says how much a chunk has."""
_OBJECTS: Final = 16
"""That are written; longer loads read them several times."""
_PROBES: Final = ObjectStorage.capabilities.probes


@dataclass(frozen=True, slots=True)
class BucketLoad:
    """How long it takes to get so many chunks."""

    chunks: int
    seconds: float
    """Median of the rounds."""
    low: float
    high: float
    gb_s: float
    """1e9 bytes per second."""


def probe_bucket(
    url: str, demand: Demand | None, show: Show, *, tiny: bool = False
) -> dict[str, Any]:
    """Measure a place in a bucket and return plain values for JSON. Leaves nothing behind.

    Writes 16 objects as large as a chunk of the model. Raises ConfigError; StorageError where the
    bucket does not answer, or may not be written to.
    """
    place = BucketPath(Bucket.at(url))
    bucket, rounds = place.bucket, 2 if tiny else 5
    nbytes = _USUAL_NBYTES if demand is None else _CHUNK_TOKENS * demand.token_nbytes
    counts = _COUNTS[:3] if tiny else _COUNTS
    folder = f".bench-{secrets.token_hex(6)}"
    keys = [(place / folder / str(number)).key for number in range(_OBJECTS)]
    try:
        show("writes", 0, 2 + len(counts))
        data = os.urandom(nbytes)
        for key in keys:
            bucket.put(key, data)
        show("lookups", 1, 2 + len(counts))
        heads = [_took(bucket.head, keys[:_PROBES], small=True) for _ in range(3 * rounds)]
        loads = []
        for step, count in enumerate(counts, 2):
            show(f"loads of {count} chunks", step, 2 + len(counts))
            asked = [keys[at % _OBJECTS] for at in range(count)]
            _took(lambda key: _get(bucket, key, nbytes), asked)  # opens the connections
            took = [_took(lambda key: _get(bucket, key, nbytes), asked) for _ in range(rounds)]
            low, middle, high = np.percentile(took, (25, 50, 75)).tolist()
            loads.append(BucketLoad(count, middle, low, high, count * nbytes / middle / 1e9))
    finally:
        with suppress(OSError):
            bucket.delete(keys)
    round_s = statistics.median(heads)
    return {
        "version": 1,
        "directory": url,
        "chunk_nbytes": nbytes,
        "lookup_round_s": round_s,
        "load_times": [asdict(load) for load in loads],
        "worth_loading": None if demand is None else _worth(demand, round_s, loads),
    }


def _get(bucket: Bucket, key: str, nbytes: int) -> None:
    with bucket.in_flight(nbytes):
        bucket.get(key)


def _took(ask: Callable[[str], object], keys: Sequence[str], *, small: bool = False) -> float:
    """Return the seconds of requests that are sent at once, as far as VUA does. Raises OSError."""
    problems: list[OSError] = []

    def guarded(key: str) -> None:
        try:
            ask(key)
        except OSError as problem:
            problems.append(problem)

    start = time.perf_counter()
    Bucket.each(guarded, keys, small=small)
    took = time.perf_counter() - start
    if problems:
        raise problems[0]
    return took


def load_seconds(chunks: int, round_s: float, loads: Sequence[BucketLoad]) -> float:
    """Return how long a hit of so many chunks takes: its lookup, and the load.

    Args:
        chunks: from 1 on.
        round_s: seconds of one round of a lookup's questions.
        loads: measured, by rising length; lengths between two of them lie on a line between them,
            and longer ones go on with the bandwidth of the longest.
    """
    rounds = max(1, math.ceil(math.log(chunks, _PROBES)))
    last = loads[-1]
    if chunks > last.chunks:
        body_s = last.seconds * chunks / last.chunks
    else:
        counts, seconds = [one.chunks for one in loads], [one.seconds for one in loads]
        body_s = float(np.interp(chunks, counts, seconds))
    return rounds * round_s + body_s


def worth_from_tokens(
    demand: Demand, round_s: float, loads: Sequence[BucketLoad], most: int = LENGTHS[-1]
) -> int | None:
    """Return from how many tokens on loading is faster than computing, up to ``most``.

    A multiple of a chunk's tokens, which are what is stored; None where computing wins even there.
    """
    slower = 0
    for chunks in range(most // _CHUNK_TOKENS, 0, -1):
        compute_s = chunks * _CHUNK_TOKENS / demand.prefill_tokens_s
        if load_seconds(chunks, round_s, loads) >= compute_s:
            slower = chunks
            break
    return None if slower == most // _CHUNK_TOKENS else (slower + 1) * _CHUNK_TOKENS


def _worth(demand: Demand, round_s: float, loads: Sequence[BucketLoad]) -> dict[str, Any]:
    return {
        "model": asdict(demand),
        "break_even_gb_s": demand.token_nbytes * demand.prefill_tokens_s / 1e9,
        "worth_from_tokens": worth_from_tokens(demand, round_s, loads),
        "by_length": {
            str(length): {
                "compute_s": length / demand.prefill_tokens_s,
                "load_s": load_seconds(length // _CHUNK_TOKENS, round_s, loads),
            }
            for length in LENGTHS
        },
    }
