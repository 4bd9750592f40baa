"""What is released: the same bytes from the same commit, which work where nothing else is."""

from __future__ import annotations

import hashlib
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import unittest
import zipfile
from pathlib import Path

import pytest

import vua
from helpers import ROOT

BUILT = ("src", "pyproject.toml", "hatch_build.py", "README.md", "LICENSE", "CHANGELOG.md")


UV = Path(sys.executable).with_name("uv")


def run(*command: str, **environment: str) -> str:
    """What a command prints; an error if it fails."""
    ran = subprocess.run(
        command,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        check=False,
    )
    if ran.returncode:
        raise AssertionError(ran.stdout + ran.stderr)
    return ran.stdout


def built(at: Path, *, mtime: int) -> list[Path]:
    """A release's wheel for this machine, and the source, made from a copy of the checkout."""
    copy = at / "checkout"
    copy.mkdir(parents=True)
    for name in BUILT:
        if (ROOT / name).is_dir():
            ignored = shutil.ignore_patterns("__pycache__", "*.so")
            shutil.copytree(ROOT / name, copy / name, ignore=ignored)
        else:
            shutil.copy(ROOT / name, copy / name)
    for path in copy.rglob("*"):
        os.utime(path, (mtime, mtime))
    build = [str(UV), "build", "--sdist", "--wheel", "--out-dir", str(at / "dist"), str(copy)]
    tag = f"manylinux_2_17_{platform.machine()}"
    run(*build, SOURCE_DATE_EPOCH="1700000000", VUA_WHEEL=tag)
    return [*(at / "dist").glob("*.whl"), *(at / "dist").glob("*.tar.gz")]


def digests(files: list[Path]) -> dict[str, str]:
    return {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in files}


class PackagesTest(unittest.TestCase):
    @pytest.mark.thorough
    @unittest.skipUnless(UV.exists(), "uv is not installed")
    def test_release(self) -> None:
        """Two builds at other places, from files of other dates, are equal byte for byte.

        Their wheel holds all that is beside the modules, and its licence. `dev.py pythons` installs
        one with what it asks for, and nothing else, and tries it out.
        """
        with tempfile.TemporaryDirectory() as folder:
            one = built(Path(folder, "a"), mtime=1_600_000_000)
            other = built(Path(folder, "elsewhere", "b"), mtime=1_650_000_000)
            self.assertEqual(2, len(one))
            self.assertEqual(digests(one), digests(other))
            wheel = zipfile.ZipFile(one[0])
            packed = set(wheel.namelist())
            info = f"vua-{vua.__version__}.dist-info"
            self.assertIn("License-Expression: Apache-2.0", wheel.read(f"{info}/METADATA").decode())
            licence = wheel.read(f"{info}/licenses/LICENSE")
        self.assertEqual((ROOT / "LICENSE").read_bytes(), licence)
        source = ROOT / "src"
        beside = {
            str(path.relative_to(source))
            for path in source.rglob("*")
            if path.is_file() and path.suffix not in (".py", ".pyc", ".so")
        }
        for needed in ("index.html", "ui.css", "ui.js"):
            self.assertIn(f"vua/cli/page/{needed}", beside)
        self.assertLessEqual(beside, packed)
