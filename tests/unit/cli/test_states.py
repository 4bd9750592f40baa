"""Every command in every state of its cache: nothing there, a file, empty, damaged, hostile, ..."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from buckets import memory_url
from commands import COMMANDS, TOKENS, filled_in, run, served, verbs
from helpers import DirectoryTest, caches_of, flip, until
from vua.catalog.bucket import BucketCatalog
from vua.catalog.directory import DirectoryCatalog
from vua.core import VUA, VUAConfig
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
    with VUA(VUAConfig(split_factor=4, model=model, **settings), place) as vua:
        cache = caches_of(layers=1, heads=1, tokens=4 * chunks, dim=8)
        vua.put(TOKENS[: 4 * chunks], cache)


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
        if code == 2 and "Usage" not in err and words[0] != "inspect":
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

    def test_missing(self) -> None:
        """One line: what was expected, what was found, what to do."""
        none, file = self.root / "none", self.root / "file"
        file.touch()
        others = ("import", "inspect")
        looking = [one for one in COMMANDS if one[1:2] == ["PLACE"] and one[0] not in others]
        for command in [*looking, ["ui", "PLACE"]]:
            verb, what = command[0], "model" if command[0] == "identify" else "cache"
            with self.subTest(command):
                code, out, err = run(*filled_in(command, str(none), self.root))
                found = "expected a directory, found nothing; name the directory of the"
                self.assertEqual((2, ""), (code, out))
                self.assertEqual(f"vua {verb}: {none}: {found} {what}\n", err)
                if verb != "identify":
                    code, out, err = run(*filled_in(command, str(file), self.root))
                    self.assertEqual((2, ""), (code, out))
                    self.assertIn(f"{file}: expected a directory, found a file; name", err)
        place = self.place()
        for asked in (
            ("import", place, none),
            ("warm", none, "--server", "http://127.0.0.1:1"),
            ("explain", place, "--tokens", none),
            ("explain", place, "--order", none),
        ):
            _, _, err = run(*asked)
            self.assertEqual(f"vua {asked[0]}: {none}: No such file or directory\n", err)

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
