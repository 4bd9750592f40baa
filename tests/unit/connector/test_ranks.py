"""Ranks of every parallel size store and load each other's files."""

from __future__ import annotations

import unittest
from importlib.util import find_spec

import pytest

import ranks_cases

pytestmark = pytest.mark.vllm


@unittest.skipUnless(find_spec("vllm"), "vLLM is not installed")
class RanksTest(ranks_cases.RanksCases):
    """With blocks in CPU memory; `test_device_transfer` has those that are staged."""


if __name__ == "__main__":
    unittest.main()
