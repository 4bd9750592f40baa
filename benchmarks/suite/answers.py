"""C1 as users of the library see it: answers of `get_closest`, whose memory is used again."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import numpy as np
import torch

from speed import expect
from suite.context import Bench
from suite.measure import Arm, Row, measure
from suite.prompts import CASES, TINY
from vua.core import VUA, ClosestKV, VUAConfig


def answers(bench: Bench) -> Iterator[Row]:
    """Answers that are dropped before the next one, with their memory kept and without."""
    case = (TINY if bench.tiny else CASES)[-1]
    layout, root = case.layout, bench.place("answers")
    shape = (1, layout.kv_heads, case.chunks * layout.chunk_tokens, layout.k_dim)
    chance = np.random.default_rng(6)
    cache = [
        [torch.from_numpy(chance.random(shape, dtype=np.float32)).bfloat16() for _ in "kv"]
        for _ in range(layout.layers)
    ]
    tokens = torch.arange(shape[2])

    def open_store(kept: int) -> VUA:
        return VUA(VUAConfig(split_factor=layout.chunk_tokens, buffer_bytes=kept), root)

    with open_store(2 * case.nbytes) as keeping, open_store(0) as fresh:
        keeping.put(tokens, cache)
        expect("the answer", holds=_same(keeping.get_closest(tokens), cache))
        expect("control", holds=not _same(keeping.get_closest(tokens), cache[::-1]))

        def copy() -> None:
            for pair, target in zip(cache, room, strict=True):
                for source, place in zip(pair, target, strict=True):
                    place.copy_(source)

        room = [[torch.zeros_like(tensor) for tensor in pair] for pair in cache]
        arms = {
            "memcpy": Arm(copy),
            "answer": Arm(partial(keeping.get_closest, tokens)),
            "answer, nothing kept": Arm(partial(fresh.get_closest, tokens)),
        }
        timings = measure(arms, "memcpy", bench.rounds(7))
        row = partial(timings.row, "C1", f"{case.name}, get_closest", nbytes=case.nbytes)
        yield row("answer", "memcpy")
        yield row("answer", "answer, nothing kept")
        yield row("answer, nothing kept", "memcpy")
    bench.drop(root)


def _same(answer: ClosestKV, cache: list[list[torch.Tensor]]) -> bool:
    return len(answer.data) == len(cache) and all(
        torch.equal(found, stored)
        for pair, wanted in zip(answer.data, cache, strict=True)
        for found, stored in zip(pair, wanted, strict=True)
    )
