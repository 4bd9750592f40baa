"""Tests 2 and 6: every system call of every operation is the last one, or fails."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator

from scorecard.faults.operations import Operation, operations
from scorecard.faults.syscalls import calls_of, run_tampered, why_not
from scorecard.faults.world import WrongBytesError
from scorecard.trial import NotRunError, Trial, scored

_ERRORS = ("ENOSPC", "EIO", "ESTALE", "EACCES", "EINTR")
_FAILING = (
    *("openat", "openat2", "mkdir", "mkdirat", "read", "preadv", "preadv2", "pwritev", "write"),
    *("close", "fsync", "rename", "renameat", "renameat2", "link", "linkat", "unlink", "unlinkat"),
    *("rmdir", "utimensat", "newfstatat", "fstat", "statx", "fchmod", "getdents64", "statfs"),
)
_GONE = "statx,newfstatat,fstat:error=ESTALE"  # from one call on: one way to ask is like another
_LYING = {"pwritev": 4096, "preadv": 4096, "read": 100}  # moves nothing, claims so many bytes


def _prepared(trial: Trial) -> list[tuple[Operation, dict[str, int]]]:
    """The operations and the calls that each makes."""
    trial.needs_vua("operations in a single thread")
    reason = why_not()
    if reason:
        raise NotRunError(reason)
    found = []
    for operation in operations(trial.directory):
        operation.prepare()
        found.append((operation, dict(calls_of(operation.run))))
    return found


def _picked(trial: Trial, cases: list[tuple[Operation, str]]) -> list[tuple[Operation, str]]:
    """As many of the cases as the scale asks for, of each operation as many as of another."""
    trial.random.shuffle(cases)
    place: Counter[str] = Counter()
    rounds = []
    for operation, inject in cases:
        rounds.append((place[operation.name], operation.name, operation, inject))
        place[operation.name] += 1
    rounds.sort(key=lambda one: one[:2])
    return [(operation, inject) for _, _, operation, inject in rounds[: trial.scale]]


def _state(operation: Operation, orphans: int) -> str:
    """What is wrong with the directory now, in a few words; empty when nothing is."""
    world = operation.world
    try:
        world.check()
        left = world.leftovers()
        if len(left) > orphans:
            return f"{len(left)} leftovers: {left[:3]}"
        world.heal()
        world.sweep()
    except WrongBytesError as problem:
        return f"WRONG BYTES: {problem}"
    except AssertionError as problem:
        return str(problem)
    return ""


@scored(
    2,
    "Kill at every syscall",
    gate=True,
    quick=16,
    full=100_000,
    bar="0 wrong; the store is usable after each; one collection leaves nothing behind",
)
def kill_at_every_call(trial: Trial) -> None:
    """Kill puts, gets, evictions and collections at each call that touches a file."""
    cases = [
        (operation, f"{call}:signal=SIGKILL:when={turn}")
        for operation, calls in _prepared(trial)
        for call, count in sorted(calls.items())
        for turn in range(1, count + 1)
    ]
    survived, faults = 0, []
    for operation, inject in _picked(trial, cases):
        operation.prepare()
        survived += not run_tampered(operation.run, inject).killed
        faults += _found(operation, inject, _state(operation, operation.orphans))
    trial.note(f"{min(trial.scale, len(cases))} of {len(cases)} calls, one kill each")
    most = 1 + min(trial.scale, len(cases)) // 50  # a call or two depends on the moment
    trial.must("each was killed where it should be", survived <= most, f"{survived} were not")
    _judge(trial, faults)


@scored(
    6,
    "Errors at every syscall",
    gate=True,
    quick=16,
    full=100_000,
    bar="the result is 'not stored' or right; nothing wrong is read; the next put heals",
)
def fail_every_call(trial: Trial) -> None:
    """Let each call fail, once or from then on; let reads and writes lie about lengths."""
    cases = []
    for operation, calls in _prepared(trial):
        for call, turn in _turns(calls):
            cases += [(operation, f"{call}:error={name}:when={turn}") for name in _ERRORS]
            cases.append((operation, f"{call}:error=EIO:when={turn}+"))
            if call in ("statx", "newfstatat"):
                cases.append((operation, f"{_GONE}:when={turn}+"))
            if call in _LYING:
                cases.append((operation, f"{call}:retval={_LYING[call]}:when={turn}"))
    faults, refused = [], 0
    for operation, inject in _picked(trial, cases):
        operation.prepare()
        outcome = run_tampered(operation.run, inject)
        refused += outcome.text == "refused"
        if not operation.may_end(outcome.text):
            faults += _found(operation, inject, outcome.text[-600:] or "it died")
        faults += _found(operation, inject, _state(operation, 99))
    trial.note(f"{min(trial.scale, len(cases))} of {len(cases)} failures, {refused} refused")
    _judge(trial, faults)


def _turns(calls: dict[str, int]) -> Iterator[tuple[str, int]]:
    named = ((call, count) for call, count in sorted(calls.items()) if call in _FAILING)
    return itertools.chain.from_iterable(
        ((call, turn) for turn in range(1, count + 1)) for call, count in named
    )


def _found(operation: Operation, inject: str, fault: str) -> list[str]:
    return [f"{operation.name}, {inject}: {fault}"] if fault else []


def _judge(trial: Trial, faults: list[str]) -> None:
    for fault in faults[:5]:
        trial.note(fault)
    wrong = [fault for fault in faults if "WRONG BYTES" in fault]
    trial.must("nothing wrong is read", not wrong, f"{len(wrong)} times")
    trial.must("the store stays usable and sound", not faults, f"{len(faults)} faults: {faults}")
