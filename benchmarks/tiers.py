"""What a place behind a directory costs: hits in the directory, and loads that are written back.

``python benchmarks/tiers.py`` starts a SeaweedFS; with a URL it uses that (the server's endpoint
and credentials in the environment). The arms of each comparison take turns.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import shutil
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))

from buckets import seaweedfs, speaking_to
from speed import describe_machine
from vua import VUA, VUAConfig

CONFIG = VUAConfig(split_factor=64, model="bench", max_bytes=64 << 30)
LAYERS, HEADS, DIM = 32, 8, 128
CHUNK_NBYTES = 8 << 20  # of 64 tokens
HITS = 10
"""Hits in the directory that are measured together: one takes milliseconds."""


def prompt(number: int, chunks: int) -> torch.Tensor:
    """Return the tokens of one of many prompts without a common prefix."""
    return torch.arange(64 * chunks) + 1_000_000 * number


def seconds(vua: VUA, tokens: torch.Tensor) -> float:
    """Load a prompt, all of which has to be there."""
    began_s = time.perf_counter()
    found = vua.get_closest(tokens)
    took_s = time.perf_counter() - began_s
    if found.num_tokens != len(tokens):
        raise RuntimeError(f"{found.num_tokens} tokens of {len(tokens)} were found")
    return took_s


def wait_until(true: Callable[[], bool]) -> None:
    """Wait for what happens in the background."""
    while not true():
        time.sleep(0.02)


def settle(vua: VUA) -> None:
    """Wait until nothing travels any more."""
    travel = (vua._writing or vua._reading).travel
    wait_until(lambda: not travel.waiting and not travel.waiting_nbytes)


def near_hits(root: Path, url: str, chunks: int, rounds: int) -> dict[str, object]:
    """Compare hits in a directory with and without a bucket behind it."""
    tokens, arms = prompt(0, chunks), {}
    with contextlib.ExitStack() as stack:
        for arm, place in (
            ("alone", [str(root / "near")]),
            ("with a bucket behind", [str(root / "near"), url]),
        ):
            arms[arm] = stack.enter_context(VUA(CONFIG, place if len(place) > 1 else place[0]))
        shape = (1, HEADS, 64 * chunks, DIM)
        kv = [[torch.randn(shape).bfloat16() for _ in "KV"] for _ in range(LAYERS)]
        arms["with a bucket behind"].put(tokens, kv)
        settle(arms["with a bucket behind"])
        times: dict[str, list[float]] = {arm: [] for arm in arms}
        for turn in range(rounds + 2):  # two to warm up
            for arm in list(arms) if turn % 2 else list(arms)[::-1]:
                times[arm].append(sum(seconds(arms[arm], tokens) for _ in range(HITS)))
    nbytes = HITS * chunks * CHUNK_NBYTES
    return compared("near hit", {arm: one[2:] for arm, one in times.items()}, nbytes)


def written_back(root: Path, url: str, chunks: int, prompts: int, rounds: int) -> dict[str, object]:
    """Compare loads from behind that are written back with loads that are not."""
    shape = (1, HEADS, 64 * chunks, DIM)
    kv = [[torch.randn(shape).bfloat16() for _ in "KV"] for _ in range(LAYERS)]
    with VUA(CONFIG, url) as vua:
        for number in range(1, prompts + 1):
            vua.put(prompt(number, chunks), kv)
    del kv
    times: dict[str, list[float]] = {"not written back": [], "written back": []}
    brought = 0
    for turn in range(rounds):
        for arm in list(times) if turn % 2 else list(times)[::-1]:
            near = root / f"back-{turn}-{arm[:3]}"
            with VUA(CONFIG, [str(near), url]) as vua:
                vua.get_closest(prompt(0, 1))  # opens it
                tiered = vua._reading.storage
                if arm == "not written back":
                    tiered.travels = None
                took_s = sum(seconds(vua, prompt(n, chunks)) for n in range(1, prompts + 1))
                times[arm].append(took_s)
                if arm == "written back":
                    settle(vua)
                    brought += vua._reading.travel.counts["brought"]
            shutil.rmtree(near)
    nbytes = prompts * chunks * CHUNK_NBYTES
    report = compared("load from behind", times, nbytes)
    report["written_back_share"] = brought / (rounds * prompts * chunks)
    print(f"  {report['written_back_share']:.0%} of the chunks were written back", flush=True)
    return report


def compared(what: str, times: dict[str, list[float]], nbytes: int) -> dict[str, object]:
    """Print what the second arm costs beside the first, and return it for JSON.

    Rounds are compared pair by pair, since a machine's speed drifts: the median of the ratios.
    """
    (one, before), (other, after) = times.items()
    ratio = median(b / a for a, b in zip(before, after, strict=True))
    rates = {arm: nbytes / median(took) / 1e9 for arm, took in times.items()}
    print(
        f"{what}: {one} {rates[one]:.2f} GB/s, {other} {rates[other]:.2f} GB/s; "
        f"{100 * (ratio - 1):+.1f} % time (median of {len(before)} pairs)",
        flush=True,
    )
    return {"nbytes": nbytes, "seconds": times, "gb_s": rates, "time_ratio": ratio}


def main() -> None:
    """Print both comparisons, and write them down where that is asked for."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("url", nargs="?")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--chunks", type=int, default=8)
    parser.add_argument("--prompts", type=int, default=8)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all times there")
    options = parser.parse_args()
    with contextlib.ExitStack() as stack:
        root = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="vua-bench-")))
        url = options.url
        if url is None:
            stack.enter_context(speaking_to(seaweedfs().endpoint))
            url = seaweedfs().place()
        report = {
            "version": 1,
            "machine": describe_machine(root),
            "chunk_nbytes": CHUNK_NBYTES,
            "near_hit": near_hits(root, f"{url}/hits", options.chunks, 3 * options.rounds),
            "load_from_behind": written_back(
                root, f"{url}/back", options.chunks, options.prompts, options.rounds
            ),
        }
    if options.json is not None:
        options.json.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
