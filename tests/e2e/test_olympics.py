"""The corruption olympics in a short form: what is seen of vLLM's `fs` tier."""

from __future__ import annotations

import contextlib
import shutil
import tempfile
import unittest
from pathlib import Path

import pytest

from e2e.harness import needs_vllm
from olympics.cells import Field, control, run
from olympics.subjects import SUBJECTS

pytestmark = [pytest.mark.vllm, pytest.mark.thorough]

SEED = 5
LIMIT_S = 240.0


@needs_vllm
class OlympicsTest(unittest.TestCase):
    def test_a_wrong_answer_is_seen(self) -> None:
        """Restarted it loads; it loads flipped bits unverified, and other tokens come out."""
        (subject,) = (one for one in SUBJECTS if one.name == "vLLM fs tier")
        place = Path(tempfile.mkdtemp(prefix="vua-olympics-"))
        self.addCleanup(shutil.rmtree, place, ignore_errors=True)
        with contextlib.closing(Field(subject, place, LIMIT_S)) as field:
            self.assertEqual("", control(field, SEED))
            found = {one: run(field, one, SEED)["outcome"] for one in ("restart", "flipped bit")}
        self.assertEqual({"restart": "right", "flipped bit": "wrong"}, found)
