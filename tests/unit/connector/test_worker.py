"""The worker's half of the connector on storage that hangs or fails, without an engine."""

from __future__ import annotations

import unittest
from importlib.util import find_spec

import pytest

import hanging_cases

pytestmark = pytest.mark.vllm


@unittest.skipUnless(find_spec("vllm"), "vLLM is not installed")
class HangingTest(hanging_cases.HangingCases):
    """With blocks in CPU memory; `test_device_transfer` has those that are staged."""


if __name__ == "__main__":
    unittest.main()
