"""A short form of the table of storage situations: two faces, some situations."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import unittest
from pathlib import Path

import pytest

from helpers import DirectoryTest
from scorecard.mounts import why_no_mounts

TESTS = Path(__file__).resolve().parents[2]


class SituationsTest(DirectoryTest):
    @unittest.skipIf(why_no_mounts("ext4"), "mounts cannot be made here")
    @pytest.mark.thorough
    def test_short(self) -> None:
        """Nothing wrong, no request fails, and what is new is stored and found again soon."""
        few = "fill ext4,another in its place,read-only,lower layer"
        more = "fill a tmpfs,removed,each file,each other,a file in its place,no descriptor,4 KiB"
        for face, chosen, many in (("library", f"{few},{more}", 20), ("CLI", few, 5)):
            report = self.root / f"{face}.json"
            words = ["--faces", face, "--only", chosen, "--json", str(report)]
            done = subprocess.run(
                [sys.executable, str(TESTS / "situations.py"), *words],
                env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
                capture_output=True, text=True, check=False,
            )  # fmt: skip
            self.assertEqual(0, done.returncode, done.stdout + done.stderr)
            cells = json.loads(report.read_text())
            self.assertEqual(many, len(cells))
            for name, cell in cells.items():
                with self.subTest(name, face=face):
                    self.assertGreater(cell[face]["right"], 0)
