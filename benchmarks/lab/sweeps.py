"""What directories of very many chunks find, whose victims come from a sweep, of an exact order.

    PYTHONPATH=src:benchmarks python -m lab.sweeps "conversation=PATH,512,5" ...

measures each trace (a name, a file, the tokens of its blocks, how many tenants): each tenant asks
for blocks of his own, from a random time on, so that a trace of a few thousand blocks needs more
room than the 65,536 chunks from which on a directory does not wait for the exact order. The rooms
hold 65,536 blocks and more. The sweeps are those of `vua.capacity.evictor: Sweep`, over simulated
fan-out directories; around them stands what `vua.capacity.evictor` does with what they find:

Victims are those of the sample until the sweep has ended beside the writers, and then the exact
lowest.

Writes docs/measurements/sweeps.json, and the table of docs/performance.md; without a trace the
table alone.
"""

from __future__ import annotations

import datetime as dt
import json
import random
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from lab.replay import Request, read
from lab.simulation import LRU, Dense, Outcome, Past, Policy, SimulatedStore, leading
from vua.capacity.evictor import HIGHEST, Candidate, Sweep
from vua.capacity.lru import MTIME_STEP_NS, Rank, by_mtime
from vua.capacity.spaces import Column
from vua.native import ChunkNames

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "docs" / "measurements" / "sweeps.json"
PAGE = ROOT / "docs" / "performance.md"
REGION = re.compile(r"(<!-- sweeps -->\n).*?(<!-- /sweeps -->)", re.DOTALL)
LEAST_ROOM: Final = (1 << 16) + 1
PARTS: Final = (10,)
"""Rooms, in percent of the distinct blocks: those that hold so many, and the first one."""
AHEAD: Final = 1 / 50
"""Share of the room for which the exact policy looks for victims at a time."""
RANKED_S: Final = 60.0
"""After so long ranks are made anew, and victims of a sweep to its end are too old: a directory has
twenty times what either took."""
STEP_BLOCKS: Final = 2
"""Blocks that go while a sweep beside them looks at a folder: 3,000 in a second, of 65,537."""
_FANS: Final = 256
_MIX: Final = 0x9E3779B97F4A7C15
_END_NS: Final = 1 << 62


def tenants(requests: Sequence[Request], many: int, seed: int = 0) -> list[Request]:
    """Return the requests of so many tenants, who begin at random times within the trace's."""
    chance, longest_s = random.Random(seed), requests[-1].time_s
    most = 1 + max(block for request in requests for block in request.blocks)
    found = []
    for tenant in range(many):
        late_s, first = chance.uniform(0, longest_s) if tenant else 0.0, tenant * most
        for one in requests:
            blocks = tuple(first + block for block in one.blocks)
            found.append(Request(blocks, one.tokens, one.time_s + late_s, one.block_tokens))
    return sorted(found, key=lambda one: one.time_s)


class Fanned:
    """Held blocks in fan-out directories, with the mtimes that a directory gives them."""

    name = "simulated"

    def __init__(self) -> None:
        """Begin without any."""
        self.mtimes_ns: dict[int, int] = {}
        self._fans: list[dict[int, None]] = [{} for _ in range(_FANS)]
        self.looks = 0
        """Blocks that were looked at."""

    @staticmethod
    def _fan(block: int) -> int:
        return ((block + 1) * _MIX >> 40) % _FANS

    def set(self, block: int, mtime_ns: int) -> None:
        """Store a block, or note that it is used."""
        if block not in self.mtimes_ns:
            self._fans[self._fan(block)][block] = None
        self.mtimes_ns[block] = mtime_ns

    def drop(self, block: int) -> None:
        """Leave a block out."""
        del self.mtimes_ns[block]
        del self._fans[self._fan(block)][block]

    def fans(self) -> list[str]:
        """Return their names."""
        return [str(number) for number in range(_FANS)]

    def columns(self, fan: str) -> tuple[ChunkNames, Column]:
        """Return a folder's blocks, named by their numbers in 16 digits and zeros, and mtimes."""
        blocks = [*self._fans[int(fan)]]
        self.looks += len(blocks)
        mtimes_ns = np.array([self.mtimes_ns[one] for one in blocks], dtype=np.int64)
        return ChunkNames.of(f"{one:016x}{0:048}" for one in blocks), mtimes_ns


class Learned:
    """Ranks by what was learned, made anew now and then, for all directories of one trace."""

    def __init__(self, past: Past) -> None:
        """Learn nothing by itself: ``past`` does."""
        self.past, self.made_ns, self.rank = past, 0, by_mtime(_END_NS)

    def at(self, now_ns: int) -> int:
        """Make ranks where those that there are, are old; return when they were made."""
        if now_ns - self.made_ns < RANKED_S * 1e9 or not self.past.density.is_learned:
            return self.made_ns
        density, made_ns = self.past.density, now_ns
        worths = density.worths(now_ns / 1e9)
        known, rows = density.in_order()
        ranks, unknown = (worths[rows] * 1e17).astype(np.int64), by_mtime(_END_NS)

        def rank(chunks: ChunkNames, mtimes_ns: Column) -> Column:
            names = chunks.numbers()
            at = np.minimum(np.searchsorted(known, names), len(known) - 1)
            old = np.where(known[at] == names, ranks[at], unknown(chunks, mtimes_ns))
            found: npt.NDArray[np.int64] = np.where(mtimes_ns >= made_ns, HIGHEST - 1, old)
            return found

        self.made_ns, self.rank = made_ns, rank
        return made_ns


class Swept(Policy):
    """Evicts what sweeps find, in their order, as `vua.capacity.evictor` does."""

    def __init__(
        self,
        capacity: int,
        learned: Learned | None = None,
        *,
        victims: int = 1 << 16,
    ) -> None:
        """Rank by what was ``learned``, else as LRU; a sweep finds ``victims`` at least."""
        super().__init__(capacity)
        self._learned, self._wanted = learned, victims
        self.folders = Fanned()
        self._pool: list[Candidate] = []
        self._now_ns = self._ranked_ns = 0
        self._sampled = 0  # victims of samples, since the last sweep to its end
        self.gone = 0
        """Blocks that were evicted."""

    def use(self, blocks: Sequence[int], hits: int, now_ns: int) -> int:  # noqa: ARG002
        """Note a request."""
        self._now_ns = now_ns
        if self._learned is not None:
            self._learned.past.note(blocks, now_ns)
        for place, block in enumerate(blocks):
            self.folders.set(block, now_ns - place * MTIME_STEP_NS)
        return len(blocks)

    def drop(self, block: int) -> None:
        """Note that a block is not held any more."""
        self.folders.drop(block)
        self.gone += 1

    def victim(self) -> int:
        """Return the block that is to go."""
        self._rank_anew()
        while True:
            while self._pool:
                one = self._pool.pop()
                block = int(one.chunk[:16], 16)
                if self.folders.mtimes_ns.get(block) == one.mtime_ns:
                    self._sampled += 1
                    return block
            sweep = Sweep([self.folders], self._wanted, self._rank)
            if self._sampled >= _FANS * STEP_BLOCKS:  # it has ended beside them
                sweep.drain(lambda: None)
                self._sampled = 0
            self._pool = [Candidate.of(one) for one in sweep.victims()[::-1]]

    @property
    def _rank(self) -> Rank:
        return by_mtime(_END_NS) if self._learned is None else self._learned.rank

    def _rank_anew(self) -> None:
        if self._learned is not None:
            made_ns = self._learned.at(self._now_ns)
            if made_ns != self._ranked_ns:
                self._ranked_ns, self._pool = made_ns, []  # they are too old


class Directory(SimulatedStore):
    """Evicts what its policy says, whether something follows it or not, as a directory does."""

    def use(self, blocks: Sequence[int], now_ns: int) -> None:
        """Find a request's leading blocks, store the rest, evict."""
        hits = leading(self.held, blocks)
        keep = self.policy.use(blocks, hits, now_ns)
        new = [block for block in blocks[hits:keep] if block not in self.held]
        self.held.update(dict.fromkeys(new, -1))
        while len(self.held) > self.policy.capacity:
            block = self.policy.victim()
            self.policy.drop(block)
            del self.held[block]
        self.hit_blocks += hits
        self.written_blocks += len(new)


def swept(requests: Sequence[Request], policy: Swept) -> Outcome:
    """Return what a directory finds and writes whose victims are found so."""
    store, asked, now_ns = Directory(policy), 0, 0
    for request in requests:
        now_ns = max(int(request.time_s * 1e9), now_ns + 10**7)
        asked += len(request.whole)
        store.use(request.whole, now_ns)
    return Outcome(asked, store.hit_blocks, store.written_blocks)


def compared(requests: Sequence[Request], room: int, victims: int = 1 << 16) -> dict[str, Any]:
    """Return the hits of exact policies and of sweeps, and blocks looked at for one that went."""
    past = Past()
    learned = Learned(past)
    exact = {"LRU": LRU(room), "hit density": Dense(room, past, AHEAD)}
    sweeps = {
        "LRU": Swept(room, victims=victims),
        "hit density": Swept(room, learned, victims=victims),
    }
    stores = {name: SimulatedStore(policy) for name, policy in exact.items()}
    directories = {name: Directory(policy) for name, policy in sweeps.items()}
    asked = now_ns = 0
    for request in requests:
        now_ns = max(int(request.time_s * 1e9), now_ns + 10**7)
        asked += len(request.whole)
        for store in (*stores.values(), *directories.values()):
            store.use(request.whole, now_ns)
    hits = {name: store.hit_blocks for name, store in stores.items()}
    return {
        "blocks": room,
        "exact": {name: many / asked for name, many in hits.items()},
        "sweeps": [
            {
                "policy": policy,
                "hit_ratio": directories[policy].hit_blocks / asked,
                "of_exact": directories[policy].hit_blocks / max(1, hits[policy]),
                "looks": one.folders.looks / max(1, one.gone),
            }
            for policy, one in sweeps.items()
        ],
    }


def measured(name: str, path: Path, block_tokens: int, many: int) -> dict[str, Any]:
    """Return what all find over a trace."""
    requests = tenants(read(path, block_tokens=block_tokens), many)
    distinct = len({block for request in requests for block in request.whole})
    sizes = [round(distinct * part / 100) for part in PARTS]
    sizes = sorted({max(LEAST_ROOM, size) for size in sizes})
    return {
        "name": name,
        "trace": path.name,
        "tenants": many,
        "requests": len(requests),
        "distinct": distinct,
        "rooms": [compared(requests, size) for size in sizes if size < distinct],
        "date": dt.datetime.now(dt.timezone.utc).date().isoformat(),
    }


def table(traces: Sequence[dict[str, Any]]) -> str:
    """Return the table, Markdown."""
    found = [(trace, room) for trace in traces for room in trace["rooms"]]
    policies = list(dict.fromkeys(name for _, room in found for name in room["exact"]))
    heads = [f"{name}: {what}" for name in policies for what in ("exact", "by sweeps")]
    lines = [["trace, tenants, room", *heads], ["---", *["--:"] * len(heads)]]
    for trace, room in found:
        part = f"{100 * room['blocks'] / trace['distinct']:.0f} %, {room['blocks']:,}"
        cells = [f"{trace['name']}, {trace['tenants']:,}, {part}"]
        for policy in policies:
            cells.append(f"{room['exact'][policy]:.4f}")
            cells += [f"{one['of_exact']:.4f} ({one['looks']:.0f})"
                      for one in room["sweeps"] if one["policy"] == policy]  # fmt: skip
        lines.append(cells)
    return "".join(f"| {' | '.join(cells)} |\n" for cells in lines)


def lowest(traces: Sequence[dict[str, Any]]) -> float:
    """Return the least share of an exact policy's hits."""
    return min(
        one["of_exact"] for trace in traces for room in trace["rooms"] for one in room["sweeps"]
    )


def text(traces: Sequence[dict[str, Any]]) -> str:
    """Return what stands between the markers."""
    dates = sorted({trace["date"] for trace in traces})
    least = f"The least share of an exact policy's hits is {lowest(traces):.4f}."
    return f"Measured on {' and '.join(dates)}. {least}\n"


def main() -> None:
    """Measure the traces that are named, and write the table."""
    there = json.loads(RESULTS.read_text("utf-8"))["traces"] if RESULTS.exists() else []
    for word in sys.argv[1:]:
        name, _, rest = word.partition("=")
        path, size, many = rest.rsplit(",", 2)
        one = measured(name, Path(path), int(size), int(many))
        print(table([one]), flush=True)
        there = [other for other in there if other["name"] != name] + [one]
        RESULTS.write_text(json.dumps({"version": 1, "traces": there}, indent=1) + "\n", "utf-8")
    page = PAGE.read_text("utf-8")
    made, found = REGION.subn(lambda region: region[1] + text(there) + region[2], page)
    if found != 1:
        sys.exit(f"{PAGE}: expected <!-- sweeps --> and <!-- /sweeps --> once, found {found}")
    PAGE.write_text(made, encoding="utf-8")


if __name__ == "__main__":
    main()
