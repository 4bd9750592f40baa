"""Remedies of docs/troubleshooting.md help: each is run on a cache that has the trouble."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any, Final

import torch

from commands import run
from helpers import DirectoryTest, caches_of
from vua.core import VUA, VUAConfig
from vua.errors import ConfigError
from vua.security.settings import Security

CHUNKS: Final = 6
TOKENS: Final = torch.arange(16 * CHUNKS)
OTHER: Final = TOKENS + 1000
KV: Final = caches_of(layers=2, heads=2, tokens=len(TOKENS), dim=64, seed=1)


class TestTroubleshooting(DirectoryTest):
    """Prompts of six chunks."""

    def cache(self, place: Path, **settings: Any) -> VUA:
        config = VUAConfig(**({"split_factor": 16, "model": "tiny"} | settings))
        return self.enterContext(VUA(config, place))

    def stored(self, place: Path, tokens: torch.Tensor = TOKENS, **settings: Any) -> None:
        with VUA(VUAConfig(split_factor=16, model="tiny", **settings), place) as vua:
            vua.put(tokens, KV)

    def found(self, place: Path, tokens: torch.Tensor = TOKENS, **settings: Any) -> int:
        """How many tokens of a prompt a new process loads."""
        with VUA(VUAConfig(split_factor=16, model="tiny", **settings), place) as vua:
            return vua.get_closest(tokens).num_tokens

    def test_the_engine_refuses_the_directory(self) -> None:
        """A directory inside one that all may write to; a user whose files are trusted."""
        wide = self.root / "wide"
        wide.mkdir()
        wide.chmod(0o777)
        with self.assertRaises(ConfigError):
            self.stored(wide)
        self.stored(wide / "inside")
        self.assertEqual(len(TOKENS), self.found(wide / "inside"))
        if os.getuid() == 0:
            theirs = self.root / "theirs"
            self.stored(theirs)
            for path in (theirs, *theirs.rglob("*")):
                os.chown(path, 12345, 12345)
            with self.assertRaisesRegex(ConfigError, "trusted_uids"):
                self.found(theirs)
            trusts = Security(trusted_uids=(12345,))
            self.assertEqual(len(TOKENS), self.found(theirs, security=trusts))

    def test_no_mark(self) -> None:
        """A cache that was copied without its `vua.json` works with it."""
        self.stored(self.root / "kv")
        copy = self.root / "copy"
        shutil.copytree(self.root / "kv", copy, ignore=shutil.ignore_patterns("vua.json"))
        with self.assertRaisesRegex(ConfigError, r"no vua\.json"):
            self.found(copy)
        shutil.copy(self.root / "kv" / "vua.json", copy)
        self.assertEqual(len(TOKENS), self.found(copy))

    def test_hits_vanish_soon(self) -> None:
        """With room for one prompt the pinned one stays; with a higher limit both do."""
        self.stored(self.root)
        room = sum(path.stat().st_size for path in self.files()) * 5 // 4
        self.stored(self.root, OTHER, max_bytes=room)
        self.assertLess(self.found(self.root, TOKENS), len(TOKENS))  # control
        for higher, pinned in ((True, False), (False, True)):
            place = self.root / ("higher" if higher else "pinned")
            self.stored(place)
            if pinned:
                with VUA(VUAConfig(split_factor=16, model="tiny"), place) as vua:
                    self.assertTrue(vua.pin(TOKENS))
            self.stored(place, OTHER, max_bytes=4 * room if higher else room * 2)
            for number in range(3 if pinned else 0):
                self.stored(place, OTHER + 1000 * number, max_bytes=room * 2)
            self.assertEqual(len(TOKENS), self.found(place))

    def test_prompts_are_not_stored_whole(self) -> None:
        """`vua gc --quick` makes room before an engine has to."""
        self.stored(self.root)
        room = sum(path.stat().st_size for path in self.files()) // 2
        self.assertEqual(0, run("gc", self.root, "--quick", "--max-bytes", f"{room}B")[0])
        self.assertLessEqual(sum(path.stat().st_size for path in self.files()), room)
        self.assertEqual(16 * len(self.files()), self.found(self.root))

    def test_the_disk_is_full(self) -> None:
        """`vua gc --max-bytes --set` shrinks a cache now and for good, also for later writers."""
        for number in range(4):
            self.stored(self.root, TOKENS + 1000 * number)
        nbytes = sum(path.stat().st_size for path in self.files())
        code, _, err = run("gc", self.root, "--max-bytes", f"{nbytes // 2}B", "--set", "--yes")
        self.assertEqual((0, ""), (code, err))
        for number in range(4, 8):
            held = sum(path.stat().st_size for path in self.files())
            self.assertLessEqual(held, nbytes // 2)
            self.stored(self.root, TOKENS + 1000 * number)

    def test_files_are_damaged(self) -> None:
        """`vua verify --repair` moves them away, and what follows them hits again afterwards."""
        self.stored(self.root)
        third = sorted(self.files(), key=lambda path: path.stat().st_mtime_ns)[2]
        data = bytearray(third.read_bytes())
        data[-1] ^= 1
        third.write_bytes(data)
        self.assertEqual(1, run("verify", self.root)[0])
        self.assertEqual(0, run("verify", "--repair", self.root)[0])
        self.assertLess(self.found(self.root) // 16, len(self.files()))
        self.stored(self.root)
        self.assertEqual((len(TOKENS), 0), (self.found(self.root), run("verify", self.root)[0]))

    def test_everything_is_to_go(self) -> None:
        """Under a running process, which goes on."""
        running = self.cache(self.root)
        running.put(TOKENS, KV)
        self.assertEqual(0, run("rm", self.root, "--all", "--yes")[0])
        self.assertEqual([], self.files())
        self.assertEqual(0, running.get_closest(TOKENS).num_tokens)
        running.put(TOKENS, KV)
        self.assertEqual(len(TOKENS), self.found(self.root))
