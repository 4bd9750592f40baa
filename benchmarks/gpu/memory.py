"""G1 to G4 and G8: between blocks, device memory and pinned host memory."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import numpy as np
import torch
from harness import Arms, Bench, expect, medians

from vua.device.paged import Job, PagedCache, choose, plan, slots_of
from vua.device.paged import move as torch_move
from vua.device.staging import Staging
from vua.format.layout import KVLayout


def gather_scatter(bench: Bench) -> None:
    """G1: bytes read and written once each, like the copy that is the limit."""
    size = 1 << 30 if bench.big else 1 << 18
    cases = (
        ("[2, nb, 16, 8, 128] flash", "L2BNHD", (32, 2, 0, 16, 8, 128)),
        ("[nb, 2, 16, 8, 128] flashinfer", "LB2NHD", (32, 0, 2, 16, 8, 128)),
        ("[nb, 8, 16, 256] HND", "LBHNC", (32, 0, 8, 16, 256)),
        ("[nb, 16, 8, 256] NHD", "LBNHC", (32, 0, 16, 8, 256)),
        ("2 MiB blocks of all layers", "BLHNC", (0, 32, 8, 16, 256)),
        ("[nb, 64, 576] MLA", "LBND", (61, 0, 64, 576)),
        ("1 head of [4, 256]: 2 KiB blocks", "LBHNC", (32, 0, 1, 4, 256)),
        ("1 head of [2, 128]: 128-byte rows", "LBHNC", (32, 0, 1, 2, 128)),
    )
    for name, axes, shape in cases:
        row = int(np.prod([n for n in shape if n])) * 2
        blocks = max(2, size // row)
        paged = PagedCache.of(bench.random(*(n or 2 * blocks for n in shape)), axes)
        block = paged.layout.block_size
        tokens = blocks * block
        ids = torch.randperm(2 * blocks)[:blocks].tolist()
        slots = slots_of(ids, block, 0, tokens).to(bench.device)
        dims = paged.layout.dims
        head = (1, paged.layout.heads, paged.layers, tokens)
        chunks, other = ([bench.random(*head, dim) for dim in dims] for _ in range(2))
        job = plan(paged, slots, *chunks, *([] if len(dims) == 2 else [None]))
        theirs = replace(job, chunks=tuple(c.view(job.word) for c in other))
        move = choose(bench.device)
        flat = torch.cat([c.flatten() for c in chunks])
        copy = torch.empty_like(flat)
        arms: Arms = {
            "device copy": lambda a=copy, b=flat: a.copy_(b),
            "gather": lambda j=job, m=move: m(j, store=False),
            "scatter": lambda j=job, m=move: m(j, store=True),
            "gather, PyTorch": lambda j=theirs: torch_move(j, store=False),
            "scatter, PyTorch": lambda j=theirs: torch_move(j, store=True),
        }
        bench.report("G1", name, bench.time(arms), 2 * flat.nbytes)
        expect(name, holds=all(map(torch.equal, job.chunks, theirs.chunks)))
        del paged, job, theirs, chunks, other, flat, copy, arms


def one_chunk(bench: Bench) -> None:
    """G2: ways of one chunk between pinned memory and blocks or device memory."""
    layout = bench.layout(256)
    nbytes = layout.full.payload_nbytes(layout)
    host, far = bench.host(nbytes), torch.empty(nbytes, dtype=torch.uint8, device=bench.device)
    large = bench.host(1 << 30 if bench.big else nbytes)
    large_far = torch.empty_like(large, device=bench.device)
    pieces = list(zip(far.chunk(64), host.chunk(64), strict=True))
    paged = bench.cache(layout, 64)
    slots = slots_of(torch.randperm(64)[:16].tolist(), 16, 0, 256).view(1, 256)
    staging = Staging([paged], layout, layout.full, chunks=1, limit=1)
    staged = staging.take()
    for store, way in ((True, "to the GPU"), (False, "from the GPU")):
        pairs = [(a, b) if store else (b, a) for a, b in pieces]
        whole = (far, host) if store else (host, far)
        limit = (large_far, large) if store else (large, large_far)
        rate = bench.time({"limit": lambda p=limit: p[0].copy_(p[1], non_blocking=True)})["limit"]
        arms: Arms = {
            "one memcpy": lambda p=whole: p[0].copy_(p[1], non_blocking=True),
            "64 memcpys": lambda p=pairs: [a.copy_(b, non_blocking=True) for a, b in p],
            "staged, to or from blocks": (
                (lambda: staging.load(staged, [slots]).wait())
                if store
                else (lambda: staging.save([staged], [slots]).wait())
            ),
        }
        if "kernels" in choose(bench.device).__module__:
            job = mapped_job(paged, slots, host, layout, bench.device)
            arms["kernel on mapped memory"] = lambda j=job, s=store: choose(bench.device)(
                j, store=s
            )
        found = {"pinned memcpy's rate": rate * nbytes / large.nbytes, **bench.time(arms)}
        bench.report("G2", f"{nbytes >> 10} KiB {way}", found, nbytes)
    staging.give_back(staged)
    staging.close()


def mapped_job(
    paged: PagedCache,
    slots: torch.Tensor,
    host: torch.Tensor,
    layout: KVLayout,
    device: torch.device,
) -> Job:
    """A move whose chunk lies in pinned host memory, which the kernel reaches over PCIe."""
    shape = (1, layout.kv_heads, layout.layers, layout.chunk_tokens, layout.k_dim)
    arrays = [half.view(torch.bfloat16).view(shape) for half in host.chunk(2)]
    job = plan(paged, slots, *(torch.empty_like(a, device=device) for a in arrays))
    return replace(job, chunks=tuple(a.view(job.word) for a in arrays))


def both_ways(bench: Bench) -> None:
    """G3: a load and a save at once, each 256 tokens."""
    layout = bench.layout(256)
    nbytes = layout.full.payload_nbytes(layout)
    paged = bench.cache(layout, 64)
    order = torch.randperm(64).tolist()
    staging = Staging([paged], layout, layout.full, chunks=1, limit=2)
    one, two = staging.take(), staging.take()
    load, save = (slots_of(ids, 16, 0, 256).view(1, 256) for ids in (order[:16], order[16:32]))

    def together() -> None:
        fences = [staging.save([two], [save]), staging.load(one, [load])]
        for fence in fences:
            fence.wait()

    arms: Arms = {
        "load": lambda: staging.load(one, [load]).wait(),
        "save": lambda: staging.save([two], [save]).wait(),
        "both at once": together,
    }
    found = bench.time(arms)
    limit = {"sum of single ones": found["load"] + found["save"]}
    bench.report("G3", f"2 x {nbytes >> 10} KiB", limit | found, 2 * nbytes)
    for staged in (one, two):
        staging.give_back(staged)
    staging.close()


def beside_compute(bench: Bench) -> None:
    """G4: how much slower matrix products are while chunks arrive all the time."""
    layout = bench.layout(256)
    paged = bench.cache(layout, 64)
    slots = slots_of(torch.randperm(64)[:16].tolist(), 16, 0, 256).view(1, 256)
    a, b = (torch.randn(8192, 8192, device=bench.device, dtype=torch.bfloat16) for _ in range(2))
    out = torch.empty_like(a)
    staging = Staging([paged], layout, layout.full, chunks=1, limit=2)
    moved = [0]

    def compute() -> None:
        for _ in range(50):
            torch.mm(a, b, out=out)

    @contextmanager
    def loading() -> Iterator[None]:
        stop = threading.Event()

        def work() -> None:
            buffers = [staging.take(), staging.take()]
            while not stop.is_set():
                staging.load(buffers[0], [slots])
                buffers.reverse()
                buffers[0].fence.wait()
                moved[0] += 1
            for buffer in buffers:
                staging.give_back(buffer)

        thread = threading.Thread(target=work)
        thread.start()
        try:
            yield
        finally:
            stop.set()
            thread.join()

    def timed() -> float:
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        compute()
        end.record()
        end.synchronize()
        return float(start.elapsed_time(end)) / 1e3

    timed()
    alone, beside, again = [], [], []
    for _ in range(bench.rounds):
        alone.append(timed())
        with loading():
            beside.append(timed())
        again.append(timed())
    found = {"alone": alone, "while loading": beside, "alone again": again}
    flops = 50 * 2 * 8192**3  # printed as GB/s: read it as GFLOP/s
    bench.report("G4", "8192^3 bf16 products (GFLOP/s)", medians(found), flops)
    print(
        f"    loaded {moved[0]} chunks of {layout.full.payload_nbytes(layout) >> 20} MiB meanwhile"
    )
    staging.close()


def layer_by_layer(bench: Bench) -> None:
    """G8: groups of 4 layers are read from mapped memory while the groups before them compute."""
    layout = bench.layout(2048)
    paged = bench.cache(layout, 256)
    host = bench.host(layout.full.payload_nbytes(layout))
    slots = slots_of(torch.randperm(256)[:128].tolist(), 16, 0, 2048).view(1, 2048)
    move, side = choose(bench.device), torch.cuda.Stream(bench.device)
    shape = (1, layout.kv_heads, layout.layers, 2048, layout.k_dim)
    arrays = [half.view(torch.bfloat16).view(shape) for half in host.chunk(2)]
    jobs = []
    for low in range(0, layout.layers, 4):
        part = [a[:, :, low : low + 4] for a in arrays]
        some = PagedCache([array[low : low + 4] for array in paged.arrays], paged.layout)
        job = plan(some, slots, *(torch.empty_like(p, device=bench.device) for p in part))
        jobs.append(replace(job, chunks=tuple(p.view(job.word) for p in part)))
    a, b = (torch.randn(4096, 4096, device=bench.device, dtype=torch.bfloat16) for _ in range(2))
    out = torch.empty_like(a)

    def load(*, compute: bool) -> None:
        current = torch.cuda.current_stream(bench.device)
        side.wait_stream(current)
        for job in jobs:
            with torch.cuda.stream(side):
                move(job, store=True)
            current.wait_stream(side)
            if compute:
                group()

    def group() -> None:
        for _ in range(10):
            torch.mm(a, b, out=out)

    arms: Arms = {
        "load": lambda: load(compute=False),
        "compute": lambda: [group() for _ in jobs],
        "load under compute": lambda: load(compute=True),
    }
    found = bench.time(arms)
    limit = {"longer one": max(found["load"], found["compute"])}
    bench.report("G8", "2048 tokens in groups of 4 layers", limit | found, host.nbytes)
