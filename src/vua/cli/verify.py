"""`vua verify` and `doctor`: whether files, and what a cache relies on, are sound.

A damaged file is reported, and the command continues. For files sealed with one of the given keys,
`verify` also proves that the key's owner wrote them. It changes nothing unless it repairs: then
damaged or foreign files are moved to `quarantine/` (or deleted when that is full), as readers do
it. A file that was replaced meanwhile stays, and so does a file with several names (hard links):
readers do not accept it, and the next save replaces it.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import asdict
from functools import partial
from typing import Literal

import click

from vua.capacity.spaces import Show
from vua.catalog import open_catalog
from vua.catalog.base import Catalog, Demand, Finding
from vua.catalog.check import (
    NO_KEYS,
    OUTCOMES,
    Verification,
)
from vua.catalog.contents import SHORT
from vua.cli.command import command, option, share, undoing
from vua.cli.output import (
    DAMAGED,
    SOUND,
    Report,
    line,
    plain,
    progress,
    table,
)
from vua.errors import ConfigError
from vua.io.words import counted, size
from vua.security.keyring import KnownKeys
from vua.security.settings import Security


def _show_findings(findings: Sequence[Finding]) -> None:
    table(["state", "what", "found"], [(one.level, one.name, one.text) for one in findings])


@command("doctor")
@option("--trusted-uids UIDS", 'the engines\' setting: "any", or 1000,1001', default="")
@option(
    "--prefill TOKENS/S",
    "speed of the prefill that loading has to beat",
    type=click.IntRange(min=1),
)
@option(
    "--token-bytes N",
    "K and V of a token; by default as stored here",
    type=click.IntRange(min=1),
)
def doctor(
    directory: str, *, trusted_uids: str = "", prefill: int | None = None,
    token_bytes: int | None = None,
) -> Report:  # fmt: skip
    """Probe what VUA needs; exit status 1 if something is bad.

    Works in a temporary directory below ``directory``, or with temporary objects: some MiB for some
    seconds. ``trusted_uids`` as in the engines' settings, user ids between commas or ``any``.
    Raises ConfigError for a missing directory or invalid user ids.
    """
    catalog = open_catalog(directory)
    security = Security(trusted_uids=_uids(trusted_uids))
    demand = Demand(token_bytes or _token_nbytes(catalog), prefill or 0.0)
    with undoing():
        findings = list(catalog.findings(security, demand))
    return Report(
        partial(_show_findings, findings),
        status=DAMAGED if any(one.level == "bad" for one in findings) else SOUND,
        directory=directory,
        findings=[asdict(one) for one in findings],
    )


def _token_nbytes(catalog: Catalog) -> int:
    """Return the K and V of a token of the largest model that is stored; 0 if there is none."""
    try:
        found, _ = catalog.contents()
    except (OSError, ConfigError):
        return 0  # a finding tells
    return max(
        (
            sum(one.full.payload_nbytes(one) // one.chunk_tokens for one in layouts)
            for layouts in (description.layouts for description in found)
        ),
        default=0,
    )


def _uids(text: str) -> list[int] | Literal["any"]:
    if text == "any":
        return "any"
    try:
        return [int(word) for word in text.split(",") if word]
    except ValueError as problem:
        raise ConfigError(
            f'--trusted-uids must be user ids between commas or "any", found {text!r}'
        ) from problem


def _show_verified(
    directory: str, results: Sequence[Verification], strays: Sequence[str], ids: frozenset[str],
    part: float,
) -> None:  # fmt: skip
    if results:
        head = ["namespace", "model", *(f" {outcome}" for outcome in OUTCOMES), " size"]
        table(head, [_row(one) for one in results])
    else:
        print(f"{directory}: no namespaces")
    for one in results:
        for path, outcome, reason in one.problems:
            line(outcome, f"{one.namespace.path}/{path}: {reason}")
        if one.namespace.is_unknown:
            print(plain(f"not read: {one.namespace.path} is of another version of VUA"))
    removed = sum(one.removed for one in results)
    if removed:
        print(f"{removed} quarantined; the next save writes them anew, `vua gc` removes")
        print("the chunks after them, which cannot be found meanwhile")
    for one in results:
        _show_sealed(one, ids)
        _show_others(one)
    if strays:
        names = ", ".join(f"{directory}/{name}" for name in strays)
        print(f"not of a cache: {plain(names)}")
    if part < 1:
        print(f"a random {part:.1%} of the chunks were read")


def _describe(result: Verification) -> dict[str, object]:
    others = {
        kind: [{"path": one.path, "nbytes": one.nbytes} for one in result.others.get(kind, [])]
        for kind in ("temporary", "quarantined", "stray")
    }
    return {
        "namespace": result.namespace.name,
        "model": result.namespace.model or None,
        "description": result.state,
        **{outcome: result.counts[outcome] for outcome in OUTCOMES},
        "nbytes": result.nbytes,
        "plain": result.plain,
        "sealed": dict(result.sealed),
        "authentic": dict(result.authentic),
        "removed": result.removed,
        "problems": [
            {"path": path, "outcome": outcome, "reason": reason}
            for path, outcome, reason in result.problems
        ],
        **others,
    }


def _row(result: Verification) -> list[object]:
    return [
        result.namespace.name[:SHORT],
        result.namespace.model or f"({result.state} description)",
        *(result.counts[outcome] for outcome in OUTCOMES),
        size(result.nbytes),
    ]


def _show_sealed(result: Verification, ids: frozenset[str]) -> None:
    name = result.namespace.name[:SHORT]
    for key_id, count in sorted(result.sealed.items()):
        told = "checked for damage; who wrote them needs the key"
        if key_id in ids:
            told = f"{result.authentic[key_id]} of them proved to be written with it"
        print(f"{name}: {counted(count, 'file', 'is', 'are')} sealed with key {key_id}: {told}")
    if ids and result.plain:
        files = counted(result.plain, "file", "is", "are")
        print(f"{name}: {files} not sealed: the writer is not proved")


def _show_others(result: Verification) -> None:
    name = result.namespace.name[:SHORT]
    if temporary := result.others.get("temporary"):
        age_s = max(0.0, time.time() - min(one.modified_s for one in temporary))
        total = size(sum(one.nbytes for one in temporary))
        files = counted(len(temporary), "temporary file")
        print(f"{name}: {files}, {total}, the oldest {age_s:.0f} s old")
    if quarantined := result.others.get("quarantined"):
        total = size(sum(one.nbytes for one in quarantined))
        print(f"{name}: {counted(len(quarantined), 'damaged file')} kept in quarantine, {total}")
    for one in result.others.get("stray", ()):
        print(f"not of a cache: {plain(f'{result.namespace.path}/{one.path}')}")


@command("verify", as_owner_of=True)
@option("--repair", "quarantine damaged files")
@option("--sample SHARE", "only a random part, like 10%", name="part", type=share, default="100%")
def verify(
    directory: str, *, repair: bool = False, part: float = 1.0, security: Security = NO_KEYS
) -> Report:
    """Check everything in a cache.

    With ``repair`` the exit status is 0 if all damaged files were quarantined. ``part`` is the
    share of the chunks to read, chosen at random. Raises ConfigError if a key of ``security``
    cannot be used.
    """
    keys, catalog = KnownKeys(security), open_catalog(directory)
    if repair:
        catalog.claim()
    with progress() as show:
        results, strays = verified(catalog, keys, part, show, repair=repair)
    sound = not any(one.damaged for one in results)
    return Report(
        partial(_show_verified, directory, results, strays, keys.ids, part),
        status=SOUND if sound else DAMAGED,
        directory=directory,
        sound=sound,
        share=part,
        namespaces=[_describe(one) for one in results],
        stray=list(strays),
    )


def verified(
    catalog: Catalog, keys: KnownKeys, part: float, show: Show, *, repair: bool = False
) -> tuple[list[Verification], list[str]]:
    """Check a share of every namespace; also return the names of everything else."""
    with catalog.namespaces(show) as (found, strays):
        return [one.verify(keys, part, show, repair=repair) for one in found], [*strays]
