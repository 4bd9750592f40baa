"""What VUA relies on of a bucket's server, and the lifecycle rule that fits a cache.

The rules that are there are asked for with `boto3` where that is installed; the package that VUA
itself speaks to buckets with cannot ask for them.
"""

from __future__ import annotations

import importlib
import math
import secrets
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any, Final
from urllib.parse import urlsplit

import numpy as np

from vua.capacity.bucket import read_bucket_bounds
from vua.capacity.scan import TTL_FOLDER, is_fan
from vua.catalog.base import Finding, Rules, size
from vua.errors import ConfigError, StorageError
from vua.storage.aside import QUARANTINE
from vua.storage.bucket import Bucket
from vua.storage.bucket_mark import bucket_contents, bucket_descriptions, is_marked_bucket
from vua.storage.bucket_path import BucketPath
from vua.storage.mark import MARK
from vua.storage.names import kind_at

__all__ = ["judged", "places_of", "prefix_of", "rules_at", "rules_for", "rules_of", "tried"]

_NBYTES: Final = 2 << 20
_HEADS: Final = 8
_DAYS: Final = 30
_DESCRIPTION_NBYTES: Final = 16384
"""Descriptions and marks are smaller, and are to stay; entries are larger."""
_DAY_S: Final = 86400


def tried(place: BucketPath) -> Iterator[Finding]:
    """Run all probes with an object of their own, which is deleted again."""
    try:
        marked = is_marked_bucket(place)
        folders, objects = place.bucket.folders(place.key)
    except (OSError, ConfigError) as problem:
        yield Finding("reach", "bad", str(problem))
        return
    yield Finding("reach", "ok", "it answers, and these credentials may list it")
    if not marked and (folders or objects):
        yield Finding("mark", "note", f"no {MARK}: what is there is not VUA's to delete")
    key = (place / f".doctor-{secrets.token_hex(6)}").key
    try:
        for probe in (_write, _condition, _ranges, _listing, _speed, _deletion):
            yield _guarded(probe, place.bucket, key)
        if place.bucket.scheme == "s3":
            yield _lifecycle(place)
    finally:
        with suppress(OSError):
            place.bucket.delete([key])


def _lifecycle(place: BucketPath) -> Finding:
    try:
        ttl_s = read_bucket_bounds(place).ttl_s
        rules = rules_of(place.bucket)
        names = [one.name for one in bucket_descriptions(place)]
        places = [place / name for name in names] or [place]
        found = [judged(rules, prefix_of(one), ttl_s) for one in places]
        return max(found, key=lambda one: ("ok", "note", "bad").index(one.level))
    except (OSError, ConfigError) as problem:
        return Finding("lifecycle", "note", f"not checked: {problem}")


def _guarded(probe: Callable[[Bucket, str], Finding], bucket: Bucket, key: str) -> Finding:
    try:
        return probe(bucket, key)
    except OSError as problem:
        return Finding(probe.__name__.strip("_"), "bad", f"the probe failed: {problem}")


def _write(bucket: Bucket, key: str) -> Finding:
    data = np.random.default_rng(0).bytes(_NBYTES)
    bucket.put(key, data)
    if bytes(bucket.get(key)[1]) != data:
        return Finding("write", "bad", "what was written came back otherwise")
    return Finding("write", "ok", "what is written is there at once, byte for byte")


def _condition(bucket: Bucket, key: str) -> Finding:
    try:
        bucket.put(key, bytes(8), create=True)
    except FileExistsError:
        return Finding("condition", "ok", "If-None-Match is kept: nothing is written twice")
    bucket.put(key, np.random.default_rng(0).bytes(_NBYTES))
    text = "If-None-Match is ignored: two writers of one chunk both send it; harmless"
    return Finding("condition", "note", text)


def _ranges(bucket: Bucket, key: str) -> Finding:
    whole = bytes(bucket.get(key)[1])
    meta, part = bucket.get(key, 4096, 8192)
    if bytes(part) != whole[4096:12288] or meta.nbytes != len(whole):
        return Finding("ranges", "bad", "a range of an object came back wrong")
    return Finding("ranges", "ok", "parts of objects can be read")


def _listing(bucket: Bucket, key: str) -> Finding:
    began = time.perf_counter()
    _, found = bucket.folders(key.rpartition("/")[0])
    took_ms = (time.perf_counter() - began) * 1e3
    if key not in [one.key for one in found]:
        return Finding("listing", "note", "a new object is not listed at once")
    return Finding("listing", "ok", f"a new object is listed at once, in {took_ms:.0f} ms")


def _speed(bucket: Bucket, key: str) -> Finding:
    heads = [_timed(lambda: bucket.head(key)) for _ in range(_HEADS)]
    get_s = min(_timed(lambda: bucket.get(key)) for _ in range(3))
    text = (
        f"a request takes {statistics.median(heads) * 1e3:.1f} ms; one connection reads "
        f"{size(int(_NBYTES / get_s))}/s"
    )
    return Finding("speed", "ok", text)


def _timed(work: Callable[[], object]) -> float:
    began = time.perf_counter()
    work()
    return max(time.perf_counter() - began, 1e-9)


def _deletion(bucket: Bucket, key: str) -> Finding:
    bucket.delete([key])
    try:
        bucket.head(key)
    except FileNotFoundError:
        return Finding("deletion", "ok", "what is deleted is gone")
    except StorageError as problem:
        return Finding("deletion", "bad", str(problem))
    return Finding("deletion", "note", "what is deleted is still seen for a while")


# -- the lifecycle rule ---------------------------------------------------------------------------


def rules_at(place: BucketPath) -> tuple[Rules | None, list[Finding]]:
    """Return rules that fit `vua ttl`, or 30 days, for what of a place is of VUA alone.

    None for a store that takes no such rules. Raises StorageError, ConfigError.
    """
    if place.bucket.scheme not in ("s3", "memory"):
        return None, []
    days = days_of(read_bucket_bounds(place).ttl_s) or _DAYS
    places = places_of(place)
    found = []
    if places != [place]:
        text = "what is not of VUA lies there: rules of the whole place would delete it"
        found.append(Finding("lifecycle", "note", text))
    return Rules(days, rules_for(places, days)) if places else None, found


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
    known = [place / one.name for one in found if one.identity is not None]
    clean = [one for one in known if _is_clean(one)]
    return [place] if not others and len(clean) == len(found) else clean


def _is_clean(place: BucketPath) -> bool:
    """Whether only VUA's folders and objects lie at the top of a namespace. Raises StorageError."""
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
