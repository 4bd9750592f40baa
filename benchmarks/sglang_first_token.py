"""Time to the first token with SGLang: from VUA, from its own memory, from its `file` backend.

`VUA_SGLANG_PYTHON=~/.cache/vua/sglang-0.5.23/bin/python python benchmarks/sglang_first_token.py
[--rounds 6] [--chunks 16]`, after `dev.py sglang`, which makes that environment. One server with a
real model on the CPU. Each round has new prompts, one for each storage (none, VUA, `file`), in an
order that turns; each is computed ("miss"), then asked again ("own": from SGLang's radix cache),
then again with that cache flushed ("stored"). Prints medians, and medians of each round's ratios.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).resolve().parents[1] / "tests"))
from e2e.damage import CHUNK
from e2e.sglang_server import PYTHON, Server, extra_config
from real_model import real_model

NEW_TOKENS = 8
NONE, VUA, FILE = "none", "vua", "file"


def main() -> None:
    """Print JSON."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--chunks", type=int, default=16, help="of 64 tokens, in each prompt")
    arguments = parser.parse_args()
    if not PYTHON:
        parser.error("VUA_SGLANG_PYTHON does not name the Python of SGLang's environment")
    with tempfile.TemporaryDirectory(prefix="vua-bench-") as folder:
        ours = extra_config(Path(folder) / VUA)
        theirs = {"prefetch_threshold": CHUNK, "file_storage_path": str(Path(folder) / FILE)}
        server = Server(real_model(), backend="dynamic", extra=ours)
        try:
            extras = {NONE: "", VUA: ours, FILE: json.dumps(theirs)}
            rounds = [
                measure(server, extras, arguments.chunks, number)
                for number in range(-1, arguments.rounds)
            ][1:]  # the first one makes what is made once
        finally:
            server.close()
    sys.stdout.write(json.dumps(report(rounds, arguments.chunks), indent=1) + "\n")


def measure(
    server: Server, extras: dict[str, str], chunks: int, number: int
) -> dict[str, dict[str, float]]:
    """One round: seconds by storage and by what was asked."""
    names = list(extras)
    turned = names[number % len(names) :] + names[: number % len(names)]
    found = {}
    for at, name in enumerate(turned):
        prompt = random.Random(100 * number + at).choices(range(100, 40000), k=chunks * CHUNK + 8)
        use(server, name, extras[name])
        first = random.Random(-100 * number - at - 1000).choices(range(100, 40000), k=CHUNK + 8)
        for _ in range(2):  # what a storage makes when it is first used
            server.ask(first, new=1)
            server.forget()
        found[name] = {}
        for what in ("miss", "own", "stored")[: 2 if name == NONE else 3]:
            if what == "stored":
                server.forget()
            start = time.monotonic()
            answer = server.ask(prompt, new=NEW_TOKENS)
            found[name][f"{what}_whole"] = time.monotonic() - start
            found[name][what] = answer.first_s
            expected = {"miss": (0, 0), "own": (chunks, 0), "stored": (chunks, chunks)}[what]
            if (answer.cached, answer.stored) != tuple(CHUNK * each for each in expected):
                sys.exit(f"{name}, {what}: {answer}")
    return found


def use(server: Server, name: str, extra: str) -> None:
    """Have the server use a storage, and forget what it holds in its memory."""
    server.forget()
    if name == NONE:
        server.call("DELETE", "/hicache/storage-backend")
    else:
        server.attach("dynamic" if name == VUA else FILE, extra)


def report(rounds: list[dict[str, dict[str, float]]], chunks: int) -> dict[str, Any]:
    """Seconds until the first token, and of whole answers, with the ratios that count."""

    def over(one: tuple[str, str], other: tuple[str, str]) -> list[float]:
        return spread(each[one[0]][one[1]] / each[other[0]][other[1]] for each in rounds)

    return {
        "rounds": len(rounds),
        "tokens": chunks * CHUNK + 8,
        "seconds": {
            f"{what}, {name}": spread(each[name][what] for each in rounds)
            for name in rounds[0]
            for what in rounds[0][name]
        },
        "stored over own": over((VUA, "stored"), (VUA, "own")),
        "stored over miss": over((VUA, "stored"), (VUA, "miss")),
        "stored over stored by file": over((VUA, "stored"), (FILE, "stored")),
        "file: stored over own": over((FILE, "stored"), (FILE, "own")),
        "miss over miss without storage": over((VUA, "miss"), (NONE, "miss")),
        "file: miss over miss without storage": over((FILE, "miss"), (NONE, "miss")),
        "whole miss over whole miss without storage": over(
            (VUA, "miss_whole"), (NONE, "miss_whole")
        ),
    }


def spread(values: Iterable[float]) -> list[float]:
    """Median, least and greatest."""
    found = sorted(values)
    return [round(each, 4) for each in (statistics.median(found), found[0], found[-1])]


if __name__ == "__main__":
    main()
