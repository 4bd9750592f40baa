"""The tools need at most 32 bytes of memory for each chunk of a directory."""

from __future__ import annotations

import gc
import os
import tracemalloc
from collections.abc import Callable
from contextlib import redirect_stdout
from pathlib import Path

import pytest

from helpers import DirectoryTest
from tools import fill
from vua.catalog.opening import open_catalog
from vua.cli import main
from vua.cli.events import changes, content
from vua.cli.ui.server import Files, overview

MOST = 32


class MemoryTest(DirectoryTest):
    """Peaks of what Python and numpy allocate, with few chunks and with many."""

    def commands(self) -> dict[str, Callable[[], object]]:
        where = str(self.root)
        words = {
            "du": ["du"],
            "ls": ["ls"],
            "ls --long": ["ls", "--long"],
            "ls --long --json": ["ls", "--long", "--json"],
            "top": ["top", "--once", "--interval", "0.001"],
            "gc": ["gc", "--yes"],
            "gc --max-per-salt": ["gc", "--yes", "--max-per-salt", "1T"],
            "verify": ["verify"],
            "events": ["events"],
        }  # fmt: skip
        return {
            **{name: lambda said=said: main([said[0], where, *said[1:]])
               for name, said in words.items()},
            "events twice": self.events,
            "ui": self.page,
        }  # fmt: skip

    def events(self) -> None:
        """Look twice, and go through what is told."""
        catalog, seen = open_catalog(str(self.root)), {}
        for _ in range(2):
            now = content(catalog, seen)
            for one in changes(seen, now, "LOCAL"):
                del one
            seen = now

    def page(self) -> None:
        """Look twice."""
        for _ in range(2):
            overview(open_catalog(str(self.root)), Files())

    def peak(self, work: Callable[[], object]) -> int:
        """The most bytes that are allocated at a time meanwhile."""
        gc.collect()
        tracemalloc.start()
        try:
            work()
            return tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()

    @pytest.mark.thorough
    def test_all(self) -> None:
        """Every tool that looks at all chunks, with 2,048 of them and with 4,096."""
        few, many = 2048, 4096
        fill(self.root, few)
        tools = self.commands()
        with Path(os.devnull).open("w", encoding="utf-8") as sink, redirect_stdout(sink):
            for work in tools.values():
                work()  # what is imported at first use does not count
            least = {name: self.peak(work) for name, work in tools.items()}
            fill(self.root, many, few)
            each = {
                name: (self.peak(work) - least[name]) / (many - few) for name, work in tools.items()
            }
        self.assertEqual({}, {name: nbytes for name, nbytes in each.items() if nbytes > MOST})
