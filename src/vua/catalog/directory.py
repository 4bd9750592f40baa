"""The catalog of a directory: from names, times and sizes, and headers where needed.

Symbolic links are not followed. Looking at a million chunks is a million small reads. On a disk
they take turns unless several are requested at once; in memory one interpreter limits them. So
large namespaces are read by several processes.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from vua.capacity.limits import Limits, ResolvedLimits, read_bounds, write_bounds
from vua.capacity.spaces import (
    Show,
    Space,
    about_chunks,
    chunk_nbytes,
    is_large,
    is_ours,
    is_trash,
    listed,
    over_fans,
    spaces,
    spread,
)
from vua.capacity.upkeep import read_census
from vua.catalog.base import Catalog, Demand, Finding, NamespaceCatalog, Removal
from vua.catalog.contents import SHORT, Content, Entries, Item, walk
from vua.errors import explaining
from vua.io import posix
from vua.io.posix import closing_fd
from vua.security.settings import Security
from vua.storage.description import DESCRIPTION, Description, read_description
from vua.storage.mark import LIMITS_FILE, MARK, UPKEEP, claim, is_marked
from vua.storage.names import QUARANTINE, chunk_path

if TYPE_CHECKING:
    from vua.capacity.gc import Leftovers
    from vua.capacity.listing import ListedChunk, Listing
    from vua.capacity.removal import Collection, Immovable
    from vua.catalog.check import Check, Checker, Verification
    from vua.security.keyring import KnownKeys

# What reads chunks is imported by the methods that need it: `vua ls` starts without.
# ruff: noqa: PLC0415


_SAMPLED: Final = 4096
"""Chunks that `vua top` looks at of very many."""


class DirectoryNamespace(NamespaceCatalog):
    """A namespace in a directory."""

    salted_most = 4096
    is_remote = False

    def __init__(self, catalog: DirectoryCatalog, space: Space) -> None:
        super().__init__(read_description(catalog.root / space.name))
        self.catalog, self.space = catalog, space
        self._settled: Description | None = None

    def has_description(self) -> bool:
        return os.path.lexists(self.stated.directory / DESCRIPTION)

    @property
    def is_ours(self) -> bool:
        return is_ours(self.space)

    @property
    def description(self) -> Description:
        from vua.store.namespace import settled

        if self._settled is None:
            self._settled = settled(self.stated)
        return self._settled

    # -- what is in it ----------------------------------------------------------------------------

    def items(self) -> Iterator[Item]:
        for fan in (*self.space.fans(), ""):
            yield from walk(self.space, fan)

    def content(self, show: Show, *, long: bool = False, exact: bool = True) -> Content:
        content, space = Content(self.stated, self.state), self.space
        if not (long or exact) and is_large(space):
            return self._counted_before(content)
        fans = space.fans()
        work = partial(_count_fan, Content(self.stated, self.state), space, long=long)
        parts, content.entries = over_fans(work, space, fans), Entries()
        for number, part in enumerate(parts, 1):
            content.add(part)
            show(space.name[:SHORT], number, len(fans), amount=content.chunks, unit="chunk")
        content.add(work("", long=False))
        return content

    def _counted_before(self, content: Content) -> Content:
        """Fill in what the census says; if it is too old, an estimate."""
        content.exact, content.files, content.pinned = False, None, None
        content.quarantine = self.quarantined()
        counted = read_census(self.catalog.root).get(self.name)
        if counted is not None and counted.fits(about_chunks(self.space)):
            content.chunks, content.nbytes, content.counted_s = counted[:3]
            content.times_ns = counted.oldest_ns, counted.newest_ns
            content.newest_s = counted.newest_ns / 1e9
            return content
        from vua.capacity.usage import measure

        usage = measure(self.catalog.root, only=[self.name])
        content.chunks, content.nbytes = usage.chunks, usage.nbytes - content.quarantine
        return content

    def names(self, show: Show, fans: Sequence[str] | None = None) -> Listing:
        from vua.capacity.listing import Listing, read_listing

        if fans is None:
            return read_listing(self.space, show, headers=False)
        found = Listing()  # of a sample names and times alone: a fortieth of the time
        for name, used_ns in chain.from_iterable(self.space.chunks(fan) for fan in fans):
            found.add(name, "", 0, used_ns)
        found.end()
        return found

    def listing(self, show: Show, past: Listing | None = None) -> Listing:
        """Read the headers of all chunks, or only of chunks with a new mtime."""
        from vua.capacity.listing import read_listing

        self._chunks = read_listing(self.space, show, known=past)
        return self._chunks

    def _listed(self) -> Listing:
        return self.names(self._show)

    def sample(self) -> Sequence[str] | None:
        if not is_large(self.space):
            return None
        step = max(1, min(256, about_chunks(self.space) // _SAMPLED))
        return [f"{fan:02x}" for fan in range(0, 256, step)]

    def firsts(self, show: Show) -> Iterable[tuple[str, str]]:
        return self.listing(show).firsts()

    def ancestors(self, chunk: str) -> Iterator[str]:
        from vua.capacity.listing import ancestors

        return ancestors(self.space, chunk)

    def matching(self, digits: str) -> list[str]:
        with listed(self.space.fd, digits[:2]) as entries:
            names = sorted(one.name for one in entries if one.name.startswith(digits))
        return [one for one in names if len(one) == 64]

    def listed(self, chunk: str) -> list[str]:
        with listed(self.space.fd, chunk_path(chunk)) as entries:
            return sorted(entry.name for entry in entries)

    def quarantined(self) -> int:
        return chunk_nbytes(self.space, QUARANTINE)

    def read(self, path: str, most: int) -> bytes:
        """As in the base class, without following links."""
        with open(posix.open_beneath(self.space.fd, path), "rb") as file:  # noqa: PTH123
            if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):  # a FIFO does not hang it
                raise OSError(errno.EINVAL, "not a regular file")
            return file.read(most)

    # -- what may be done to it -------------------------------------------------------------------

    def pin(self, chunk: str, *, on: bool = True) -> int:
        from vua.capacity.listing import pin

        return len(pin(self.space, chunk, on=on))

    def settle(self, listing: Listing) -> tuple[int, int]:
        """Delete remains of a crash in chunks' folders; return how many, and their bytes."""
        return self.catalog.leftovers.settle(self.space, listing)

    def is_unused(self, chunk: ListedChunk) -> bool:
        """Whether a chunk was not used since it was listed."""
        from vua.capacity.lru import mtime_ns_of

        return mtime_ns_of(self.space.fd, chunk.name) == chunk.used_ns

    def erase(self, chunks: Iterable[ListedChunk], done: Removal) -> None:
        from vua.capacity.listing import read_node
        from vua.capacity.removal import ImmovableError, evict_chunk, told_immovable

        for one in chunks:
            try:
                nbytes = evict_chunk(self.space, one.name, pinned=bool(one.pins))
            except ImmovableError as problem:
                self.catalog.immovable[self.name, one.name] = problem
                continue
            if nbytes is None:
                done.kept += bool(read_node(self.space, one.name).pinned)
            else:
                done.chunks += 1
                done.nbytes += nbytes
        done.left = told_immovable(self.catalog.immovable)

    def drop(self, done: Removal) -> None:
        from vua.capacity.removal import delete_namespace

        root = os.open(self.catalog.root, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        with closing_fd(root):
            done.nbytes += delete_namespace(root, self.name)

    def checked(
        self, keys: KnownKeys, share: float, *, repair: bool
    ) -> Iterator[tuple[int, Verification]]:
        from vua.catalog.check import Check, Verification, sampled

        try:
            large, names = is_large(self.space), ["", *sampled(self.space.fans(), share)]
        except OSError as problem:
            part = Verification(self.stated, "")
            part.add(".", Check("error", (problem.strerror or str(problem),), 0))
            yield 1, part
            return
        work = partial(_verify_fan, self.stated, keys, repair=repair)
        yield from ((len(names), part) for part in spread(work, names, large=large))


class DirectoryCatalog(Catalog):
    """A cache in a directory."""

    root: Path
    leftovers: Leftovers
    """Of a `vua gc`, which sweeps first."""

    def __init__(self, where: str, root: Path) -> None:
        super().__init__(where, root)
        self.immovable: Immovable = {}

    def is_local(self) -> bool:
        with closing_fd(os.open(self.root, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)) as fd:
            return posix.is_local(fd)

    def is_foreign(self) -> bool:
        return not is_marked(self.root)

    @contextlib.contextmanager
    def namespaces(
        self, show: Show
    ) -> Iterator[tuple[Sequence[DirectoryNamespace], Sequence[str]]]:
        """List the directory; namespaces are opened when they are used, a few at a time."""
        del show
        with explaining(self.where), spaces(self.root) as found:
            known = {space.name for space in found} | {MARK, LIMITS_FILE, UPKEEP}
            names = {path.name for path in self.root.iterdir()} - known
            others = sorted(name for name in names if not is_trash(name))
            yield [DirectoryNamespace(self, space) for space in found], others

    def claim(self) -> None:
        with explaining(self.where):
            claim(self.root)

    def bounds(self) -> Limits:
        return read_bounds(self.root)

    def write_bounds(self, bounds: Limits) -> None:
        write_bounds(self.root, bounds)

    def limits(self, *sources: Limits) -> Mapping[str, Any]:
        return asdict(ResolvedLimits.of(self.root, *sources, file=False))

    def free_nbytes(self) -> int:
        status = os.statvfs(self.root)
        return status.f_bavail * status.f_frsize

    def stored_nbytes(self, found: Sequence[DirectoryNamespace]) -> int:
        from vua.capacity.usage import measure

        del found
        return measure(self.root).nbytes

    def sweep(self, found: Sequence[DirectoryNamespace], *, dry_run: bool) -> tuple[int, int]:
        from vua.capacity.gc import Leftovers

        self.leftovers = Leftovers(self.root, dry_run=dry_run)
        return self.leftovers.sweep([one.space for one in found])

    def excess(self, limits: Mapping[str, Any], done: Collection) -> int:
        from vua.capacity.gc import excess
        from vua.capacity.removal import NOTHING

        planned = sum(done.deleted.values(), NOTHING)
        return excess(self.root, ResolvedLimits(**limits), done, planned)

    def evict(self, limits: Mapping[str, Any], done: Collection, show: Show) -> bool:
        from vua.capacity.gc import evict

        evict(self.root, ResolvedLimits(**limits), done, show, self.immovable)
        return True

    def findings(self, security: Security, demand: Demand) -> Iterator[Finding]:
        from vua.catalog.probes import at_rest, tried

        owner, *others = at_rest(self.root, security)
        yield owner
        yield from tried(self.root, demand)
        yield from others

    def findings_at_rest(self, security: Security) -> list[Finding]:
        from vua.catalog.probes import at_rest, may_write

        owner, *others = at_rest(self.root, security)
        return [owner, *may_write(self.root), *others]


def _count_fan(content: Content, space: Space, fan: str, *, long: bool) -> Content:
    return content.counted(walk(space, fan), long=long)


# -- verifying ------------------------------------------------------------------------------------


def _verify_fan(namespace: Description, keys: KnownKeys, fan: str, *, repair: bool) -> Verification:
    """Check one fan-out directory, or (for "") the items beside them."""
    from vua.catalog.check import Check, Checker, Verification, check_all
    from vua.storage.local import LocalStorage

    try:
        storage = LocalStorage(namespace.directory, security=Security(trusted_uids="any"))
        with contextlib.closing(storage):
            items = list(walk(Space(namespace.name, storage.fileno()), fan))
            judge = partial(_judge, storage.fileno(), namespace.name, Checker(keys))
            return check_all(namespace, items, judge, storage, repair=repair)
    except FileNotFoundError:
        return Verification(namespace, "")  # the namespace was deleted this moment
    except OSError as problem:
        result = Verification(namespace, "")
        result.add(fan or ".", Check("error", (problem.strerror or str(problem),), 0))
        return result


def _judge(
    space_fd: int, name: str, checker: Checker, item: Item
) -> tuple[Check | None, bytes | None, bool]:
    from vua.catalog.check import Check, ExpectedEntry, read_plain

    try:
        fd = posix.open_beneath(space_fd, item.path)
    except FileNotFoundError:
        return None, None, False
    except OSError as problem:
        text = str(problem.strerror) if item.regular else "not a regular file"
        return Check("error", (text,), 0), None, not item.regular
    with closing_fd(fd):
        check, version = read_plain(fd, checker, ExpectedEntry(name, item.chunk, item.shard))
    # Without a version it has further names (hard links).
    return check, version, version is not None or not item.regular
