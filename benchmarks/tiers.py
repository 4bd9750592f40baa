"""What a place behind a directory costs: hits in the directory, and loads that are written back.

``python benchmarks/tiers.py`` starts a SeaweedFS; with a URL it uses that (the server's endpoint
and credentials in the environment). The arms of each comparison take turns.
"""

from __future__ import annotations

import argparse
import contextlib
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
from vua import VUA, VUAConfig

CONFIG = VUAConfig(split_factor=64, model="bench", max_bytes=64 << 30)
LAYERS, HEADS, DIM = 32, 8, 128  # 8 MiB in a chunk of 64 tokens


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
    wait_until(lambda: not travel.waiting and not travel._back.waiting_nbytes)


def near_hits(root: Path, url: str, chunks: int, rounds: int) -> None:
    """Compare hits in a directory with and without a bucket behind it."""
    tokens, arms = prompt(0, chunks), {}
    with contextlib.ExitStack() as stack:
        for arm, place in (("alone", [str(root / "near")]), ("tiered", [str(root / "near"), url])):
            arms[arm] = stack.enter_context(VUA(CONFIG, place if len(place) > 1 else place[0]))
        shape = (1, HEADS, 64 * chunks, DIM)
        kv = [[torch.randn(shape).bfloat16() for _ in "KV"] for _ in range(LAYERS)]
        arms["tiered"].put(tokens, kv)
        settle(arms["tiered"])
        times: dict[str, list[float]] = {arm: [] for arm in arms}
        for turn in range(rounds):
            for arm in list(arms) if turn % 2 else list(arms)[::-1]:
                times[arm].append(seconds(arms[arm], tokens))
        alone, tiered = (median(times[arm][2:]) for arm in ("alone", "tiered"))
        gb = chunks * (8 << 20) / 1e9
        print(
            f"near hit: alone {gb / alone:.2f} GB/s, with a bucket behind {gb / tiered:.2f} GB/s,"
        )
        print(
            f"  {100 * (tiered / alone - 1):+.1f} % time (median of {rounds - 2} each)", flush=True
        )


def written_back(root: Path, url: str, chunks: int, prompts: int, rounds: int) -> None:
    """Compare loads from behind that are written back with loads that are not."""
    shape = (1, HEADS, 64 * chunks, DIM)
    kv = [[torch.randn(shape).bfloat16() for _ in "KV"] for _ in range(LAYERS)]
    with VUA(CONFIG, url) as vua:
        for number in range(1, prompts + 1):
            vua.put(prompt(number, chunks), kv)
    del kv
    times: dict[str, list[float]] = {"off": [], "on": []}
    brought = 0
    for turn in range(rounds):
        for arm in ("off", "on") if turn % 2 else ("on", "off"):
            near = root / f"back-{turn}-{arm}"
            with VUA(CONFIG, [str(near), url]) as vua:
                vua.get_closest(prompt(0, 1))  # opens it
                tiered = vua._reading.storage
                if arm == "off":
                    tiered.travels = None
                took_s = sum(seconds(vua, prompt(n, chunks)) for n in range(1, prompts + 1))
                times[arm].append(took_s)
                if arm == "on":
                    settle(vua)
                    brought += vua._reading.travel.counts["brought"]
            shutil.rmtree(near)
    off, on = median(times["off"]), median(times["on"])
    gb = prompts * chunks * (8 << 20) / 1e9
    print(f"loads from behind: {gb / off:.2f} GB/s, written back meanwhile {gb / on:.2f} GB/s,")
    print(f"  {100 * (on / off - 1):+.1f} % time; {brought} of {rounds * prompts * chunks} brought")
    print(
        "  ", [f"{100 * (b / a - 1):+.0f}" for a, b in zip(times["off"], times["on"], strict=True)]
    )


def main() -> None:
    """Print both."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("url", nargs="?")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--chunks", type=int, default=8)
    parser.add_argument("--prompts", type=int, default=8)
    options = parser.parse_args()
    with contextlib.ExitStack() as stack:
        root = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="vua-bench-")))
        url = options.url
        if url is None:
            stack.enter_context(speaking_to(seaweedfs().endpoint))
            url = seaweedfs().place()
        near_hits(root, f"{url}/hits", options.chunks, 3 * options.rounds)
        written_back(root, f"{url}/back", options.chunks, options.prompts, options.rounds)


if __name__ == "__main__":
    main()
