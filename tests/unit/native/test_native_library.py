"""Mirrors `hatch_build.py`, `vua.native.stamp` and `bindings`: what is built and loaded."""

from __future__ import annotations

import importlib
import importlib.util
import os
import platform
import re
import shutil
import subprocess
import sys
import unittest
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from helpers import ROOT, DirectoryTest, has_native, native_code
from vua import native
from vua.errors import ConfigError
from vua.native import bindings, stamp

NOT_BUILT = "native code is not built: python3 dev.py build"
RELEASES = ("manylinux_2_17_x86_64", "manylinux_2_17_aarch64")

LOOK = """
import logging, sys
from pathlib import Path
from vua import native
from vua.native import bindings
logging.basicConfig(level=logging.INFO)
bindings.FOLDER = Path(sys.argv[1])
if "unchecked" in sys.argv:
    bindings.fault_of = lambda library, built_from: None
for _ in range(2):
    library = native.library()
digests = native.hash_chain(b"", memoryview(bytes(512)), 256)
print("in use" if library else "not in use", len(digests))
"""

spec = importlib.util.spec_from_file_location("hatch_build", ROOT / "hatch_build.py")
hatch_build = importlib.util.module_from_spec(spec)
spec.loader.exec_module(hatch_build)


class TestLibrary(DirectoryTest):
    """What is done with the library's file. Each case is a process with a folder of its own."""

    def setUp(self) -> None:
        """Copy the C files, and the library if it is there."""
        super().setUp()
        self.folder = self.root / "native"
        shutil.copytree(bindings.FOLDER, self.folder, ignore=shutil.ignore_patterns("*.py*"))
        self.library = stamp.library_path(self.folder, platform.machine())

    def look(self, *words: str, **environment: str) -> subprocess.CompletedProcess[str]:
        """Look for the library in a fresh process."""
        return subprocess.run(
            [sys.executable, "-c", LOOK, str(self.folder), *words],
            env={**os.environ, "VUA_NATIVE": "auto", **environment},
            capture_output=True,
            text=True,
            check=False,
        )

    def assert_python(self, why: str, level: str = "WARNING") -> None:
        """Python does the work, after one line that says why, which file, and what to do."""
        done = self.look()
        self.assertEqual((0, "not in use 64\n"), (done.returncode, done.stdout), done.stderr)
        (line,) = done.stderr.splitlines()
        self.assertRegex(line, f"^{level}:vua.*{re.escape(str(self.library))}.*{why}.*dev.py build")

    @unittest.skipUnless(has_native(), NOT_BUILT)
    def test_in_use(self) -> None:
        """A sound library is used, and one line says so."""
        done = self.look()
        self.assertEqual((0, "in use 64\n"), (done.returncode, done.stdout), done.stderr)
        (line,) = done.stderr.splitlines()
        self.assertRegex(line, f"^INFO:vua.*in use: {re.escape(str(self.library))}$")

    @unittest.skipUnless(has_native(), NOT_BUILT)
    def test_damaged(self) -> None:
        """A library that is cut short, has lost a page or changed by a bit is not loaded."""
        sound, built_from = self.library.read_bytes(), stamp.sources_digest(self.folder)
        half = len(sound) // 2
        self.assertIsNone(stamp.fault_of(sound, built_from))
        for name, damaged in {
            "empty": b"",
            "a byte short": sound[:-1],
            "without what vouches for it": sound[: -stamp.NBYTES],
            "a byte more": sound + b"\n",
            "first page lost": bytes(4096) + sound[4096:],
            "a page lost": sound[:4096] + bytes(4096) + sound[8192:],
            "a bit": sound[:half] + bytes([sound[half] ^ 4]) + sound[half + 1 :],
            "all zeros": bytes(len(sound)),
        }.items():
            with self.subTest(name):
                self.assertRegex(stamp.fault_of(damaged, built_from) or "", "is damaged")
        self.library.write_bytes(sound[:4096])
        self.assert_python("is damaged")

    @unittest.skipUnless(has_native(), NOT_BUILT)
    def test_other_version(self) -> None:
        """A library of other C files than those beside it is not loaded."""
        with (self.folder / "load.h").open("a") as header:
            header.write("/* changed */\n")
        self.assert_python("built from other C files")

    def test_unusable(self) -> None:
        """What is vouched for but does not load, or lacks functions, is not used."""
        other = Path(importlib.import_module("xxhash._xxhash").__file__).read_bytes()
        built_from = stamp.sources_digest(self.folder)
        for compiled, why in ((b"no library", "invalid ELF|too short"), (other, "vua_load")):
            with self.subTest(why):
                self.library.write_bytes(compiled + stamp.stamp(compiled, built_from))
                self.assert_python(why)

    @pytest.mark.thorough
    def test_missing(self) -> None:
        """An installation without the library is sound, and calls no compiler."""
        self.library.unlink(missing_ok=True)
        self.assert_python("is missing", "INFO")
        required = self.look(VUA_NATIVE="require")
        self.assertNotEqual(0, required.returncode)
        self.assertIn("ConfigError: VUA_NATIVE=require", required.stderr)
        called = self.root / "called"
        for name in ("cc", "gcc", "clang"):
            compiler = self.root / name
            compiler.write_text(f"#!/bin/sh\ntouch {called}\n")
            compiler.chmod(0o700)
        before = sorted(self.root.iterdir())
        home = {"HOME": str(self.root), "XDG_CACHE_HOME": str(self.root / "cache")}
        done = self.look(PATH=str(self.root), CC=str(self.root / "cc"), **home)
        self.assertEqual("not in use 64\n", done.stdout, done.stderr)
        self.assertEqual(before, sorted(self.root.iterdir()))

    def test_status(self) -> None:
        """It says what is in use, and what is to be mended."""
        found = native.status()
        self.assertEqual((has_native(), False), (found.library is not None, found.refused))
        for mode, refused in (("off", False), ("yes", True)):
            with self.subTest(mode), native_code(mode):
                found = native.status()
                self.assertIsNone(found.library)
                self.assertEqual(refused, found.refused)
                self.assertIn("VUA_NATIVE", found.text)
        with native_code("yes"), self.assertRaisesRegex(ConfigError, "auto, off or require"):
            native.library()


def compiler() -> bool:
    try:
        return bool(hatch_build.local_compiler())
    except hatch_build.BuildError:
        return False


def new_hook() -> Any:
    class Hook(hatch_build.NativeBuildHook):
        app = mock.Mock()

    return Hook.__new__(Hook)


class TestBuild(DirectoryTest):
    """How the library is made: `hatch_build.py`."""

    def setUp(self) -> None:
        super().setUp()
        self.folder = self.root / "native"
        shutil.copytree(bindings.FOLDER, self.folder, ignore=shutil.ignore_patterns("*.so"))
        self.enterContext(mock.patch.object(hatch_build, "FOLDER", self.folder))
        self.data: dict[str, Any] = {"force_include": {}}

    def fake_compiler(self, script: str) -> dict[str, str]:
        """The environment in which a script stands in for the compiler."""
        path = self.root / "my cc"
        path.write_text(f"#!/bin/sh\n{script}\n")
        path.chmod(0o700)
        return {"CC": f"'{path}' -some-option"}

    def hook(self, version: str = "standard") -> Any:
        """Let hatchling's hook fill in what a wheel is to have; return it."""
        hook = new_hook()
        self.addCleanup(lambda: hook.finalize(version, self.data, ""))
        hook.initialize(version, self.data)
        return hook

    @pytest.mark.thorough
    @unittest.skipUnless(compiler(), "no C compiler here")
    def test_built_when_changed(self) -> None:
        """In the source tree it is compiled once, and again when a C file has changed."""
        for expected in (True, False):
            changed, path = hatch_build.build_in_place()
            self.assertEqual(expected, changed)
        first = stamp.sources_digest(self.folder)
        self.assertIsNone(stamp.fault_of(path.read_bytes(), first))
        bindings.Library(path)
        with (self.folder / "chain.c").open("a") as source:
            source.write("/* changed */\n")
        self.assertEqual((True, path), hatch_build.build_in_place())
        self.assertIsNotNone(stamp.fault_of(path.read_bytes(), first))
        self.assertIsNone(stamp.fault_of(path.read_bytes(), stamp.sources_digest(self.folder)))

    def test_wheel_without_compiler(self) -> None:
        """Then it is a wheel for every platform, with a message; a release is refused."""
        for environment in ({"CC": "/no/such/cc"}, self.fake_compiler("exit 3")):
            with mock.patch.dict(os.environ, {**environment, "VUA_WHEEL": ""}):
                warn = self.hook().app.display_warning
            warn.assert_called_once()
            self.assertIn("without its native code", warn.call_args.args[0])
            self.assertEqual({"force_include": {}}, self.data)
        with mock.patch.dict(os.environ, {"VUA_WHEEL": "pure"}):
            self.hook().app.display_warning.assert_not_called()
        self.assertEqual({"force_include": {}}, self.data)
        for tag in ("linux_x86_64", "manylinux_2_17_riscv64"):
            with (
                mock.patch.dict(os.environ, {"VUA_WHEEL": tag}),
                self.assertRaisesRegex(hatch_build.BuildError, tag),
            ):
                self.hook()

    def test_for_every_processor(self) -> None:
        """Nothing is compiled for the machine that compiles."""
        release = [word for tag in RELEASES for word in hatch_build.release_compiler(tag)[0]]
        words = [*hatch_build.FLAGS, *release]
        self.assertEqual([], [word for word in words if word.startswith(("-march", "-mcpu"))])
