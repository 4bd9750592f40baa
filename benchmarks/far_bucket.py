"""The time to the first token of a hit in a bucket far away, beside a local disk and computing.

    python benchmarks/far_bucket.py [--delays 5,20,50,200] [--rounds N] [--json FILE]

A real vLLM on the CPU with SmolLM2-135M-Instruct (float32) speaks to a real SeaweedFS through a
proxy that holds back each answer for so many milliseconds. One engine stores prompts of several
lengths in a directory, which is copied into the bucket. An engine per delay, which knows nothing of
what is stored, loads one prompt that is not counted, to open connections, and then these. Before
that `benchmarks/speed.py` predicts from which prefix on loading wins; shown is the length from
which on it did.
"""

from __future__ import annotations

import argparse
import json
import math
import multiprocessing
import os
import random
import sys
import tempfile
from itertools import pairwise
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import median
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))

from buckets import seaweedfs, speaking_to
from engines import CHUNK, Engine, expect
from proxy import FaultyProxy
from real_model import NAME, real_model
from small_models import ENGINE_ENVIRONMENT
from speed import Demand, describe_machine, probe_bucket
from vua.capacity.spaces import silent
from vua.storage.bucket import Bucket
from vua.storage.location import BucketPath

LENGTHS = (64, 128, 256, 512, 1024, 2048)
"""Stored tokens of the prompts."""
RATE_OF = (64, 1024)
"""The prompts whose times give the model's prefill speed: what each request costs beside, with
loading or without, is the same in both."""
MORE = 8
"""Tokens of a prompt behind those that are stored."""
TOKEN_NBYTES = 30 * 3 * 64 * 2 * 4
"""Of K and V: layers, KV heads, dimensions, K and V, float32."""


def serve(pipe: Connection) -> None:
    """A process of its own: the server, and the proxy, whose delay is told from time to time."""
    server = seaweedfs()
    proxy = FaultyProxy(server.endpoint, lambda *_: "slow" if proxy.delay_s else "")
    proxy.delay_s = 0.0
    url = server.place()
    pipe.send((proxy.endpoint, url))
    while (job := pipe.recv()) is not None:
        if isinstance(job, Path):
            with speaking_to(proxy.endpoint):
                copy(job, BucketPath(Bucket.at(url)))
        else:
            proxy.delay_s = job
        pipe.send(job)
    proxy.close()
    server.close()


def copy(root: Path, place: BucketPath) -> None:
    """Copy a cache directory into a bucket, where it is one, too."""
    for path in filter(Path.is_file, root.rglob("*")):
        place.bucket.put((place / str(path.relative_to(root))).key, path.read_bytes())


def start(root: str) -> Engine:
    """Start an engine whose cache lies there."""
    engine = Engine("VUA", real_model(), root, max_model_len=LENGTHS[-1] + 256, cache_mib=512)
    engine.wait_until_ready()
    return engine


def times(engine: Engine, prompts: dict[int, list[list[int]]], mode: str) -> dict[int, float]:
    """Seconds to the first token by length, medians; mode "all" loads all that is stored."""
    found = {}
    for length, some in prompts.items():
        answers = [engine.ask([prompt], mode, forget=True) for prompt in some]
        wanted = length if mode == "all" else 0
        for answer in answers:
            expect(f"{mode}: cached tokens of {length}", [wanted], answer["cached"])
        found[length] = median(answer["first_token_s"] for answer in answers)
    return found


def predicted(url: str, tokens_s: float) -> dict[str, Any]:
    """What `benchmarks/speed.py` predicts."""
    return probe_bucket(url, Demand("", TOKEN_NBYTES, tokens_s), silent)


def measured(loaded: dict[int, float], computed: dict[int, float]) -> int | None:
    """Return from how many tokens on loading was faster: whole chunks, on the line between lengths.

    None where it was so from the shortest on, or not even with the longest.
    """
    gains = [(length, computed[length] - loaded[length]) for length in loaded]
    for (short, loss), (long, gain) in pairwise(gains):
        if loss < 0 <= gain:
            tokens = short + (long - short) * -loss / (gain - loss)
            return math.ceil(tokens / CHUNK) * CHUNK
    return None


def main() -> None:
    """Measure, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--delays", default="5,20,50,200", metavar="MS,MS")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write everything there")
    options = parser.parse_args()
    fork = multiprocessing.get_context("fork")  # before anything here has threads
    pipe, theirs = fork.Pipe()
    server = fork.Process(target=serve, args=(theirs,))
    server.start()
    endpoint, url = pipe.recv()
    try:
        with tempfile.TemporaryDirectory(prefix="vua-bench-") as root, speaking_to(endpoint):
            measure(pipe, url, root, options)
    finally:
        pipe.send(None)
        server.join()


def measure(pipe: Connection, url: str, root: str, options: argparse.Namespace) -> None:
    """Store prompts in both places, load them, and show what that took."""
    os.environ.update(ENGINE_ENVIRONMENT)
    import vllm.entrypoints.llm
    import vllm.v1.engine.core
    import vllm.v1.worker.cpu_worker  # noqa: F401 - once, for all engines

    chance = random.Random(1)
    prompts = {
        length: [chance.choices(range(10, 40_000), k=length + MORE) for _ in range(options.rounds)]
        for length in LENGTHS
    }
    first = chance.choices(range(10, 40_000), k=LENGTHS[0] + MORE)
    chunks = sum(len(some) * length // CHUNK for length, some in prompts.items())
    disk = start(root)
    for some in ([first], *prompts.values()):
        disk.ask(some, forget=True)
    disk.root = Path(root)
    disk.wait_until_stored(chunks + LENGTHS[0] // CHUNK)
    computed, local = times(disk, prompts, "alone"), times(disk, prompts, "all")
    disk.close()
    pipe.send(Path(root))
    pipe.recv()
    short, long = RATE_OF
    tokens_s = (long - short) / (computed[long] - computed[short])
    report: dict[str, Any] = {
        "version": 1, "machine": describe_machine(Path(root)), "model": NAME,
        "prefill_tokens_s": tokens_s, "computed_s": computed, "local_disk_s": local, "links": [],
    }  # fmt: skip
    show("", "lookup round", "predicted", "measured", *LENGTHS)
    show("computed", "", "", "", *(f"{one:.3f}" for one in computed.values()))
    show("local disk", "", "", "", *(f"{one:.3f}" for one in local.values()))
    for delay_ms in map(float, options.delays.split(",")):
        pipe.send(delay_ms / 1e3)
        pipe.recv()
        said = predicted(url + "-bench", tokens_s)
        engine = start(url)
        engine.ask([first], forget=True)
        loaded = times(engine, prompts, "all")
        engine.close()
        link = {
            "delay_ms": delay_ms, "loaded_s": loaded, "bench": said,
            "predicted_tokens": said["worth_loading"]["worth_from_tokens"],
            "measured_tokens": measured(loaded, computed),
        }  # fmt: skip
        report["links"].append(link)
        round_ms = f"{said['lookup_round_s'] * 1e3:.0f} ms"
        found = [str(link[f"{which}_tokens"]) for which in ("predicted", "measured")]
        row = (f"{one:.3f}" for one in loaded.values())
        show(f"bucket, {delay_ms:g} ms", round_ms, *found, *row)
        if options.json is not None:
            options.json.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")


def show(*cells: object) -> None:
    """Print a row."""
    print("".join(f"{cell!s:>14.12}" for cell in cells), flush=True)


if __name__ == "__main__":
    main()
