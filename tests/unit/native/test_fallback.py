"""Mirrors `vua.native.fallback`: in Python the same comes out as in C, whatever is read."""

from __future__ import annotations

import errno
import os
import sys
import threading
import time
import unittest
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import strategies as st

from helpers import DirectoryTest, Memory, descriptors, has_native, model_arrays, rectangle
from layouts import DEEP, SMALL, shards
from properties import given
from vua import native
from vua.format.entry import EntryCodec, entry_plan
from vua.format.layout import KVLayout
from vua.io.files import Directory
from vua.native import Headers, Transfer, fallback

FILES = 3
NOISE = np.random.default_rng(6).bytes(4 << 20)
MODELS = {layout: model_arrays(layout, FILES) for layout in (SMALL, DEEP)}


def damage(path: Path, how: str, at: int) -> None:
    nbytes = path.stat().st_size
    if how == "missing":
        path.unlink()
    elif how == "shorter":
        os.truncate(path, at % nbytes)
    elif how == "longer":
        os.truncate(path, nbytes + 1 + at)
    elif how == "link":
        path.rename(path.with_suffix(".there"))
        path.symlink_to(path.with_suffix(".there"))
    elif how == "other bytes":
        with path.open("r+b") as file:
            file.seek(at % nbytes)
            file.write(b"\x77")


def contents(transfer: Transfer, into: Headers, files: int) -> list[bytes]:
    """What was read: the memory of each file, and the tables."""
    kept = (into.headers, into.digests, into.inodes, into.discard)
    found = [table[:files].tobytes() for table in kept if table is not None]
    for place in range(files):
        discard = np.zeros(transfer.plan.discard_nbytes, np.uint8)
        if into.discard is not None:
            discard = into.discard[place]
        blocks = native.blocks_of(transfer, place, discard.ctypes.data)
        found += [bytes(view) for block in blocks for view in block]
    return found


@unittest.skipUnless(has_native(), "native code is not built: python3 dev.py build")
class TestReadEntries(DirectoryTest):
    """Both read the same files into memories of their own."""

    @given(
        st.sampled_from([SMALL, DEEP]),
        st.sampled_from([None, 2, 4]),
        st.tuples(
            st.sampled_from(["", "missing", "shorter", "longer", "link", "other bytes"]),
            st.integers(0, FILES - 1),
            st.integers(0, 1 << 20),
            st.booleans(),
        ),
        st.data(),
    )
    @pytest.mark.thorough
    def test_same(
        self, layout: KVLayout, block: int | None, case: Any, data: st.DataObject
    ) -> None:
        """The same count, headers, digests, inodes and memory, also of what is discarded."""
        how, bad, at, keep = case
        stored, needed = (data.draw(shards(layout.layers, layout.kv_heads)) for _ in range(2))
        taken = stored.intersection(needed)
        if taken is None:
            return
        codec = EntryCodec("0" * 64, layout, stored)
        plan = entry_plan(codec, taken, needed, block or layout.chunk_tokens)
        paths = [f"{number}.file" for number in range(FILES)]
        for path in paths:
            (self.root / path).unlink(missing_ok=True)
            start = (at + ord(path[0])) % 1000
            (self.root / path).write_bytes(NOISE[start : start + codec.file_nbytes])
        damage(self.root / paths[bad], how, at)
        fd = os.open(self.root, os.O_RDONLY | os.O_DIRECTORY)
        self.addCleanup(os.close, fd)
        found = []
        for read in (native.read_entries, fallback.read_entries):
            model = rectangle(MODELS[layout], needed)
            memory = Memory(layout, needed, FILES, block_tokens=block).fill(model)
            transfer = Transfer(plan, memory.map())
            into = Headers(plan, FILES, keep_discarded=keep)
            done = read(transfer, Directory(fd), paths, 0, into, 0, FILES)
            found.append((done, contents(transfer, into, done)))
            for place in range(done if keep else 0):
                blocks = native.blocks_of(transfer, place, into.discard[place].ctypes.data)
                self.assertEqual(into.digests[place].tolist(), native.digests_of(blocks))

        self.assertEqual(bad if how not in ("", "other bytes") else FILES, found[0][0])
        self.assertEqual(found[0], found[1])


class TestInterpreterLock(DirectoryTest):
    """Beside a busy Python thread, giving the lock away costs 5 ms each time."""

    def test_cached_reads_keep_it(self) -> None:
        """No other thread gets it while cached files are opened, read, hashed and closed."""
        codec = EntryCodec("0" * 64, DEEP, DEEP.full)
        memory = Memory(DEEP, DEEP.full, FILES)
        transfer = Transfer(
            entry_plan(codec, DEEP.full, DEEP.full, DEEP.chunk_tokens), memory.map()
        )
        paths, into = [f"{number}.file" for number in range(FILES)], Headers(transfer.plan, FILES)
        for path in paths:
            (self.root / path).write_bytes(NOISE[: codec.file_nbytes])
        fd = os.open(self.root, os.O_RDONLY | os.O_DIRECTORY)
        self.addCleanup(os.close, fd)
        counted, ends = [0], threading.Event()

        def count() -> None:
            while not ends.is_set():
                counted[0] += 1

        thread = threading.Thread(target=count)
        thread.start()
        self.addCleanup(thread.join)
        self.addCleanup(ends.set)
        self.addCleanup(sys.setswitchinterval, sys.getswitchinterval())

        def kept() -> bool:
            sys.setswitchinterval(1)
            time.sleep(0.001)  # the other thread begins to wait when this one has it back
            before = counted[0]
            for _ in range(20):
                fallback.read_entries(transfer, Directory(fd), paths, 0, into, 0, FILES)
            after = counted[0]
            sys.setswitchinterval(0.001)
            return before == after

        self.assertTrue(any(kept() for _ in range(5)), "on a busy machine it may take a second")
        self.assertTrue(into.digests.all())


@unittest.skipUnless(has_native(), "native code is not built: python3 dev.py build")
class TestListChunks(DirectoryTest):
    """Both list the same directory."""

    def listed(self, fd: int) -> list[dict[str, int]]:
        both = []
        for listing in (native.list_chunks, fallback.list_chunks):
            names, mtimes_ns = listing(fd)
            self.assertEqual(len({*names}), len(names))
            both.append(dict(zip(names, mtimes_ns.tolist(), strict=True)))
        return both

    def test_same(self) -> None:
        """Chunks and their mtimes, and nothing else that lies there; twice in a row."""
        name, year_ns = "0123456789abcdef" * 4, 366 * 86400 * 10**9
        stored = {f"{number:x}" + name[1:]: number * year_ns + number for number in range(16)}
        late, early = "f0" * 32, "e0" * 32
        stored |= {late: 400 * year_ns, early: -year_ns - 1}
        for chunk, mtime_ns in stored.items():
            (self.root / chunk).mkdir()
            os.utime(self.root / chunk, ns=(mtime_ns, mtime_ns))
        stored[late] = native.LATEST_NS  # as late as it can be told
        for other in (
            name.upper(),
            name[1:],
            name + "0",
            "g" + name[1:],
            "trash-" + name,
            "é" * 32,
        ):
            (self.root / other).mkdir()
        (self.root / ("a0" * 32)).write_bytes(b"a file")
        (self.root / ("b0" * 32)).symlink_to(self.root / name)
        fd = os.open(self.root, os.O_RDONLY | os.O_DIRECTORY)
        self.addCleanup(os.close, fd)
        for _ in range(2):
            self.assertEqual([stored, stored], self.listed(fd))

    def test_names_in_memory(self) -> None:
        """Names are a sequence of texts; numbers are their first eight bytes."""
        stored = [f"{number * 0x9E3779B97F4A7C15 % 2**64:016x}{number:048x}" for number in range(9)]
        names = native.ChunkNames.of(stored)
        self.assertEqual((stored, stored[7]), ([*names], names[7]))
        self.assertEqual(stored[2:5], [*names[2:5]])
        self.assertEqual([stored[7], stored[1]], [*names[np.array([7, 1])]])
        self.assertEqual([int(name[:16], 16) for name in stored], names.numbers().tolist())
        self.assertEqual([], native.ChunkNames.of([]).numbers().tolist())

    def test_sizes(self) -> None:
        """Bytes of regular files alone; why a directory cannot be opened; no descriptor stays."""
        one, none, link, file = (letter * 64 for letter in "abcd")
        (self.root / "aa" / one).mkdir(parents=True)
        for name, nbytes in (("first", 1000), ("second", 24)):
            (self.root / "aa" / one / name).write_bytes(bytes(nbytes))
        (self.root / "aa" / one / "link").symlink_to("first")
        (self.root / "aa" / one / "folder").mkdir()
        for name in (link, file):
            (self.root / name[:2]).mkdir()
        (self.root / "cc" / link).symlink_to(self.root / "aa" / one)
        (self.root / "dd" / file).write_bytes(b"a file")
        fd = os.open(self.root, os.O_RDONLY | os.O_DIRECTORY)
        self.addCleanup(os.close, fd)
        before, names = descriptors(self.root), native.ChunkNames.of([one, none, link, file])
        expected = [1024, -errno.ENOENT, -errno.ENOTDIR, -errno.ENOTDIR]

        self.assertEqual(expected, native.chunk_sizes(fd, names).tolist())
        self.assertEqual(expected, fallback.chunk_sizes(fd, names))
        self.assertEqual(before, descriptors(self.root))
