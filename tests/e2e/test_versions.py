"""Different releases of vLLM on one directory. `dev.py test-oldest` runs these."""

from __future__ import annotations

import unittest
from functools import cache

import pytest

from e2e.damage import stored
from e2e.harness import (
    OTHER_VLLM,
    PROMPT,
    Batch,
    Driver,
    EngineTest,
    Phase,
    Served,
    run,
    vllm_version,
)

pytestmark = pytest.mark.vllm

BATCH = Batch([PROMPT])


@cache
def installed() -> Driver:
    """Engines of the installed vLLM, not of the one that hides it."""
    return Driver(left_out=OTHER_VLLM)


class VersionsTest(EngineTest):
    @unittest.skipUnless(OTHER_VLLM, "needs a second vLLM: dev.py test-oldest")
    def test_directory_of_another_version(self) -> None:
        """What one release wrote the other one loads, though their paged caches differ in form."""
        drivers: dict[str, Driver | None] = {"this": None, "installed": installed()}
        plain = {name: self.by(driver, Phase([BATCH])) for name, driver in drivers.items()}
        for first, second in (("this", "installed"), ("installed", "this")):
            with self.subTest(first=first):
                phase = Phase([BATCH], root=self.root.with_name(first))
                cold = self.by(drivers[first], phase)
                files = stored(self.root.with_name(first))
                warm = self.by(drivers[second], phase)

                self.assertEqual([plain[first].tokens, [0]], [cold.tokens, cold.cached])
                self.assertEqual([plain[second].tokens, [640]], [warm.tokens, warm.cached])
                self.assertEqual(10, len(files))
                self.assertEqual(files, stored(self.root.with_name(first)))
        this, other = (plain[name].log for name in ("this", "installed"))
        self.assertIn(f"engine (v{vllm_version().public})", this)
        self.assertNotIn(f"engine (v{vllm_version().public})", other)

    def by(self, driver: Driver | None, phase: Phase) -> Served:
        (served,) = run(phase, by=driver)
        self.assertIsNone(served.problem)
        return served
