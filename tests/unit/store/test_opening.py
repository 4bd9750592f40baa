"""Mirrors `vua.store.place`: a directory alone needs nothing of buckets and tiers."""

from __future__ import annotations

import subprocess
import sys

import pytest

from helpers import DirectoryTest

USE = """
import sys
import torch
import vua.connector.opening, vua.connector.worker, vua.connector.scheduler
from vua import VUA, VUAConfig
tokens, layer = torch.arange(32), 2 * [torch.zeros(1, 1, 32, 8)]
with VUA(VUAConfig(split_factor=16), sys.argv[1]) as cache:
    assert cache.put(tokens, [layer]) == 2
    assert cache.get_closest(tokens).num_tokens == 32
print(*sorted(name for name in sys.modules if name.startswith("vua.")))
"""
FAR = ("bucket", "object", "tiered", "far", "travel")


class OpeningTest(DirectoryTest):
    @pytest.mark.thorough
    def test_far_modules_are_not_imported(self) -> None:
        """Storing in a directory and loading from it imports no module of other places."""
        done = subprocess.run(
            [sys.executable, "-c", USE, str(self.root)], capture_output=True, text=True, check=True
        )
        names = done.stdout.split()
        self.assertIn("vua.storage.local", names)
        self.assertEqual([], [name for name in names if name.rpartition(".")[2] in FAR])
