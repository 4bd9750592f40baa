"""C3: saves against raw writes of the same bytes, and how long the caller is blocked."""

from __future__ import annotations

import contextlib
import itertools
import os
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from functools import partial
from importlib.util import find_spec
from pathlib import Path

import numpy as np

from speed import Buffer, RawFile, direct_works, expect, in_buffer
from suite.context import Bench
from suite.measure import Arm, Row, measure
from suite.prompts import (
    CASES,
    TINY,
    Case,
    Place,
    file_path,
    file_rows,
    keys_of,
    make,
    noise,
    staged,
)
from vua.capacity.limits import Limits
from vua.format.identity import Identity
from vua.format.keys import ChunkKey
from vua.storage.base import WRITTEN
from vua.store.namespace import Namespace
from vua.store.store import Store
from vua.store.writer import EntryWriter

_COPIES = "the copies alone"
_CALL_NBYTES = 1 << 20
"""What a raw write gives to one call: as fast as whole files, and steadier. For a larger call the
system takes larger pieces of memory, and those it may have given back to its host before."""
_WIDE = Limits(max_bytes=1 << 60, min_free_bytes=0)
"""So that nothing is counted meanwhile: nobody tells VUA of what is emptied here."""


class Saving:
    """The same chunks, written again and again under new names."""

    def __init__(self, root: Path, case: Case) -> None:
        """Make the memory that is written from."""
        self.root, self.case, source = root, case, noise(case)
        identity = Identity(model=case.name, chunk_tokens=case.layout.chunk_tokens)
        self.store: Store = Namespace.create(
            root / "vua", identity, [case.layout], bounds=_WIDE
        ).stores[0]
        self.home = f"{root}/vua/{self.store.namespace}"
        self.staged, self.paged = make("staged", case), make("paged", case)
        first = keys_of(case.layout, case.chunks)
        for place, key in enumerate(first):
            EntryWriter(self.store, source.map).save([key], place)
        for memory in (self.staged, self.paged):
            expect("load", holds=self.store.load(first, memory.map).chunks == case.chunks)
        self._savers = {m.place: EntryWriter(self.store, m.map) for m in (self.staged, self.paged)}
        rows, headers = file_rows(self.store, self.staged.map, case.chunks)
        owner = (self.staged, headers)
        self._files = [RawFile("", row, owner, _CALL_NBYTES) for row in rows]
        self._whole_files = [RawFile("", row, owner) for row in rows]
        self.seeds = itertools.count(100)
        self.keys: list[ChunkKey] = []
        self.written: list[str] = []
        (root / "raw").mkdir()
        for fan in range(256):  # as they are in a store of some thousand chunks
            Path(self.home, f"{fan:02x}").mkdir(0o700, exist_ok=True)

    def fresh(self) -> None:
        """Delete what was written last, leave recycled memory, and think of new names.

        A write into memory that the system has to find first takes several times as long; a write
        and delete of the same size before each timed one puts all arms into the same state.
        """
        saved = [file_path(self.home, self.store, key) for key in self.keys]
        for path in (*saved, *self.written):
            with contextlib.suppress(FileNotFoundError):
                os.truncate(path, 0)
        seed = next(self.seeds)
        self.keys = keys_of(self.case.layout, self.case.chunks, seed)
        self.written = [f"{self.root}/raw/{seed}-{n}" for n in range(self.case.chunks)]
        scratch = self.root / "scratch"
        scratch.write_bytes(bytes(self.case.nbytes))
        scratch.unlink()

    def raw(self, first: int = 0, step: int = 1) -> None:
        """Write the same bytes to as many files by pwritev and rename, checksums not made."""
        self._raw(self._files, first, step)

    def raw_whole(self) -> None:
        """The same by one call a file."""
        self._raw(self._whole_files)

    def _raw(self, files: Sequence[RawFile], first: int = 0, step: int = 1) -> None:
        for at in range(first, self.case.chunks, step):
            files[at].path = self.written[at]
            files[at].write()

    def raw_shared(self, pool: ThreadPoolExecutor) -> None:
        """The same by two threads."""
        list(pool.map(lambda first: self.raw(first, 2), range(2)))

    def save(self, place: Place) -> None:
        """Save every chunk from memory of one kind, with the saver kept, by two threads at most."""
        written = self._savers[place].save_all(self.keys)
        expect("save", holds=written == self.case.chunks)

    def save_each(self) -> None:
        """Save one chunk after the other."""
        for at, key in enumerate(self.keys):
            expect("save", holds=self._savers["staged"].save([key], at) == [WRITTEN])

    def save_alone(self) -> None:
        """Save every chunk as if it were the only one."""
        for at, key in enumerate(self.keys):
            expect(
                "save", holds=EntryWriter(self.store, self.staged.map).save([key], at) == [WRITTEN]
            )

    def check(self) -> None:
        """Raise unless what was saved from paged blocks loads as what was put there."""
        self.fresh()
        self.save("paged")
        loaded = staged(self.case.layout, self.case.chunks)
        expect("control", holds=not np.array_equal(loaded.words, self.staged.words))
        expect("load", holds=self.store.load(self.keys, loaded.map).chunks == self.case.chunks)
        expect("the saved bytes", holds=np.array_equal(loaded.words, self.staged.words))


def saves(bench: Bench) -> Iterator[Row]:
    """C3: from chunk buffers and from paged blocks; in the background; O_DIRECT; peers."""
    for case in TINY if bench.tiny else (CASES[0], CASES[2]):
        root = bench.place("saves")
        saving = Saving(root, case)
        saving.check()
        with ThreadPoolExecutor(2, thread_name_prefix="vua-bench-save") as pool:
            arms = _arms(bench, saving, pool)
            timings = measure(arms, "raw pwritev", bench.rounds(7))
        row = partial(timings.row, "C3", case.name, of="raw pwritev")
        for arm in arms:
            if arm == "save, caller blocked":
                yield row(arm=arm, target=0.05, better="lower")
                yield timings.row("C3", case.name, arm, _COPIES, better="lower")
            elif arm not in ("raw pwritev", _COPIES):
                target = 0.9 if arm in ("save", "save, from paged blocks") else None
                yield row(arm=arm, nbytes=case.nbytes, target=target)
        if bench.peers:
            bench.peers.rest()
        bench.drop(root)


def _arms(bench: Bench, saving: Saving, pool: ThreadPoolExecutor) -> dict[str, Arm]:
    case, fresh = saving.case, saving.fresh
    arms = {
        "raw pwritev": Arm(saving.raw, fresh),
        "save": Arm(partial(saving.save, "staged"), fresh),
        "save, from paged blocks": Arm(partial(saving.save, "paged"), fresh),
        "save, one thread": Arm(saving.save_each, fresh),
        "save, one thread, nothing kept": Arm(saving.save_alone, fresh),
        "raw pwritev, one call a file": Arm(saving.raw_whole, fresh),
        "raw pwritev, two threads": Arm(partial(saving.raw_shared, pool), fresh),
    }
    if find_spec("torch") is None:
        bench.skip("C3", "how long the caller is blocked", "torch is not installed")
    else:
        arms |= _blocked(saving, pool)
    why_not = direct_works(saving.root)
    if why_not is None:
        size = saving.store.codec(saving.store.layout.full).file_nbytes
        buffer = Buffer(case.chunks * (size + 4096))
        direct = in_buffer([""] * case.chunks, buffer, -(-size // 4096) * 4096)

        def write() -> None:
            for file, path in zip(direct, saving.written, strict=True):
                file.path = path
                file.write(os.O_DIRECT)

        arms["O_DIRECT"] = Arm(write, fresh)
    else:
        bench.skip("C3", "the O_DIRECT limit", why_not)
    if bench.peers:
        payload = case.nbytes // case.chunks
        bench.peers.prepare(nbytes=payload, chunks=case.chunks, layers=case.layout.layers)
        arms |= {
            f"peer: {arm}": Arm(partial(bench.peers.save, arm), fresh) for arm in bench.peers.arms
        }
    return arms


def _blocked(saving: Saving, pool: ThreadPoolExecutor) -> dict[str, Arm]:
    """How adapters save: blocks are copied into a buffer, which is written in the background.

    Times the copies and the hand-over alone, and waits for the writes afterwards; and the copies
    without any writes.
    """
    import torch

    from vua.device.paged import PagedCache, gather, slots_of

    layout, chunks = saving.case.layout, saving.case.chunks
    buffers = [staged(layout, 1) for _ in range(chunks)]
    savers = [EntryWriter(saving.store, buffer.map) for buffer in buffers]
    paged, size = saving.paged, saving.paged.map.segment_tokens
    words = torch.from_numpy(paged.words.view(np.int16))  # [array, layer, block, head, token, dim]
    cache = PagedCache.of(list(zip(words[0], words[1], strict=True)), "BHND")
    blocks = (paged.map.segment_offset[0] // np.uint64(paged.words.strides[2])).tolist()
    slots = slots_of(blocks, size, 0, chunks * layout.chunk_tokens).view(chunks, -1)
    targets = [torch.from_numpy(buffer.words[0].view(np.int16)) for buffer in buffers]

    def copy(place: int) -> None:
        gather(cache, slots[place], *targets[place])

    copy(0)
    same = np.array_equal(buffers[0].words[0], saving.staged.words[0])
    expect("the gathered bytes", holds=same)

    def save() -> float:
        start = time.perf_counter()
        for place in range(chunks):
            copy(place)
        writes = [pool.submit(savers[place].save, [key]) for place, key in enumerate(saving.keys)]
        took = time.perf_counter() - start
        wait(writes)
        expect("save", holds=all(write.result() == [WRITTEN] for write in writes))
        return took

    return {
        "save, caller blocked": Arm(save, saving.fresh),
        _COPIES: Arm(lambda: list(map(copy, range(chunks))), saving.fresh),
    }
