"""30: vLLM with a cache that is being destroyed answers as it does without one."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import vua
from vua.testing.trial import Trial, scored

__all__: list[str] = []

_QUICK = "tests/vllm_e2e/test_damage.py::DamagedTest::test_flipped_bit"
_FULL = "tests/vllm_e2e/test_stress.py::StormTest"


@scored(
    30, "End to end", gate=True, quick=10, full=500,
    bar="vLLM, greedy, 1 of 3 blocks damaged or deleted: tokens equal to a cold run, 0 failed",
)  # fmt: skip
def end_to_end(trial: Trial) -> None:
    """Run the engine tests of a checkout: one of damage, or the storms of many requests."""
    trial.needs_vua("an engine's connector")
    trial.needs("vLLM", find_spec("vllm") is not None)
    checkout = Path(vua.__file__).parents[2]
    trial.needs("a checkout with its tests", (checkout / "tests" / "vllm_e2e").is_dir())
    trial.needs("pytest", find_spec("pytest") is not None)
    marks = "vllm" if trial.quick else "vllm and (soak or thorough)"
    test = _QUICK if trial.quick else _FULL
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider"]
    done = subprocess.run(  # noqa: S603 - our own tests
        [*command, "-m", marks, test],
        cwd=checkout,
        env={**os.environ, "PYTHONPATH": str(checkout / "src")},
        capture_output=True,
        text=True,
        check=False,
    )
    last = (done.stdout.strip() or done.stderr.strip() or "nothing").splitlines()[-1]
    trial.must("the same tokens, no request fails", done.returncode == 0, last)
    trial.must("control: tests were run", " passed" in last, last)
