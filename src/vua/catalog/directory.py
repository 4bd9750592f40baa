"""The catalog of a directory: from names, times and sizes, and headers where needed.

Symbolic links are not followed. Looking at a million chunks is a million small reads. On a disk
they take turns unless several are requested at once; in memory one interpreter limits them. So
large namespaces are read by several processes.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import os
import stat
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Final, TypeVar

from vua.capacity.evictor import PINNED_SHARE
from vua.capacity.gc import collect
from vua.capacity.limits import Limits, ResolvedLimits, read_bounds, write_bounds
from vua.capacity.listing import ListedChunk, Listing, ancestors, read_listing, read_node
from vua.capacity.marks import count_ttls, pin, unpin
from vua.capacity.removal import Collection, Remover, delete_namespace, nbytes_at
from vua.capacity.spaces import (
    Show,
    Space,
    chunk_nbytes,
    fans_of,
    is_large,
    is_ours,
    listed,
    silent,
    some_fans,
    spaces,
    spread,
    trash_in,
)
from vua.capacity.usage import measure
from vua.catalog.base import (
    Ask,
    Catalog,
    Demand,
    Finding,
    NamespaceCatalog,
    Removal,
    Use,
)
from vua.catalog.check import (
    Check,
    Checker,
    ExpectedEntry,
    OpenFile,
    Verification,
    read_plain,
    sampled,
)
from vua.catalog.contents import (
    DirectoryContents,
    Item,
    opened_space,
    walk,
)
from vua.errors import explaining
from vua.io import posix
from vua.io.posix import close_quietly, closing_fd
from vua.io.words import size
from vua.security.keyring import KnownKeys
from vua.security.settings import Security
from vua.storage.base import entry_name
from vua.storage.description import (
    Description,
    read_description,
)
from vua.storage.local import LocalStorage
from vua.storage.mark import claim
from vua.storage.names import QUARANTINE, chunk_path
from vua.store.evidence import settled

T = TypeVar("T")
R = TypeVar("R")

_ANYBODY: Final = Security(trusted_uids="any")
"""Files of all owners are checked: an owner does not make bytes right or wrong."""


class DirectoryNamespace(NamespaceCatalog):
    """A namespace in a directory."""

    def __init__(self, root: Path, space: Space) -> None:
        self.space, self.name = space, space.name
        self.stated = read_description(root / self.name)
        self._settled: Description | None = None

    @property
    def is_ours(self) -> bool:
        return is_ours(self.space)

    @property
    def description(self) -> Description:
        """Its description, with some headers that confirm it, read at first use."""
        if self._settled is None:
            self._settled = settled(self.stated)
        return self._settled

    def matching(self, digits: str) -> list[str]:
        with listed(self.space.fd, digits[:2]) as entries:
            names = sorted(one.name for one in entries if one.name.startswith(digits))
        return [one for one in names if len(one) == 64]

    def listed(self, chunk: str) -> list[str]:
        with listed(self.space.fd, chunk_path(chunk)) as entries:
            return sorted(entry.name for entry in entries)

    @contextlib.contextmanager
    def opened(self, path: str) -> Iterator[OpenFile]:
        """Open a file below the namespace, without following links."""
        fd = posix.open_beneath(self.space.fd, path)
        if not stat.S_ISREG(os.fstat(fd).st_mode):  # a FIFO does not hang it
            close_quietly(fd)
            raise OSError(errno.EINVAL, "not a regular file")
        with open(fd, "rb", buffering=0) as stream:  # noqa: PTH123 - a descriptor
            yield OpenFile(stream)

    def fans(self) -> tuple[Sequence[str], int]:
        return some_fans(self.space)

    def salts(self, show: Show) -> Iterable[str]:
        return [salt for _, salt in self.listing(show).firsts()]

    def listing(self, show: Show, past: Listing | None = None) -> Listing:
        """Read the headers of all chunks, or only of chunks with a new mtime."""
        return read_listing(self.space, show, known=past)

    def names(self, show: Show, fans: Sequence[str] | None = None) -> Listing:
        return read_listing(self.space, show, headers=False, fans=fans)

    def other_nbytes(self) -> tuple[int, int]:
        space, names = self.space, [name for name, _ in trash_in(self.space.fd, roots=False)]
        left = sum(nbytes_at(space.fd, name) for name in names)
        return chunk_nbytes(space, QUARANTINE), left

    def ancestors(self, chunk: str) -> Iterator[str]:
        return ancestors(self.space, chunk)

    def pin(self, chunk: str) -> int:
        return len(pin(self.space, chunk))

    def unpin(self, chunk: str) -> int:
        return len(unpin(self.space, chunk))


class DirectoryCatalog(DirectoryContents, Catalog):
    """A cache in a directory."""

    def __init__(self, where: str, root: Path) -> None:
        DirectoryContents.__init__(self, where, root)
        Catalog.__init__(self, where, root)

    def is_local(self) -> bool:
        with closing_fd(os.open(self.root, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)) as fd:
            return posix.is_local(fd)

    # -- what lies in it --------------------------------------------------------------------------

    def _strays(self) -> list[str]:
        with spaces(self.root) as found:
            return self._others({space.name for space in found})

    @contextlib.contextmanager
    def namespaces(
        self, show: Show
    ) -> Iterator[tuple[Sequence[DirectoryNamespace], Sequence[str]]]:
        """List the directory; namespaces are opened when they are used, a few at a time."""
        del show
        with explaining(self.where), spaces(self.root) as found:
            others = self._others({space.name for space in found})
            yield [DirectoryNamespace(self.root, space) for space in found], others

    def listing(self, description: Description, show: Show) -> Listing | None:
        with opened_space(description) as space:
            return read_listing(space, show)

    def quick_use(self) -> Use:
        with explaining(self.where):
            usage, bounds = measure(self.root), read_bounds(self.root)
            return Use(
                *(usage.chunks, usage.nbytes, usage.exact, (), bounds),
                limits=self.limits_of(bounds),
                free_nbytes=self.free_nbytes(),
                strays=self._strays(),
            )

    def free_nbytes(self) -> int:
        status = os.statvfs(self.root)
        return status.f_bavail * status.f_frsize

    # -- what may be done to it -------------------------------------------------------------------

    def claim(self) -> None:
        with explaining(self.where):
            claim(self.root)

    def bounds(self) -> Limits:
        return read_bounds(self.root)

    def limits_of(self, bounds: Limits) -> Mapping[str, float | None]:
        del bounds
        return asdict(ResolvedLimits.of(self.root, Limits()))

    def keep(self, news: Mapping[str, object]) -> None:
        with explaining(self.where):
            known = read_bounds(self.root)
            write_bounds(self.root, replace(known, **news))  # type: ignore[arg-type]

    def own_ttls(self) -> int:
        with spaces(self.root) as found:
            return count_ttls(found)

    def collect(
        self, given: Limits, *, keep: bool = False, quick: bool = False,
        lost: Callable[[], frozenset[str]] | None = None, dry_run: bool = False,
        ask: Ask, show: Show,
    ) -> Collection:  # fmt: skip
        with explaining(self.where):
            lasting = {name: one for name, one in asdict(given).items() if one is not None}
            own = replace(read_bounds(self.root), **lasting) if keep else given
            limits = ResolvedLimits.of(self.root, own, file=not keep)
            if given.max_bytes is not None and not dry_run:
                usage = measure(self.where)
                if usage.nbytes > limits.max_bytes:
                    change = f"from {size(usage.nbytes)} to {size(limits.max_bytes)}"
                    ask(f"Shrink {self.where} {change} by deleting the rest?")
            if keep and not dry_run:
                self.keep(lasting)
            done = collect(self.root, limits, quick=quick, rehearse=dry_run, known=lost, show=show)
            done.strays = self._strays()
        return done

    def delete(
        self, chunks: Iterable[tuple[DirectoryNamespace, ListedChunk]],
        whole: Sequence[DirectoryNamespace], done: Removal,
    ) -> None:  # fmt: skip
        remover, done.nbytes = Remover(), 0
        theirs = ((one, chunk) for one in whole for chunk in one.names(silent).all())
        for one, chunk in itertools.chain(theirs, chunks):
            nbytes = remover.evict_chunk(one.space, chunk.name, pinned=bool(chunk.pins))
            done.nbytes += nbytes or 0
            if nbytes is None:
                done.chunks -= 1
                done.kept += bool(read_node(one.space, chunk.name).pinned)
        with closing_fd(os.open(self.root, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)) as fd:
            done.nbytes += sum(delete_namespace(fd, one.name) for one in whole)
        done.left = remover.left

    def pins_may_hold(self) -> int | None:
        limits = ResolvedLimits.of(self.root, Limits())
        return int(limits.max_bytes * PINNED_SHARE)

    # -- whether it is sound ----------------------------------------------------------------------

    def checked(
        self, description: Description, keys: KnownKeys, share: float, *, repair: bool
    ) -> Iterator[tuple[int, Verification]]:
        try:
            with opened_space(description) as space:
                large, names = is_large(space), ["", *sampled(fans_of(space), share)]
        except OSError as problem:
            part = Verification(description, "")
            part.add(".", Check("error", (problem.strerror or str(problem),), 0))
            yield 1, part
            return
        work = partial(_verify_fan, description, keys, repair=repair)
        yield from ((len(names), part) for part in spread(work, names, large=large))

    def findings(self, security: Security, demand: Demand) -> Iterator[Finding]:
        from vua.catalog.probes import at_rest, tried  # noqa: PLC0415 - of `vua doctor` alone

        owner, *others = at_rest(self.root, security)
        yield owner
        yield from tried(self.root, demand)
        yield from others

    def findings_at_rest(self, security: Security) -> list[Finding]:
        from vua.catalog.probes import at_rest, may_write  # noqa: PLC0415 - likewise

        owner, *others = at_rest(self.root, security)
        return [owner, *may_write(self.root), *others]


# -- verifying ------------------------------------------------------------------------------------


def _verify_fan(namespace: Description, keys: KnownKeys, fan: str, *, repair: bool) -> Verification:
    """Check one fan-out directory, or (for "") the items beside them."""
    result, checker = Verification(namespace, ""), Checker(keys)
    try:
        storage = LocalStorage(namespace.directory, security=_ANYBODY)
        with contextlib.closing(storage):
            for item in walk(Space(namespace.name, storage.fileno()), fan):
                if item.kind == "unreadable":
                    result.add(item.path, Check("error", (item.problem,), 0))
                elif item.kind != "entry":
                    result.add_other(item)
                else:
                    check, removed = _check_file(storage, item, checker, namespace, repair=repair)
                    if check is not None:
                        result.add(item.path, check)
                        result.removed += removed
    except FileNotFoundError:
        pass  # the namespace was deleted this moment
    except OSError as problem:
        result.add(fan or ".", Check("error", (problem.strerror or str(problem),), 0))
    return result


def _check_file(
    storage: LocalStorage, item: Item, checker: Checker, namespace: Description, *, repair: bool
) -> tuple[Check | None, bool]:
    """Check one entry (None if it vanished meanwhile); also whether it was quarantined."""
    version = None
    try:
        fd = posix.open_beneath(storage.fileno(), item.path)
    except FileNotFoundError:
        return None, False
    except OSError as problem:
        check = Check("error", (str(problem.strerror),), 0)
        if not item.regular:
            check = Check("error", ("not a regular file",), 0)
    else:
        try:
            check, version = read_plain(
                fd, checker, ExpectedEntry(namespace.name, item.chunk, item.shard)
            )
        finally:
            close_quietly(fd)
    if not repair or check.outcome == "sound" or item.shard is None:
        return check, False
    if version is None and item.regular:  # it cannot be opened, or has further names (hard links)
        return check, False
    return check, storage.delete(entry_name(item.chunk, item.shard), version)
