"""C4: rows between paged blocks and chunk buffers, against memcpy and torch's indexing.

All by one thread: torch's second one goes on spinning for some milliseconds, on the core that the
next arm's would need, and to wake a core takes as long as some of these copies.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from importlib.util import find_spec

from speed import expect
from suite.context import Bench
from suite.measure import Arm, Row, measure
from vua import native

_FORMS = (
    # axes, row elements, bytes of a row of one head: 2-byte elements
    ("LB2NHD", "NHD, K and V apart", 4, 128),
    ("LBHNC", "HND, K and V in one row", 8, 128),
    ("LBND", "MLA, one latent", 1, 576),
)


def moves(bench: Bench) -> Iterator[Row]:
    """C4: gather and scatter of 256 tokens a chunk on this machine's CPU."""
    if find_spec("torch") is None:
        bench.skip("C4", "gather and scatter", "torch is not installed")
        return
    for axes, name, heads, dim in _FORMS:
        for block in (16,) if bench.tiny else (16, 64):
            yield from _form(bench, axes, f"{name}, blocks of {block}", heads, dim, block)


def _form(bench: Bench, axes: str, name: str, heads: int, dim: int, block: int) -> Iterator[Row]:
    import torch

    from vua.device.paged import PagedCache, gather, scatter, slots_of

    layers, chunks, tokens = (2, 2, 64) if bench.tiny else (16, 8, 256)
    blocks = chunks * tokens // block * 2
    size = {"L": layers, "B": blocks, "2": 2, "N": block, "H": heads, "D": dim, "C": 2 * dim}
    latent = axes == "LBND"
    shape = [size[axis] for axis in axes]
    pool = torch.randint(-32768, 32767, shape, dtype=torch.int16)
    cache = PagedCache.of(pool, axes, k_dim=dim)
    table = torch.randperm(blocks, generator=torch.Generator().manual_seed(5))
    slots = slots_of(table[: blocks // 2].tolist(), block, 0, chunks * tokens).view(chunks, tokens)
    arrays = torch.zeros((1 if latent else 2, chunks, heads, layers, tokens, dim), dtype=pool.dtype)
    other = arrays.clone()
    flat = slots.reshape(-1)
    width = arrays.numel() // flat.numel()  # as many bytes, a token's side by side: torch's best
    rows = torch.zeros((blocks * block, width), dtype=pool.dtype)
    picked = torch.empty((flat.numel(), width), dtype=pool.dtype)
    arms = {
        "memcpy": Arm(partial(other.copy_, arrays)),
        "index_select": Arm(lambda: torch.index_select(rows, 0, flat, out=picked)),
        "gather": Arm(partial(gather, cache, slots, *arrays)),
        "scatter": Arm(partial(scatter, cache, slots, *arrays)),
    }
    gather(cache, slots, *arrays)
    kept = pool.clone()
    scattered = pool.zero_()
    scatter(cache, slots, *arrays)
    expect("control: emptied blocks", holds=not torch.equal(kept, scattered))
    gather(cache, slots, *other)
    expect("gathered after scatter", holds=torch.equal(arrays, other))
    theirs = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with native.crew.fixed(1):
            timings = measure(arms, "memcpy", bench.rounds(15))
    finally:
        torch.set_num_threads(theirs)
    nbytes = arrays.numel() * 2
    for arm in ("gather", "scatter"):
        yield timings.row("C4", name, arm, "memcpy", nbytes=nbytes, target=0.9)
        yield timings.row("C4", name, arm, "index_select", nbytes=nbytes)
    yield timings.row("C4", name, "index_select", "memcpy", nbytes=nbytes)
