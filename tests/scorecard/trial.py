"""How a test of the scorecard is written and what it finds.

A test is a function of a :class:`Trial`, registered under its number by :func:`scored`::

    @scored(12, "Bit flips", gate=True, quick=500, full=100_000, bar="all are detected")
    def bit_flips(trial: Trial) -> None:
        subject = trial.make(nbytes=65536)
        wrong = sum(... for _ in range(trial.scale))
        trial.must("no flip is accepted", wrong == 0, f"{wrong} of {trial.scale} wrong")

``must`` is for what is unsafe, ``should`` for what is only worse than the bar: a test passes when
everything holds, is *partly* passed when only some of the ``should`` do not, fails otherwise. All
chance comes from ``trial.random``. Everything is made below ``trial.directory``, a fresh directory
that the runner deletes. A subject that lacks what is tested raises ``NotApplicableError``; what
this machine lacks (a tool, root, a GPU) raises ``NotRunError``.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar, Final, Literal

from scorecard.subject import Key, MakeSubject, NotApplicableError, Subject

__all__ = ["TESTS", "Check", "Look", "NotApplicableError", "NotRunError", "Test", "Trial", "scored"]

CANARY: Final = b"canary! "
"""Fills the memory of every load beforehand: eight bytes that noise has once in 2**64 places."""

Look = Literal["hit", "miss", "wrong", "raised"]
Verdict = Literal["pass", "partly", "fail", "not applicable", "not run"]


class NotRunError(Exception):
    """This machine lacks what the test needs; the message says what."""


@dataclass(frozen=True, slots=True)
class Check:
    """One thing that was found out."""

    what: str
    holds: bool
    found: str
    must: bool


@dataclass(slots=True)
class Trial:
    """One run of one test against one subject."""

    factory: MakeSubject
    directory: Path
    """Fresh and empty; on the file system that is tested."""
    scale: int
    """How much to do: the test's quick or full number, or a part of that."""
    quick: bool
    seed: int
    own: bool = True
    """Whether the subject is VUA itself, so that VUA's own interfaces may be tested."""
    random: random.Random = field(init=False)
    checks: list[Check] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    _made: list[Subject] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.random = random.Random(self.seed)

    # -- subjects -----------------------------------------------------------------------------

    def make(
        self,
        nbytes: int = 65536,
        *,
        root: str | Path = "cache",
        max_bytes: int | None = None,
        durable: bool = False,
    ) -> Subject:
        """Open the subject in ``root`` (below the trial's directory), making that if need be."""
        where = self.directory / root
        where.mkdir(mode=0o700, parents=True, exist_ok=True)
        subject = self.factory(where, nbytes, max_bytes=max_bytes, durable=durable)
        self._made.append(subject)
        return subject

    def stored(self, subject: Subject, count: int) -> list[Key]:
        """Put ``count`` entries with payloads of their own and return their keys."""
        keys = [Key(number) for number in range(count)]
        for key in keys:
            if not subject.put(key, key.payload(subject.nbytes)):
                raise RuntimeError(f"{subject.name} did not store entry {key.number}")
        return keys

    def look(self, subject: Subject, key: Key) -> Look:
        """Get ``key`` into memory full of canaries and compare every byte with its payload."""
        into = bytearray(CANARY * (subject.nbytes // len(CANARY)))
        try:
            hit = subject.get(key, memoryview(into))
        except Exception as problem:  # noqa: BLE001 - whatever reaches the caller counts
            self.note(f"get raised {type(problem).__name__}: {problem}")
            return "raised"
        if not hit:
            return "miss"
        return "hit" if into == key.payload(subject.nbytes) else "wrong"

    def close(self) -> None:
        for subject in self._made:
            subject.close()
        self._made.clear()

    # -- findings -----------------------------------------------------------------------------

    def must(self, what: str, holds: bool, found: object = "") -> None:  # noqa: FBT001
        """Note something without which the subject is unsafe."""
        self.checks.append(Check(what, bool(holds), str(found), must=True))

    def should(self, what: str, holds: bool, found: object = "") -> None:  # noqa: FBT001
        """Note something that the bar asks for, without which the subject is still safe."""
        self.checks.append(Check(what, bool(holds), str(found), must=False))

    def note(self, text: str) -> None:
        """Add a remark for the reader of the table; only the first of its kind is kept."""
        if len(self.notes) < 5 and text not in self.notes:
            self.notes.append(text[:300])

    def needs(self, what: str, there: bool) -> None:  # noqa: FBT001
        """Raise NotRunError unless the machine has what is needed."""
        if not there:
            raise NotRunError(f"needs {what}")

    def needs_vua(self, what: str) -> None:
        """Raise NotRunError unless the subject is VUA: the test is about ``what`` of VUA's own."""
        if not self.own:
            raise NotRunError(f"no adapter for {what}")

    def verdict(self) -> Verdict:
        """Judge what was found; a ``control: `` shows that the test works and earns nothing."""
        if not self.checks:
            raise RuntimeError("the test has checked nothing")
        aims = [check.holds for check in self.checks if "control: " not in check.what]
        if any(check.must and not check.holds for check in self.checks) or not any(aims):
            return "fail"
        return "pass" if all(check.holds for check in self.checks) else "partly"


@dataclass(frozen=True, slots=True)
class Test:
    """One row of the scorecard."""

    __test__: ClassVar = False  # for pytest: it tests nothing by itself

    number: int
    title: str
    gate: bool
    """Whether VUA may not ship without it."""
    quick: int
    """How much a quick run does; 0: it has no quick form."""
    full: int
    """How much a full run does."""
    bar: str
    run: Callable[[Trial], None]


TESTS: dict[int, Test] = {}
"""The registered tests by number; filled by importing :mod:`scorecard.card`."""


def scored(
    number: int, title: str, *, gate: bool = False, quick: int, full: int, bar: str
) -> Callable[[Callable[[Trial], None]], Callable[[Trial], None]]:
    """Register a function as test ``number``; see the module's description.

    Args:
        number: 1..37, as in docs/guarantees.md.
        title: two or three words.
        gate: whether VUA may not ship without it.
        quick: ``trial.scale`` in the quick form, which takes a few seconds at most; 0 for none.
        full: ``trial.scale`` in the full form.
        bar: what is asked for, in one sentence.
    """

    def register(run: Callable[[Trial], None]) -> Callable[[Trial], None]:
        if number in TESTS and TESTS[number].run.__module__ != run.__module__:
            raise ValueError(f"test {number} is registered twice")
        TESTS[number] = Test(number, title, gate, quick, full, bar, run)
        return run

    return register
