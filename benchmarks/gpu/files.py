"""G5 to G7: between blocks and files."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from itertools import count
from pathlib import Path

import numpy as np
import safetensors.torch
import torch
from harness import Arms, Bench, PosixMover, expect, medians, once

from vua.device.gds import CuFileMover, DirectReader, Gds
from vua.device.paged import PagedCache, gather, slots_of
from vua.device.staging import Staging
from vua.format.identity import Identity
from vua.format.keys import KeyChain, token_ids
from vua.format.layout import KVLayout
from vua.storage.base import WRITTEN
from vua.store.namespace import Namespace
from vua.store.store import Loader, Store
from vua.store.writer import EntryWriter


def stored(bench: Bench, chunks: int) -> tuple[Store, KVLayout, list, PagedCache, torch.Tensor]:
    """A store with a prompt of some 64-token chunks, and the cache that they came from."""
    layout = bench.layout(64)
    identity = Identity(model=f"bench {bench.big}", kv_dtype="BF16", chunk_tokens=64)
    store = Namespace.create(bench.directory, identity, [layout]).stores[0]
    chain = KeyChain(token_ids(list(range(64 * chunks))), 64)
    keys = chain.first(chunks)
    paged = bench.cache(layout, 8 * chunks)
    slots = slots_of(torch.randperm(8 * chunks)[: 4 * chunks].tolist(), 16, 0, 64 * chunks)
    return store, layout, keys, paged, slots.view(chunks, 64)


class Loading:
    """G5's arms: the same chunks from files to the GPU in several ways."""

    def __init__(self, bench: Bench, chunks: int) -> None:
        """Store the chunks, once as VUA does and once as torch does."""
        self.bench, self.chunks = bench, chunks
        self.store, self.layout, self.keys, self.paged, self.slots = stored(bench, chunks)
        self.payload = self.layout.full.payload_nbytes(self.layout)
        self.staging = Staging([self.paged], self.layout, self.layout.full, chunks=2, limit=2)
        for at, key in enumerate(self.keys):
            staged = self.staging.take()
            self.staging.save([staged], [self.slots[at : at + 1]]).wait()
            EntryWriter(self.store, staged.memory).save([key])
            self.staging.give_back(staged)
        root, shard = self.store.storage.directory, f"{self.layout.full.name}.safetensors"
        self.paths = [Path(root, key.name[:2], key.name, shard) for key in self.keys]
        self.copies = [bench.directory / f"{n}.pt" for n in range(chunks)]
        for copy in self.copies:
            torch.save(torch.zeros(self.payload, dtype=torch.uint8), copy)
        self.host = bench.host(self.payload)
        self.far = torch.empty(self.payload, dtype=torch.uint8, device=bench.device)
        self.loaders: dict[object, Loader] = {}
        device = bench.device
        self.gds = Gds(
            "auto", lambda: CuFileMover(device) if bench.big else PosixMover(), root, device
        )
        codec = self.store.codec(self.layout.full)
        self.direct_reader = DirectReader(self.gds, codec, self.store.storage)
        if self.gds.mover is not None:
            module = Path("/proc/driver/nvidia-fs").exists()
            print(f"    by {self.gds.mover.name}; nvidia-fs: {module} (False: compatibility mode)")
        else:
            print(f"    no GPUDirect Storage: {self.gds.why}")

    def direct(self) -> None:
        """Read two chunks at a time into device memory, verify them there, scatter."""
        staging = self.staging
        buffers = [staging.take(), staging.take()]
        for at in range(0, self.chunks, 2):
            staged = buffers[at // 2 % 2]
            staged.fence.wait()
            with staging.aside():
                found = self.direct_reader.read(self.keys[at : at + 2], staged.device_bytes)
            expect("direct read", holds=found == (2, False))
            staging.load(staged, [self.slots[at : at + 2]], there=True)
        for staged in buffers:
            staging.give_back(staged)

    def by_mover(self) -> None:
        """Read the payloads by the mover alone, unverified."""
        mover = self.gds.mover
        for path in self.paths:
            with path.open("rb") as stream:
                handle = mover.open(stream.fileno())
                got = mover.read(handle, self.far, 0, self.payload, 4096)
                mover.close(handle)
            expect("mover", holds=got == self.payload)

    def pipelined(self) -> None:
        """Read the next two chunks while the last two travel: what an adapter does."""
        staging = self.staging
        buffers = [staging.take(), staging.take()]
        for at in range(0, self.chunks, 2):
            staged = buffers[at // 2 % 2]
            staged.fence.wait()
            memory = staged.memory
            loader = self.loaders.setdefault(staged, Loader(self.store, memory))
            expect("load", holds=loader.load(self.keys[at : at + 2]).chunks == 2)
            staging.load(staged, [self.slots[at : at + 2]])
        for staged in buffers:
            staging.give_back(staged)

    def raw(self) -> None:
        """Read the payloads into one pinned buffer, unverified."""
        view = memoryview(self.host.numpy())
        for path in self.paths:
            fd = os.open(path, os.O_RDONLY)
            expect("raw read", holds=os.preadv(fd, [view], 4096) == self.payload)
            os.close(fd)

    def over_pcie(self) -> None:
        """Copy as many bytes from pinned memory."""
        for _ in self.paths:
            self.far.copy_(self.host, non_blocking=True)

    def arms(self) -> Arms:
        """All ways, the limits first."""
        device = str(self.bench.device)
        direct: Arms = {"GDS, verified, to blocks": self.direct, "GDS read alone": self.by_mover}
        return {
            "preadv": self.raw,
            "PCIe": self.over_pcie,
            "VUA, verified, to blocks": self.pipelined,
            **(direct if self.gds.mover is not None else {}),
            "safetensors.load_file": lambda: [
                safetensors.torch.load_file(p, device) for p in self.paths
            ],
            "torch.load": lambda: [
                torch.load(p, map_location=device, weights_only=True) for p in self.copies
            ],
            "np.fromfile, pin, copy": lambda: [pinned_copy(p, self.bench) for p in self.paths],
        }

    def check(self, load: Callable[[], None]) -> None:
        """What is loaded into wiped blocks is what was stored from them."""
        shape = (self.chunks, self.layout.kv_heads, self.layout.layers, 64, self.layout.k_dim)
        first, wiped, again = (self.bench.random(2, *shape) for _ in range(3))
        gather(self.paged, self.slots, *first)
        for page in (page for array in self.paged.arrays for page in array):
            page.zero_()
        gather(self.paged, self.slots, *wiped)
        load()
        self.bench.sync()
        gather(self.paged, self.slots, *again)
        bits = [t.view(torch.int16) for t in (first, wiped, again)]
        expect("loaded bytes", holds=torch.equal(bits[0], bits[2]))
        expect("negative control", holds=not torch.equal(bits[0], bits[1]))


def load_files(bench: Bench) -> None:
    """G5: from files into blocks."""
    loading = Loading(bench, 64 if bench.big else 4)
    arms = loading.arms()
    for temperature in ("warm", "cold"):
        found: dict[str, list[float]] = {name: [] for name in arms}
        for _ in range(max(3, bench.rounds // 4)):
            for name, work in arms.items():
                if temperature == "cold":
                    drop_from_page_cache([*loading.paths, *loading.copies])
                else:
                    work()
                found[name].append(once(bench, work))
        times = medians(found)
        limit = {"slower of preadv, PCIe": max(times["preadv"], times["PCIe"])}
        case = f"{loading.chunks} files of {loading.payload >> 10} KiB, {temperature}"
        bench.report("G5", case, limit | times, loading.chunks * loading.payload)
    loading.check(loading.pipelined)
    if loading.gds.mover is not None:
        loading.check(loading.direct)
    loading.gds.close()
    loading.staging.close()


def pinned_copy(path: Path, bench: Bench) -> torch.Tensor:
    """The way without a library: read, pin, copy."""
    data = torch.from_numpy(np.fromfile(path, dtype=np.uint8))
    return (data.pin_memory() if bench.big else data).to(bench.device, non_blocking=True)


def drop_from_page_cache(paths: list[Path]) -> None:
    """Write files to disk and ask the kernel to forget them (a memory file system will not)."""
    for path in paths:
        fd = os.open(path, os.O_RDONLY)
        os.fsync(fd)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(fd)


def save_files(bench: Bench) -> None:
    """G6: what a save costs the engine's thread, and what it costs in all."""
    chunks = 16 if bench.big else 4
    store, layout, keys, paged, slots = stored(bench, chunks)
    payload = layout.full.payload_nbytes(layout)
    staging = Staging([paged], layout, layout.full, chunks=1, limit=chunks)
    host, far = bench.host(payload), torch.empty(payload, dtype=torch.uint8, device=bench.device)
    names = count()

    def queue() -> list:
        buffers = [staging.take() for _ in keys]
        staging.save(buffers, [slots])
        return buffers

    def finish(buffers: list, *, write: bool) -> None:
        other = [next(names), *range(64 * chunks - 1)]  # what is stored is not written again
        fresh = KeyChain(token_ids(other), 64).first(chunks)
        for staged, key in zip(buffers, fresh, strict=True):
            staged.fence.wait()
            if write:
                expect("save", holds=EntryWriter(store, staged.memory).save([key]) == [WRITTEN])
            staging.give_back(staged)

    def raw_write() -> None:
        for _ in keys:
            path = bench.directory / f"raw-{next(names)}"
            fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL)
            expect("raw write", holds=os.write(fd, memoryview(host.numpy())) == payload)
            os.close(fd)

    blocking, waiting = [], []
    for _ in range(bench.rounds):
        bench.sync()
        start = time.perf_counter()
        buffers = queue()
        blocking.append(time.perf_counter() - start)
        finish(buffers, write=False)
        waiting.append(time.perf_counter() - start)
    transfer = bench.time({"": lambda: [host.copy_(far, non_blocking=True) for _ in keys]})[""]
    found = medians({"save() returned": blocking, "buffers complete": waiting})
    case = f"{chunks} chunks of {payload >> 10} KiB"
    bench.report("G6", case, {"transfer alone": transfer, **found}, chunks * payload)
    arms: Arms = {"raw write": raw_write, "save, written": lambda: finish(queue(), write=True)}
    bench.report("G6", case, bench.time(arms, rounds=max(3, bench.rounds // 4)), chunks * payload)
    staging.close()


def fixed_cost(bench: Bench) -> None:
    """G7: one 64-token chunk."""
    store, layout, keys, paged, slots = stored(bench, 1)
    staging = Staging([paged], layout, layout.full, chunks=1, limit=1)
    staged = staging.take()
    staging.save([staged], [slots]).wait()
    EntryWriter(store, staged.memory).save([keys[0]])
    loader = Loader(store, staged.memory)
    small, far = bench.host(4096), torch.empty(4096, dtype=torch.uint8, device=bench.device)

    def from_file() -> None:
        expect("load", holds=loader.load(keys).chunks == 1)
        staging.load(staged, [slots]).wait()

    arms: Arms = {
        "memcpy of 4 KiB": lambda: far.copy_(small, non_blocking=True),
        "host memory to blocks": lambda: staging.load(staged, [slots]).wait(),
        "file to blocks": from_file,
    }
    payload = layout.full.payload_nbytes(layout)
    bench.report("G7", f"one chunk of {payload >> 10} KiB", bench.time(arms, 50), payload)
    staging.give_back(staged)
    staging.close()
