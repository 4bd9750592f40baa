"""Mirrors `mark` and `scan`: nothing of others is deleted, renamed or written to."""

from __future__ import annotations

import errno
import json
import os
import re
import stat
import subprocess
import sys
import threading
import unittest
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

import foreign
from commands import collect, run, run_json
from helpers import DirectoryTest, caches_of, entries_below
from vua.capacity.limits import Limits, ResolvedLimits, write_bounds
from vua.capacity.spaces import spaces
from vua.capacity.usage import measure
from vua.core import VUA, VUAConfig
from vua.errors import ConfigError
from vua.storage.mark import LIMITS_FILE, MARK, claim, claimable, is_marked, make_mark

CONFIG = VUAConfig(split_factor=4, max_bytes="1G", min_free_bytes=0)
COMMANDS = (
    ("gc",),
    ("gc", "--max-bytes", "0", "--set"),
    ("gc", "--dry-run"),
    ("rm", "--all", "--pinned"),
    ("rm", "--all", "--dry-run"),
    ("rm", foreign.HEX64),
    ("verify", "--repair"),
    ("ttl", "1s"),
    ("ttl", "--off"),
    ("pin", foreign.HEX64),
)


def fill(root: Path, first: int = 0, config: VUAConfig = CONFIG) -> None:
    with VUA(config, root) as vua:
        kv = caches_of(layers=1, heads=1, tokens=12, dim=8)
        vua.put(torch.tensor(range(first, first + 12)), kv)


class TestForeign(DirectoryTest):
    """Directories of others, alone and within a cache."""

    def archive(self) -> Path:
        fill(self.root / "source")
        path = self.root / "prompt.tar"
        self.assertEqual(0, run("export", self.root / "source", path, "--all")[0])
        return path

    def test_not_marked(self) -> None:
        """No command, and no engine, changes anything in a directory of somebody else."""
        archive = self.archive()
        for kind in foreign.NAMES:
            root = self.root / "theirs" / "there"
            with self.subTest(kind=kind):
                foreign.make(kind, root)
                before = foreign.digest(root.parent)
                for command, *rest in COMMANDS:
                    code, _, said = run(command, root, *rest)
                    self.assertEqual(2, code, (command, rest, said))
                    self.assertIn("nothing in it is changed", said)
                self.assertEqual(2, run("import", root, archive)[0])
                with self.assertRaisesRegex(ConfigError, "not empty"):
                    VUA(CONFIG, root)
                with self.assertRaises(ConfigError):
                    collect(root, ResolvedLimits(0, 0, 1e-6, 0))
                self.assertEqual(before, foreign.digest(root.parent))
            subprocess.run(["rm", "-rf", root.parent], check=True)

    @pytest.mark.thorough
    def test_within_a_cache(self) -> None:
        """The same things beside a cache's own, and in its namespaces, stay as they are."""
        for kind in foreign.NAMES:
            root = self.root / "cache"
            with self.subTest(kind=kind):
                fill(root)
                (space,) = (path for path in root.iterdir() if len(path.name) == 64)
                chunk = next(path for path in space.glob("*/*") if len(path.name) == 64)
                files = entries_below(space)
                for where in (root / "theirs", space / "theirs", chunk / "theirs"):
                    foreign.make(kind, where)
                planted = {where: foreign.digest(where) for where in
                           (root / "theirs", space / "theirs", chunk / "theirs")}  # fmt: skip
                beside = self._beside(kind, root)
                for command, *rest in COMMANDS[:-1]:
                    run(command, root, *rest)
                self.assertEqual([], [path for path in files if path.exists()])
                for where, before in planted.items():
                    self.assertEqual(before, foreign.digest(where), where)
                for where, digest in beside.items():
                    self.assertEqual(digest, foreign.digest(where), where)
            subprocess.run(["rm", "-rf", root, self.root / "outside"], check=True)

    def _beside(self, kind: str, root: Path) -> dict[Path, dict[str, tuple[object, ...]]]:
        """Plant everything in the root itself, too; what has a name that VUA needs is left out."""
        aside = self.root / "aside"
        foreign.make(kind, aside)
        taken = {path.name for path in root.iterdir()} | {"bounds.json", ".upkeep", MARK}
        names = [path.name for path in aside.iterdir() if path.name not in taken]
        for name in names:
            (aside / name).rename(root / name)
        subprocess.run(["rm", "-rf", aside], check=True)
        return {root / name: foreign.digest(root / name) for name in names}

    def test_in_a_chunk(self) -> None:
        """Of a chunk with a stranger's file in it everything else goes, and makes room."""
        fill(self.root)
        files = self.files()
        for path in files:
            (path.parent / "notes.txt").write_text("mine")
        report = collect(
            self.root, ResolvedLimits.of(self.root, Limits(max_bytes=0, min_free_bytes=0))
        )
        self.assertEqual(3, report.evicted.chunks)
        self.assertEqual([], self.files())
        self.assertEqual(3, len(self.files("notes.txt")))
        self.assertEqual(0, run("rm", self.root, "--all")[0])
        self.assertEqual(3, len(self.files("notes.txt")))

    def test_beside_chunks(self) -> None:
        """What a stranger keeps in a namespace, or in a fan-out directory, stays at its place."""
        for depth in (1, 2):
            with self.subTest(depth=depth):
                fill(self.root)
                place = self.files()[0].parents[3 - depth]
                (place / "notes.txt").write_text("mine")
                self.assertEqual(0, run("rm", self.root, "--all")[0])
                self.assertEqual([], self.files())
                self.assertEqual("mine", (place / "notes.txt").read_text())

    @pytest.mark.thorough
    def test_deep(self) -> None:
        """Thousands of nested directories are no trouble: nothing is followed down there."""
        fill(self.root)
        (space,) = (path for path in self.root.iterdir() if len(path.name) == 64)
        for where in (self.root, space):
            place = os.open(where, os.O_RDONLY)
            for name in (f"trash-{foreign.HEX16}", *["ab"] * 3000):
                os.mkdir(name, dir_fd=place)
                below = os.open(name, os.O_RDONLY, dir_fd=place)
                os.close(place)
                place = below
            os.close(place)
            os.utime(where / f"trash-{foreign.HEX16}", (0, 0))
        self.addCleanup(subprocess.run, ["rm", "-rf", self.root], check=True)
        for command in (("gc",), ("gc", "--dry-run"), ("rm", "--all")):
            self.assertEqual(0, run(command[0], self.root, *command[1:])[0], command)
        self.assertTrue((self.root / f"trash-{foreign.HEX16}" / "ab").is_dir())


class TestMark(DirectoryTest):
    """Who gets the mark, and when."""

    def test_made_with_the_directory(self) -> None:
        """A new directory gets it, and an empty one; what file systems put there does not count."""
        for number, names in enumerate(((), ("lost+found",), (".snapshot", ".nfs00ab"))):
            root = self.root / str(number)
            for name in names:
                (root / name).mkdir(parents=True)
            with VUA(CONFIG, root):
                self.assertTrue(is_marked(root))
                self.assertEqual("vua.root.v1", json.loads((root / MARK).read_text())["format"])

    def test_synced(self) -> None:
        """A power cut spares the files that say what a directory is, and how large it may be."""
        files, folders, sync = set(), set(), os.fsync

        def fsync(fd: int) -> None:
            if stat.S_ISDIR(os.fstat(fd).st_mode):
                folders.update((os.fstat(fd).st_ino, name) for name in os.listdir(fd))
            else:
                files.add(os.fstat(fd).st_ino)
            sync(fd)

        with mock.patch("os.fsync", fsync):
            fill(self.root / "kv")
            write_bounds(self.root / "kv", Limits(max_bytes=1 << 30))
        for name in (MARK, LIMITS_FILE, "namespace.json"):
            (path,) = (self.root / "kv").rglob(name)
            self.assertIn(path.stat().st_ino, files)
            self.assertIn((path.parent.stat().st_ino, name), folders)

    def test_a_file_system_that_cannot_sync(self) -> None:
        """It is used all the same; an error of the disk is told."""
        with mock.patch("os.fsync", side_effect=OSError(errno.EINVAL, "cannot")):
            make_mark(self.root)
        self.assertTrue(is_marked(self.root))
        with (
            mock.patch("os.fsync", side_effect=OSError(errno.EIO, "broken")),
            self.assertRaises(OSError),
        ):
            write_bounds(self.root, Limits(max_bytes=1))

    def test_copied_without_the_mark(self) -> None:
        """Neither engines nor tools touch such a copy; what they print makes it a cache."""
        fill(self.root)
        (self.root / MARK).unlink()
        before = self.snapshot()
        with self.assertRaises(ConfigError) as refused:
            VUA(CONFIG, self.root)
        for words in (["gc", self.root, "--max-bytes", "0"], ["rm", self.root, "--all"]):
            code, _, err = run(*words)
            self.assertEqual(2, code)
            self.assertIn(str(refused.exception), err)
        self.assertEqual(before, self.snapshot())
        self.assertEqual(3, run_json("ls", self.root)[1]["namespaces"][0]["chunks"])
        told = re.search(r"write (.*) to (.*)$", str(refused.exception))
        assert told is not None
        Path(told[2]).write_text(told[1])
        with VUA(CONFIG, self.root) as vua:
            self.assertEqual(12, vua.get_closest(torch.arange(12)).num_tokens)
        self.assertEqual(0, run("gc", self.root, "--max-bytes", "0", "--min-free", "0")[0])
        self.assertEqual([], self.files())

    def test_mark_lost_by_a_writer(self) -> None:
        """A process that runs goes on within its bounds, deletes nothing, and says so once."""
        fill(self.root)
        bounds = VUAConfig(split_factor=4, max_bytes=measure(self.root).nbytes, min_free_bytes=0)
        with self.assertLogs("vua") as log, VUA(bounds, self.root) as vua:
            (self.root / MARK).unlink()
            before = self.snapshot()
            kv = caches_of(layers=1, heads=1, tokens=12, dim=8)
            for first in (100, 200):
                vua.put(torch.arange(12) + first, kv)
            self.assertEqual(12, vua.get_closest(torch.arange(12)).num_tokens)
        self.assertEqual(before, self.snapshot())
        self.assertEqual(1, "".join(log.output).count("so nothing is deleted there"))

    def test_made_meanwhile(self) -> None:
        """Another process makes the mark and a namespace between two looks of this one."""
        listed = os.scandir

        def scandir(*args: Any) -> Any:
            with mock.patch("os.scandir", listed):
                fill(self.root)
            return listed(*args)

        with mock.patch("os.scandir", scandir):
            self.assertTrue(claimable(self.root))

    def test_another_version(self) -> None:
        """A cache of another version stays as it is: what was found, expected, and what to do."""
        fill(self.root)
        (self.root / MARK).write_text('{"format": "vua.root.v9"}')
        before = self.snapshot()
        with self.assertRaises(ConfigError) as refused:
            VUA(CONFIG, self.root)
        for text in (str(self.root), "'vua.root.v9'", "'vua.root.v1'", "Use that version"):
            self.assertIn(text, str(refused.exception))
        code, _, err = run("gc", self.root, "--max-bytes", "0")
        self.assertEqual(2, code)
        self.assertIn(str(refused.exception), err)
        self.assertEqual(before, self.snapshot())

    def test_many_at_once(self) -> None:
        """Any number of threads and processes may open a new directory at the same time."""
        problems: list[BaseException] = []
        for turn in range(10):
            root = self.root / str(turn)

            def open_it(root: Path = root) -> None:
                try:
                    root.mkdir(exist_ok=True)
                    claim(root)
                except (OSError, ConfigError) as problem:
                    problems.append(problem)

            threads = [threading.Thread(target=open_it) for _ in range(8)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            self.assertEqual([MARK], [path.name for path in root.iterdir()])
        self.assertEqual([], problems)

    def test_deleted_under_a_process(self) -> None:
        """A directory that is deleted and made anew by a running process is marked anew."""
        root = self.root / "cache"
        with VUA(CONFIG, root) as vua:
            kv = caches_of(layers=1, heads=1, tokens=12, dim=8)
            vua.put(torch.arange(12), kv)
            subprocess.run(["rm", "-rf", root], check=True)
            self.assertEqual(3, vua.put(torch.arange(12), kv))
            self.assertTrue(is_marked(root))


class TestCommands(DirectoryTest):
    """`--dry-run`, and the question."""

    def test_dry_run(self) -> None:
        """It names what then goes, to the byte, and changes nothing."""
        for first in (0, 100, 200):
            fill(self.root, first)
        first = self.files()[0].parent
        first.joinpath(f"pin-{first.name}").touch()
        stamp = first.stat().st_mtime_ns
        os.utime(first, ns=(stamp, stamp))
        aside = self.root / "gone"
        parents = [path.parent for path in self.files() if path.parent != first]
        parents[0].rename(aside)  # perhaps what follows it is out of reach now
        run("gc", self.root, "--quick", "--min-free", "0")
        half = f"{measure(self.root).nbytes // 2}B"
        limits = ("--max-bytes", half, "--min-free", "0")
        before = foreign.digest(self.root)
        _, planned = run_json("gc", self.root, *limits, "--dry-run")
        self.assertEqual(before, foreign.digest(self.root))
        _, done = run_json("gc", self.root, *limits)
        self.assertEqual(planned["deleted"], done["deleted"])
        self.assertGreater(done["deleted"]["evicted"]["chunks"], 0)
        for name in ("chunks", "nbytes", "within"):
            self.assertEqual(planned[name], done[name], name)
        before = foreign.digest(self.root)
        _, planned = run_json("rm", self.root, "--all", "--dry-run")
        self.assertEqual(before, foreign.digest(self.root))
        _, done = run_json("rm", self.root, "--all")
        for name in ("chunks", "nbytes", "kept"):
            self.assertEqual(planned[name], done[name], name)

    @pytest.mark.thorough
    @unittest.skipUnless(hasattr(os, "openpty"), "needs a terminal")
    def test_question(self) -> None:
        """On a terminal it asks, and takes silence for a no; without one it does not ask."""
        fill(self.root)
        for answer, left in (("\n", 3), ("n\n", 3), ("y\n", 0)):
            mine, theirs = os.openpty()
            command = [sys.executable, "-m", "vua", "rm", str(self.root), "--all"]
            os.write(mine, answer.encode())
            done = subprocess.run(
                command, stdin=theirs, stderr=theirs, stdout=subprocess.PIPE, check=False
            )
            said = os.read(mine, 4096).decode()
            os.close(mine)
            os.close(theirs)
            self.assertIn("3 chunks", said)
            self.assertEqual((2 if left else 0, left), (done.returncode, len(self.files())))
        with spaces(self.root) as found:
            self.assertEqual([], found)
