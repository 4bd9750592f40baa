"""`vua verify`: reads every file of a directory and checks it.

Whatever it meets it reports and goes on behind. Of files that are sealed with one of the keys given
it also proves that somebody with that key wrote them. Changes nothing, unless it is to repair: then
what is damaged or foreign is taken out of sight (into `quarantine/`, or deleted when that is full),
as a reader does it who comes upon it. What others have replaced meanwhile stays, and so does a file
with further names (hard links), whose bytes somebody else may be using: no reader takes it, and the
next save puts a new one in its place.
"""

from __future__ import annotations

import itertools
import random
import stat
from contextlib import closing, nullcontext, suppress
from dataclasses import replace
from functools import partial
from typing import Final

from vua.capacity.scan import Show, Space, fans_of
from vua.cli.check import Check, Checker, Outcome, Place
from vua.cli.keys import NO_KEYS
from vua.cli.owner import to_change
from vua.cli.spread import is_large, spread
from vua.cli.text import (
    DAMAGED,
    SHORT,
    SOUND,
    Write,
    progress,
)
from vua.cli.verified import Result, report
from vua.cli.walk import Found, described, open_root, walk, walk_bucket
from vua.errors import VUAError
from vua.format.codecs import AUTO
from vua.io import posix
from vua.io.plain import is_plain
from vua.io.posix import close_quietly
from vua.security.keyring import KnownKeys
from vua.security.settings import Security
from vua.storage.aside import version_of
from vua.storage.base import entry_name
from vua.storage.bucket import Bucket
from vua.storage.bucket_mark import claim_bucket
from vua.storage.bucket_path import BucketPath
from vua.storage.description import DESCRIPTION, Description, read_description
from vua.storage.local import LocalStorage
from vua.storage.names import is_compressed
from vua.storage.object import ObjectStorage
from vua.storage.urls import is_url
from vua.store.evidence import fits, layouts_by
from vua.store.making import make_namespace

__all__ = ["verify"]

_AT_ONCE: Final = 64
"""Objects that are held in memory at a time at most."""
_ANYBODY: Final = Security(trusted_uids="any")
"""Whose files are looked at: whose a file is does not make its bytes right or wrong."""


def verify(
    directory: str,
    *,
    repair: bool = False,
    part: float = 1.0,
    security: Security = NO_KEYS,
    show: Show | None = None,
    write: Write | None,
) -> int:
    """Check everything in ``directory`` and print a report; return the exit code.

    With ``repair`` it is 0 where all that was damaged could be taken out of sight. ``part`` is the
    share of the chunks to read, chosen at random; ``show`` is told how far it is, by default a
    terminal is. Raises ConfigError where a key of ``security``
    cannot be used.
    """
    keys = KnownKeys(security)
    if repair and is_url(directory):
        claim_bucket(BucketPath(Bucket.at(directory)), tool=True)
    elif repair:
        to_change(directory)
    found, strays = open_root(directory)
    with progress() if show is None else nullcontext(show) as told:
        results = [_verify(one, told, keys, part, repair=repair) for one in found]
    damaged = any(result.damaged for result in results)
    if write is not None:
        write(
            {
                "directory": directory,
                "sound": not damaged,
                "share": part,
                "namespaces": [result.describe() for result in results],
                "stray": strays,
            }
        )
    else:
        report(directory, results, strays, keys.ids)
        if part < 1:
            print(f"a random {part:.1%} of the chunks were read")
    return DAMAGED if damaged else SOUND


def _verify(
    namespace: Description, show: Show, keys: KnownKeys, share: float, *, repair: bool
) -> Result:
    result = Result(namespace, described(namespace))
    if result.description == "later":
        result.later.append((DESCRIPTION, f"{namespace.later}: it is left as it is"))
    if isinstance(namespace.path, BucketPath):
        _verify_bucket(result, namespace.path, show, keys, share, repair=repair)
        _judge_description(result, repair=False)
        return result
    try:
        with closing(LocalStorage(namespace.directory, security=_ANYBODY)) as storage:
            space = Space(namespace.name, storage.fileno())
            large, names = is_large(space), ["", *_sample(fans_of(space), share)]
    except OSError as problem:
        result.add(".", Check("error", (problem.strerror or str(problem),), 0))
        return result
    parts = spread(partial(_part, namespace, keys, repair=repair), names, large=large)
    for number, part in enumerate(parts, 1):
        result.join(part)
        show(namespace.name[:SHORT], number, len(names), amount=result.nbytes)
    if described(read_description(namespace.path)) == "missing" and result.counts:
        reason = "missing: the next save writes it; entries' headers say what is needed meanwhile"
        result.problems.append((DESCRIPTION, "error", reason))
    _judge_description(result, repair=repair)
    return result


def _judge_description(result: Result, *, repair: bool) -> None:
    """Compare a namespace's description with what the headers of its sound entries say.

    With ``repair`` it is written anew from these, where its identity is sound.
    """
    namespace = result.namespace
    stated = {group: some.most_common(1)[0][0] for group, some in result.layouts.items()}
    if result.description == "damaged":
        reason = "it does not describe this namespace"
    elif result.description == "ok" and not fits(stated, namespace.layouts):
        reason = f"it says {namespace.layouts}, and entries' headers {tuple(stated.values())}"
    else:
        return
    healed = False
    if repair and namespace.identity is not None and stated and "" in stated:
        layouts = layouts_by(namespace, stated)
        with suppress(OSError):
            mode = stat.S_IMODE(namespace.directory.stat().st_mode)
            security = replace(_ANYBODY, group_read=bool(mode & stat.S_IRGRP))
            make_namespace(namespace.directory, namespace.identity, layouts, security, anew=True)
            healed = read_description(namespace.directory).layouts == layouts
    fate = "it was written anew" if healed else "the next save writes it anew"
    result.problems.append((DESCRIPTION, "corrupt", f"{reason}; {fate}"))
    result.removed += healed


def _sample(fans: list[str], share: float) -> list[str]:
    """Return that share of the fan-out directories, one at least: chunks are uniform over them."""
    count = min(len(fans), max(1, round(share * len(fans))))
    return sorted(random.sample(fans, count))


def _verify_bucket(
    result: Result,
    place: BucketPath,
    show: Show,
    keys: KnownKeys,
    share: float,
    *,
    repair: bool,
) -> None:
    """Check the objects of a namespace, some at a time."""
    storage, checker, namespace = ObjectStorage(place, codec=AUTO), Checker(keys), result.namespace

    def check(found: Found) -> tuple[str, Check, bool]:
        try:
            meta, data = place.bucket.get((place / found.path).key)
        except OSError as problem:
            return found.path, Check("error", (str(problem),), 0), False
        where = Place(namespace.name, found.chunk, found.shard)
        compressed = is_compressed(found.path)
        done = checker.check_bytes(memoryview(bytearray(data)), where, compressed=compressed)
        removed = False
        if repair and done.outcome in ("corrupt", "foreign") and found.shard is not None:
            removed = storage.delete(entry_name(found.chunk, found.shard), meta.tag or None)
        return found.path, done, removed

    fans = _sample([f"{fan:02x}" for fan in range(256)], share)
    run: list[Found] = []
    for found in itertools.chain(walk_bucket(namespace), [None]):
        if found is not None and found.kind != "entry":
            result.others.setdefault(found.kind, []).append(found)
        elif found is not None and found.chunk[:2] in fans:
            run.append(found)
        if run and (found is None or len(run) == _AT_ONCE):
            for path, done, removed in place.bucket.each(check, run):
                result.add(path, done)
                result.removed += removed
            run = []
            show(namespace.name[:SHORT], amount=result.nbytes)


def _part(namespace: Description, keys: KnownKeys, fan: str, *, repair: bool) -> Result:
    """Check one fan-out directory, or (for "") what lies beside them."""
    result, checker = Result(namespace, ""), Checker(keys)
    try:
        with closing(LocalStorage(namespace.directory, security=_ANYBODY)) as storage:
            for found in walk(Space(namespace.name, storage.fileno()), fan):
                if found.kind == "unreadable":
                    result.add(found.path, Check("error", (found.problem,), 0))
                elif found.kind != "entry":
                    result.others.setdefault(found.kind, []).append(found)
                else:
                    check, removed = _check(storage, found, checker, namespace, repair=repair)
                    if check is not None:
                        result.add(found.path, check)
                        result.removed += removed
    except FileNotFoundError:
        pass  # the namespace was deleted this moment
    except OSError as problem:
        result.add(fan or ".", Check("error", (problem.strerror or str(problem),), 0))
    return result


def _check(
    storage: LocalStorage, found: Found, checker: Checker, namespace: Description, *, repair: bool
) -> tuple[Check | None, bool]:
    """Check one entry, None when it vanished meanwhile; and whether it was taken out of sight."""
    version = None
    try:
        fd = posix.open_beneath(storage.fileno(), found.path)
    except FileNotFoundError:
        return None, False
    except OSError as problem:
        check = Check("error", (str(problem.strerror),), 0)
        if not found.regular:
            check = Check("error", ("not a regular file",), 0)
    else:
        place = Place(namespace.name, found.chunk, found.shard)
        try:
            check, version = _read(fd, checker, place)
        finally:
            close_quietly(fd)
    if not repair or check.outcome in ("sound", "later") or found.shard is None:
        removed = False
    elif version is None and found.regular:
        removed = False  # it cannot be opened, or has further names: whoever may, decides
    else:
        removed = storage.delete(entry_name(found.chunk, found.shard), version)
    return check, removed


def _read(fd: int, checker: Checker, place: Place) -> tuple[Check, bytes | None]:
    """Check an open file, and return its version; None where no reader would take it."""
    try:
        check = checker.check(fd, place)
    except VUAError as problem:
        check = Check("error", (str(problem),), 0)
    status = posix.status_cached(fd)
    if is_plain(status, None):
        return check, version_of(status)
    if stat.S_ISREG(status.mode):
        links = "it has further names (hard links), so no reader takes it"
        outcome: Outcome = "foreign" if check.outcome == "sound" else check.outcome
        check = replace(check, outcome=outcome, reasons=(*check.reasons, links))
    return check, None
