"""Mirrors `vua.native.fallback`: in Python the same comes out as in C, whatever is read."""

from __future__ import annotations

import os
import unittest
from pathlib import Path
from typing import Any

import numpy as np
from hypothesis import strategies as st

from helpers import DirectoryTest, Memory, has_native, model_arrays, rectangle
from layouts import DEEP, SMALL, shards
from properties import given
from vua import native
from vua.format.entry import EntryCodec
from vua.format.layout import KVLayout
from vua.format.plan import entry_plan
from vua.io.posix import memory_at
from vua.native import Headers, Transfer, fallback

FILES = 4


def damage(path: Path, how: str, at: int) -> None:
    """Do something to a file."""
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


@unittest.skipUnless(has_native(), "native code is not built: python3 dev.py build")
class TestReadEntries(DirectoryTest):
    """Both read the same files into memories of their own."""

    @given(
        st.sampled_from([SMALL, DEEP]),
        st.sampled_from([None, 2, 4]),
        st.sampled_from(["", "missing", "shorter", "longer", "link", "other bytes"]),
        st.integers(0, FILES - 1),
        st.integers(0, 1 << 20),
        st.booleans(),
        st.data(),
    )
    def test_same(self, layout: KVLayout, block: int | None, *drawn: Any) -> None:
        """The same count, headers, digests, inodes and memory, also of what is discarded."""
        how, bad, at, keep, data = drawn
        stored, needed = (data.draw(shards(layout.layers, layout.kv_heads)) for _ in range(2))
        taken = stored.intersection(needed)
        if taken is None:
            return
        codec = EntryCodec("0" * 64, layout, stored)
        plan = entry_plan(codec, taken, needed, block or layout.chunk_tokens)
        draw = np.random.default_rng(at)
        paths = [f"{number}.file" for number in range(FILES)]
        for path in paths:
            (self.root / path).unlink(missing_ok=True)
            (self.root / path).write_bytes(draw.bytes(codec.file_nbytes))
        damage(self.root / paths[bad], how, at)
        fd = os.open(self.root, os.O_RDONLY | os.O_DIRECTORY)
        self.addCleanup(os.close, fd)
        found = []
        for read in (native.read_entries, fallback.read_entries):
            model = rectangle(model_arrays(layout, FILES), needed)
            memory = Memory(layout, needed, FILES, block_tokens=block).fill(model)
            tokens = memory.map()
            transfer = Transfer(plan, tokens.base, tokens.head_stride, tokens.piece_offset, memory)
            into = Headers(
                np.zeros((FILES, plan.header_nbytes), dtype=np.uint8),
                np.zeros((FILES, plan.blocks), dtype=np.uint64),
                np.zeros((FILES, 2), dtype=np.uint64),
                np.zeros((FILES, plan.discard_nbytes), dtype=np.uint8) if keep else None,
            )
            done = read(transfer, fd, paths, 0, into)
            rows = [
                bytes(memory_at(int(address), int(nbytes)))
                for place in range(done)
                for (address, nbytes), array in zip(
                    transfer.rows(place),
                    np.repeat(plan.extents["array"], plan.segments),
                    strict=True,
                )
                if array < 2
            ]
            tables = [table[:done].tobytes() for table in into if table is not None]
            found.append((done, rows, tables))
            if keep or not plan.discard_nbytes:
                for place in range(done):
                    discard = 0 if into.discard is None else into.discard[place].ctypes.data
                    blocks = transfer.blocks(transfer.rows(place, discard))
                    self.assertEqual(into.digests[place].tolist(), native.digests_of(blocks))

        self.assertEqual(bad if how not in ("", "other bytes") else FILES, found[0][0])
        self.assertEqual(found[0], found[1])


if __name__ == "__main__":
    unittest.main()
