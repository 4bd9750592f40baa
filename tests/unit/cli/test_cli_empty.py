"""Every command on a cache that is empty, holds one chunk, or is emptied while it runs."""

from __future__ import annotations

import contextlib
import itertools
import json
import shutil
import unittest
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from buckets import memory_url
from commands import TOKENS, run, verbs
from helpers import DirectoryTest, caches_of, until
from ui import served
from vua.catalog.directory import DirectoryCatalog
from vua.catalog.listed import ListedCatalog
from vua.core import VUA, VUAConfig
from vua.storage.bucket import Bucket

COMMANDS: list[list[object]] = [
    ["ls"], ["ls", "-l"], ["ls", "-l", "--sort", "prompt"], ["ls", "--sort", "newest"], ["du"],
    ["du", "--quick"], ["verify"], ["verify", "--repair"], ["verify", "--sample", "10%"],
    ["top", "--once", "--interval", "0.01"], ["doctor"], ["explain", "--tokens", "TOKENS"],
    ["explain", "--tokens", "TOKENS", "--quick"], ["events"], ["export", "TAR", "--all"],
    ["export", "TAR", "--tokens", "TOKENS"], ["gc"], ["gc", "--dry-run"], ["gc", "--quick"],
    ["gc", "--max-bytes", "1G"], ["gc", "--ttl", "1h"], ["ttl"], ["ttl", "1d"], ["pin"],
    ["rm", "--all", "--dry-run"], ["rm", "abcdef"], ["rm", "--all", "--yes"],
]  # fmt: skip
OTHERS = {"args", "completion", "identify", "import", "inspect", "key", "ui", "warm"}
"""Commands that look at no cache, or at files that have to be there; `ui` has a test of its own."""


def empty(where: str, *, whole: bool) -> None:
    """Delete all chunks of a cache, or all that is there."""
    if where.startswith("memory:"):
        bucket = Bucket.at(where)
        keys = [one.key for one in bucket.walk()]
        bucket.delete([key for key in keys if whole or key.count("/") > 2])
        return
    for path in Path(where).glob("*" if whole else "*/??/*"):
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink()


@contextlib.contextmanager
def emptied(then: Callable[[], None]) -> Iterator[None]:
    """Do something right after a command has seen which namespaces there are."""

    def contents(of: Callable[..., Any]) -> Callable[..., Any]:
        def work(*given: Any, **named: Any) -> Any:
            found = of(*given, **named)
            then()
            return found

        return work

    def namespaces(of: Callable[..., Any]) -> Callable[..., Any]:
        @contextlib.contextmanager
        def work(*given: Any, **named: Any) -> Iterator[Any]:
            with of(*given, **named) as found:
                then()
                yield found

        return work

    with contextlib.ExitStack() as stack:
        for kind in (DirectoryCatalog, ListedCatalog):
            for name, wrap in (("contents", contents), ("namespaces", namespaces)):
                wrapped = wrap(getattr(kind, name))
                stack.enter_context(mock.patch.object(kind, name, wrapped))
        yield


@unittest.skipUnless(find_spec("obstore"), "obstore is not installed")
class EmptyTest(DirectoryTest):
    """Directories and buckets."""

    numbers = itertools.count()
    forms = itertools.cycle(([], ["--json"], []))
    """By turns: there are as many directories as buckets."""

    def places(self, chunks: int) -> list[str]:
        """A new directory and a new bucket with so many chunks; without any they are not marked."""
        places = [str(self.root / f"{next(self.numbers)}"), memory_url()]
        Path(places[0]).mkdir(mode=0o700)
        for place in places if chunks else ():
            with VUA(VUAConfig(split_factor=4, model="m"), place) as vua:
                cache = caches_of(layers=1, heads=1, tokens=4 * chunks, dim=8)
                vua.put(TOKENS[: 4 * chunks], cache)
        return places

    def words(self, command: list[object], place: str) -> list[str]:
        tokens, archive = self.root / "tokens", self.root / f"{next(self.numbers)}.tar"
        tokens.write_text(json.dumps(TOKENS.tolist()))
        given = {"TOKENS": str(tokens), "TAR": str(archive)}
        return [str(command[0]), place, *(given.get(str(one), str(one)) for one in command[1:])]

    def check(self, words: list[str]) -> None:
        """A command ends with an exit status of its own, and with one line if it can do nothing."""
        code, out, err = run(*words, *next(self.forms))
        self.assertIn(code, (0, 1, 2), err)
        if code == 2:
            self.assertEqual(1, len(err.splitlines()), err)
        self.assertNotRegex(out, r"(?<![\d,.])1 (chunks|files|namespaces|other prompts)\b")

    def test_top(self) -> None:
        """`vua top` has nothing to compare, and says so by zeros."""
        for place in self.places(0):
            code, out, _ = run("top", place, "--once", "--interval", "0.01")
            self.assertEqual(0, code)
            self.assertIn("0 chunks", out)

    @pytest.mark.thorough
    def test_every_command(self) -> None:
        """Every command, on an empty cache, an emptied one and one of one chunk."""
        self.assertEqual(verbs(), {str(one[0]) for one in COMMANDS} | OTHERS)
        for command in COMMANDS:
            for chunks, left in ((0, None), (3, False), (3, True), (1, None)):
                for place in self.places(chunks):
                    if left is not None:
                        empty(place, whole=left)
                    with self.subTest(command, place=place, chunks=chunks, left=left):
                        self.check(self.words(command, place))

    @pytest.mark.thorough
    def test_emptied_meanwhile(self) -> None:
        """Every command, while chunks or all that is there are deleted under it."""
        for command in COMMANDS:
            for whole in (False, True):
                for place in self.places(3):
                    with self.subTest(command, place=place, whole=whole):
                        words = self.words(command, place)
                        with emptied(lambda place=place, whole=whole: empty(place, whole=whole)):
                            self.check(words)

    @pytest.mark.thorough
    def test_page(self) -> None:
        """The page looks at an empty directory, and at one that is emptied meanwhile."""
        for chunks in (0, 3):
            place = self.places(chunks)[0]
            with self.subTest(chunks), served(place) as page:
                page.looked("Healthy")
                empty(place, whole=False)
                until(lambda: not any(one["chunks"] for one in page.overview()["namespaces"]))
                page.looked("Healthy")
