"""Lifecycle rules of S3: the one that fits a cache, and whether those that are there do.

The rules are asked for with `boto3` where that is installed; the package that VUA itself speaks to
buckets with cannot ask for them.
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Mapping, Sequence
from typing import Any, Final
from urllib.parse import urlsplit

from vua.capacity.scan import TTL_FOLDER, is_fan
from vua.cli.probes import Finding
from vua.errors import ConfigError, StorageError
from vua.storage.aside import QUARANTINE
from vua.storage.bucket import Bucket
from vua.storage.bucket_mark import bucket_contents
from vua.storage.bucket_path import BucketPath
from vua.storage.description import Description
from vua.storage.names import kind_at

__all__ = ["days_of", "judged", "places_of", "prefix_of", "rules_for", "rules_of"]

_DESCRIPTION_NBYTES: Final = 16384
"""Descriptions and marks are smaller, and are to stay; entries are larger."""
_DAY_S: Final = 86400


def days_of(ttl_s: float | None) -> int | None:
    """Return a time to live in days, at least one; None for none."""
    return None if ttl_s is None else max(1, math.ceil(ttl_s / _DAY_S))


def prefix_of(place: BucketPath) -> str:
    """Return what the keys of a cache's objects begin with in its bucket."""
    path = urlsplit(str(place)).path.strip("/")
    return f"{path}/" if path else ""


def places_of(place: BucketPath) -> list[BucketPath]:
    """Return the places that rules may cover, for all in them is of VUA.

    The cache's own one, or where something else lies in it the namespaces that hold nothing else.
    It looks as far as the folders of chunks, by a request or two for each namespace. Raises
    StorageError.
    """
    found, others = bucket_contents(place)
    clean = [place / one.name for one in found if one.identity is not None and _is_clean(one)]
    return [place] if not others and len(clean) == len(found) else clean


def _is_clean(namespace: Description) -> bool:
    """Whether only VUA's folders and objects lie at the top of a namespace. Raises StorageError."""
    place = namespace.path
    if not isinstance(place, BucketPath):
        return False
    folders, objects = place.bucket.folders(place.key)
    names = [one.removeprefix(f"{place.key}/") for one in folders]
    known = (TTL_FOLDER, QUARANTINE)
    return all(name in known or is_fan(name) for name in names) and not any(
        kind_at(one.key.removeprefix(f"{place.key}/")) == "stray" for one in objects
    )


def rules_for(places: Sequence[BucketPath], days: int) -> dict[str, object]:
    """Return rules for `aws s3api put-bucket-lifecycle-configuration`, one for each place.

    They leave out the descriptions (``namespace.json``, ``vua.json``) by their size. Where a bucket
    keeps versions, those of before go after a day.
    """
    rules = [
        {
            "ID": f"vua-unused-{number}" if number else "vua-unused",
            "Status": "Enabled",
            "Filter": {
                "And": {
                    "Prefix": prefix_of(place),
                    "ObjectSizeGreaterThan": _DESCRIPTION_NBYTES,
                }
            },
            "Expiration": {"Days": days},
            "NoncurrentVersionExpiration": {"NoncurrentDays": 1},
            "AbortIncompleteMultipartUpload": {"DaysAfterInitiation": 1},
        }
        for number, place in enumerate(places)
    ]
    return {"Rules": rules}


def rules_of(bucket: Bucket) -> Sequence[Mapping[str, Any]]:
    """Ask for a bucket's rules; none where it has none.

    Raises ConfigError without boto3, StorageError for any other answer, without secrets.
    """
    try:
        boto3, errors = map(importlib.import_module, ("boto3", "botocore.exceptions"))
    except ImportError as problem:
        msg = "that needs the package boto3"
        raise ConfigError(msg) from problem
    try:
        answer = boto3.client("s3").get_bucket_lifecycle_configuration(
            Bucket=urlsplit(bucket.url).netloc
        )
    except errors.ClientError as problem:
        code = str(problem.response.get("Error", {}).get("Code", "no code"))[:60]
        if code == "NoSuchLifecycleConfiguration":
            return []
        raise StorageError(5, f"the server says {code}") from None
    except errors.BotoCoreError as problem:
        raise StorageError(5, type(problem).__name__) from None
    rules: Sequence[Mapping[str, Any]] = answer.get("Rules", [])
    return rules


def judged(rules: Sequence[Mapping[str, Any]], prefix: str, ttl_s: float | None) -> Finding:
    """Say whether a bucket's rules fit a cache below ``prefix`` whose objects live so long."""
    wanted = days_of(ttl_s)
    found = [
        days
        for rule in rules
        if rule.get("Status") == "Enabled" and prefix.startswith(_prefix(rule))
        if isinstance(days := rule.get("Expiration", {}).get("Days"), int)
    ]
    if not found:
        text = "no rule deletes what nobody uses: the cache grows until `vua gc`"
        return Finding("lifecycle", "note", text)
    days = min(found)
    if wanted is None:
        text = (
            f"a rule deletes objects {days} days after the last write, used or not: "
            f"`vua ttl URL {days}d` has uses renew them"
        )
        return Finding("lifecycle", "note", text)
    if days < wanted:
        text = f"a rule deletes objects after {days} days, and `vua ttl` says {wanted}: too early"
        return Finding("lifecycle", "bad", text)
    text = f"a rule deletes objects after {days} days, and uses renew them ({wanted} days)"
    return Finding("lifecycle", "ok", text)


def _prefix(rule: Mapping[str, Any]) -> str:
    """Return the prefix of a rule, in any of the forms that it may stand in."""
    chosen = rule.get("Filter") or {}
    for one in (rule, chosen, chosen.get("And") or {}):
        if one.get("Prefix"):
            return str(one["Prefix"])
    return ""
