"""`vua doctor`: whether a directory or bucket, and this host, are what VUA relies on."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Final, Literal

import click

from vua.catalog.base import Finding, Rules
from vua.catalog.opening import open_catalog
from vua.cli.command import command
from vua.cli.output import DAMAGED, SOUND, Report, table
from vua.errors import ConfigError
from vua.security.settings import Security

__all__ = ["Diagnosis", "doctor"]

_PLAIN: Final = frozenset(
    ["publish", "symbolic links", "openat2", "RWF_NOWAIT", "O_DIRECT", "cachestat", "permissions",
     "time stamps", "visibility", "hard links"]
)  # fmt: skip
"""Findings without a figure: passed, they are one row; `--json` has them all."""


@dataclass(frozen=True, slots=True)
class Diagnosis(Report):
    """All findings."""

    directory: str
    findings: Sequence[Finding]
    rules: Rules | None
    """Lifecycle rules that fit the cache."""

    @property
    def code(self) -> int:
        return DAMAGED if any(one.level == "bad" for one in self.findings) else SOUND

    def describe(self) -> object:
        return {
            "directory": self.directory,
            "findings": [asdict(one) for one in self.findings],
            "lifecycle": self.rules and self.rules.rules,
        }

    def show(self) -> None:
        passed = [one.name for one in self.findings if one.level == "ok" and one.name in _PLAIN]
        rows = [(one.level, one.name, one.text) for one in self.findings if one.name not in passed]
        if passed:
            rows.append(("ok", f"{len(passed)} more", ", ".join(passed)))
        table(["state", "what", "found"], rows)
        if self.rules is not None:
            days = self.rules.days
            print(
                f"\nA lifecycle rule that deletes what was not written or renewed for {days} days"
            )
            print("below its prefix, also other programs' objects:")
            print(json.dumps(self.rules.rules, indent=1))


@command("doctor", "test what VUA relies on")
@click.option(
    "--trusted-uids", metavar="UIDS", default="", help='the engines\' setting: "any", or 1000,1001'
)
def doctor(directory: str, *, trusted_uids: str = "") -> Diagnosis:
    """Probe what VUA needs; exit status 1 if something is bad.

    Works in a temporary directory below ``directory``, or with temporary objects: some MiB for some
    seconds. ``trusted_uids`` as in the engines' settings, user ids between commas or ``any``.
    Raises ConfigError if there is no directory, or for invalid user ids.
    """
    catalog = open_catalog(directory)
    findings = list(catalog.findings(Security(trusted_uids=_uids(trusted_uids))))
    rules = None
    if findings[0].level == "ok":  # it can be reached
        rules, more = catalog.rules()
        findings += more
    return Diagnosis(directory, findings, rules)


def _uids(text: str) -> list[int] | Literal["any"]:
    if text == "any":
        return "any"
    try:
        return [int(word) for word in text.split(",") if word]
    except ValueError as problem:
        raise ConfigError(
            f'--trusted-uids must be user ids between commas or "any", found {text!r}'
        ) from problem
