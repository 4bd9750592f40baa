"""The example that VUA started from works as it stands."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import vua
from helpers import DirectoryTest

EXAMPLE = """
import os
import torch
from vua.core import VUA, VUAConfig

# Set up cache storage directory
cache_dir = "./vua_cache"
os.makedirs(cache_dir, exist_ok=True)

# Create a VUA instance
vua = VUA(VUAConfig, cache_dir)

# Generate sample tokens ensuring the length is divisible by split_factor
tokens = torch.randint(0, 0xFFFF, (1, 512), dtype=torch.uint16)
trimmed_tokens = VUAConfig.trim_to_split_factor(tokens)

# Create a sample key-value cache (for demonstration purposes)
# This is a list with one layer and two tensor pairs (keys and values)
kvcache = [[torch.randn(1, 2, trimmed_tokens.size(1), 64), torch.randn(1, 2, trimmed_tokens.size(1), 64)]]

# Store the cache using put()
vua.put(trimmed_tokens, kvcache)

# Retrieve the cache using get_closest()
result = vua.get_closest(trimmed_tokens, device="cpu")
print("Retrieved tokens:", result.tokens)
print("Retrieved data:", result.data)
"""  # noqa: E501 - as it was written

CHECK = """
assert torch.equal(trimmed_tokens.int(), result.tokens.int())
for given, found in zip(kvcache, result.data, strict=True):
    assert torch.equal(given[0], found[0]) and torch.equal(given[1], found[1])
print("checked")
"""


class TestVUA(DirectoryTest):
    """What the READMEs of the first VUA promise."""

    @pytest.mark.thorough
    def test_example(self) -> None:
        """The example of the README runs, and what it retrieves is what it stored."""
        done = subprocess.run(
            [sys.executable, "-c", EXAMPLE + CHECK],
            cwd=self.root,
            env=os.environ | {"PYTHONPATH": str(Path(vua.__file__).parents[1])},
            capture_output=True,
            text=True,
            check=False,
        )

        self.assertEqual((0, ""), (done.returncode, done.stderr))
        self.assertIn("Retrieved tokens: tensor([[", done.stdout)
        self.assertIn("Retrieved data: [[tensor([[[[", done.stdout)
        self.assertTrue(done.stdout.endswith("checked\n"))
