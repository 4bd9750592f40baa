"""What is released: the same bytes from the same commit, and lists that agree with each other."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import unittest
import zipfile
from pathlib import Path

import pytest

from helpers import ROOT

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

BUILT = ("src", "pyproject.toml", "hatch_build.py", "README.md", "LICENSE", "CHANGELOG.md")


def built(at: Path, *, mtime: int) -> list[Path]:
    """A pure wheel and a source distribution, in this order, made from a copy of the checkout."""
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
    uv = Path(sys.executable).with_name("uv")
    ran = subprocess.run(
        [str(uv), "build", "--sdist", "--wheel", "--out-dir", str(at / "dist"), str(copy)],
        env={**os.environ, "SOURCE_DATE_EPOCH": "1700000000", "VUA_WHEEL": "pure"},
        capture_output=True,
        text=True,
        check=False,
    )
    if ran.returncode:
        raise AssertionError(ran.stderr)
    return [*(at / "dist").glob("*.whl"), *(at / "dist").glob("*.tar.gz")]


def digests(files: list[Path]) -> dict[str, str]:
    return {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in files}


class PackagesTest(unittest.TestCase):
    def test_bill_of_materials(self) -> None:
        """It lists what the package depends on."""
        project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
        lines = (ROOT / "requirements" / "wheel.txt").read_text(encoding="utf-8").splitlines()
        listed = [line for line in lines if line and not line.startswith("#")]
        self.assertEqual(project["dependencies"], listed)

    @pytest.mark.thorough
    @unittest.skipUnless(Path(sys.executable).with_name("uv").exists(), "uv is not installed")
    def test_reproducible(self) -> None:
        """Two builds at other places, from files of other dates, are equal byte for byte.

        Their wheel holds all that is beside the modules.
        """
        with tempfile.TemporaryDirectory() as folder:
            one = built(Path(folder, "a"), mtime=1_600_000_000)
            other = built(Path(folder, "elsewhere", "b"), mtime=1_650_000_000)
            self.assertEqual(2, len(one))
            self.assertEqual(digests(one), digests(other))
            packed = set(zipfile.ZipFile(one[0]).namelist())
        source = ROOT / "src"
        beside = {
            str(path.relative_to(source))
            for path in source.rglob("*")
            if path.is_file() and path.suffix not in (".py", ".pyc", ".so")
        }
        for needed in ("index.html", "ui.css", "ui.js"):
            self.assertIn(f"vua/cli/ui/page/{needed}", beside)
        self.assertLessEqual(beside, packed)
