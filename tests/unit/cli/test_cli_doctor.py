"""Mirrors `vua.cli.verify` and `vua.catalog.probes`: what VUA relies on, and what shows it."""

from __future__ import annotations

import errno
import os
import shutil
import time
import unittest
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from buckets import memory_url
from commands import run, run_json
from helpers import DirectoryTest, caches_of, native_code, read_only
from vua.capacity.limits import Limits, write_bounds
from vua.catalog import probes
from vua.catalog.base import Demand, Verdict
from vua.catalog.probes import PROBES, Mount, mount_of
from vua.core import VUA, VUAConfig
from vua.errors import ConfigError
from vua.security.settings import Security
from vua.storage.mark import MARK, check_root, make_mark

NAMES = ["owner", *PROBES, "speed", "space", "witness", "native loop"]
MOUNTS = r"""
21 1 8:1 / / rw,relatime shared:1 - ext4 /dev/sda1 rw
22 21 0:30 / /data rw,noatime - nfs4 server:/x rw,vers=4.2,lookupcache=positive,hard
23 22 0:31 / /data/a\040b rw - tmpfs tmpfs rw
24 21 0:32 / /database rw - xfs /dev/sdb rw
""".strip()


class TestDoctor(DirectoryTest):
    """The command; what a bad finding advises removes it."""

    def levels(self, *words: str, root: Path | None = None) -> tuple[int, dict[str, Verdict]]:
        """Exit code, and level and text by name."""
        code, report = run_json("doctor", root or self.root, *words)
        return code, {one["name"]: (one["level"], one["text"]) for one in report["findings"]}

    def bad(self, name: str, advice: str, *words: str) -> None:
        code, found = self.levels(*words)
        self.assertEqual((1, "bad"), (code, found[name][0]))
        self.assertIn(advice, found[name][1])

    def sound(self, name: str, *words: str, root: Path | None = None) -> None:
        """It is not bad (any more)."""
        self.assertNotEqual("bad", self.levels(*words, root=root)[1].get(name, ("ok", ""))[0])

    def test_sound(self) -> None:
        """An ordinary directory is sound, and is left as it was."""
        make_mark(self.root)
        mark = self.root / MARK
        before, stamp = self.snapshot(), mark.stat().st_mtime_ns
        code, found = self.levels()

        self.assertEqual(NAMES, list(found))
        self.assertEqual([], [(n, one) for n, one in found.items() if one[0] == "bad"])
        self.assertEqual(0, code)
        self.assertEqual([MARK], [path.name for path in self.root.iterdir()])
        self.assertEqual((before, stamp), (self.snapshot(), mark.stat().st_mtime_ns))

    def test_speed(self) -> None:
        """What is read per second, and from which prompt length on loading wins."""
        places = [self.root, memory_url()] if find_spec("obstore") else [self.root]
        for place in places:
            for words, expected in (
                ([], r"GB/s.*; give --token-bytes and --prefill to learn"),
                (
                    ["--token-bytes", 1024],
                    r"GB/s.*; loading brings [\d,]+ tokens/s .*: give --prefill",
                ),
                (
                    ["--token-bytes", 1024, "--prefill", 1],
                    r"wins over 1 tokens/s .* from 1 tokens on",
                ),
                (["--token-bytes", 1024, "--prefill", 10**15], "it never wins"),
            ):
                with self.subTest(place, words=words):
                    found = run_json("doctor", place, *map(str, words))[1]["findings"]
                    (text,) = [one["text"] for one in found if one["name"] == "speed"]
                    self.assertRegex(text, expected)
        with VUA(VUAConfig(split_factor=4, model="m"), self.root) as vua:
            vua.put(torch.arange(4), caches_of(layers=3, heads=2, tokens=4, dim=8))
        self.assertIn("tokens/s of 384 B each", self.levels()[1]["speed"][1])  # 3 x 2 x 8 x 2 x 4
        for words in (["--prefill", "0"], ["--token-bytes", "-1"], ["--prefill", "x"]):
            self.assertEqual(2, run("doctor", self.root, *words)[0])

    def test_break_even(self) -> None:
        """Loading wins once what it takes less per token exceeds what it takes beforehand."""
        self.assertIn("from 21 tokens on", Demand(1000, 500.0).judge(1e6, 0.0205))
        self.assertIn("from 1 tokens on", Demand(1000, 500.0).judge(1e6, 0.0))
        self.assertIn("it never wins", Demand(1000, 1000.0).judge(1e6, 0.01))

    def test_owner(self) -> None:
        """Modes, other users' directories, and directories that hold something else."""
        for make in (lambda: self.root.chmod(0o777), (self.root / "notes.txt").touch):
            make()
            with self.assertRaises(ConfigError) as refused:  # in the words of the engine
                check_root(self.root, security=Security())
            self.bad("owner", str(refused.exception))
            self.root.chmod(0o700)
        (self.root / "notes.txt").unlink()
        self.root.chmod(0o777)  # as Kubernetes makes an emptyDir
        for remedy in ("inside it", "chmod it to 700", 'set trusted_uids to "any"'):
            self.bad("owner", remedy)
        self.bad("owner", "chmod it to 700", "--trusted-uids", "1000")  # names no help here
        self.sound("owner", "--trusted-uids", "any")
        self.root.chmod(0o700)
        self.sound("owner")
        (self.root / "notes.txt").write_text("x")
        self.bad("owner", f"for example {self.root / 'vua-cache'};")
        check_root(self.root / "vua-cache", security=Security())
        self.sound("owner", root=self.root / "vua-cache")
        advised = '{"format": "vua.root.v1"}'
        self.bad("owner", f"write {advised} to {self.root / MARK}")
        (self.root / MARK).write_text(advised)
        self.sound("owner")
        code, _, err = run("doctor", self.root, "--trusted-uids", "me")
        self.assertEqual(2, code)
        self.assertIn("user ids between commas", err)

    @unittest.skipIf(os.geteuid(), "only root gives directories away")
    def test_other_user(self) -> None:
        os.chown(self.root, 12345, -1)
        self.bad("owner", "chown it, or name that user in trusted_uids")
        self.sound("owner", "--trusted-uids", "12345")
        os.chown(self.root, 0, -1)
        self.sound("owner")

    def test_write(self) -> None:
        """A directory that may not be written to, a full disk, a probe that stays."""
        self.root.chmod(0o755)
        with read_only(self.root):
            self.bad("write", "check the directory's owner and mode, or use it for reading")
        for number, advice in ((errno.ENOSPC, "free some"), (errno.EROFS, "how it is mounted")):
            with mock.patch("os.mkdir", side_effect=OSError(number, os.strerror(number))):
                self.bad("write", advice)
        self.sound("write")
        with mock.patch("shutil.rmtree"):
            level, text = self.levels()[1]["removal"]
        self.assertEqual("bad", level)
        path = text.partition(" could not be removed; remove it by hand")[0]
        shutil.rmtree(path)
        self.sound("removal")
        self.assertEqual([], list(self.root.iterdir()))
        self.assertEqual(2, run("doctor", self.root / "none")[0])

    def test_umask(self) -> None:
        """An unusual umask changes nothing, as VUA mends the modes itself."""
        before = os.umask(0o022)
        try:
            for mask in (0, 0o077, 0o277):
                os.umask(mask)
                if os.geteuid() == 0 or mask != 0o277:
                    self.assertEqual("ok", self.levels()[1]["permissions"][0], oct(mask))
        finally:
            os.umask(before)

    def test_space(self) -> None:
        """Bounds that leave no room, that cannot be read, and few inodes."""
        make_mark(self.root)
        self.assertEqual("ok", self.levels()[1]["space"][0])
        write_bounds(self.root, Limits(max_bytes="100%"))
        self.assertEqual("note", self.levels()[1]["space"][0])
        bounds = self.root / "bounds.json"
        again = ("gc", self.root, "--min-free", "0", "--set")
        for remedy in (bounds.unlink, lambda: self.assertEqual(0, run(*again)[0])):
            write_bounds(self.root, Limits(min_free_bytes="100%"))
            self.bad("space", "free space or set other bounds")
            remedy()
            self.sound("space")
        for remedy in (bounds.unlink, lambda: write_bounds(self.root, Limits(max_bytes="1GiB"))):
            bounds.write_text("{")
            self.bad("space", "mend or delete it")
            remedy()
            self.sound("space")
        bounds.unlink()
        bounds.symlink_to(self.root / "loop")  # ELOOP even for root, as EACCES for others
        self.bad("space", "cannot be read")
        self.assertNotIn("delete", self.levels()[1]["space"][1])
        bounds.unlink()
        if os.statvfs(self.root).f_files:
            with mock.patch.object(probes, "_FEW_INODES", 1 << 62):
                self.bad("space", "delete small files")

    def test_host(self) -> None:
        """No native loop is a note, one that is refused is bad."""
        with native_code("off"):
            self.assertEqual("note", self.levels()[1]["native loop"][0])
        with native_code("nonsense"):
            self.assertEqual(1, self.levels()[0])

    def test_removed_after_failure(self) -> None:
        """A probe that fails is bad by itself; the rest is tried, and all is removed."""
        with mock.patch("os.replace", side_effect=RuntimeError), self.assertRaises(RuntimeError):
            run("doctor", self.root)
        self.assertEqual([], list(self.root.iterdir()))
        with mock.patch("os.replace", side_effect=OSError(errno.EIO, "broken")):
            code, found = self.levels()
        self.assertEqual((1, "bad"), (code, found["publish"][0]))
        self.assertIn("broken", found["publish"][1])
        self.assertEqual([], list(self.root.iterdir()))


class TestProbes(DirectoryTest):
    """Each probe notices a system that is not as VUA needs it."""

    def probe(self, name: str) -> str:
        path = self.root / "ground"
        path.mkdir()
        try:
            return PROBES[name](path)[0]
        finally:
            shutil.rmtree(path)

    def test_mounts(self) -> None:
        """The mount is the innermost one, whatever characters are in its name."""
        table = self.root / "mountinfo"
        table.write_text(MOUNTS)
        for path, kind in (
            ("/", "ext4"), ("/x", "ext4"), ("/data", "nfs4"), ("/data/x/y", "nfs4"),
            ("/data/a b/c", "tmpfs"), ("/database/x", "xfs"),
        ):  # fmt: skip
            self.assertEqual(kind, mount_of(path, str(table)).kind, path)
        self.assertIn("lookupcache=positive", mount_of("/data", str(table)).options)
        self.assertEqual(Mount(""), mount_of("/", str(self.root / "none")))

    def test_file_system(self) -> None:
        """NFS that caches absent names, and memory, are noted."""
        for mount, level in (
            (Mount("ext4"), "ok"), (Mount("nfs4", ("rw", "hard")), "note"), (Mount(""), "ok"),
            (Mount("nfs4", ("lookupcache=positive",)), "ok"), (Mount("tmpfs"), "note"),
        ):  # fmt: skip
            with mock.patch.object(probes, "mount_of", return_value=mount):
                self.assertEqual(level, self.probe("file system"), mount)

    def test_broken(self) -> None:
        """What is noticed where a system call does otherwise."""
        opened, made, change, stamped, now = os.open, os.mkdir, os.chmod, os.utime, time.time_ns
        other = os.geteuid() + 1

        def no_excl(path: str, flags: int, mode: int = 0o777, *, dir_fd: int | None = None) -> int:
            return opened(path, flags & ~os.O_EXCL, mode, dir_fd=dir_fd)

        def wide(path: str, mode: int, *, dir_fd: int | None = None) -> None:
            made(path, mode, dir_fd=dir_fd)
            if Path(path).name == "private":
                change(path, 0o755, dir_fd=dir_fd)

        def rounded(step: int) -> Callable[..., None]:
            return lambda path, *, ns, **rest: stamped(
                path, ns=tuple(one // step * step for one in ns), **rest
            )

        rows: tuple[tuple[str, str, str, Callable[..., Any]], ...] = (
            ("publish", "bad", "os.replace", os.link),
            ("publish", "bad", "os.open", no_excl),
            ("permissions", "bad", "os.mkdir", wide),
            ("permissions", "note", "os.geteuid", lambda: other),
            ("time stamps", "bad", "os.utime", rounded(10**9)),
            ("time stamps", "ok", "os.utime", rounded(1000)),
            ("clock", "note", "time.time_ns", lambda: now() + 3600 * 10**9),
        )
        refused = mock.patch("os.chmod", side_effect=PermissionError(errno.EPERM, "refused"))
        for name, level, call, how in rows:
            with self.subTest(name, call=call), refused:
                self.assertEqual("ok", self.probe(name))
                with mock.patch(call, how):
                    self.assertEqual(level, self.probe(name))
