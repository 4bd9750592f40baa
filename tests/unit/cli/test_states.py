"""Every command in every state of its cache: nothing there, a file, empty, damaged, hostile, ..."""

from __future__ import annotations

import contextlib
import gc
import json
import os
import re
import shutil
import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from buckets import memory_url
from commands import COMMANDS, TOKENS, filled_in, put_prompt, run, served, verbs
from helpers import DirectoryTest, flip, until
from tools import fill
from vua.catalog import open_catalog
from vua.catalog.directory import DirectoryCatalog
from vua.catalog.stored import BucketCatalog
from vua.cli import main
from vua.cli.events import changes, content
from vua.cli.ui import Files, overview
from vua.io import words as words_of
from vua.security.keyring import write_key
from vua.security.settings import Security
from vua.storage.bucket import Bucket

EVIL = "\x1b[2J\x1b]0;owned\x07\r\x9b31m\x7f\u202eevil"
MANY_OF_ONE = re.compile(
    r"(?<![\d,.])1 (?:[a-z]+ )?(?:files|chunks|names|namespaces|spaces|other prompts)\b"
    r"|(?<![\d,.])1 [a-z]+(?: [a-z]+)? (?:are|stay)\b"
)


def put(place: str, chunks: int, model: str = "m", **settings: Any) -> None:
    put_prompt(place, TOKENS[: 4 * chunks], model=model, **settings)


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
        for kind in (DirectoryCatalog, BucketCatalog):
            for name, wrap in (("contents", contents), ("namespaces", namespaces)):
                wrapped = wrap(getattr(kind, name))
                stack.enter_context(mock.patch.object(kind, name, wrapped))
        yield


class StatesTest(DirectoryTest):
    def setUp(self) -> None:
        pytest.importorskip("obstore")
        super().setUp()
        self.number = 0

    def place(self, kind: str = "directory") -> str:
        if kind == "bucket":
            return memory_url()
        self.number += 1
        folder = self.root / str(self.number)
        folder.mkdir(mode=0o700)
        return str(folder)

    def check(self, words: list[str], *forms: str) -> tuple[int, str, str]:
        """A command ends by itself: with one line if it can do nothing; its output is guarded."""
        code, out, err = run(*words, *forms)
        self.assertIn(code, (0, 1, 2), err)
        if code == 2 and "Usage" not in err:
            self.assertEqual(1, len(err.splitlines()), err)
        self.assertLessEqual({one for one in out + err if not one.isprintable()}, {"\n"})
        self.assertNotRegex(out + err, MANY_OF_ONE)
        if forms and out:
            joined = f"[{','.join(out.splitlines())}]" if words[0] == "events" else out
            self.assertTrue(json.loads(joined) is not None and out.isascii())
        return code, out, err

    def check_all(self, make: Callable[[], str], then: Callable[[str], object] = str) -> None:
        """Every command, each on a place of its own, for people and for programs."""
        for number, command in enumerate(COMMANDS):
            place = make()
            with self.subTest(command, place=place):
                words = filled_in(command, place, self.root)
                with emptied(lambda place=place: then(place)):
                    self.check(words, *["--json"] * (number % 3 == 1))

    @pytest.mark.thorough
    def test_states(self) -> None:
        """Not marked, one chunk, some of three chunks, and what each of them becomes meanwhile."""
        self.assertEqual(verbs(), {str(one[0]) for one in COMMANDS} | {"ui"})
        for kind in ("directory", "bucket"):
            self.check_all(lambda kind=kind: self.place(kind))
            self.check_all(lambda kind=kind: self.stored(kind, 1))
            for whole in (False, True):
                self.check_all(lambda kind=kind, whole=whole: self.stored(kind, 3, whole=whole))
                self.check_all(
                    lambda kind=kind: self.stored(kind, 3),
                    lambda place, whole=whole: empty(place, whole=whole),
                )

    def stored(self, kind: str, chunks: int, *, whole: bool | None = None) -> str:
        place = self.place(kind)
        put(place, chunks)
        if whole is not None:
            empty(place, whole=whole)
        return place

    @pytest.mark.thorough
    def test_damaged(self) -> None:
        """A damaged file, a description cut short, strays and leftovers; without a seal's key."""
        write_key(self.root / "key")
        keys = Security(key_file=str(self.root / "key"))

        def make() -> str:
            place = self.place()
            put(place, 3)
            put(place, 2, "sealed", security=keys)
            put(place, 1, "cut")
            space = min(Path(place).glob("*/??/*/*.safetensors")).parents[2]
            flip(next(space.rglob("*.safetensors")), 4200)
            (space / ".tmp-mine").touch()
            (Path(place) / "stray").touch()
            max(Path(place).glob("*/namespace.json")).write_text("{")
            return place

        self.check_all(make)

    def test_hostile(self) -> None:
        """No name of a file, a model or a directory passes a control character on; JSON is JSON."""
        place = Path(f"{self.place()}{EVIL}")
        put(str(place), 3)
        put(str(place), 2, EVIL)
        file = next(place.rglob("*.safetensors"))
        (file.parent / f"pin-{EVIL}").touch()
        (file.parents[2] / EVIL).touch()
        (place / f"{EVIL}\nsound: all").touch()
        flip(file, 4200)
        for command in COMMANDS:
            for where in (str(place), f"{self.root}/none{EVIL}"):
                if command[0] == "rm" and where == str(place):
                    continue
                words = filled_in(command, where, self.root)
                with self.subTest(command, where=where):
                    for forms in ([], ["--json"]):
                        _, out, err = self.check(words, *forms)
                        self.assertTrue(out + err or command[0] == "events")
        for words in (
            [EVIL],
            ["ui", f"{EVIL}none"],
            ["rm", str(place), EVIL],
            ["gc", str(place), EVIL],
        ):
            self.check(words)
        _, out, _ = run("ls", place, "--json")
        self.assertIn(EVIL, [one["identity"]["model"] for one in json.loads(out)["namespaces"]])

    def test_unreadable(self) -> None:
        """A directory that this user may not read."""
        place = Path(self.place())
        place.chmod(0)
        self.root.chmod(0o755)
        if root := os.getuid() == 0:
            os.seteuid(65534)
        try:
            for verb in ("ls", "verify"):
                self.assertEqual((2, ""), run(verb, place)[:2])
        finally:
            if root:
                os.seteuid(0)

    @pytest.mark.thorough
    def test_page(self) -> None:
        """The page looks at an empty directory, and at one that is emptied meanwhile."""
        for chunks in (0, 3):
            place = self.stored("directory", chunks) if chunks else self.place()
            with self.subTest(chunks), served(place) as page:
                page.looked("Healthy")
                empty(place, whole=False)
                until(lambda: not any(one["chunks"] for one in page.overview()["namespaces"]))
                page.looked("Healthy")

    def test_counted(self) -> None:
        """One is one, none and several are many."""
        said = [words_of.counted(number, "chunk") for number in (0, 1, 1234)]
        self.assertEqual(["0 chunks", "1 chunk", "1,234 chunks"], said)
        self.assertEqual("1 entry is", words_of.counted(1, "entry", "is", "are"))
        self.assertEqual(["17 B", "1.0 KiB"], [words_of.size(17), words_of.size(1024)])


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
        # a sweep keeps 65,536 victims at most: fewer than there are chunks, here too
        self.enterContext(mock.patch("vua.capacity.evictor._VICTIMS", 1024))
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
