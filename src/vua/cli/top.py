"""`vua top`: what goes on in a directory that is in use, from names and times alone.

It looks at every chunk's mtime (:mod:`vua.capacity.lru`) once per interval: a chunk with a younger
mtime than at the look before was used (or is new), one that is gone was evicted. A process updates
a prefix's mtime once a minute at most, so `used` counts chunks in use, not requests. At a million
chunks a look takes seconds: the interval is the time from its end to the start of the next one.

Of a bucket it lists the objects: their times are those of the last write or renewal, and a request
names 1,000 of them. So it looks once a minute there unless told otherwise, and says what it cost.
"""

from __future__ import annotations

import os
import sys
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from vua.capacity.bucket import read_bucket_bounds
from vua.capacity.limits import Limits, ResolvedLimits, nbytes_of
from vua.capacity.prefix_tree import read_node
from vua.capacity.scan import Space, chunk_nbytes, chunks_of, fans_of, spaces
from vua.capacity.usage import measure
from vua.cli.arguments import between_looks_s
from vua.cli.bucket_chunks import BucketSpace, cost, listed_spaces, opened_bucket
from vua.cli.text import SHORT, SOUND, Write, clear_screen, progress, size, table
from vua.errors import StorageError
from vua.storage.bucket_cost import KINDS, cost_dollars
from vua.storage.bucket_path import BucketPath
from vua.storage.description import read_description
from vua.storage.problems import explained
from vua.storage.urls import is_url
from vua.store.namespace import check_root

__all__ = ["top"]

_INTERVAL_S: Final = 2.0
_WINDOWS_S: Final = (60, 3600, 86_400)
_SALTS_FROM: Final = 4096
"""Namespaces with more chunks than these are not asked for salts: it needs a header per chunk."""


@dataclass(slots=True)
class _Look:
    """A namespace at one moment."""

    name: str
    model: str
    mtimes_ns: dict[bytes, int]
    """When each chunk was last used, ns by the server's clock."""
    chunk_nbytes: float
    salts: Counter[str]
    """First chunks by salt (the first digits of its digest), where that is cheap to know."""


def top(directory: str, interval_s: float | None, *, once: bool, write: Write | None) -> int:
    """Show what is stored, used, new and gone, again and again; ``once``: over one interval.

    Raises ConfigError, StorageError.
    """
    root = opened_bucket(directory) if is_url(directory) else check_root(directory, create=False)
    interval_s = between_looks_s(interval_s, directory, _INTERVAL_S)
    try:
        before, began_s = _look(root), time.monotonic()
        while True:
            time.sleep(interval_s)
            now, now_s = _look(root), time.monotonic()
            report = _compared(root, before, now, now_s - began_s)
            if write is not None:
                write({"directory": directory, **report})
            else:
                if not once:
                    clear_screen()
                _print(directory, report)
            sys.stdout.flush()
            if once:
                return SOUND
            before, began_s = now, now_s
    except OSError as problem:
        if isinstance(problem, (StorageError, BrokenPipeError)):
            raise
        raise explained(problem, directory) from problem


def _look(root: Path | BucketPath) -> dict[str, _Look]:
    if isinstance(root, BucketPath):
        with progress() as show:
            return {space.name: _look_at_bucket(space) for space in listed_spaces(root, show)}
    with spaces(root) as found:
        return {space.name: _look_at(root, space) for space in found}


def _look_at(root: Path, space: Space) -> _Look:
    identity = read_description(root / space.name).identity
    mtimes_ns = {bytes.fromhex(chunk): mtime_ns for chunk, mtime_ns in _chunks(space)}
    salts: Counter[str] = Counter()
    if len(mtimes_ns) <= _SALTS_FROM:
        links = (read_node(space, name.hex()) for name in mtimes_ns)
        salts = Counter(one.salt.hex()[:SHORT] or "-" for one in links if not one.before)
    sampled = [f"{name.hex()[:2]}/{name.hex()}" for name in list(mtimes_ns)[:64]]
    mean = sum(chunk_nbytes(space, path) for path in sampled) / max(1, len(sampled))
    model = "" if identity is None else identity.name or identity.model
    return _Look(space.name, model, mtimes_ns, mean, salts)


def _look_at_bucket(space: BucketSpace) -> _Look:
    chunks = space.chunks.values()
    mtimes_ns = {bytes.fromhex(one.name): int(one.written_s * 1e9) for one in chunks}
    mean = sum(one.nbytes for one in chunks) / max(1, len(chunks))
    identity = space.description.identity
    model = "" if identity is None else identity.name or identity.model
    return _Look(space.name, model, mtimes_ns, mean, Counter())


def _chunks(space: Space) -> Iterator[tuple[str, int]]:
    for fan in fans_of(space):
        yield from chunks_of(space, fan)


def _compared(
    root: Path | BucketPath, before: dict[str, _Look], now: dict[str, _Look], took_s: float
) -> dict[str, object]:
    newest = max((max(one.mtimes_ns.values(), default=0) for one in now.values()), default=0)
    now_ns = max(time.time_ns(), newest)  # mtimes are by the server's clock, which may be ahead
    rows = [_row(before.get(name), one, now_ns, took_s) for name, one in sorted(now.items())]
    return {
        **_whole(root, now),
        "chunks": sum(len(one.mtimes_ns) for one in now.values()),
        "seconds": round(took_s, 3),
        "namespaces": rows,
    }


def _whole(root: Path | BucketPath, now: dict[str, _Look]) -> dict[str, object]:
    """What the whole cache occupies, and its limits; of a bucket, what the looks have cost."""
    if isinstance(root, BucketPath):
        nbytes = sum(round(one.chunk_nbytes * len(one.mtimes_ns)) for one in now.values())
        most, counts = read_bucket_bounds(root).max_bytes, root.bucket.counts
        return {
            "nbytes": nbytes,
            "max_bytes": None if most is None else nbytes_of(most, 0),
            "free_nbytes": None,
            "requests": {kind: counts[kind] for kind in KINDS},
            "requests_dollars": cost_dollars(counts),
        }
    usage, status, limits = measure(root), os.statvfs(root), ResolvedLimits.of(root, Limits())
    return {
        "nbytes": usage.nbytes,
        "max_bytes": limits.max_bytes,
        "free_nbytes": status.f_bavail * status.f_frsize,
    }


def _row(before: _Look | None, now: _Look, now_ns: int, took_s: float) -> dict[str, object]:
    old = {} if before is None else before.mtimes_ns
    new = sum(name not in old for name in now.mtimes_ns)
    gone = sum(name not in now.mtimes_ns for name in old)
    used = sum(mtime_ns > old.get(name, mtime_ns) for name, mtime_ns in now.mtimes_ns.items())
    return {
        "namespace": now.name,
        "model": now.model,
        "chunks": len(now.mtimes_ns),
        "nbytes": round(now.chunk_nbytes * len(now.mtimes_ns)),
        "new_per_s": round(new / took_s, 3),
        "new_nbytes_per_s": round(new * now.chunk_nbytes / took_s),
        "used_per_s": round(used / took_s, 3),
        "gone_per_s": round(gone / took_s, 3),
        "used_within": {
            str(window): sum(
                now_ns - mtime_ns <= window * 10**9 for mtime_ns in now.mtimes_ns.values()
            )
            for window in _WINDOWS_S
        },
        "salts": dict(now.salts.most_common(10)),
    }


def _print(directory: str, report: dict[str, object]) -> None:
    nbytes = int(str(report["nbytes"]))
    most, free = (report[name] for name in ("max_bytes", "free_nbytes"))
    text = f"{directory}: {report['chunks']} chunks, {size(nbytes)}"
    text += "" if most is None else f" of at most {size(int(str(most)))}"
    text += "" if free is None else f"; {size(int(str(free)))} of the disk free"
    if isinstance(counts := report.get("requests"), dict):
        text += f"; {cost(counts)}"
    print(f"{text}; over {report['seconds']} s")
    head = ["namespace", "model", " chunks", " size", " new/s", " used/s", " gone/s"]
    head += [f" used in {text}" for text in ("1 min", "1 h", "1 day")] + ["salts"]
    rows = []
    spaces_ = report["namespaces"]
    for one in spaces_ if isinstance(spaces_, list) else []:
        salts = " ".join(f"{salt}:{count}" for salt, count in one["salts"].items() if salt != "-")
        rows.append([
            one["namespace"][:SHORT], one["model"], one["chunks"], size(one["nbytes"]),
            one["new_per_s"], one["used_per_s"], one["gone_per_s"], *one["used_within"].values(),
            salts or "-",
        ])  # fmt: skip
    table(head, rows)
