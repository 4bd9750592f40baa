"""What the copy between VUA's buffers and SGLang's host memory costs, of a whole load.

`python benchmarks/sglang_copies.py`: loads chunks from a directory (in the page cache) into host
pools of SGLang's forms, for the shapes of a rank with one KV head, of a model with eight, and of
MLA. The first and the last have pages that are the same bytes as chunks in `page_first_direct`, so
reads in place would be possible there. Prints medians of interleaved rounds.
"""

from __future__ import annotations

import json
import statistics
import sys
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from sglang_case import transfers_of
from vua.format.identity import Identity
from vua.format.keys import KeyChain, token_ids
from vua.format.layout import KVLayout
from vua.sglang.transfers import HostPages
from vua.store.namespace import Namespace

PAGE, PAGES, ROUNDS = 64, 24, 9
SHAPES = {
    "one head of 128, 32 layers": KVLayout(32, 1, 128, 128, "BF16", PAGE),
    "eight heads of 128, 32 layers": KVLayout(32, 8, 128, 128, "BF16", PAGE),
    "MLA of 576, 61 layers": KVLayout(61, 1, 576, 0, "BF16", PAGE),
}


class TimedPages(HostPages):
    """Notes for how long chunks are copied into the pool."""

    seconds = 0.0

    def scatter(self, *arguments: Any) -> None:
        """Copy."""
        start = time.perf_counter()
        super().scatter(*arguments)
        self.seconds += time.perf_counter() - start


def pool(layout: KVLayout) -> Any:
    """A host pool in `page_first_direct`, as SGLang's."""
    rows = (layout.layers, PAGE, layout.kv_heads, layout.k_dim)
    arrays = [torch.zeros(PAGES, *rows, dtype=torch.bfloat16) for _ in range(2)]
    return SimpleNamespace(
        layout="page_first_direct",
        page_size=PAGE,
        page_num=PAGES,
        kv_buffer=arrays[0],
        k_buffer=arrays[0],
        v_buffer=arrays[1],
    )


def main() -> None:
    """Print JSON: milliseconds of a load, and of the copy in it."""
    keys, slots = KeyChain(token_ids(range(PAGES * PAGE)), PAGE), torch.arange(PAGES * PAGE)
    with tempfile.TemporaryDirectory(prefix="vua-bench-") as root:
        made = {}
        for name, layout in SHAPES.items():
            namespace = Namespace.create(
                Path(root), Identity(model=name, chunk_tokens=PAGE), [layout]
            )
            pages = TimedPages(pool(layout), latent=not layout.v_dim)
            moves = transfers_of(Path(root), namespace, layout.full, pages)
            moves.save(keys.first(PAGES), slots)
            made[name] = (moves, pages, namespace)
        found: dict[str, list[tuple[float, float]]] = {name: [] for name in SHAPES}
        for _ in range(ROUNDS + 1):
            for name, (moves, pages, _) in made.items():
                pages.seconds, start = 0.0, time.perf_counter()
                if moves.load(keys.first(PAGES), slots) != PAGES:
                    sys.exit(f"{name}: not loaded")
                found[name].append((time.perf_counter() - start, pages.seconds))
        for moves, _, namespace in made.values():
            moves.close()
            namespace.close()
    report = {}
    for name, rounds in found.items():
        nbytes = PAGES * SHAPES[name].full.payload_nbytes(SHAPES[name])
        load, copy = (statistics.median(each) for each in zip(*rounds[1:], strict=True))
        report[name] = {
            "mib": nbytes >> 20,
            "load_ms": round(1000 * load, 2),
            "copy_ms": round(1000 * copy, 2),
            "copy_share": round(statistics.median(c / w for w, c in rounds[1:]), 3),
            "copy_gb_s": round(nbytes / copy / 1e9, 1),
        }
    sys.stdout.write(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
