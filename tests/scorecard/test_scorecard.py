"""The scorecard runs, VUA passes its gates, and what has no checksums does not."""

from __future__ import annotations

import functools
import json
import logging
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from helpers import DirectoryTest
from scorecard.runner import Outcome, Plan, Table, run_apart, run_test
from scorecard.stores import StoreSubject, VuaSubject, make_vua
from scorecard.subject import Key, Subject
from scorecard.trial import TESTS, NotApplicableError, NotRunError, Test, Trial
from vua.storage.local import LocalStorage

ENGINE = (30, 31)  # tests/e2e is what they run, and CI runs that anyway
TIMED = (27, 29)
"""Whose bars are times: they show in the table, and fail no build."""


class Raw(Subject):
    """What peers do: raw bytes under a name, and existence is a hit."""

    name = "raw bytes"

    def __init__(self, root: Path, nbytes: int) -> None:
        self.root, self.nbytes = root, nbytes

    def path(self, key: Key) -> Path:
        return self.root / f"{self.cut(key.number.to_bytes(8, 'little')).hex()}.bin"

    def put(self, key: Key, data: bytes) -> bool:
        if not self.path(key).exists():
            self.path(key).write_bytes(data)
        return True

    def get(self, key: Key, into: memoryview) -> bool:
        try:
            with self.path(key).open("rb") as stream:
                stream.readinto(into)
        except OSError:
            return False
        return True

    def files(self, key: Key) -> list[Path]:
        return [self.path(key)] if self.path(key).exists() else []


def make_raw(
    root: Path, nbytes: int, *, max_bytes: int | None = None, durable: bool = False
) -> Subject:
    if max_bytes is not None or durable:
        raise NotApplicableError("raw")
    return Raw(root, nbytes)


class TestCard(DirectoryTest):
    """The runs."""

    @pytest.mark.thorough
    def test_quick_form(self) -> None:
        """VUA passes every gate that this machine can run, in the quick form."""
        report = self.root / "report.json"
        numbers = ",".join(str(number) for number in TESTS if number not in ENGINE)
        seed = os.environ.get("VUA_TEST_SEED", "1")
        command = [sys.executable, "-m", "scorecard", "--only", numbers, "--seed", seed]
        command += ["--timeout", "900"]  # for each of them: other tests run beside it
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
        done = subprocess.run(
            [*command, "--json", str(report)],
            capture_output=True,
            text=True,
            check=False,
            env=environment,
        )

        self.assertEqual(0, done.returncode, done.stdout)
        (table,) = json.loads(report.read_text(encoding="utf-8"))
        outcomes = table["outcomes"]
        gates = {o["number"]: o["verdict"] for o in outcomes if o["gate"]}
        self.assertLessEqual(set(gates.values()), {"pass", "not run"}, done.stdout)
        self.assertLessEqual(
            {12, 13, 14, 15, 18, 19, 20, 21, 22, 24, 25, 26, 28, 32, 34, 36}, set(gates)
        )
        self.assertEqual([], [o for o in outcomes if o["verdict"] == "error"])
        behind = [o for o in outcomes if o["verdict"] == "fail" and o["number"] not in TIMED]
        self.assertEqual([], behind)

    @pytest.mark.thorough
    def test_raw_bytes_fail(self) -> None:
        """A store without checksums fails the gates that are about them."""
        plan = Plan(make=make_raw, own=False, directory=self.root)
        verdicts = {number: run_test(TESTS[number], plan) for number in (12, 13, 14, 15, 20)}

        self.assertEqual({"fail"}, {one.verdict for one in verdicts.values()}, verdicts)
        table = Table("raw", list(verdicts.values()), {})
        self.assertEqual([12, 13, 14, 15, 20], table.failed_gates)
        self.assertEqual((0.0, 5), table.total)

    @pytest.mark.thorough
    def test_telling_time_fails(self) -> None:
        """One that reads another tenant's entry before it misses fails the gate: it is slower."""

        class Telling(VuaSubject):
            def get(self, key: Key, into: memoryview) -> bool:
                """Read what tenant A has of these tokens, and only then look for one's own."""
                other = replace(key, salt="A")
                if self.holds(other):
                    super().get(other, into)
                return super().get(key, into)

        kept = run_test(TESTS[21], Plan(make_vua, directory=self.root))
        self.assertEqual(("pass", []), (kept.verdict, kept.found))
        outcome = run_test(TESTS[21], Plan(Telling, directory=self.root))
        self.assertEqual("fail", outcome.verdict)
        self.assertIn("a foreign entry looks like none", outcome.found[0])

    @pytest.mark.thorough
    def test_raw_files_fail(self) -> None:
        """One that follows links and waits for FIFOs fails the gate that is about them."""
        outcome = run_apart(TESTS[25], Plan(make=make_raw, own=False, directory=self.root))

        self.assertEqual("fail", outcome.verdict)
        self.assertIn("FIFO: a miss: hung", outcome.found)
        self.assertIn("symbolic link: a miss: hit", outcome.found)

    def test_all_are_there(self) -> None:
        """Tests are numbered from 1 to 37, none twice; twenty-two of them are gates."""
        self.assertLessEqual(set(TESTS), set(range(1, 38)))
        self.assertLessEqual(sum(test.gate for test in TESTS.values()), 22)
        for test in TESTS.values():
            self.assertLessEqual(test.quick, test.full)


class TestStorage(DirectoryTest):
    """A storage of one's own in front of the scorecard; here it is ours."""

    @pytest.mark.thorough
    def test_local(self) -> None:
        """The local storage passes what is about damage and about the directory."""
        logging.disable(logging.WARNING)  # one for each of thousands of damaged files
        self.addCleanup(logging.disable, logging.NOTSET)
        make = functools.partial(StoreSubject, "local", LocalStorage)
        plan = Plan(make=make, own=False, directory=self.root)
        for number in (8, 14):
            with self.subTest(number=number):
                outcome = run_test(TESTS[number], plan)
                passed = ("pass",) if TESTS[number].gate else ("pass", "partly")
                self.assertIn(outcome.verdict, passed, outcome.found)


class TestRunner(DirectoryTest):
    """How tests become lines of the table."""

    def outcome(
        self, run: Callable[[Trial], None], *, apart: bool = False, timeout_s: float = 30.0
    ) -> Outcome:
        test = Test(99, "made up", gate=True, quick=1, full=1, bar="", run=run)
        plan = Plan(make=make_raw, directory=self.root, timeout_s=timeout_s)
        return (run_apart if apart else run_test)(test, plan)

    def test_verdicts(self) -> None:
        """What must hold decides, then what should; reasons are told."""

        def raise_(problem: Exception) -> None:
            raise problem

        for verdict, run in {
            "pass": lambda trial: trial.must("a", holds=True),
            "partly": lambda trial: (trial.should("a", holds=True), trial.should("b", holds=False)),
            "fail": lambda trial: (trial.must("a", holds=False), trial.should("b", holds=True)),
            "error": lambda trial: None,  # it checked nothing
            "not run": lambda trial: raise_(NotRunError("x")),
            "not applicable": lambda trial: raise_(NotApplicableError("x")),
        }.items():
            with self.subTest(verdict=verdict):
                outcome = self.outcome(run)
                self.assertEqual(verdict, outcome.verdict)
                self.assertEqual(verdict == "pass", not outcome.found)
        self.assertEqual([], list(self.root.iterdir()), "directories are left")

    def test_apart(self) -> None:
        """A test that hangs or kills its process is a line of the table, too."""
        hung = self.outcome(lambda trial: time.sleep(60), apart=True, timeout_s=0.3)
        self.assertEqual(("error", ["did not end within 0 s"]), (hung.verdict, hung.found))
        died = self.outcome(lambda trial: os.kill(os.getpid(), signal.SIGKILL), apart=True)
        self.assertEqual(("error", ["its process died with status -9"]), (died.verdict, died.found))
        fine = self.outcome(lambda trial: trial.must("a", holds=True), apart=True)
        self.assertEqual("pass", fine.verdict)
