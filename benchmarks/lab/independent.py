"""The same traces by simulators that others have written, in their own packages.

libCacheSim finds LRU's hits, block by block: a request touches its stored blocks, then its blocks
from the last to the first, as VUA's directories have it. kvcache-simulator, of Mooncake's authors,
has an optimal policy over a tree of prefixes. It counts a trace's second half, and says nothing
where the store is not full by then. (Its LRU keeps a prompt's last block longest: another policy
than ours.) Neither is a dependency: `dev.py shares` installs them into a folder of their own.
"""

from __future__ import annotations

import json
from collections.abc import Sequence

from lab.policies import clairvoyant
from lab.simulation import LRU, Past, TraceRequest, leading, simulate

DIGITS = 4


class Held:
    """What libCacheSim's LRU holds."""

    def __init__(self, blocks: int) -> None:
        """Make an empty one for so many blocks."""
        import libcachesim

        self.cache, self.request = libcachesim.LRU(blocks, hashpower=18), libcachesim.Request
        self.number = 0

    def _asked(self, block: int) -> object:
        self.number += 1
        return self.request(obj_size=1, obj_id=block, clock_time=self.number)

    def __contains__(self, block: object) -> bool:
        """Whether a block is held; is no use of it."""
        assert isinstance(block, int)
        return self.cache.find(self._asked(block), update_cache=False) is not None

    def use(self, block: int) -> None:
        """Use a block, or store it."""
        self.cache.get(self._asked(block))


def libcachesim_lru(requests: Sequence[TraceRequest], blocks: int) -> float:
    """Return the ratio of hits that libCacheSim's LRU gives."""
    held, hits, asked = Held(blocks), 0, 0
    for request in requests:
        found = leading(held, request.whole)
        hits, asked = hits + found, asked + len(request.whole)
        for block in (*reversed(request.whole[:found]), *reversed(request.whole)):
            held.use(block)
    return hits / asked


def kvcache_simulator_optimal(
    requests: Sequence[TraceRequest], block_tokens: int, sizes: Sequence[int]
) -> list[float | None]:
    """Return the ratio of hits of its optimal policy in the second half, for sizes in blocks.

    None: the store was not full before it.
    """
    from kvcache_sim.plan import build_execution_plan
    from kvcache_sim.policies import simulate_policy
    from kvcache_sim.trace import parse_trace_lines

    lines = [
        json.dumps({"block_size": block_tokens, "hash_ids": list(request.whole),
                    "input_length": len(request.whole) * block_tokens})
        for request in requests
    ]  # fmt: skip
    plan = build_execution_plan(parse_trace_lines(lines))
    done = [simulate_policy(plan, "optimal", size) for size in sizes]
    return [None if "underfilled" in one.measurementMode else one.hitRate for one in done]


def compared(
    requests: Sequence[TraceRequest], block_tokens: int, sizes: Sequence[int]
) -> list[dict[str, object]]:
    """Return, by size, our ratios of hits beside theirs: [ours, theirs] each."""
    lru = simulate(requests, [LRU(size) for size in sizes])
    there = [request for request in requests if request.whole]  # as kvcache-simulator counts them
    make = clairvoyant(there)
    belady = simulate(there, [make(size, Past()) for size in sizes], len(there) // 2)
    theirs = kvcache_simulator_optimal(there, block_tokens, sizes)
    rows: list[dict[str, object]] = []
    for at, size in enumerate(sizes):
        row: dict[str, object] = {"blocks": size}
        row["LRU, libCacheSim"] = [lru[at].hit_ratio, libcachesim_lru(requests, size)]
        if (best := theirs[at]) is not None:
            row["Belady, second half, kvcache-simulator"] = [belady[at].hit_ratio, best]
        rows.append(row)
    return rows
