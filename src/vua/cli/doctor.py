"""`vua doctor`: whether a place, and this host, are what VUA relies on."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Literal

import click

from vua.catalog.base import Finding, Rules
from vua.catalog.opening import open_catalog
from vua.cli.command import command
from vua.cli.output import DAMAGED, SOUND, Report, table
from vua.errors import ConfigError
from vua.security.settings import Security

__all__ = ["Diagnosis", "doctor"]


@dataclass(frozen=True, slots=True)
class Diagnosis(Report):
    """What was found."""

    directory: str
    findings: Sequence[Finding]
    rules: Rules | None
    """Lifecycle rules that fit."""

    @property
    def code(self) -> int:
        """Whether nothing is bad."""
        return DAMAGED if any(one.level == "bad" for one in self.findings) else SOUND

    def describe(self) -> object:
        """Return plain values for programs."""
        return {
            "directory": self.directory,
            "findings": [asdict(one) for one in self.findings],
            "lifecycle": self.rules and self.rules.rules,
        }

    def show(self) -> None:
        """Print a row per finding, and the rule."""
        rows = [(one.level, one.name, one.text) for one in self.findings]
        table(["state", "what", "found"], rows)
        if self.rules is not None:
            days = self.rules.days
            print(
                f"\nA lifecycle rule that deletes what was not written or renewed for {days} days"
            )
            print("below its prefix, whosever it is:")
            print(json.dumps(self.rules.rules, indent=1))


@command("doctor", "test what VUA relies on")
@click.option(
    "--trusted-uids", metavar="UIDS", default="", help='the engines\' setting: "any", or 1000,1001'
)
def doctor(directory: str, *, trusted_uids: str = "") -> Diagnosis:
    """Try out what VUA needs; exit status 1 when something is bad.

    Works in a directory of its own below ``directory``, or with objects, some MiB for some seconds,
    and removes them. ``trusted_uids`` is what engines are told, user ids between commas or ``any``.
    Raises ConfigError where there is no directory, or where these are no user ids.
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
