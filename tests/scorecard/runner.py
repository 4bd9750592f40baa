"""Runs the scorecard and prints it; `dev.py scorecard` is its command.

Every test runs in a process of its own (a fork), so that one that hangs, crashes or leaves threads
behind takes nothing else with it, and in a directory of its own, which is deleted afterwards.
"""

from __future__ import annotations

import contextlib
import datetime as dt
import json
import logging
import multiprocessing
import os
import platform
import shutil
import signal
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Final

from scorecard import card
from scorecard.stores import make_vua
from scorecard.subject import MakeSubject, NotApplicableError
from scorecard.trial import TESTS, NotRunError, Test, Trial

MARKS: Final = {"pass": "pass", "partly": "partly", "fail": "FAIL", "error": "ERROR"}
POINTS: Final = {"pass": 1.0, "partly": 0.5, "fail": 0.0, "error": 0.0}


@dataclass(frozen=True, slots=True)
class Outcome:
    """One line of the table."""

    number: int
    title: str
    gate: bool
    verdict: str
    """pass, partly, fail, error, not applicable or not run."""
    scale: int
    seed: int
    seconds: float
    found: list[str]
    """What did not hold, or why the test was not run; then remarks."""
    held: list[str] = field(default_factory=list)
    """What held."""

    @property
    def counts(self) -> bool:
        return self.verdict in POINTS


@dataclass(frozen=True, slots=True)
class Plan:
    """What to run."""

    make: MakeSubject = make_vua
    own: bool = True
    full: bool = False
    fraction: float = 1.0
    """Part of the full scale that is done, to be named with the result."""
    seed: int = 1
    only: Sequence[int] = ()
    directory: Path | None = None
    """Where the tests make their files; the system's temporary directory by default."""
    timeout_s: float = 120.0
    verbose: bool = False
    """Whether what subjects log and print is shown."""


def scale_of(test: Test, plan: Plan) -> int:
    """How much of a test the plan does."""
    if not plan.full:
        return test.quick
    return max(1, test.quick, round(test.full * plan.fraction))


def run_test(test: Test, plan: Plan) -> Outcome:
    """Run one test here, in this process; whatever goes wrong is in the outcome."""
    began_s, scale = time.monotonic(), scale_of(test, plan)
    seed = plan.seed * 1000 + test.number
    directory = Path(tempfile.mkdtemp(prefix=f"vua-test-{test.number}-", dir=plan.directory))
    trial = Trial(plan.make, directory, scale, not plan.full, seed, own=plan.own)
    try:
        try:
            trial.needs("the full form", scale > 0)
            test.run(trial)
            verdict = str(trial.verdict())
            found = [_line(c.what, c.found) for c in trial.checks if not c.holds] + trial.notes
        except NotApplicableError as problem:
            verdict, found = "not applicable", [str(problem)]
        except NotRunError as problem:
            verdict, found = "not run", [str(problem)]
        except Exception as problem:  # noqa: BLE001 - a test that breaks is a line of the table
            last = traceback.extract_tb(problem.__traceback__)[-1]
            place = f"{Path(last.filename).name}:{last.lineno}"
            verdict, found = "error", [f"{type(problem).__name__}: {problem} ({place})"[:500]]
            found += trial.notes
        with contextlib.suppress(Exception):
            trial.close()
    finally:
        shutil.rmtree(directory, ignore_errors=True)
    held = [_line(check.what, check.found) for check in trial.checks if check.holds]
    seconds = time.monotonic() - began_s
    return Outcome(test.number, test.title, test.gate, verdict, scale, seed, seconds, found, held)


def _line(what: str, found: str) -> str:
    return f"{what}: {found}" if found else what


def _child(test: Test, plan: Plan, answer: Connection) -> None:
    os.setsid()  # so that what the test starts can be ended with it
    if not plan.verbose:
        logging.lastResort = logging.NullHandler()  # thousands of misses; None writes of itself
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
    answer.send(asdict(run_test(test, plan)))
    answer.close()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # without waiting for threads that a subject has left


def run_apart(test: Test, plan: Plan) -> Outcome:
    """Run one test in a forked process, at most ``plan.timeout_s`` long."""
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe(duplex=False)
    began_s = time.monotonic()
    process = context.Process(target=_child, args=(test, plan, theirs))
    with warnings.catch_warnings():
        warnings.simplefilter(
            "ignore", DeprecationWarning
        )  # of a fork beside threads: it ends soon
        process.start()
    theirs.close()
    problem = f"did not end within {plan.timeout_s:.0f} s"
    try:
        if ours.poll(plan.timeout_s):
            try:
                return Outcome(**ours.recv())
            except EOFError:
                process.join(10)
                problem = f"its process died with status {process.exitcode}"
    finally:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid or 0, signal.SIGKILL)
        process.join()
        ours.close()
    seed, scale = plan.seed * 1000 + test.number, scale_of(test, plan)
    seconds = time.monotonic() - began_s
    return Outcome(test.number, test.title, test.gate, "error", scale, seed, seconds, [problem])


@dataclass(frozen=True, slots=True)
class Table:
    """What one run has found."""

    subject: str
    outcomes: list[Outcome]
    environment: dict[str, str]

    @property
    def failed_gates(self) -> list[int]:
        return [o.number for o in self.outcomes if o.gate and o.counts and o.verdict != "pass"]

    @property
    def total(self) -> tuple[float, int]:
        """Points, one a test that passes and a half for one that partly does, and tests run."""
        counted = [o for o in self.outcomes if o.counts]
        return sum(POINTS[o.verdict] for o in counted), len(counted)

    def lines(self) -> Iterable[str]:
        yield f"{self.subject}; " + ", ".join(f"{k} {v}" for k, v in self.environment.items())
        for outcome in self.outcomes:
            yield line_of(outcome)
        points, tests = self.total
        gates = [o for o in self.outcomes if o.gate and o.counts]
        passed = len(gates) - len(self.failed_gates)
        yield f"total {points:g} of {tests} tests run; {passed} of {len(gates)} gates run passed"

    def as_json(self) -> dict[str, Any]:
        outcomes = [asdict(outcome) for outcome in self.outcomes]
        return {"subject": self.subject, **self.environment, "outcomes": outcomes}


def line_of(outcome: Outcome) -> str:
    """One line of the table, and what was found wrong below it."""
    star = "*" if outcome.gate else " "
    mark = MARKS.get(outcome.verdict, outcome.verdict)
    text = (
        f"{outcome.number:>2}{star} {outcome.title:<28} {mark:<14} n={outcome.scale:<8} "
        f"seed={outcome.seed:<7} {outcome.seconds:7.1f} s"
    )
    return "\n".join([text, *(f"      {found}" for found in outcome.found)])


def run(plan: Plan, *, show: bool = True) -> Table:
    """Run the plan's tests one after the other; prints each line as soon as it is known."""
    _ = card  # the tests are registered by importing it
    numbers = sorted(TESTS) if not plan.only else sorted(plan.only)
    with tempfile.TemporaryDirectory(prefix="vua-test-", dir=plan.directory) as root:
        name = _name_of(plan, Path(root))
    now = dt.datetime.now(dt.timezone.utc).strftime("%Y-%m-%d %H:%M UTC")
    form = f"full x {plan.fraction:g}" if plan.full else "quick"
    table = Table(name, [], {
        "form": form, "seed": str(plan.seed), "date": now, "python": platform.python_version(),
        "kernel": platform.release(),
    })  # fmt: skip
    for number in numbers:
        if number not in TESTS:
            raise ValueError(f"there is no test {number}; there are {sorted(TESTS)}")
        outcome = run_apart(TESTS[number], plan)
        table.outcomes.append(outcome)
        if show:
            print(line_of(outcome), flush=True)  # noqa: T201 - it is what the command is for
    return table


def _name_of(plan: Plan, root: Path) -> str:
    """Ask the subject for its name, in a process of its own: some start threads."""
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe(duplex=False)

    def ask() -> None:
        theirs.send(plan.make(root, 65536).name)
        os._exit(0)

    process = context.Process(target=ask)
    process.start()
    theirs.close()
    try:
        return str(ours.recv())
    except EOFError:
        raise RuntimeError("the subject could not be opened; its error is above") from None
    finally:
        process.join()


def write_json(tables: Sequence[Table], path: Path) -> None:
    path.write_text(json.dumps([table.as_json() for table in tables], indent=1), encoding="utf-8")
