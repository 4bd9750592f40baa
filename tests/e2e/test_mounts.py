"""Two clients of a distributed file system that share a cache: SeaweedFS, mounted twice by FUSE."""

from __future__ import annotations

import subprocess
import sys
import unittest

import pytest

from helpers import ROOT

pytestmark = pytest.mark.thorough


@unittest.skipUnless((ROOT / "benchmarks").exists(), "not in a checkout")
class MountsTest(unittest.TestCase):
    def test_seaweedfs(self) -> None:
        """Conformance, `vua doctor`, and what one client sees of the other: nothing is wrong."""
        command = [sys.executable, "benchmarks/nfs/fuse.py", "--kinds", "seaweedfs"]
        done = subprocess.run(
            [*command, "--parts", "across,soon"], cwd=ROOT, capture_output=True, text=True,
            check=False,
        )  # fmt: skip
        if done.returncode == 2:
            self.skipTest(done.stdout)
        self.assertEqual(0, done.returncode, done.stdout + done.stderr)
        self.assertIn('"b gets what a has put, right and whole", "holds": true', done.stdout)
