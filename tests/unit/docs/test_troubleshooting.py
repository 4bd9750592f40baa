"""Each remedy of docs/troubleshooting.md helps: it is run on a cache that has the trouble."""

from __future__ import annotations

import os
import re
import shutil
from pathlib import Path
from typing import Any, Final

import torch

from commands import run
from helpers import ROOT, TESTS, DirectoryTest, caches_of
from vua.core import VUA, VUAConfig
from vua.errors import ConfigError
from vua.security.settings import Security

CHUNKS: Final = 6
TOKENS: Final = torch.arange(16 * CHUNKS)
OTHER: Final = TOKENS + 1000
KV: Final = caches_of(layers=2, heads=2, tokens=len(TOKENS), dim=64, seed=1)

HERE: Final = {
    "The engine refuses the directory.": "test_the_engine_refuses_the_directory",
    '"not a cache directory of VUA (no vua.json) and not empty".': "test_no_mark",
    "Hits vanish soon.": "test_hits_vanish_soon",
    "Prompts are not stored whole": "test_prompts_are_not_stored_whole",
    "The disk is full.": "test_the_disk_is_full",
    "Files are damaged.": "test_files_are_damaged",
    "Everything is to go.": "test_everything_is_to_go",
}
ELSEWHERE: Final = {
    "The slowest requests got slower.":
        "unit/connector/test_load_policy.py: test_hanging_load test_margin",
    '"vLLM is not installed".': "unit/vllm/test_serve.py: test_no_vllm",
    "Nothing hits.": "unit/cli/test_cli_explain.py: test_salt test_nearest test_field_of_config",
    "Nothing hits after a start.": "unit/weights/test_weights.py: test_a_note_travels",
    '"this engine is served without a stored KV cache".': "unit/vllm/test_refusals.py: test_rows",
    "Hits only on the same host.": "unit/cli/test_cli_doctor.py: test_mounts test_other_user",
    "Less is loaded than is stored.": "unit/cli/test_cli_explain.py: test_whole_blocks",
    "Loads are slow.": "unit/cli/test_cli_doctor.py: test_break_even test_broken test_speed",
    "Chunks push other files out of memory.": "unit/cli/test_cli_doctor.py: test_cold",
    '"is not what this engine computes"': "unit/connector/test_witness.py: test_who_is_believed",
    "A process was killed.": "unit/capacity/test_gc.py: test_leftovers",
    '"... is gone" or "... is another directory than the one that was open here".':
        "unit/capacity/test_ours.py: test_deleted_under_a_process",
    "The server's clock was set.": "unit/capacity/test_upkeep.py: test_set_back",
    "A host has another clock.": "unit/capacity/test_upkeep.py: test_another_ones_clock",
}  # fmt: skip
"""Remedies that need an engine, a mount, another user or a clock, and the tests that run them."""


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

    def test_each(self) -> None:
        """Every heading of the page has its test, and each test is there."""
        page = (ROOT / "docs/troubleshooting.md").read_text(encoding="utf-8")
        headings = re.findall(r"^\*\*(.+?)\*\*", page, re.MULTILINE)
        headings.remove("Storing slows the engine.")  # it names nothing to do
        self.assertEqual(sorted(headings), sorted([*HERE, *ELSEWHERE]))
        for name in HERE.values():
            self.assertTrue(hasattr(self, name), name)
        for where in ELSEWHERE.values():
            file, _, names = where.partition(": ")
            text = (TESTS / file).read_text(encoding="utf-8")
            for name in names.split():
                self.assertIn(f"    def {name}", text, where)

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
        """`vua verify --repair` and `vua gc` leave what can be found; the rest is stored anew."""
        self.stored(self.root)
        third = sorted(self.files(), key=lambda path: path.stat().st_mtime_ns)[2]
        data = bytearray(third.read_bytes())
        data[-1] ^= 1
        third.write_bytes(data)
        self.assertEqual(1, run("verify", self.root)[0])
        self.assertEqual(0, run("verify", "--repair", self.root)[0])
        self.assertEqual(0, run("gc", self.root, "--yes")[0])
        left = self.found(self.root)
        self.assertEqual(left // 16, len(self.files()))
        self.assertLess(left, len(TOKENS))
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
