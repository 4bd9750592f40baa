"""`vua verify`: reads every file of a directory and checks it. Changes nothing."""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

from vua import _linux
from vua.cli.check import Check, Checker, Outcome, Place
from vua.cli.text import DAMAGED, SHORT, SOUND, Write, plain, progress, size, table
from vua.cli.walk import Found, described, open_root, walk
from vua.directory import DESCRIPTION, Namespace, read_namespace

__all__ = ["verify"]

_OUTCOMES: tuple[Outcome, ...] = ("sound", "corrupt", "foreign", "error")


@dataclass(slots=True)
class _Result:
    """What was found out about one namespace."""

    namespace: Namespace
    description: str
    counts: Counter[str] = field(default_factory=Counter)
    nbytes: int = 0
    sealed: Counter[str] = field(default_factory=Counter)
    """Files per key that they are sealed with, by its 16 hex."""
    problems: list[tuple[str, str, str]] = field(default_factory=list)
    """(path, outcome, reason) of whatever is not sound."""
    others: dict[str, list[Found]] = field(default_factory=dict)
    """What lies there beside entries, by kind."""

    @property
    def damaged(self) -> bool:
        return bool(self.problems)

    def add(self, path: str, check: Check) -> None:
        self.counts[check.outcome] += 1
        self.nbytes += check.nbytes
        if check.info is not None and check.info.kind:
            self.sealed[check.info.mark.key_id] += 1
        if check.outcome != "sound":
            self.problems.append((path, check.outcome, "; ".join(check.reasons)))

    def describe(self) -> dict[str, object]:
        identity = self.namespace.identity
        return {
            "namespace": self.namespace.name,
            "model": identity and (identity.name or identity.model),
            "description": self.description,
            **{outcome: self.counts[outcome] for outcome in _OUTCOMES},
            "nbytes": self.nbytes,
            "sealed": dict(self.sealed),
            "problems": [
                {"path": path, "outcome": outcome, "reason": reason}
                for path, outcome, reason in self.problems
            ],
            **{
                kind: [
                    {"path": one.path, "nbytes": one.nbytes} for one in self.others.get(kind, [])
                ]
                for kind in ("temporary", "quarantined", "stray")
            },
        }

    def row(self) -> list[object]:
        identity = self.namespace.identity
        return [
            self.namespace.name[:SHORT],
            identity.name or identity.model if identity else f"({self.description} description)",
            *(self.counts[outcome] for outcome in _OUTCOMES),
            size(self.nbytes),
        ]


def verify(directory: str, *, write: Write | None) -> int:
    """Check everything in ``directory`` and print a report; return the exit code."""
    found, strays = open_root(directory)
    checker = Checker()
    with progress() as show:
        results = [_verify(namespace, checker, show) for namespace in found]
    damaged = any(result.damaged for result in results)
    if write is not None:
        write(
            {
                "directory": directory,
                "sound": not damaged,
                "namespaces": [result.describe() for result in results],
                "stray": strays,
            }
        )
    else:
        _report(directory, results, strays)
    return DAMAGED if damaged else SOUND


def _verify(namespace: Namespace, checker: Checker, show: Callable[[str], None]) -> _Result:
    result = _Result(namespace, described(namespace))
    if result.description == "damaged":
        reason = "it does not describe this namespace; the next save writes it anew"
        result.problems.append((DESCRIPTION, "corrupt", reason))
    directory = os.open(namespace.path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        for found in walk(namespace.path):
            if found.kind == "unreadable":
                result.add(found.path, Check("error", (found.problem,), 0))
            elif found.kind != "entry":
                result.others.setdefault(found.kind, []).append(found)
            else:
                check = _check(directory, found, checker, namespace)
                if check is not None:
                    result.add(found.path, check)
            show(f"{namespace.name[:SHORT]}: {found.path[3:15]}, {size(result.nbytes)} read")
    finally:
        os.close(directory)
    if described(read_namespace(namespace.path)) == "missing" and result.counts:
        reason = "missing: no chunk of this namespace is found until the next save writes it"
        result.problems.append((DESCRIPTION, "error", reason))
    return result


def _check(directory: int, found: Found, checker: Checker, namespace: Namespace) -> Check | None:
    """Check one entry; None when it vanished meanwhile."""
    try:
        fd = _linux.open_beneath(directory, found.path)
    except FileNotFoundError:
        return None
    except OSError as problem:
        reason = "not a regular file" if not found.regular else str(problem.strerror)
        return Check("error", (reason,), 0)
    try:
        place = Place(namespace.name, found.chunk, found.shard, namespace.layout_of(found.shard))
        return checker.check(fd, place)
    finally:
        os.close(fd)


def _report(directory: str, results: list[_Result], strays: list[str]) -> None:
    if results:
        head = ["namespace", "model", *(f" {outcome}" for outcome in _OUTCOMES), " size"]
        table(head, [result.row() for result in results])
    else:
        print(f"{directory}: no namespaces")
    for result in results:
        for path, outcome, reason in result.problems:
            print(f"{outcome}: {plain(f'{result.namespace.path}/{path}')}: {plain(reason)}")
    for result in results:
        _report_others(result)
    if strays:
        print(f"not of a cache: {plain(', '.join(f'{directory}/{name}' for name in strays))}")


def _report_others(result: _Result) -> None:
    name = result.namespace.name[:SHORT]
    for key_id, count in sorted(result.sealed.items()):
        needs = "checked for damage; who wrote them needs the key"
        print(f"{name}: {count} files are sealed with key {key_id}: {needs}")
    if temporary := result.others.get("temporary"):
        age_s = max(0.0, time.time() - min(found.modified_s for found in temporary))
        total = size(sum(found.nbytes for found in temporary))
        print(f"{name}: {len(temporary)} temporary files, {total}, the oldest {age_s:.0f} s old")
    if quarantined := result.others.get("quarantined"):
        total = size(sum(found.nbytes for found in quarantined))
        print(f"{name}: {len(quarantined)} damaged files kept in quarantine, {total}")
    for found in result.others.get("stray", ()):
        print(f"not of a cache: {plain(f'{result.namespace.path}/{found.path}')}")
