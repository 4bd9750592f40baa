"""30, 31: what VUA gives a real vLLM is what that one would have computed."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

from scorecard.trial import Trial, scored

_QUICK = "tests/e2e/test_damage.py::DamagedTest::test_flipped_bit"
_FULL = "tests/e2e/test_stress.py::StormTest"


@scored(
    30, "End to end", gate=True, quick=10, full=500,
    bar="vLLM, greedy, 1 of 3 blocks damaged or deleted: tokens equal to a cold run, 0 failed",
)  # fmt: skip
def end_to_end(trial: Trial) -> None:
    """Run the engine tests of a checkout: one of damage, or the storms of many requests."""
    marks = "vllm" if trial.quick else "vllm and (soak or thorough)"
    status, said = _pytest(trial, "-m", marks, _QUICK if trial.quick else _FULL)
    trial.must("the same tokens, no request fails", status == 0, said)
    trial.must("control: tests were run", " passed" in said, said)


@scored(
    31, "Identity of engines", gate=True, quick=10, full=60,
    bar="random models, settings, adapters, pictures: 0 hits across other K and V, 0.95 shared",
)  # fmt: skip
def identities(trial: Trial) -> None:
    """Run the campaign of random engines of a checkout, judged by the K and V they compute."""
    if trial.quick:
        status, said = _pytest(trial, "tests/e2e/test_campaign.py")
        trial.must("control: tests were run", " passed" in said, said)
    else:
        words = ["e2e.campaign", "--setups", str(trial.scale), "--seed", str(trial.seed)]
        status, said = _run(trial, *words)
    trial.must("nobody loads what it would have computed otherwise", status == 0, said)


def _pytest(trial: Trial, *words: str) -> tuple[int, str]:
    trial.needs("pytest", find_spec("pytest") is not None)
    return _run(trial, "pytest", "-q", "-x", "-p", "no:cacheprovider", *words)


def _run(trial: Trial, *words: str) -> tuple[int, str]:
    """Run a module; return its exit status and the last line that it wrote."""
    trial.needs_vua("an engine's connector")
    trial.needs("vLLM", find_spec("vllm") is not None)
    done = subprocess.run(
        [sys.executable, "-m", *words],
        cwd=Path(__file__).parents[3],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        check=False,
    )
    said = (done.stdout.strip() or done.stderr.strip() or "nothing").splitlines()[-1]
    return done.returncode, said
