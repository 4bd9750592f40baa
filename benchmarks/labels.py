"""Times what it costs that a put compares a stored chunk with what is given for it.

    python benchmarks/labels.py /mnt/disk/folder

Takes turns between a `VUA` with a label, which compares, and one with an identity of the same
namespace, which does not: puts of a prompt that is stored already (nothing is written), and puts of
one that is stored but for its last chunk (8 MiB is written). Prints median and minimum of each, and
their ratios. Uses a directory of its own in the one named, and removes it.
"""

from __future__ import annotations

import argparse
import shutil
import statistics
import tempfile
import time
from pathlib import Path

import torch

from vua import VUA, VUAConfig
from vua.format.identity import Identity
from vua.format.keys import KeyChain, token_ids

LAYERS, HEADS, DIM, CHUNK = 32, 8, 128, 64
NAME = "benchmark"
ARMS = ("compared", "not compared")


def caches(tokens: int) -> list[list[torch.Tensor]]:
    """Random K and V of this many tokens."""
    noise = torch.Generator().manual_seed(0)
    shape = (1, HEADS, tokens, DIM)
    return [[torch.randn(shape, generator=noise).bfloat16() for _ in "kv"] for _ in range(LAYERS)]


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("path", help="where to make a directory")
    parser.add_argument("--chunks", type=int, default=8, help="chunks of the prompt")
    parser.add_argument("--rounds", type=int, default=200, help="puts of each kind in each arm")
    args = parser.parse_args()
    length = args.chunks * CHUNK
    config = VUAConfig(split_factor=CHUNK, model=NAME)
    identity = Identity(model=NAME, chunk_tokens=CHUNK, name=NAME)
    cache, prompt = caches(length), torch.arange(length)
    with (
        tempfile.TemporaryDirectory(dir=args.path) as folder,
        VUA(config, folder) as compares,
        VUA(config, folder, identity=identity) as trusts,
    ):
        arms = dict(zip(ARMS, (compares, trusts), strict=True))
        compares.put(prompt, cache)
        times: dict[tuple[str, str], list[float]] = {}
        for turn in range(2 * args.rounds):
            for arm, vua in list(arms.items())[:: 1 - 2 * (turn % 2)]:
                tail, kind = prompt.clone(), "stored"
                if turn >= args.rounds:
                    tail[-CHUNK:] += 1000 * (2 * turn + ARMS.index(arm))
                    kind = "stored but for a chunk"
                start = time.perf_counter()
                written = vua.put(tail, cache)
                times.setdefault((kind, arm), []).append(time.perf_counter() - start)
                if written != (turn >= args.rounds):
                    msg = f"{written} chunks were written"
                    raise RuntimeError(msg)
                if written:
                    name = KeyChain(token_ids(tail.tolist()), CHUNK)[args.chunks - 1].name
                    shutil.rmtree(Path(folder, identity.namespace, name[:2], name))
    for kind in ("stored", "stored but for a chunk"):
        for name, of in (("median", statistics.median), ("minimum", min)):
            with_it, without = (of(times[kind, arm]) * 1e3 for arm in ARMS)
            print(
                f"{kind}, {name}: {with_it:.3f} ms compared, {without:.3f} ms not, "
                f"ratio {with_it / without:.3f}"
            )


if __name__ == "__main__":
    main()
