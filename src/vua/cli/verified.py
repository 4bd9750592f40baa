"""What `vua verify` has found out about a namespace, added up, and how it is told."""

from __future__ import annotations

import time
from collections import Counter
from dataclasses import dataclass, field

from vua.cli.check import Check, Outcome
from vua.cli.text import SHORT, line, plain, size, table
from vua.cli.walk import Found
from vua.format.layout import KVLayout
from vua.storage.description import Description

__all__ = ["Result", "report"]

OUTCOMES: tuple[Outcome, ...] = ("sound", "corrupt", "foreign", "error")


@dataclass(slots=True)
class Result:
    """What was found out about one namespace, or a part of it."""

    namespace: Description
    description: str
    counts: Counter[str] = field(default_factory=Counter)
    nbytes: int = 0
    sealed: Counter[str] = field(default_factory=Counter)
    """Files per key that they are sealed with, by its 16 hex."""
    authentic: Counter[str] = field(default_factory=Counter)
    """Those of them that were proved to be written with that key, and are sound."""
    removed: int = 0
    """Of what is not sound: taken out of sight."""
    problems: list[tuple[str, str, str]] = field(default_factory=list)
    """(path, outcome, reason) of whatever is not sound."""
    later: list[tuple[str, str]] = field(default_factory=list)
    """(path, reason) of what is of a later version of VUA, and stays as it is."""
    layouts: dict[str, Counter[KVLayout]] = field(default_factory=dict)
    """What sound entries say of each group of layers."""
    plain: int = 0
    """Files that say that they are not sealed."""
    others: dict[str, list[Found]] = field(default_factory=dict)
    """What lies there beside entries, by kind."""

    @property
    def damaged(self) -> bool:
        """Whether something is not sound, and still there."""
        return len(self.problems) > self.removed

    def add(self, path: str, check: Check) -> None:
        """Note what was found out about one file."""
        self.counts[check.outcome] += 1
        self.nbytes += check.nbytes
        if check.info is not None and not check.info.kind:
            self.plain += 1
        elif check.info is not None:
            self.sealed[check.info.seal_info.key_id] += 1
            if check.authentic and check.outcome == "sound":
                self.authentic[check.info.seal_info.key_id] += 1
        if check.outcome == "sound" and check.info is not None:
            group = check.info.layout.group
            self.layouts.setdefault(group, Counter())[check.info.layout] += 1
        if check.outcome == "later":
            self.later.append((path, "; ".join(check.reasons)))
        elif check.outcome != "sound":
            self.problems.append((path, check.outcome, "; ".join(check.reasons)))

    def join(self, part: Result) -> None:
        """Add a part."""
        self.counts.update(part.counts)
        self.nbytes += part.nbytes
        self.removed += part.removed
        self.plain += part.plain
        self.sealed.update(part.sealed)
        self.authentic.update(part.authentic)
        self.problems += part.problems
        self.later += part.later
        for group, some in part.layouts.items():
            self.layouts.setdefault(group, Counter()).update(some)
        for kind, found in part.others.items():
            self.others.setdefault(kind, []).extend(found)

    def describe(self) -> dict[str, object]:
        """Return plain values for programs."""
        identity = self.namespace.identity
        return {
            "namespace": self.namespace.name,
            "model": identity and (identity.name or identity.model),
            "description": self.description,
            **{outcome: self.counts[outcome] for outcome in OUTCOMES},
            "nbytes": self.nbytes,
            "plain": self.plain,
            "sealed": dict(self.sealed),
            "authentic": dict(self.authentic),
            "removed": self.removed,
            "later": [{"path": path, "reason": reason} for path, reason in self.later],
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
        """Return a row of the table."""
        identity = self.namespace.identity
        return [
            self.namespace.name[:SHORT],
            identity.name or identity.model if identity else f"({self.description} description)",
            *(self.counts[outcome] for outcome in OUTCOMES),
            size(self.nbytes),
        ]


def report(directory: str, results: list[Result], strays: list[str], ids: frozenset[str]) -> None:
    """Print it all; ``ids`` are the keys that were given."""
    if results:
        head = ["namespace", "model", *(f" {outcome}" for outcome in OUTCOMES), " size"]
        table(head, [result.row() for result in results])
    else:
        print(f"{directory}: no namespaces")
    for result in results:
        for path, outcome, reason in result.problems:
            line(outcome, f"{result.namespace.path}/{path}: {reason}")
        if result.later:
            path, reason = result.later[0]
            more = f" (and {len(result.later) - 1} more)" * (len(result.later) > 1)
            print(plain(f"left as it is: {result.namespace.path}/{path}: {reason}{more}"))
    removed = sum(result.removed for result in results)
    if removed:
        print(f"{removed} taken out of sight; the next save writes them anew, `vua gc` removes")
        print("what followed them and is out of reach meanwhile")
    for result in results:
        _report_sealed(result, ids)
        _report_others(result)
    if strays:
        print(f"not of a cache: {plain(', '.join(f'{directory}/{name}' for name in strays))}")


def _report_sealed(result: Result, ids: frozenset[str]) -> None:
    name = result.namespace.name[:SHORT]
    for key_id, count in sorted(result.sealed.items()):
        told = "checked for damage; who wrote them needs the key"
        if key_id in ids:
            told = f"{result.authentic[key_id]} of them proved to be written with it"
        print(f"{name}: {count} files are sealed with key {key_id}: {told}")
    if ids and result.plain:
        print(f"{name}: {result.plain} files are not sealed: nothing proves who wrote them")


def _report_others(result: Result) -> None:
    name = result.namespace.name[:SHORT]
    if temporary := result.others.get("temporary"):
        age_s = max(0.0, time.time() - min(found.modified_s for found in temporary))
        total = size(sum(found.nbytes for found in temporary))
        print(f"{name}: {len(temporary)} temporary files, {total}, the oldest {age_s:.0f} s old")
    if quarantined := result.others.get("quarantined"):
        total = size(sum(found.nbytes for found in quarantined))
        print(f"{name}: {len(quarantined)} damaged files kept in quarantine, {total}")
    for found in result.others.get("stray", ()):
        print(f"not of a cache: {plain(f'{result.namespace.path}/{found.path}')}")
