"""Writes generated traces for `dev.py replay`: what may meet a policy tried on one trace only.

    python benchmarks/mixtures.py DIRECTORY
    python3 dev.py replay DIRECTORY/agents.jsonl --simulated --policies all

Each is an hour of requests. `chat` is memoryless: whoever has asked goes on with the same chance,
however often he did before, so that the number of uses says nothing. `loop` asks for the same
documents in turn. `shift` changes every ten minutes which documents are popular. `scan` is asked
for once. `agents` share system prompts and grow long contexts, with short pauses; `agents_slow`
with long ones. `tools` are short tasks with popular templates.
"""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Iterator
from itertools import count
from pathlib import Path

HOUR_S = 3600.0
BLOCK_TOKENS = 512

Timed = tuple[float, list[int]]
"""When a request comes, and its blocks."""


class Traffic:
    """Makes requests; all block ids are of one trace."""

    def __init__(self, seed: int) -> None:
        """Begin with no block."""
        self.chance = random.Random(seed)
        self._ids = count(1)

    def new(self, low: int, high: int) -> list[int]:
        """Return as many new blocks as ``low`` to ``high``."""
        return [next(self._ids) for _ in range(self.chance.randint(low, high))]

    def arrivals(self, per_s: float) -> Iterator[float]:
        """Yield times at random."""
        time_s = self.chance.expovariate(per_s)
        while time_s < HOUR_S:
            yield time_s
            time_s += self.chance.expovariate(per_s)

    def chat(self, per_s: float, system: int = 0) -> Iterator[Timed]:
        """Conversations of some turns, with pauses of minutes."""
        common = self.new(system, system)
        for start_s in self.arrivals(per_s):
            time_s, blocks = start_s, common + self.new(4, 30)
            yield time_s, blocks
            while self.chance.random() < 0.6:
                time_s += self.chance.lognormvariate(0, 0.6) * self.chance.uniform(40, 200)
                blocks = blocks + self.new(1, 3)
                yield time_s, blocks

    def scan(self, per_s: float) -> Iterator[Timed]:
        """Prompts that nobody repeats."""
        for time_s in self.arrivals(per_s):
            yield time_s, self.new(10, 60)

    def loop(self, documents: int, every_s: float) -> Iterator[Timed]:
        """Documents of 30 blocks, one after the other, over and over."""
        texts = [self.new(30, 30) for _ in range(documents)]
        for number in range(int(HOUR_S / every_s)):
            yield number * every_s, texts[number % documents] + self.new(1, 1)

    def shift(self, documents: int, per_s: float) -> Iterator[Timed]:
        """Documents, few of them popular, and others every ten minutes."""
        texts, period = [self.new(5, 40) for _ in range(documents)], -1
        for time_s in self.arrivals(per_s):
            if int(time_s / 600) != period:
                period = int(time_s / 600)
                self.chance.shuffle(texts)
            at = min(documents, int(self.chance.paretovariate(0.6))) - 1
            yield time_s, texts[at] + self.new(1, 3)

    def agents(self, per_s: float, pause_s: float, grow: int) -> Iterator[Timed]:
        """Up to 60 calls that each extend a context; beyond 250 blocks it starts anew."""
        systems = [self.new(20, 20) for _ in range(3)]
        for start_s in self.arrivals(per_s):
            system, time_s = self.chance.choice(systems), start_s
            blocks = system + self.new(4, 20)
            for _ in range(self.chance.randint(5, 60)):
                yield time_s, blocks
                time_s += 2 + self.chance.expovariate(1 / pause_s)
                blocks = blocks + self.new(1, grow)
                if len(blocks) > 250:
                    blocks = system + self.new(4, 20)

    def tools(self, per_s: float) -> Iterator[Timed]:
        """A template, a task, a few calls within seconds."""
        templates = [self.new(4, 16) for _ in range(60)]
        for start_s in self.arrivals(per_s):
            at = min(60, int(self.chance.paretovariate(0.7))) - 1
            time_s, blocks = start_s, templates[at] + self.new(1, 12)
            for _ in range(1 + int(self.chance.expovariate(0.5))):
                yield time_s, blocks
                time_s += self.chance.lognormvariate(2, 1)
                blocks = blocks + self.new(1, 4)


def mixture(name: str, seed: int = 7) -> list[Timed]:
    """Return the requests of one trace in order."""
    it = Traffic(seed)
    parts = {
        "chat": lambda: [it.chat(1.2, 1)],
        "chat_scan": lambda: [it.chat(0.6, 1), it.scan(1.0)],
        "loop": lambda: [it.loop(300, 2)],
        "loop_chat": lambda: [it.loop(200, 4), it.chat(0.8)],
        "shift": lambda: [it.shift(2000, 2)],
        "shift_scan": lambda: [it.shift(2000, 1), it.scan(1.0)],
        "agents": lambda: [it.agents(0.12, 12, 5)],
        "agents_slow": lambda: [it.agents(0.12, 60, 10)],
        "tools": lambda: [it.tools(1.5)],
        "all": lambda: [
            it.agents(0.03, 12, 5), it.tools(0.5), it.chat(0.4), it.scan(0.2), it.shift(1000, 0.3),
        ],
    }  # fmt: skip
    timed = (one for part in parts[name]() for one in part)
    return sorted((one for one in timed if one[0] < HOUR_S), key=lambda one: one[0])


NAMES = (
    "chat", "chat_scan", "loop", "loop_chat", "shift", "shift_scan", "agents", "agents_slow",
    "tools", "all",
)  # fmt: skip


def main() -> None:
    """Write all of them."""
    directory = Path(sys.argv[1])
    directory.mkdir(parents=True, exist_ok=True)
    for name in NAMES:
        with (directory / f"{name}.jsonl").open("w", encoding="utf-8") as out:
            for time_s, blocks in mixture(name):
                one = {"timestamp": int(time_s * 1000), "hash_ids": blocks}
                one["input_length"] = len(blocks) * BLOCK_TOKENS
                out.write(json.dumps(one) + "\n")


if __name__ == "__main__":
    main()
