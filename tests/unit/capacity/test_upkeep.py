"""Bounds that hold with many namespaces, odd clocks, few descriptors and tools of another user."""

from __future__ import annotations

import contextlib
import json
import os
import resource
import shutil
import subprocess
import tarfile
import time
import unittest
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from unittest import mock

import pytest
import torch

from commands import collect, run, run_json
from helpers import SOON_S, DirectoryTest, caches_of
from vua.capacity.evictor import PINNED_SHARE
from vua.capacity.limits import Limits, ResolvedLimits
from vua.capacity.listing import read_listing
from vua.capacity.spaces import Space
from vua.capacity.upkeep import upkeep_directory
from vua.capacity.usage import measure
from vua.core import VUA, VUAConfig
from vua.storage.mark import is_marked
from vua.storage.names import AFTER

HOUR_NS = 3600 * 10**9
TOKENS = 64
USER = 12345


def config(nbytes: int | str, model: str = "model", **settings: object) -> VUAConfig:
    return VUAConfig(split_factor=4, model=model, max_bytes=nbytes, min_free_bytes=0, **settings)


def put(vua: VUA, first: int, tokens: int = TOKENS) -> int:
    """Store a prompt of sixteen chunks that no other has; return how many were written."""
    kv = caches_of(layers=1, heads=1, tokens=tokens, dim=8)
    return vua.put(torch.arange(first * 1000, first * 1000 + tokens), kv)


class UpkeepTest(DirectoryTest):
    """A directory of one model's prompts."""

    def setUp(self) -> None:
        super().setUp()
        self.root /= "cache"
        with VUA(config("1G"), self.root) as vua:
            put(vua, 0)
        self.one = measure(self.root).nbytes

    def shift(self, seconds: float) -> None:
        """Let all that is there have been used so much later, as if a clock had been set since."""
        for path in sorted(self.root.rglob("*"), reverse=True):
            with contextlib.suppress(FileNotFoundError):  # a lease ends
                stamp = path.lstat().st_mtime_ns + int(seconds * 1e9)
                os.utime(path, ns=(stamp, stamp), follow_symlinks=False)

    def stored(self, vua: VUA, first: int) -> int:
        """How many chunks of a prompt are there."""
        return vua.get_closest(torch.arange(first * 1000, first * 1000 + TOKENS)).num_tokens // 4

    def space(self) -> Space:
        (path,) = (path for path in self.root.iterdir() if len(path.name) == 64)
        fd = os.open(path, os.O_RDONLY)
        self.addCleanup(os.close, fd)
        return Space(path.name, fd)


class TestManyNamespaces(UpkeepTest):
    """More namespaces than descriptors."""

    @contextmanager
    def descriptors(self, more: int) -> Iterator[None]:
        """Let the process have few descriptors for a while, beside those that it has open."""
        before = resource.getrlimit(resource.RLIMIT_NOFILE)
        limit = len(list(Path("/proc/self/fd").iterdir())) + more
        resource.setrlimit(resource.RLIMIT_NOFILE, (limit, before[1]))
        try:
            yield
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, before)

    def test_no_descriptor_at_all(self) -> None:
        """Where nothing can be looked at, that is no reason to think that nothing is there."""
        with VUA(config(self.one), self.root) as vua:
            put(vua, 1)
        taken: list[int] = []
        with self.descriptors(8):
            try:
                with self.assertRaises(OSError):
                    while True:
                        taken.append(os.open(os.devnull, os.O_RDONLY))
                with self.assertRaises(OSError):
                    measure(self.root)
            finally:
                for fd in taken:
                    os.close(fd)

    @unittest.skipUnless(os.geteuid() == 0, "needs root, to be another user")
    def test_hidden(self) -> None:
        """A namespace of another user's that may not be opened counts like those that may."""
        whole = measure(self.root).nbytes
        with VUA(config("1G", "other"), self.root) as vua:
            put(vua, 0)
        other, mine = (path for path in self.root.iterdir() if len(path.name) == 64)
        self.root.parent.chmod(0o755)
        self.root.chmod(0o755)
        other.chmod(0o700)
        for path in [mine, *mine.rglob("*")]:
            path.chmod(0o755)
        os.seteuid(USER)
        try:
            self.assertEqual(2 * whole, measure(self.root).nbytes)
            os.seteuid(0)
            mine.chmod(0o700)
            os.seteuid(USER)
            self.assertGreater(measure(self.root).nbytes, whole)
        finally:
            os.seteuid(0)


class TestEmptied(UpkeepTest):
    """Namespaces that hold nothing any more."""

    def test_goes_after_an_hour(self) -> None:
        """Emptied ones go, not at once, and with them what was only theirs."""
        collect(self.root, ResolvedLimits.of(self.root, Limits(max_bytes=0, min_free_bytes=0)))
        (path,) = (path for path in self.root.iterdir() if len(path.name) == 64)
        self.assertTrue(path.exists())
        os.utime(path, ns=(0, 0))
        report = collect(self.root, ResolvedLimits.of(self.root, Limits(min_free_bytes=0)))
        self.assertEqual((1, False), (report.emptied, path.exists()))
        self.assertEqual({"vua.json", ".upkeep"}, {path.name for path in self.root.iterdir()})

    @pytest.mark.thorough
    def test_in_an_engine(self) -> None:
        """Where no `gc` runs, processes that evict delete them."""
        before = set(self.root.iterdir())
        with VUA(config("1G", "old"), self.root) as vua:
            put(vua, 5, 4)
            (old,) = {path for path in self.root.iterdir() if len(path.name) == 64} - before
        collect(self.root, ResolvedLimits.of(self.root, Limits(max_bytes=0, min_free_bytes=0)))
        os.utime(old, ns=(0, 0))
        with VUA(config(2 * self.one), self.root) as vua:
            for number in range(5):
                put(vua, number)
        self.assertFalse(old.exists())

    def test_beside_a_writer(self) -> None:
        """A process that has it open and stores again loses nothing, however often it goes."""
        with VUA(config("1G"), self.root) as vua:
            for number in range(1, 6):
                self.assertEqual(16, put(vua, number))
                self.assertEqual(16, self.stored(vua, number))
                nothing = ResolvedLimits.of(self.root, Limits(max_bytes=0, min_free_bytes=0))
                for _ in range(9):  # what is touched meanwhile stays
                    if not collect(self.root, nothing).chunks:
                        break
                (path,) = (path for path in self.root.iterdir() if len(path.name) == 64)
                os.utime(path, ns=(0, 0))
                report = collect(self.root, ResolvedLimits.of(self.root, Limits(min_free_bytes=0)))
                self.assertEqual(1, report.emptied)
            self.assertEqual(16, put(vua, 1))

    def test_something_comes(self) -> None:
        """A chunk that is stored between the look and the removal stays, and can be found."""
        space = self.space()
        (path,) = (path for path in self.root.iterdir() if len(path.name) == 64)
        collect(self.root, ResolvedLimits.of(self.root, Limits(max_bytes=0, min_free_bytes=0)))
        described = (path / "namespace.json").read_bytes()
        os.utime(path, ns=(0, 0))
        real = os.unlink

        def unlink(name: str, *, dir_fd: int | None = None) -> None:
            real(name, dir_fd=dir_fd)
            if name == "namespace.json":
                os.mkdir("ab", dir_fd=space.fd)

        with mock.patch("os.unlink", unlink):
            report = collect(self.root, ResolvedLimits.of(self.root, Limits(min_free_bytes=0)))
        self.assertEqual((0, described), (report.emptied, (path / "namespace.json").read_bytes()))
        self.assertEqual([], [*self.root.glob(".tmp*")])


class TestClocks(UpkeepTest):
    """A server whose clock jumps by hours, either way."""

    def test_set_back(self) -> None:
        """After an hour back all of a prompt is stored, and what is used now stays longest."""
        for hours in (1, -1):
            with VUA(config(4 * self.one), self.root) as vua:
                for number in range(1, 6):
                    put(vua, number)
                self.shift(hours * 3600)
                for number in range(10, 14):
                    self.assertEqual(16, put(vua, number), number)
                self.assertGreaterEqual(self.stored(vua, 13), 16)
                self.assertGreaterEqual(self.stored(vua, 12), 16)
            listing = read_listing(self.space())
            late = [
                one.name
                for some in listing.parts(99)
                for one in some
                if (above := listing.get(one.before or "")) and above.used_ns < one.used_ns
            ]
            self.assertEqual([], late, "no chunk is younger than the one before it")

    @pytest.mark.thorough
    def test_something_else_has_its_name(self) -> None:
        """A file or a link in the place of `.upkeep` stays; a full cache evicts all the same."""
        path = self.root / ".upkeep"
        for name, make in (
            ("file", lambda: path.write_text("mine")),
            ("link", lambda: path.symlink_to("/nowhere")),
        ):
            with self.subTest(name):
                if path.is_dir():
                    shutil.rmtree(path)
                path.unlink(missing_ok=True)
                make()
                before = path.readlink() if path.is_symlink() else path.read_text()
                with VUA(config(4 * self.one), self.root) as vua:
                    for number in range(1, 9):
                        put(vua, number)
                    self.assertGreater(self.stored(vua, 8), 0)
                self.assertLess(measure(self.root).nbytes, 1.25 * 4 * self.one)
                after = path.readlink() if path.is_symlink() else path.read_text()
                self.assertEqual(before, after)
                self.assertFalse((self.root / "uses").exists())
                code, out, err = run("gc", self.root, "--max-bytes", "0", "--yes")
                self.assertEqual(0, code, out + err)

    def test_old_leftovers_from_the_future(self) -> None:
        """What a crash left behind before the clock was set back by a day goes, too."""
        path = self.root / f".tmp-{'a' * 16}"
        for hours, there in ((0.5, True), (24, False)):
            path.write_bytes(b"")
            stamp = time.time_ns() + int(hours * HOUR_NS)
            os.utime(path, ns=(stamp, stamp))
            collect(self.root, ResolvedLimits.of(self.root, Limits(min_free_bytes=0)))
            self.assertEqual(there, path.exists(), hours)


class TestPins(UpkeepTest):
    """Pins have a budget."""

    @pytest.mark.thorough
    def test_beyond_the_budget(self) -> None:
        """All is pinned: half of the limit stays so, what was used last; new prompts find room."""
        with VUA(config(8 * self.one), self.root) as vua:  # nothing goes before all is pinned
            for number in range(1, 4):
                put(vua, number)
            for number in range(4):
                tokens = torch.arange(number * 1000, number * 1000 + TOKENS)
                self.assertEqual([TOKENS], vua.pin(tokens))
        space = self.space()
        pinned = read_listing(space).totals().nbytes
        self.assertGreater(pinned, PINNED_SHARE * 4 * self.one)
        with VUA(config(4 * self.one), self.root) as vua:
            for number in range(10, 13):
                self.assertEqual(16, put(vua, number))
            left = read_listing(space).totals().pinned_nbytes
            self.assertTrue(0.4 * 4 * self.one <= left <= 0.5 * 4 * self.one, left / self.one)
            self.assertGreater(self.stored(vua, 3), self.stored(vua, 0))

    def test_told(self) -> None:
        """`vua gc` says when pins hold too much."""
        run("gc", self.root, "--max-bytes", f"{self.one}B", "--min-free", "0", "--set")
        with VUA(config("1G"), self.root) as vua:
            vua.pin(torch.arange(TOKENS))
        self.assertIn("pinned", run("gc", self.root)[1])


class TestCircles(UpkeepTest):
    """Chunks that are said to follow each other in a circle."""

    def circle(self) -> list[Path]:
        """Let the prompt's last three chunks follow each other."""
        space = self.space()
        names = [*read_listing(space).in_order()][-3:]
        paths = [self.root / space.name / name[:2] / name for name in names]
        for path, before in zip(paths, [names[-1], *names], strict=False):
            (path / f"{AFTER}{before}").touch()
        return paths

    def test_ends(self) -> None:
        """`gc`, `rm`, `pin` and `export` come to an end, and what may be of use stays."""
        paths = self.circle()
        report = run_json("gc", self.root, "--max-per-salt", "1G")[1]
        self.assertEqual(0, report["deleted"]["chunks"])
        self.assertEqual(0, run("pin", self.root, paths[0].name)[0])
        self.assertEqual(0, run("pin", self.root, paths[0].name, "--remove")[0])
        self.assertEqual(0, run("rm", self.root, paths[0].name)[0])
        self.assertEqual([], [path for path in paths if path.exists()])

    def test_import(self) -> None:
        """An archive that says so is refused there; the rest of it is taken in."""
        archive, forged = self.root.parent / "a.tar", self.root.parent / "b.tar"
        names = [*read_listing(self.space()).in_order()]
        self.assertEqual(0, run("export", self.root, archive, "--all")[0])
        last, before = names[-1], names[-2]
        ustar = tarfile.USTAR_FORMAT
        with tarfile.open(archive) as source, tarfile.open(forged, "w", format=ustar) as out:
            for member in source:
                if f"/{before}/" in member.name:
                    mark = tarfile.TarInfo(f"{member.name.rpartition('/')[0]}/{AFTER}{last}")
                    out.addfile(mark)
                out.addfile(member, source.extractfile(member))
        other = self.root.parent / "other"
        self.assertEqual(0, run("import", other, archive)[0])
        for path in other.rglob(f"{before}/*"):
            path.unlink()
        code, said, _ = run("import", other, forged)
        self.assertEqual(1, code, said)
        self.assertIn("begins at", said)
        self.assertEqual([], [*other.rglob(f"{AFTER}*")])


@unittest.skipUnless(os.geteuid() == 0, "needs root, to be another user")
class TestOtherUser(UpkeepTest):
    """Tools run by root in a user's directory."""

    def setUp(self) -> None:
        super().setUp()
        self.root.parent.chmod(0o755)
        subprocess.run(["rm", "-rf", self.root], check=True)
        self.root.mkdir(mode=0o700)
        os.chown(self.root, USER, USER)

    def engine(self, first: int, stop: int) -> int:
        """Store these prompts as that user; return how many were stored wholly."""
        child = os.fork()
        if child == 0:
            stored = 255
            try:
                os.setgroups([])
                os.setgid(USER)
                os.setuid(USER)
                with VUA(config(3 * self.one), self.root) as vua:
                    stored = sum(put(vua, number) == 16 for number in range(first, stop))
            finally:
                os._exit(stored)
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])

    @pytest.mark.thorough
    def test_engine_goes_on(self) -> None:
        """After root's tools the engine evicts and stores as before: nothing there is root's."""
        self.assertEqual(1, self.engine(0, 1))
        archive = self.root.parent / "a.tar"
        self.assertEqual(0, run("export", self.root, archive, "--all")[0])
        archive.chmod(0o600)
        for command in (("verify",), ("verify", "--repair"), ("gc",), ("ttl", "100000s"), ("du",),
                        ("gc", "--max-bytes", f"{3 * self.one}B", "--min-free", "0", "--set"),
                        ("rm", "--all"), ("import", archive), ("verify",), ("ls",)):  # fmt: skip
            code, out, said = run(command[0], self.root, *command[1:])
            self.assertEqual(0, code, (command, out, said))
        self.assertEqual(0, os.geteuid())
        owners = {path.lstat().st_uid for path in [self.root, *self.root.rglob("*")]}
        self.assertEqual({USER}, owners)
        self.assertEqual(6, self.engine(1, 7))
        self.assertTrue(is_marked(self.root))

    def test_shared_directory(self) -> None:
        """Whoever may write to the directory may evict: the place of the lease has its mode."""
        self.root.chmod(0o2770)
        os.close(upkeep_directory(self.root))
        self.assertEqual(0o2770, (self.root / ".upkeep").stat().st_mode & 0o7777)
        self.assertEqual(USER, (self.root / ".upkeep").stat().st_gid)


class TestHostileDescription(UpkeepTest):
    """A `namespace.json` that somebody made to be a nuisance."""

    def test_small_in_memory(self) -> None:
        """What it claims takes no memory and no time."""
        space = self.space()
        path = self.root / space.name / "namespace.json"
        said = json.loads(path.read_text())
        tokens = self.root.parent / "tokens"
        tokens.write_text(json.dumps(list(range(TOKENS))))
        for change in (
            {"layout": {**said["layout"], "layers": 99_999, "kv_heads": 99_999}},
            {"further_groups": [{**said["layout"], "group": f"w{n}"} for n in range(1, 5000)]},
            {"more": "x" * (2 << 20)},
        ):
            path.write_text(json.dumps({**said, **change}))
            began_s = time.monotonic()
            before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
            _, out, _ = run("explain", self.root, "--tokens", tokens)
            self.assertLess(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before, 200_000)
            self.assertLess(time.monotonic() - began_s, SOON_S)
            self.assertIn("a hit: all 16 whole chunks", out)  # by the headers of the entries
