"""Mirrors `settings`: whose files are read, who may read, and what planted things do."""

from __future__ import annotations

import contextlib
import os
import re
import socket
import stat
import tempfile
import threading
import time
import unittest
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import pytest
import torch

from helpers import (
    ROOT,
    SOON_S,
    TESTS,
    DirectoryTest,
    caches_of,
    has_native,
    kv_bits,
    native_code,
)
from scorecard.attacks import FOREIGN_UID, PLANTS, clear, foreign_uid, hostile_names
from vua.core import VUA, VUAConfig
from vua.errors import ConfigError, StorageError
from vua.format.identity import Identity
from vua.format.keys import KeyChain, token_ids
from vua.security.keyring import Keyring, write_key
from vua.security.settings import Security
from vua.storage.mark import claim

TOKENS = torch.arange(24)
CACHE = caches_of(layers=2, heads=2, tokens=24, dim=16)
root_only = unittest.skipUnless(os.geteuid() == 0, "only root can give files to others")


class SecurityTest(DirectoryTest):
    """A cache of three chunks."""

    def setUp(self) -> None:
        super().setUp()
        self.cache = self.root / "cache"

    @contextlib.contextmanager
    def open(self, **settings: object) -> Iterator[VUA]:
        config = VUAConfig(split_factor=8, threads=1, security=Security(**settings))  # type: ignore[arg-type]
        with VUA(config, self.cache) as vua:
            yield vua

    def put(self, **settings: object) -> int:
        with self.open(**settings) as vua:
            return vua.put(TOKENS, CACHE)

    def get(self, **settings: object) -> int:
        """How many tokens are found, after looking at each byte of them."""
        with self.open(**settings) as vua:
            found = vua.get_closest(TOKENS)
            if found:
                self.assertEqual(kv_bits(CACHE, found.num_tokens), kv_bits(found.data))
            return found.num_tokens

    def chunks(self) -> list[Path]:
        """The files of the three chunks in order of position."""
        keys = KeyChain(token_ids(TOKENS), 8)
        return [next(self.cache.rglob(f"{keys[n].name}/*.safetensors")) for n in range(3)]


class TestSettings(unittest.TestCase):
    """What may be set."""

    def test_refused(self) -> None:
        """Values that mean nothing are refused, and so is encryption without a key."""
        for settings in (
            {"trusted_uids": "all"}, {"trusted_uids": [-1]}, {"trusted_uids": [True]},
            {"trusted_uids": 5}, {"trusted_uids": ["0"]}, {"group_read": 1}, {"encrypt": True},
            {"key_file": ""}, {"key_file": 3}, {"key_file": "a\0"}, {"tenant_keys": b"x"},
        ):  # fmt: skip
            with self.subTest(settings), self.assertRaises(ConfigError):
                Security(**settings)

    def test_relative_paths(self) -> None:
        """Paths of keys mean what they meant when they were given, wherever the process goes."""
        with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
            write_key(Path("own.key"))
            security = Security(key_file="own.key")
            keyring = Keyring("0" * 64, security)
            with contextlib.chdir("/"):
                self.assertIsNotNone(keyring.naming())


class TestModes(SecurityTest):
    """Who may read what is written."""

    def modes(self, root: Path) -> set[tuple[bool, str]]:
        """(is a directory, mode) of all that lies there, but for the upkeep's."""
        found = [root, *root.rglob("*")]
        return {
            (path.is_dir(), f"{stat.S_IMODE(path.stat().st_mode):o}")
            for path in found
            if ".upkeep" not in path.parts
        }

    def test_group(self) -> None:
        """The group may read, and nobody write, whatever the umask."""
        for umask in (0o000, 0o022, 0o077, 0o277):
            self.cache = self.root / f"{umask:o}"
            before = os.umask(umask)
            try:
                self.assertEqual(3, self.put(group_read=True))
            finally:
                os.umask(before)

            self.assertEqual({(True, "2750"), (False, "640")}, self.modes(self.cache))

    def test_own(self) -> None:
        """Below a directory of a group with the setgid bit, files are private all the same."""
        self.cache.mkdir()
        self.cache.chmod(0o2750)
        self.put()

        modes = self.modes(self.cache) - {(True, "2750")}  # the root itself stays as it is
        self.assertEqual({(False, "600"), (True, "2700")}, modes | {(True, "2700")})

    @root_only
    def test_reader_of_the_group(self) -> None:
        """A member of the group reads what a trusted user wrote; nobody else does."""
        self.root.chmod(0o755)
        self.put(group_read=True)
        for path in [self.cache, *self.cache.rglob("*")]:
            os.chown(path, FOREIGN_UID, 4343)
            path.chmod(0o2750 if path.is_dir() else 0o640)
        for groups, settings, expected in (
            ([4343], {"trusted_uids": [FOREIGN_UID]}, 24),
            ([4343], {"trusted_uids": "any"}, 24),
            ([4344], {"trusted_uids": "any"}, 0),
        ):
            with self.subTest(groups=groups, settings=settings), _as(4245, groups):
                self.assertEqual(expected, self.get(**settings))
        with _as(4245, [4343]), self.assertRaisesRegex(ConfigError, f"user {FOREIGN_UID}"):
            self.get()


class TestForeign(SecurityTest):
    """What belongs to another user."""

    @root_only
    def test_file(self) -> None:
        """Another user's file is a miss and stays; the next put writes it anew."""
        self.put()
        [_, middle, _] = self.chunks()
        sound = middle.read_bytes()
        for native in ("off", "require") if has_native() else ("off",):
            with (
                self.subTest(native), native_code(native),
                foreign_uid(middle),
            ):  # fmt: skip
                self.assertEqual(8, self.get())
                self.assertEqual(sound, middle.read_bytes())
                self.assertEqual(24, self.get(trusted_uids=[FOREIGN_UID]))
                self.assertEqual(24, self.get(trusted_uids="any"))
        os.chown(middle, FOREIGN_UID, -1)

        self.assertEqual(1, self.put())
        self.assertEqual((0, 24), (middle.stat().st_uid, self.get()))

    @root_only
    def test_namespace(self) -> None:
        """A namespace that another user made beforehand is not used, and nothing is put into it."""
        self.cache.mkdir()
        self.cache.chmod(0o1777)
        claim(self.cache)
        identity = Identity(model="default", chunk_tokens=8, name="default")
        planted = self.cache / identity.namespace
        planted.mkdir()
        os.chown(planted, FOREIGN_UID, -1)
        planted.chmod(0o777)

        with self.assertRaisesRegex(StorageError, f"belongs to user {FOREIGN_UID}"):
            self.put()
        self.assertEqual([], list(planted.iterdir()))
        self.assertEqual(0, self.get())

    def test_namespace_link(self) -> None:
        """A link in a namespace's place is not followed."""
        self.cache.mkdir()
        claim(self.cache)
        elsewhere = self.root / "elsewhere"
        elsewhere.mkdir()
        identity = Identity(model="default", chunk_tokens=8, name="default")
        (self.cache / identity.namespace).symlink_to(elsewhere)

        with self.assertRaises(StorageError):
            self.put()
        self.assertEqual([], list(elsewhere.iterdir()))

    @root_only
    def test_root(self) -> None:
        """A root that belongs to another user is refused, unless that user is trusted."""
        self.put()
        with foreign_uid(self.cache):
            with self.assertRaisesRegex(ConfigError, f"belongs to user {FOREIGN_UID}.*chown"):
                self.get()
            self.assertEqual(24, self.get(trusted_uids=[FOREIGN_UID]))

    def test_writable_root(self) -> None:
        """A root that everybody may write to is refused, unless it has the sticky bit."""
        self.put()
        self.cache.chmod(0o777)
        with self.assertRaisesRegex(ConfigError, "has mode 777.*chmod"):
            self.get()
        self.assertEqual(24, self.get(trusted_uids="any"))
        self.cache.chmod(0o1777)
        self.assertEqual(24, self.get())


class TestPlanted(SecurityTest):
    """Things that are no entries, where entries, temporary files and directories belong."""

    def setUp(self) -> None:
        super().setUp()
        self.put()
        self.victim = self.root / "victim"
        self.victim.write_bytes(self.chunks()[1].read_bytes())

    def unharmed(self, expected: bytes) -> None:
        """The victim is what it was, and nothing was made beside it."""
        self.assertEqual(expected, self.victim.read_bytes())
        self.assertEqual({"cache", "victim"}, {path.name for path in self.root.iterdir()})

    def test_final(self) -> None:
        """In an entry's place: a miss at once, nothing is followed, and the next put heals it.

        A hard link to a file of this user's own is that file: snapshots consist of these.
        """
        before = self.victim.read_bytes()
        for name, plant in PLANTS.items():
            if name == "hard link":
                continue
            [_, middle, _] = self.chunks()
            with self.subTest(name):
                clear(middle)
                plant(middle, self.victim)
                began_s = time.monotonic()
                self.assertEqual(8, self.get())
                self.assertEqual(1, self.put())
                self.assertLess(time.monotonic() - began_s, SOON_S)
                self.assertEqual(24, self.get())
                self.unharmed(before)

    def test_temporary(self) -> None:
        """Where temporary files will be: nothing is followed; the put fails, or takes another."""
        before = self.victim.read_bytes()
        for name, plant in PLANTS.items():
            [_, middle, _] = self.chunks()
            number = mock.patch("vua.storage.local.secrets.token_hex", return_value="0" * 8)
            with self.subTest(name), number, self.open() as vua:
                middle.unlink()
                vua.put(TOKENS[:8], [[t[:, :, :8] for t in pair] for pair in CACHE])
                tag = f"{socket.gethostname()[:32]}-{'0' * 8}"
                planted = middle.with_name(f".tmp-{tag}-{os.getpid()}-0")
                plant(planted, self.victim)
                with contextlib.suppress(StorageError):
                    vua.put(TOKENS, CACHE)
                vua.put(TOKENS, CACHE)
                self.unharmed(before)
                clear(planted)
        self.assertEqual(24, self.get())

    def test_parents(self) -> None:
        """In the place of a chunk's directory, or its fan-out: nothing is followed or written."""
        before = self.victim.read_bytes()
        outside = self.root / "cache" / "outside"
        for depth in (0, 1):
            for name in ("symlink", "dangling symlink", "symlink to itself", "fifo", "socket"):
                [_, middle, _] = self.chunks()
                parent = middle.parents[depth]
                with self.subTest(name, depth=depth):
                    aside = parent.rename(self.cache / "aside")
                    outside.mkdir()
                    target = outside if name == "symlink" else self.victim
                    PLANTS[name](parent, target)
                    self.assertLess(self.get(), 24)
                    with contextlib.suppress(StorageError):
                        self.put()
                    self.assertEqual([], list(outside.iterdir()))
                    self.unharmed(before)
                    clear(parent)
                    aside.rename(parent)
                    outside.rmdir()
        self.assertEqual(24, self.get())

    @pytest.mark.thorough
    def test_parent_race(self) -> None:
        """While a chunk's directory is swapped for a link again and again nothing goes outside."""
        outside = self.root / "cache" / "outside"
        outside.mkdir()
        parent, aside = self.chunks()[0].parent, self.cache / "aside"
        stop = threading.Event()

        def swap() -> None:
            while not stop.is_set():
                with contextlib.suppress(OSError):
                    parent.rename(aside)
                with contextlib.suppress(OSError):
                    parent.symlink_to(outside)
                with contextlib.suppress(OSError):
                    parent.unlink()
                with contextlib.suppress(OSError):
                    aside.rename(parent)

        thread = threading.Thread(target=swap)
        thread.start()
        try:
            with self.open() as vua:
                for _ in range(200):
                    with contextlib.suppress(StorageError):
                        vua.put(TOKENS, CACHE)
                    found = vua.get_closest(TOKENS)
                    if found:
                        self.assertEqual(kv_bits(CACHE, found.num_tokens), kv_bits(found.data))
                    self.assertEqual([], list(outside.iterdir()))
        finally:
            stop.set()
            thread.join()


class TestNames(SecurityTest):
    """Strings of users that would do harm in a path."""

    def test_traversal(self) -> None:
        """As model, salt or adapter they make names of 64 hex digits, all different."""
        seen: set[str] = set()
        names = hostile_names(500)
        for name in names:
            seen.add(Identity(model=name).namespace)
            seen.add(Identity(model="m", adapter=name, epoch=name).namespace)
            value = name.encode(errors="surrogatepass")
            for tag in ("salt", "lora"):
                seen.add(KeyChain(token_ids([1]), 1, {0: [(tag, value)]})[0].name)

        self.assertEqual(4 * len(names), len(seen))
        self.assertEqual({64}, {len(name) for name in seen})
        self.assertEqual(set(), set("".join(seen)) - set("0123456789abcdef"))


class TestPage(unittest.TestCase):
    """docs/threat-model.md and docs/guarantees.md."""

    def test_tests_exist(self) -> None:
        """Every test that the pages name is there."""
        pages = (ROOT / "docs" / name for name in ("threat-model.md", "guarantees.md"))
        page = "\n".join(path.read_text(encoding="utf-8") for path in pages)
        named = re.findall(r"`((?:e2e/)?test_\w+\.py)(?:: ([\w, ]+))?`", page)
        self.assertGreater(len(named), 15)
        for file, names in named:
            found = list(TESTS.rglob(file))
            self.assertTrue(found, file)
            source = "\n".join(path.read_text(encoding="utf-8") for path in found)
            for name in filter(None, names.split(", ")):
                with self.subTest(file=file, name=name):
                    self.assertRegex(source, rf"(def|class) {name}\b")


@contextlib.contextmanager
def _as(uid: int, groups: list[int]) -> Iterator[None]:
    """Be another user for a while. Only root can."""
    before = os.getgroups()
    os.setgroups(groups)
    os.setegid(groups[0] if groups else uid)
    os.seteuid(uid)
    try:
        yield
    finally:
        os.seteuid(0)
        os.setegid(0)
        os.setgroups(before)
