"""The corruption olympics in a short form: VUA, and vLLM's `fs` tier to show what is seen."""

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
    def outcomes(self, name: str, *accidents: str) -> dict[str, str]:
        (subject,) = (one for one in SUBJECTS if one.name == name)
        place = Path(tempfile.mkdtemp(prefix="vua-olympics-"))
        self.addCleanup(shutil.rmtree, place, ignore_errors=True)
        with contextlib.closing(Field(subject, place, LIMIT_S)) as field:
            self.assertEqual("", control(field, SEED))
            found = {accident: run(field, accident, SEED) for accident in accidents}
        self.assertNotIn("cannot be run", {one["outcome"] for one in found.values()}, found)
        return {accident: one["outcome"] for accident, one in found.items()}

    def test_vua(self) -> None:
        """What is stored is found again, and what is damaged is a miss."""
        self.assertEqual(
            {"restart": "right", "flipped bit": "miss"},
            self.outcomes("VUA", "restart", "flipped bit"),
        )

    def test_a_wrong_answer_is_seen(self) -> None:
        """Control: the `fs` tier loads flipped bits unverified, and other tokens come out."""
        self.assertEqual({"flipped bit": "wrong"}, self.outcomes("vLLM fs tier", "flipped bit"))
