"""Mirrors `vua.cli.verify` and `vua.catalog.probes`: what VUA relies on, and what shows it."""

from __future__ import annotations

import ast
import contextlib
import errno
import inspect
import io
import os
import shutil
import subprocess
import sys
import time
import unittest
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any, ClassVar
from unittest import mock

import torch

from buckets import memory_url
from commands import run, run_json
from helpers import DirectoryTest, caches_of, native_code, read_only
from vua.capacity.limits import Limits, write_bounds
from vua.catalog import probes
from vua.catalog.base import Demand, Finding
from vua.catalog.bucket import judged
from vua.catalog.probes import PROBES, Mount, ProbeDirectory, mount_of
from vua.cli.verify import show_findings
from vua.core import VUA, VUAConfig
from vua.errors import ConfigError
from vua.io.posix import cached_pages
from vua.security.settings import Security
from vua.storage.mark import MARK, check_root, make_mark

NAMES = [
    "owner", "file system", "publish", "symbolic links", "openat2", "RWF_NOWAIT", "O_DIRECT",
    "cachestat", "permissions", "time stamps", "clock", "visibility", "hard links", "speed",
    "space", "witness", "native loop", "GDS",
]  # fmt: skip
MOUNTS = r"""
21 1 8:1 / / rw,relatime shared:1 - ext4 /dev/sda1 rw
22 21 0:30 / /data rw,noatime - nfs4 server:/x rw,vers=4.2,lookupcache=positive,hard
23 22 0:31 / /data/a\040b rw - tmpfs tmpfs rw
24 21 0:32 / /database rw - xfs /dev/sdb rw
""".strip()


class TestDoctor(DirectoryTest):
    """The command."""

    def levels(self) -> tuple[int, dict[str, tuple[str, str]]]:
        """Exit code, and level and text by name."""
        code, report = run_json("doctor", self.root)
        return code, {one["name"]: (one["level"], one["text"]) for one in report["findings"]}

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

    def test_foreign(self) -> None:
        """A directory of somebody else's files is bad, in the words of the engine that refuses."""
        (self.root / "notes.txt").write_text("x")
        with self.assertRaises(ConfigError) as refused:
            check_root(self.root)
        code, found = self.levels()
        self.assertEqual((1, "bad"), (code, found["owner"][0]))
        self.assertIn(str(refused.exception), found["owner"][1])

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
                (["--token-bytes", 1024, "--prefill", 1e15], "it never wins"),
            ):
                with self.subTest(place, words=words):
                    found = run_json("doctor", place, *map(str, words))[1]["findings"]
                    (text,) = [one["text"] for one in found if one["name"] == "speed"]
                    self.assertRegex(text, expected)
        with VUA(VUAConfig(split_factor=4, model="m"), self.root) as vua:
            vua.put(torch.arange(4), caches_of(layers=3, heads=2, tokens=4, dim=8))
        self.assertIn("tokens/s of 384 B each", self.levels()[1]["speed"][1])  # 3 x 2 x 8 x 2 x 4
        for words in (["--prefill", "0"], ["--token-bytes", "-1"], ["--prefill", "nan"]):
            self.assertEqual(2, run("doctor", self.root, *words)[0])

    def test_break_even(self) -> None:
        """Loading wins once what it takes less per token exceeds what it takes beforehand."""
        self.assertIn("from 21 tokens on", Demand(1000, 500.0).judge(1e6, 0.0205))
        self.assertIn("from 1 tokens on", Demand(1000, 500.0).judge(1e6, 0.0))
        self.assertIn("it never wins", Demand(1000, 1000.0).judge(1e6, 0.01))

    def test_unreadable_limits(self) -> None:
        """Limits that this user may not read are not called damaged: nothing is to be deleted."""
        bounds = self.root / "bounds.json"
        bounds.symlink_to(self.root / "loop")  # ELOOP even for root, as EACCES for others
        code, found = self.levels()
        self.assertEqual((1, "bad"), (code, found["space"][0]))
        self.assertIn("cannot be read", found["space"][1])
        self.assertNotIn("delete", found["space"][1])

    def test_owner(self) -> None:
        """Where an engine does not start the doctor says so, in the engine's own words."""
        self.root.chmod(0o777)  # as Kubernetes makes an emptyDir
        with self.assertRaises(ConfigError) as refused:
            check_root(self.root, security=Security())
        code, found = self.levels()

        self.assertEqual((1, "bad"), (code, found["owner"][0]))
        self.assertIn(str(refused.exception), found["owner"][1])
        code, report = run_json("doctor", self.root, "--trusted-uids", "any")
        self.assertEqual((0, "ok"), (code, report["findings"][0]["level"]))
        inside = self.root / "vua"  # what the words advise
        check_root(inside, security=Security())
        self.assertEqual("ok", run_json("doctor", inside)[1]["findings"][0]["level"])
        code, _, err = run("doctor", self.root, "--trusted-uids", "me")
        self.assertEqual(2, code)
        self.assertIn("user ids between commas", err)

    def test_text(self) -> None:
        """For people each finding is named; those that passed and have no figure are in one row."""
        code, out, err = run("doctor", self.root)

        self.assertEqual((0, ""), (code, err))
        self.assertEqual([], [name for name in NAMES if name not in out])
        self.assertGreater(len(NAMES), len(out.splitlines()))
        bad = Finding("publish", "bad", "a rename replaces")
        with contextlib.redirect_stdout(io.StringIO()) as shown:
            show_findings([Finding("hard links", "ok", "x"), bad])
        self.assertRegex(shown.getvalue(), r"bad +publish +a rename replaces")
        self.assertRegex(shown.getvalue(), r"ok +1 more +hard links")

    def test_read_only(self) -> None:
        """A directory that may not be written to is bad; none is an unusable question."""
        with read_only(self.root):
            code, found = self.levels()
        self.assertEqual((1, "bad"), (code, found["write"][0]))
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
        """Bounds that leave no room are bad, and so are unusable ones."""
        self.assertEqual("ok", self.levels()[1]["space"][0])
        write_bounds(self.root, Limits(max_bytes="100%"))
        self.assertEqual("note", self.levels()[1]["space"][0])
        write_bounds(self.root, Limits(min_free_bytes="100%"))
        code, found = self.levels()
        self.assertEqual((1, "bad"), (code, found["space"][0]))
        (self.root / "bounds.json").write_text("{")
        code, found = self.levels()
        self.assertEqual((1, "bad"), (code, found["space"][0]))
        self.assertIn("bounds.json", found["space"][1])

    def test_host(self) -> None:
        """No native loop is a note; cuFile is found, and never loaded."""
        library = self.root / "libcufile.so.0"
        library.write_text("no library")
        with native_code("off"), mock.patch.dict(os.environ, LD_LIBRARY_PATH=f":{self.root}"):
            _, found = self.levels()
        self.assertEqual("note", found["native loop"][0])
        self.assertIn("libcufile.so", found["GDS"][1])
        with native_code("nonsense"):
            self.assertEqual(1, self.levels()[0])

    def test_removed_after_failure(self) -> None:
        """A probe that fails is bad by itself; the rest is tried, and all is removed."""
        with mock.patch("os.symlink", side_effect=RuntimeError), self.assertRaises(RuntimeError):
            run("doctor", self.root)
        self.assertEqual([], list(self.root.iterdir()))
        with (
            mock.patch("os.link", side_effect=OSError(errno.EPERM, "no links")),
            mock.patch("os.replace", side_effect=OSError(errno.EIO, "broken")),
        ):
            code, found = self.levels()
        self.assertEqual((1, "bad", "note"), (code, found["publish"][0], found["hard links"][0]))
        self.assertIn("broken", found["publish"][1])
        self.assertEqual([], list(self.root.iterdir()))

    def test_light(self) -> None:
        """It needs no torch and no engine."""
        script = (
            "import sys; from vua.cli import main; main(['doctor', sys.argv[1]]);"
            "print(sorted({'torch', 'safetensors', 'vllm', 'transformers'} & set(sys.modules)))"
        )
        done = subprocess.run(
            [sys.executable, "-c", script, str(self.root)],
            capture_output=True, text=True, check=True,
        )  # fmt: skip

        self.assertEqual("[]", done.stdout.splitlines()[-1])


class TestAdvice(DirectoryTest):
    """What a bad finding advises removes it; a new one without a row here fails the test."""

    ROWS: ClassVar = {
        "publish": "TestProbes.test_publish",  # another disk is one where the probe passes
        "symlinks": "TestProbes.test_symlinks",
        "modes": "TestProbes.test_modes",
        "stamps": "TestProbes.test_stamps",
        "visible": "TestProbes.test_visible",
        "_owner": "TestAdvice.test_owner",
        "tried": "TestAdvice.test_write",
        "_unwritable": "TestAdvice.test_write",
        "_guarded": "TestDoctor.test_removed_after_failure",
        "_space": "TestAdvice.test_space",
        "_native": "TestDoctor.test_host",
    }

    def test_rows(self) -> None:
        """Every function that returns a bad finding has a test."""
        found = {
            one.name
            for one in ast.parse(inspect.getsource(probes)).body
            if isinstance(one, ast.FunctionDef)
            and any(isinstance(at, ast.Constant) and at.value == "bad" for at in ast.walk(one))
        }
        self.assertEqual(found, set(self.ROWS))
        for kind, name in (row.split(".") for row in self.ROWS.values()):
            self.assertTrue(callable(getattr(globals()[kind], name, None)), name)

    def finding(self, name: str, *words: str, root: Path | None = None) -> tuple[str, str]:
        report = run_json("doctor", root or self.root, *words)[1]
        found = {one["name"]: (one["level"], one["text"]) for one in report["findings"]}
        return found.get(name, ("ok", ""))

    def bad(self, name: str, advice: str, *words: str) -> None:
        level, text = self.finding(name, *words)
        self.assertEqual("bad", level)
        self.assertIn(advice, text)

    def sound(self, name: str, *words: str, root: Path | None = None) -> None:
        """It is not bad (any more), and an engine of this user starts."""
        self.assertNotEqual("bad", self.finding(name, *words, root=root)[0])

    def test_owner(self) -> None:
        """Modes, other users' directories, and directories that hold something else."""
        for remedy in ("inside it", "chmod it to 700", 'set trusted_uids to "any"'):
            self.root.chmod(0o777)
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

    @unittest.skipIf(os.geteuid(), "only root gives directories away")
    def test_other_user(self) -> None:
        os.chown(self.root, 12345, -1)
        self.bad("owner", "chown it, or name that user in trusted_uids")
        self.sound("owner", "--trusted-uids", "12345")
        os.chown(self.root, 0, -1)
        self.sound("owner")

    def test_write(self) -> None:
        """A directory that this user may not write to, a full disk, a probe that stays."""
        self.root.chmod(0o755)
        with read_only(self.root):
            self.bad("write", "check the directory's owner and mode, or use it for reading")
        with as_nobody(self.root):  # the owner and mode as they should be
            self.sound("write")
        full = mock.patch("os.mkdir", side_effect=OSError(errno.ENOSPC, "No space left on device"))
        with full:
            self.bad("write", "free some")
        self.sound("write")
        with mock.patch("shutil.rmtree"):
            level, text = self.finding("removal")
        self.assertEqual("bad", level)
        path = text.partition(" could not be removed; remove it by hand")[0]
        shutil.rmtree(path)
        self.sound("removal")
        self.assertEqual([], list(self.root.iterdir()))

    def test_read_only_mount(self) -> None:
        """Owner and mode do not matter there: it is to be mounted for writing."""
        mount, where = ["mount", "-t", "tmpfs", "none", "-o"], str(self.root)
        if (
            os.geteuid()
            or subprocess.run([*mount, "ro", where], capture_output=True, check=False).returncode
        ):
            self.skipTest("this process may not mount anything")
        try:
            self.bad("write", "(Read-only file system); check how it is mounted")
            subprocess.run([*mount, "remount,rw", where], check=True)
            self.sound("write")
        finally:
            subprocess.run(["umount", where], check=True)

    def test_space(self) -> None:
        """Bounds that leave no room, that cannot be read, and few inodes."""
        make_mark(self.root)
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
        if os.statvfs(self.root).f_files:
            with mock.patch.object(probes, "_FEW_INODES", 1 << 62):
                self.bad("space", "delete small files")

    def test_lifecycle(self) -> None:
        """A rule that deletes too early: another rule, or the time to live that is advised."""
        rule = {"Status": "Enabled", "Expiration": {"Days": 2}}
        found = judged([rule], "kv/", 10 * 86400)
        self.assertEqual("bad", found.level)
        self.assertIn("change the rule, or `vua ttl URL 2d`", found.text)
        self.assertEqual("ok", judged([rule], "kv/", 2 * 86400).level)
        rule["Expiration"] = {"Days": 10}
        self.assertEqual("ok", judged([rule], "kv/", 10 * 86400).level)


@contextlib.contextmanager
def as_nobody(root: Path) -> Iterator[None]:
    """Be another user than root, who owns a directory."""
    if os.geteuid():
        yield
        return
    os.chown(root, 65534, -1)
    os.seteuid(65534)
    try:
        yield
    finally:
        os.seteuid(0)
        os.chown(root, 0, -1)


class TestProbes(DirectoryTest):
    """Each probe notices a system that is not as VUA needs it."""

    def probe(self, name: str, mount: Mount | None = None) -> Finding:
        path = self.root / "ground"
        path.mkdir()
        fd = os.open(path, os.O_RDONLY)
        try:
            probe = next(one for one in PROBES if one.__name__ == name)
            return probe(ProbeDirectory(str(path), fd, mount or Mount("ext4")))
        finally:
            os.close(fd)
            shutil.rmtree(path)

    def broken(self, name: str, what: str, how: Callable[..., Any]) -> tuple[str, str]:
        """The probe's level here, and its level where a system call does otherwise."""
        sound = self.probe(name).level
        with mock.patch(what, how):
            return sound, self.probe(name).level

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
            self.assertEqual(level, self.probe("file_system", mount).level, mount)

    def test_publish(self) -> None:
        """A rename that leaves the old name, and an O_EXCL that does not hold, are bad."""
        opened = os.open

        def copy(old: str, new: str, *, src_dir_fd: int, dst_dir_fd: int) -> None:
            os.link(old, new, src_dir_fd=src_dir_fd, dst_dir_fd=dst_dir_fd)

        def no_excl(path: str, flags: int, mode: int = 0o777, *, dir_fd: int | None = None) -> int:
            return opened(path, flags & ~os.O_EXCL, mode, dir_fd=dir_fd)

        self.assertEqual(("ok", "bad"), self.broken("publish", "os.replace", copy))
        self.assertEqual(("ok", "bad"), self.broken("publish", "os.open", no_excl))

    def test_symlinks(self) -> None:
        """A link that can be passed through is bad."""

        def passable(_: str, link: str, *, dir_fd: int) -> None:
            os.mkdir(link, dir_fd=dir_fd)
            os.close(os.open(f"{link}/file", os.O_CREAT | os.O_WRONLY, dir_fd=dir_fd))

        self.assertEqual(("ok", "bad"), self.broken("symlinks", "os.symlink", passable))

    def test_direct(self) -> None:
        """Without O_DIRECT there is a note."""
        opened = os.open

        def refuse(path: str, flags: int, mode: int = 0o777, *, dir_fd: int | None = None) -> int:
            if flags & os.O_DIRECT:
                raise OSError(errno.EINVAL, "no")
            return opened(path, flags, mode, dir_fd=dir_fd)

        with mock.patch("os.open", refuse):
            self.assertEqual("note", self.probe("direct").level)

    def test_cold(self) -> None:
        """Where the system does not tell cold files there is a note; else it is as it tells."""
        with (self.root / "file").open("wb+") as file:
            known = cached_pages(file.fileno()) is not None
        self.assertEqual("ok" if known else "note", self.probe("cold").level)
        with mock.patch("vua.io.posix.LINUX64", new=False):
            self.assertEqual("note", self.probe("cold").level)

    def test_modes(self) -> None:
        """Directories that stay wider are bad; files of another owner are noted."""
        made, change = os.mkdir, os.chmod

        def wide(path: str, mode: int, *, dir_fd: int | None = None) -> None:
            made(path, mode, dir_fd=dir_fd)
            if dir_fd is not None:
                change(path, 0o755, dir_fd=dir_fd)

        with mock.patch("os.chmod", side_effect=PermissionError(errno.EPERM, "refused")):
            self.assertEqual(("ok", "bad"), self.broken("modes", "os.mkdir", wide))
        other = os.geteuid() + 1
        self.assertEqual(("ok", "note"), self.broken("modes", "os.geteuid", lambda: other))

    def test_stamps(self) -> None:
        """Stamps in whole seconds are bad, in whole microseconds they are not."""
        stamped = os.utime

        def rounded(step: int) -> Callable[..., None]:
            return lambda path, *, ns, **rest: stamped(
                path, ns=tuple(one // step * step for one in ns), **rest
            )

        self.assertEqual(("ok", "bad"), self.broken("stamps", "os.utime", rounded(10**9)))
        self.assertEqual(("ok", "ok"), self.broken("stamps", "os.utime", rounded(1000)))

    def test_clock(self) -> None:
        """A clock that is off by an hour is noted."""
        now = time.time_ns
        late = self.broken("clock", "time.time_ns", lambda: now() + 3600 * 10**9)
        self.assertEqual(("ok", "note"), late)

    def test_visible(self) -> None:
        """A file that another process makes and that does not show is bad."""
        with mock.patch.object(probes, "_VISIBLE_S", 0.1):
            unseen = self.broken("visible", "subprocess.run", lambda *_, **__: None)
        self.assertEqual(("ok", "bad"), unseen)
