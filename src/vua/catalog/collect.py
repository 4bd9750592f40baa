"""What is done to a cache as a whole, wherever it is: `vua gc` and `vua rm`."""

from __future__ import annotations

import contextlib
import heapq
import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, replace
from typing import Any, Final

from vua.capacity.limits import Limits
from vua.capacity.listing import ListedChunk, Listing
from vua.capacity.removal import NOTHING, Collection, DeletionTotals
from vua.capacity.spaces import Show, silent
from vua.catalog.base import Ask, Catalog, NamespaceCatalog, Removal, resolve
from vua.catalog.contents import SHORT
from vua.errors import ConfigError, explaining
from vua.io.words import counted, size

_AT_ONCE: Final = 256
"""Chunks whose headers are read between two progress reports."""


def collect(
    catalog: Catalog, given: Limits, *, keep: bool = False, quick: bool = False,
    dry_run: bool = False, ask: Ask = silent, show: Show = silent,
) -> Collection:  # fmt: skip
    """Bring a cache within its limits and sweep it.

    Safe beside readers, writers and other passes: nothing younger than an hour counts as remains of
    a crash, and a chunk is looked at again before it is deleted. Foreign files stay unchanged.

    Args:
        catalog: the cache.
        given: limits beside those of ``bounds.json``; with ``keep`` they are written there.
        keep: see ``given``.
        quick: skip what needs a look into the folder of each chunk.
        dry_run: change nothing, and report what would be deleted.
        ask: asks before much is deleted.
        show: reports progress.

    Raises ConfigError for a place without the mark, OSError if it cannot be listed or changed.
    """
    began_s = time.monotonic()
    lasting = {name: one for name, one in asdict(given).items() if one is not None}
    if (
        catalog.free_nbytes() is None
        and not given.min_free_bytes is given.max_bytes_per_salt is None
    ):
        raise ConfigError(
            "--min-free and --max-per-salt do not apply to buckets; use --max-bytes or --ttl"
        )
    with explaining(catalog.where):
        catalog.claim()
        known = catalog.bounds()
        limits = catalog.limits(*([replace(known, **lasting)] if keep else [given, known]))
        done, most = Collection(limits), limits["max_bytes"]
        with catalog.namespaces(show) as (every, others):
            ours = [one for one in every if one.is_ours]
            found = [one for one in ours if not one.stated.is_unknown]
            if not (dry_run or given.max_bytes is None or most is None):
                nbytes = catalog.stored_nbytes(found)
                change = f"from {size(nbytes)} to {size(most)}"
                if nbytes > most:
                    ask(f"Shrink {catalog.where} {change} by deleting the rest?")
            if keep and not dry_run:
                catalog.keep(lasting)
            done.leftovers = DeletionTotals(*catalog.sweep(found, dry_run=dry_run))
            for space in found:
                if not (quick or space.is_remote):
                    _tidy(space, done, show, dry_run=dry_run)
            if dry_run or not catalog.evict(limits, done, show):
                _evict_oldest(catalog, found, done, show, dry_run=dry_run)
            done.strays = _strays(every, ours, others)
    done.seconds = time.monotonic() - began_s
    return done


def _delete(
    space: NamespaceCatalog, listing: Listing, still_goes: Callable[[ListedChunk], bool], *,
    show: Show, dry_run: bool,
) -> DeletionTotals:  # fmt: skip
    """Delete doomed chunks that still go; what stays is not in the listing any more, either."""
    removal, some = Removal(), _doomed(listing, space.name, show)
    if dry_run:
        removal.count(some)
    else:
        space.erase(filter(still_goes, some), removal)
    listing.remove_doomed()
    return DeletionTotals(removal.chunks, removal.nbytes)


def _tidy(space: Any, done: Collection, show: Show, *, dry_run: bool) -> None:
    """Delete remains of crashes, and what of a salt is more than it may have."""
    most = done.limits["max_bytes_per_salt"]
    listing = space.chunks if most is None else space.listing(show)
    done.leftovers += DeletionTotals(*space.settle(listing))
    if most is not None:
        listing.doom_over(most)
        done.over_quota += _delete(space, listing, space.is_unused, show=show, dry_run=dry_run)
    done.pinned_nbytes = (done.pinned_nbytes or 0) + listing.totals().pinned_nbytes


def _evict_oldest(
    catalog: Catalog, found: Sequence[NamespaceCatalog], done: Collection, show: Show, *,
    dry_run: bool,
) -> None:  # fmt: skip
    """Delete the least recently used; a chunk stays as long as one that follows it.

    Pinned chunks stay. They are renewed after half of their life, so that no lifecycle rule deletes
    them.
    """
    limits, oldest_ns = done.limits, _count(found, done)
    over, now_ns = catalog.excess(limits, done), int(time.time() * 1e9)
    before_ns = 0 if limits["ttl_s"] is None else now_ns - int(limits["ttl_s"] * 1e9)
    if over > 0 or oldest_ns < before_ns:
        listings = [space.listing(show) if space.is_remote else space.chunks for space in found]
        done.expired, done.evicted = _choose_victims(listings, over, before_ns)
        for space, listing in zip(found, listings, strict=True):
            _delete(space, listing, bool, show=show, dry_run=dry_run)
            if not dry_run:
                with contextlib.suppress(OSError):  # then it is read again the next time
                    space.note_befores()
    for space in () if dry_run or limits["ttl_s"] is None else found:
        for some in space.chunks.pinned(_AT_ONCE, (now_ns + before_ns) // 2):
            space.renew(some)
    _count(found, done)
    done.within = catalog.excess(limits, done) <= 0


def _count(found: Sequence[NamespaceCatalog], done: Collection) -> int:
    """Note what is left; return when the chunk unused for longest was used."""
    totals = [space.chunks.totals() for space in found]
    done.chunks, done.nbytes, done.pinned_nbytes = (
        sum(getattr(one, name) for one in totals) for name in ("chunks", "nbytes", "pinned_nbytes")
    )
    done.nbytes += sum(space.quarantined() for space in found if not space.is_remote)
    return min((one.oldest_ns or 0 for one in totals if one.chunks), default=1 << 62)


def _choose_victims(
    listings: Sequence[Listing], excess: int, before_ns: int
) -> tuple[DeletionTotals, DeletionTotals]:
    """Doom chunks not used since ``before_ns``, and more until ``excess`` bytes are freed.

    A chunk comes after the chunks that follow it in prompts, also if they were written earlier.
    Pinned ones stay. Returns what both amount to.
    """
    expired = evicted = NOTHING
    by_need = (zip(one.by_need(), itertools.repeat(one), strict=False) for one in listings)
    order = heapq.merge(*by_need, key=lambda row: row[0])
    for place, ((needed_ns, _, name, nbytes), listing) in enumerate(order):
        if needed_ns < before_ns:
            expired += DeletionTotals(1, nbytes)
        elif expired.nbytes + evicted.nbytes < excess:
            evicted += DeletionTotals(1, nbytes)
        else:
            break
        listing.doom(name, place)
    return expired, evicted


def remove(
    catalog: Catalog, names: Sequence[str], *, force: bool, dry_run: bool, ask: Ask, show: Show
) -> Removal:
    """Delete chunks with all that follow them, leaves first, or namespaces.

    Args:
        catalog: the cache.
        names: first digits of names; none for all namespaces.
        force: also pinned chunks.
        dry_run: change nothing, and report what would be deleted.
        ask: asks before anything is deleted.
        show: reports progress.
    """
    with explaining(catalog.where), catalog.namespaces(show) as (found, others):
        picked, ours = [resolve(found, one) for one in names], [one for one in found if one.is_ours]
        picked = picked or [(one, "") for one in ours]
        done, (some, whole) = Removal(), _picked(picked, show, force=force)
        for listing in some.values():
            done.kept += 0 if force else listing.spare_pinned()
            total = listing.totals(doomed=True)
            done.chunks += total.chunks
            done.nbytes += total.nbytes
        done.nbytes += sum(space.quarantined() for space in whole)
        done.strays = _strays(found, ours, others)
        if dry_run:
            return done
        if done.chunks or whole:
            part = counted(len(whole), "namespace") if whole else "chunks"
            text = f"{counted(done.chunks, 'chunk')}, {size(done.nbytes)}"
            ask(f"Delete {part if names else 'everything'} in {catalog.where} ({text})?")
        done.chunks, done.nbytes = 0, 0
        for space, listing in some.items():
            space.erase(_doomed(listing, space.name, show), done)
            if space in whole:
                space.drop(done)
    return done


def _picked(
    picked: Sequence[tuple[NamespaceCatalog, str]], show: Show, *, force: bool
) -> tuple[dict[NamespaceCatalog, Listing], list[NamespaceCatalog]]:
    """Doom what was picked; return the listings, and the namespaces that go as a whole."""
    some, whole = dict[NamespaceCatalog, Listing](), list[NamespaceCatalog]()
    for space, chunk in sorted(picked, key=lambda one: one[1]):  # namespaces come first
        if not (chunk or space.is_ours):
            raise ConfigError(f"{space.name} is not a namespace of VUA, it stays unchanged")
        if space in whole:
            continue
        if space not in some:
            some[space] = space.listing(show) if chunk else space.names(show)
        if not chunk and (force or not some[space].totals().pinned):
            whole.append(space)
        some[space].doom_below(chunk)
    return some, whole


def _doomed(listing: Listing, name: str, show: Show) -> Iterator[ListedChunk]:
    """Yield the chunks to delete of the namespace ``name``, in order."""
    freed = 0
    for one in listing.doomed():
        if (chunk := listing.get(one)) is not None:
            show(f"{name[:SHORT]}: deleting", amount=freed)
            freed += chunk.nbytes
            yield chunk


def _strays(
    found: Sequence[NamespaceCatalog], ours: Sequence[NamespaceCatalog], others: Sequence[str]
) -> list[str]:
    """Return the names of what is not VUA's, as far as it was listed."""
    inside = [f"{one.name}/{path}" for one in ours for path in one.strays]
    return [*others, *(one.name for one in found if one not in ours), *inside]
