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
from scorecard.faults.mounts import why_no_mounts

TESTS = Path(__file__).resolve().parents[2]


class SituationsTest(DirectoryTest):
    @unittest.skipIf(why_no_mounts("ext4"), "mounts cannot be made here")
    @pytest.mark.thorough
    def test_short(self) -> None:
        """Nothing wrong, no request fails, and what is new is stored and found again soon."""
        report = self.root / "cells.json"
        chosen = "fill ext4,another in its place,read-only,lower layer"
        words = ["--faces", "library,CLI", "--only", chosen, "--json", str(report)]
        done = subprocess.run(
            [sys.executable, str(TESTS / "situations.py"), *words],
            env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
            capture_output=True, text=True, check=False,
        )  # fmt: skip
        self.assertEqual(0, done.returncode, done.stdout + done.stderr)
        cells = json.loads(report.read_text())
        self.assertEqual(5, len(cells))
        for name, faces in cells.items():
            for face, cell in faces.items():
                with self.subTest(name, face=face):
                    self.assertEqual(["library", "CLI"], list(faces))
                    self.assertGreater(cell["right"], 0)
