"""Commands on a cache in a bucket that differ from those on a directory: du, gc, rm, adopt.

Every request is counted and said: a bucket's owner pays for them. What a bucket does by itself is
its lifecycle rule; see docs/object-stores.md.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace

from vua.capacity.bucket import read_bucket_bounds, write_bucket_bounds
from vua.capacity.limits import Limits, nbytes_of
from vua.capacity.scan import Show
from vua.cli.bucket_chunks import (
    BucketChunk,
    BucketSpace,
    cost,
    find_key_ids,
    listed,
    opened_bucket,
    print_strays,
    resolve,
)
from vua.cli.keys import key_ids
from vua.cli.owner import confirm
from vua.cli.text import DAMAGED, SHORT, SOUND, Write, plain, progress, size, table, when
from vua.errors import ConfigError
from vua.security.settings import Security
from vua.storage.bucket import Bucket
from vua.storage.bucket_cost import DOLLARS_PER_GB_MONTH, KINDS, cost_dollars
from vua.storage.bucket_mark import adopted_bucket, claim_bucket
from vua.storage.bucket_path import BucketPath

__all__ = ["adopt_bucket", "du_bucket", "gc_bucket", "rm_bucket"]

_GB = 10**9


# -- du -----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Occupied:
    """What a namespace takes."""

    namespace: str
    chunks: int
    nbytes: int
    pinned: int
    oldest_s: float | None
    newest_s: float | None

    def row(self) -> list[object]:
        times = (self.oldest_s, self.newest_s)
        shown = ("-" if at is None else when(at) for at in times)
        return [self.namespace[:SHORT], self.chunks, size(self.nbytes), self.pinned, *shown]


def _occupied(space: BucketSpace) -> _Occupied:
    chunks = space.chunks.values()
    times = [one.written_s for one in chunks]
    return _Occupied(
        space.name,
        len(chunks),
        sum(one.nbytes for one in chunks),
        sum(bool(one.pins) for one in chunks),
        min(times, default=None),
        max(times, default=None),
    )


def du_bucket(url: str, *, write: Write | None) -> int:
    """Show what a cache in a bucket occupies, by namespace, and what that and the look cost."""
    place = opened_bucket(url)
    with progress() as show:
        spaces, strays = listed(place, show)
    rows = [_occupied(space) for space in spaces]
    nbytes, chunks = sum(one.nbytes for one in rows), sum(one.chunks for one in rows)
    bounds, monthly = read_bucket_bounds(place), nbytes / _GB * DOLLARS_PER_GB_MONTH
    counts = place.bucket.counts
    if write is not None:
        whole = {
            "nbytes": nbytes,
            "chunks": chunks,
            "exact": True,
            "strays": len(strays),
            "bounds": asdict(bounds),
            "requests": {kind: counts[kind] for kind in KINDS},
            "requests_dollars": cost_dollars(counts),
            "monthly_dollars": round(monthly, 6),
        }
        write({"directory": url, **whole, "namespaces": [asdict(one) for one in rows]})
        return SOUND
    if rows:
        head = ["namespace", " chunks", " size", " pinned", "oldest", "newest"]
        table(head, [one.row() for one in rows])
    print(plain(f"{place}: {chunks} chunks, {size(nbytes)}; {cost(counts)}"))
    print_strays(strays)
    if place.bucket.scheme in ("s3", "gs", "az"):
        print(f"storage: ${monthly:.2f} a month at S3's list price; others' prices differ")
    return SOUND


# -- gc -----------------------------------------------------------------------------------------


def gc_bucket(
    url: str, said: Limits, *, keep: bool = False, security: Security | None = None,
    dry_run: bool, yes: bool, write: Write | None,
) -> int:  # fmt: skip
    """Bring a cache in a bucket within limits by listing it: what was not used for longest goes.

    A chunk stays for as long as one that follows it in some prompt, and pinned ones stay: these are
    renewed where half of their life has passed, so that no lifecycle rule takes them. What
    ``bounds.json`` says holds, too; with ``keep`` what is ``said`` goes there. With ``security``
    what is sealed with none of its keys goes first. Raises ConfigError where these are not to be
    had, StorageError.
    """
    place = opened_bucket(url)
    claim_bucket(place, tool=True)
    if said.min_free_bytes is not None or said.max_bytes_per_salt is not None:
        msg = "a bucket has no free space, and nobody counts salts there: give --max-bytes or --ttl"
        raise ConfigError(msg)
    limits = _limits(place, said)
    with progress() as show:
        spaces, strays = listed(place, show)
        spaces = [space for space in spaces if not space.description.later]  # of a later VUA
        chunks = [one for space in spaces for one in space.chunks.values()]
        total = sum(one.nbytes for one in chunks)
        most = total if limits.max_bytes is None else nbytes_of(limits.max_bytes, 0)
        before_s = 0.0 if limits.ttl_s is None else time.time() - limits.ttl_s
        doomed: list[BucketChunk] = []
        if total > most or any(one.written_s < before_s for one in chunks):
            for space in spaces:
                space.find_befores(show)
            doomed = _doomed(chunks, total - most, before_s)
        doomed += [one for one in _unreadable(chunks, security, show) if one not in doomed]
        nbytes = sum(one.nbytes for one in doomed)
        if doomed and not dry_run:
            confirm(f"Delete {len(doomed)} chunks, {size(nbytes)}, of {url}?", yes=yes)
            place.bucket.delete([key for one in doomed for key in one.keys])
        if not dry_run:
            left = [key for space in spaces for key in space.of_ours(space.leftovers)]
            place.bucket.delete(left)
        if keep and not dry_run:
            _keep(place, said)
        if limits.ttl_s is not None and not dry_run:
            _renew_pinned(chunks, time.time() - limits.ttl_s / 2)
    within = total - nbytes <= most
    if write is not None:
        deleted = {"chunks": len(doomed), "nbytes": nbytes}
        stay = {"chunks": len(chunks) - len(doomed), "nbytes": total - nbytes}
        report = {"within": within, "deleted": deleted, **stay, "strays": len(strays)}
        write({"directory": url, "dry_run": dry_run, **report})
    else:
        word = "would be deleted" if dry_run else "deleted"
        print(f"{len(doomed)} chunks, {size(nbytes)}, {word}; {cost(place.bucket.counts)}")
        print(plain(f"{place}: {len(chunks) - len(doomed)} chunks, {size(total - nbytes)} stay"))
        print_strays(strays)
    return SOUND if within else DAMAGED


def _limits(place: BucketPath, said: Limits) -> Limits:
    """Return what holds: the stricter of what is said and of what ``bounds.json`` says."""
    both = (said, read_bucket_bounds(place))
    sizes = [nbytes_of(one.max_bytes, 0) for one in both if one.max_bytes is not None]
    times = [one.ttl_s for one in both if one.ttl_s is not None]
    return Limits(max_bytes=min(sizes, default=None), ttl_s=min(times, default=None))


def _keep(place: BucketPath, said: Limits) -> None:
    """Put what is said into ``bounds.json``, beside what stands there."""
    news = {name: value for name, value in asdict(said).items() if value is not None}
    write_bucket_bounds(place, replace(read_bucket_bounds(place), **news))


def _doomed(chunks: Sequence[BucketChunk], excess: int, before_s: float) -> list[BucketChunk]:
    """Return what goes: what is older than ``before_s``, and more until ``excess`` bytes go."""
    order = sorted(chunks, key=lambda one: (one.needed_s, -one.written_s))
    doomed: list[BucketChunk] = []
    nbytes = 0
    for chunk in order:
        if chunk.needed_s >= before_s and nbytes >= excess:
            break
        if not chunk.pins:
            doomed.append(chunk)
            nbytes += chunk.nbytes
    return doomed


def _unreadable(
    chunks: Sequence[BucketChunk], security: Security | None, show: Show
) -> list[BucketChunk]:
    """Return the chunks that are sealed with keys that nobody has any more; none without keys.

    Raises ConfigError where the keys that are left cannot be read.
    """
    if security is None:
        return []
    key_ids(security)  # raises before anything is asked
    find_key_ids(chunks, show)
    known = {"", *key_ids(security)}  # also those that were made meanwhile
    return [one for one in chunks if not one.pins and not known & one.key_ids]


def _renew_pinned(chunks: Sequence[BucketChunk], before_s: float) -> None:
    """Give pinned chunks that were written before then the time of now."""
    keys = [
        (one.place, path)
        for one in chunks
        if one.pins and one.written_s < before_s
        for path in one.paths
    ]
    if keys:
        Bucket.each(lambda one: one[0].bucket.try_renew((one[0] / one[1]).key), keys)


# -- rm, adopt ------------------------------------------------------------------------------------


def rm_bucket(
    url: str, names: Sequence[str], *, everything: bool, force: bool, dry_run: bool, yes: bool,
    write: Write | None,
) -> int:  # fmt: skip
    """Delete namespaces, or chunks with all that follows them; exit status 1 if pins kept some.

    What VUA has not written stays, with the description of the namespace that it lies in.
    """
    place = opened_bucket(url)
    claim_bucket(place, tool=True)
    if everything == bool(names):
        msg = "name what to remove, or say --all"
        raise ConfigError(msg)
    keys: dict[str, None] = {}
    kept: set[tuple[str, str]] = set()
    with progress() as show:
        spaces, strays = listed(place, show)
        picked = [resolve(spaces, name) for name in names] or [(one, "") for one in spaces]
        for space, chunk in picked:
            doomed = space.descendants(chunk, show) if chunk else list(space.chunks)
            held = [] if force else [name for name in doomed if space.chunks[name].pins]
            if not chunk and not held:
                keys.update(dict.fromkeys(space.every_key()))
                continue
            kept.update((space.name, name) for name in held)
            gone = [space.chunks[name] for name in doomed if name not in set(held)]
            keys.update(dict.fromkeys(key for one in gone for key in one.keys))
    if keys and not dry_run:
        confirm(f"Delete {len(keys)} objects of {url}?", yes=yes)
        place.bucket.delete(list(keys))
    if write is not None:
        done = {"objects": len(keys), "kept": len(kept), "strays": len(strays)}
        write({"directory": url, **done, "dry_run": dry_run})
    else:
        print(plain(f"{place}: {len(keys)} objects {'would be ' * dry_run}removed"))
        if kept:
            print(f"{len(kept)} pinned chunks stay; --pinned removes these too")
        print_strays(strays)
    return DAMAGED if kept else SOUND


def adopt_bucket(url: str, *, write: Write | None) -> int:
    """Make a place with namespaces a cache whose objects VUA may delete."""
    place = opened_bucket(url)
    there, mine = adopted_bucket(place)
    if write is not None:
        write({"directory": url, "was_marked": there, "namespaces": mine})
    else:
        print(plain(f"{place}: VUA may delete its own objects here"))
    return SOUND
