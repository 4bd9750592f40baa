"""`vua doctor` of a place in a bucket: whether its server does what VUA relies on, and how fast."""

from __future__ import annotations

import json
import secrets
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import asdict
from typing import Final

import numpy as np

from vua.capacity.bucket import read_bucket_bounds
from vua.cli import lifecycle
from vua.cli.probes import Finding
from vua.cli.text import DAMAGED, SOUND, Write, plain, size
from vua.errors import ConfigError, StorageError
from vua.storage.bucket import Bucket
from vua.storage.bucket_mark import bucket_descriptions, is_marked_bucket
from vua.storage.bucket_path import BucketPath
from vua.storage.mark import MARK

__all__ = ["doctor_bucket"]

_NBYTES: Final = 2 << 20
_HEADS: Final = 8
_DAYS: Final = 30


def doctor_bucket(url: str, *, write: Write | None) -> int:
    """Try out what VUA needs, with some objects of its own; exit status 1 when something is bad."""
    place = BucketPath(Bucket.at(url))
    findings = list(_tried(place))
    days, rule = _DAYS, None
    if place.bucket.scheme in ("s3", "memory") and findings[0].level == "ok":
        with suppress(OSError, ConfigError):
            days = lifecycle.days_of(read_bucket_bounds(place).ttl_s) or _DAYS
            places = lifecycle.places_of(place)
            rule = lifecycle.rules_for(places, days) if places else None
            if places != [place]:
                text = "what is not of VUA lies there: rules of the whole place would delete it"
                findings.append(Finding("lifecycle", "note", text))
    if write is not None:
        write({"directory": url, "findings": [asdict(one) for one in findings], "lifecycle": rule})
    else:
        width = max(len(one.name) for one in findings)
        for one in findings:
            print(plain(f"{one.level:<4}  {one.name:<{width}}  {one.text}"))
        if rule is not None:
            print(
                f"\nA lifecycle rule that deletes what was not written or renewed for {days} days"
            )
            print("below its prefix, whosever it is:")
            print(json.dumps(rule, indent=1))
    return DAMAGED if any(one.level == "bad" for one in findings) else SOUND


def _tried(place: BucketPath) -> Iterator[Finding]:
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
        rules = lifecycle.rules_of(place.bucket)
        names = [one.name for one in bucket_descriptions(place)]
        places = [place / name for name in names] or [place]
        found = [lifecycle.judged(rules, lifecycle.prefix_of(one), ttl_s) for one in places]
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
