"""What deciding whether to load or to compute costs, over knowing the faster way for every prompt.

    python benchmarks/load_policy.py [--seeds 4]

A clock that the simulation moves, prompts of 128 to 2,496 tokens of which all is stored, and
storages so many times as slow as computing, with noise of 25 %. Prints a Markdown table: seconds
over those of the faster way, the smallest and the largest of the seeds.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Callable, Sequence

from vua.connector.cache_spec import Group, Model
from vua.connector.config import ConnectorConfig
from vua.connector.load_policy import LoadPolicy
from vua.format.identity import Identity
from vua.format.layout import KVLayout

CHUNK = 64
COMPUTE_TOKEN_S = 1e-3
FIXED_S = 2e-3
"""What a load takes however short it is."""
PROMPTS = 300
NOISE = 0.25
IDLE_S = 0.5
IN_TURN = (0.05, 8.0, 0.2, 30.0, 0.1, 3.0)

Ratio = Callable[[random.Random, int], float]
CASES: dict[str, Ratio] = {
    "the six in turn": lambda _, at: IN_TURN[at // PROMPTS],
    "always 0.1": lambda *_: 0.1,
    "always 10": lambda *_: 10.0,
    "always 1.2": lambda *_: 1.2,
    "0.1, 0.8 or 2, by chance per prompt": lambda chance, _: chance.choice((0.1, 0.8, 2.0)),
}


class Clock:
    """Seconds that only the simulation adds."""

    def __init__(self) -> None:
        """Begin somewhere."""
        self.now_s = 1000.0

    def __call__(self) -> float:
        """What time it is."""
        return self.now_s


def run(ratio: Ratio, seed: int) -> tuple[float, float, float]:
    """Return the time of always loading, of always computing and of deciding, over the best."""
    layout = KVLayout(1, 1, 8, 8, "U8", CHUNK)
    group = Group(layout, (0,), ((layout.full,),), (0,))
    model = Model(Identity(model="m", chunk_tokens=CHUNK), (group,), (32,))
    clock, chance = Clock(), random.Random(seed)
    policy = LoadPolicy(model, ConnectorConfig(shared_storage_path="/kv"), clock=clock)
    loads_s = computes_s = best_s = took_s = 0.0
    for at in range(len(IN_TURN) * PROMPTS):
        tokens = CHUNK * chance.randint(2, 39)
        compute_s = tokens * COMPUTE_TOKEN_S * chance.uniform(1 - NOISE, 1 + NOISE)
        slow = ratio(chance, at) * chance.uniform(1 - NOISE, 1 + NOISE)
        load_s = FIXED_S + slow * tokens * COMPUTE_TOKEN_S
        policy.step_begins()
        loaded = policy.decide(0, tokens).tokens
        spent_s = 0.0
        if loaded:
            policy.ordered("r", 0, loaded)
            part_s = FIXED_S + (load_s - FIXED_S) * loaded / tokens
            clock.now_s += part_s
            policy.measured({"r": part_s})
            policy.ended("r")
            spent_s += part_s
        if left := tokens - loaded:
            policy.prefill.scheduled(left, left * (loaded + left / 2))
            part_s = compute_s * left / tokens
            clock.now_s += part_s
            policy.prefill.ended()
            spent_s += part_s
        clock.now_s += IDLE_S
        loads_s, computes_s, took_s = loads_s + load_s, computes_s + compute_s, took_s + spent_s
        best_s += min(load_s, compute_s)
    return loads_s / best_s, computes_s / best_s, took_s / best_s


def spread(values: Sequence[float]) -> str:
    """The smallest and the largest."""
    low, high = f"{min(values):.2f}", f"{max(values):.2f}"
    return low if low == high else f"{low} to {high}"


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--seeds", type=int, default=4)
    seeds = range(parser.parse_args().seeds)
    print("| | always load | always compute | decided |")
    print("|---|---|---|---|")
    for name, ratio in CASES.items():
        columns = zip(*(run(ratio, seed) for seed in seeds), strict=True)
        print(f"| {name} | {' | '.join(map(spread, columns))} |")


if __name__ == "__main__":
    main()
