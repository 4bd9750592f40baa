"""`vua import`: what `vua export` wrote into a directory, which others may be using.

Each file is verified wholly, in memory, before a byte of it is written; then it is published as any
writer does it: into a namespace whose identity gives its name, after its prefix, within the bounds,
and never over what is there. An archive proves that it is whole and that each file is what it says.
It does not prove who computed it: take archives only from whom you would let write to the cache.
"""

from __future__ import annotations

import itertools
import os
import re
import sys
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO, Final, cast

import numpy as np

from vua.capacity.scan import AFTER, Show
from vua.cli.archive import Member, Reader, file_sizes
from vua.cli.bucket_chunks import opened_bucket
from vua.cli.check import Checker, Place
from vua.cli.owner import as_owner, to_change
from vua.cli.text import (
    DAMAGED,
    SHORT,
    SOUND,
    Write,
    line,
    progress,
    size,
)
from vua.errors import (
    ConfigError,
    EntryError,
    InputError,
    LayoutError,
    StorageError,
    UntrustedError,
)
from vua.format.entry import EntryCodec
from vua.format.header import AUTHENTIC, ENCRYPTED
from vua.format.keys import ChunkKey
from vua.format.layout import Shard, payload_map
from vua.format.parse import parse_entry
from vua.io.header_plan import header_plan
from vua.native import Transfer
from vua.storage.base import Batch, entry_name
from vua.storage.bucket_mark import claim_bucket
from vua.storage.bucket_path import BucketPath
from vua.storage.description import DESCRIPTION, MAX_DESCRIPTION_NBYTES, parse_description
from vua.storage.local import SUFFIX
from vua.storage.problems import explained
from vua.storage.urls import is_url
from vua.store.entry_writer import EntryWriter
from vua.store.namespace import check_root
from vua.store.opening import create_namespace
from vua.store.store import Store

__all__ = ["import_"]

_DESCRIPTION: Final = re.compile(rf"([0-9a-f]{{64}})/{re.escape(DESCRIPTION)}")
_INSIDE: Final = re.compile(r"([0-9a-f]{64})/([0-9a-f]{2})/(\2[0-9a-f]{62})/([a-z0-9.-]{1,100})")
_MOST_PROBLEMS: Final = 20


@dataclass(slots=True)
class _Done:
    written: int = 0
    present: int = 0
    """There already; left as they are."""
    refused: int = 0
    """For which there was no room, or whose prefix is not there."""
    nbytes: int = 0
    namespaces: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)


def import_(directory: str, file: str, *, write: Write | None) -> int:
    """Take in an archive; exit status 1 if some of it was damaged or found no room.

    ``file`` may be ``-`` for stdin. Root takes it in as the directory's owner. Raises InputError
    for what is no archive, ConfigError, StorageError.
    """
    try:
        with ExitStack() as stack:
            show = stack.enter_context(progress())
            stream, total = cast(BinaryIO, sys.stdin.buffer), 0
            if file != "-":
                stream = stack.enter_context(Path(file).open("rb"))
                total = os.fstat(stream.fileno()).st_size
            stack.enter_context(as_owner(directory))
            root = _to_write(directory)
            taker = _Taker(root, Reader(stream), stack)
            done = taker.run(show, total)
    except OSError as problem:
        if isinstance(problem, StorageError):
            raise
        raise explained(problem, str(problem.filename or directory)) from problem
    sound = not done.problems and not done.refused
    if write is not None:
        write({"directory": directory, "file": file, "written": done.written,
               "present": done.present, "refused": done.refused, "nbytes": done.nbytes,
               "namespaces": done.namespaces, "problems": done.problems})  # fmt: skip
        return SOUND if sound else DAMAGED
    for text in done.problems[:_MOST_PROBLEMS]:
        line("not taken", text)
    if len(done.problems) > _MOST_PROBLEMS:
        print(f"and {len(done.problems) - _MOST_PROBLEMS} more")
    if done.refused:
        print(f"{done.refused} files found no room, or no prefix to follow; see `vua du`")
    print(
        f"{directory}: {done.written} files written, {size(done.nbytes)}; {done.present} were there"
    )
    return SOUND if sound else DAMAGED


def _to_write(where: str) -> Path | BucketPath:
    """Return a place that may be changed, made where it is missing.

    Raises ConfigError, StorageError.
    """
    if is_url(where):
        place = opened_bucket(where)
        claim_bucket(place, tool=True)
        return place
    check_root(where)
    return to_change(where)


class _Taker:
    """Takes members in, one after the other."""

    def __init__(self, root: Path | BucketPath, reader: Reader, stack: ExitStack) -> None:
        self._root, self._reader, self._stack = root, reader, stack
        self._done, self._checker = _Done(), Checker()
        self._stores: dict[str, list[Store]] = {}
        self._before: dict[tuple[str, str], str] = {}
        self._ends: dict[tuple[str, str], int | None] = {}
        """Of chunks that are there: the position behind their last token, None for no chunk."""

    def run(self, show: Show, total: int) -> _Done:
        """Take everything in; what is not to be had is a problem, not an error.

        ``total`` are the bytes of the archive, 0 where that is not known.
        """
        done, read_nbytes = self._done, 0
        try:
            for member in self._reader.members():
                try:
                    self._take(member)
                except (ConfigError, EntryError, LayoutError) as problem:
                    done.problems.append(f"{member.name}: {problem}")
                read_nbytes += member.nbytes
                show(member.name[:SHORT], read_nbytes, total, amount=read_nbytes)
        except LayoutError:
            raise
        except InputError as problem:  # what came before is whole, each file by itself
            done.problems.append(str(problem))
        return done

    def _take(self, member: Member) -> None:
        if match := _DESCRIPTION.fullmatch(member.name):
            self._open(match[1], member)
            return
        match = _INSIDE.fullmatch(member.name)
        if match is None:
            msg = "no name that a cache has"
            raise ConfigError(msg)
        namespace, _, chunk, name = match.groups()
        if name.startswith(AFTER) and re.fullmatch("[0-9a-f]{64}", name[len(AFTER) :]):
            if (
                self._before.setdefault((namespace, chunk), name[len(AFTER) :])
                != name[len(AFTER) :]
            ):
                msg = "another chunk was said to come before this one"
                raise ConfigError(msg)
            return
        shard = Shard.parse(name.removesuffix(SUFFIX)) if name.endswith(SUFFIX) else None
        if shard is None:
            msg = "no name that a cache has"
            raise ConfigError(msg)
        self._take_file(namespace, chunk, shard, member)

    def _open(self, namespace: str, member: Member) -> None:
        """Make or open the namespace that is described."""
        if member.nbytes > MAX_DESCRIPTION_NBYTES:
            msg = f"{member.nbytes} bytes are too long for a description"
            raise ConfigError(msg)
        identity, layouts = parse_description(bytes(self._reader.read()))
        if identity.namespace != namespace:
            msg = f"it describes namespace {identity.namespace[:SHORT]}"
            raise ConfigError(msg)
        if namespace not in self._stores:
            stores = create_namespace(self._root, identity, layouts).stores
            self._stack.callback(stores[0].close)  # one capacity for all
            self._stores[namespace] = stores
            self._done.namespaces.append(namespace)

    def _take_file(self, namespace: str, chunk: str, shard: Shard, member: Member) -> None:
        stores = self._stores.get(namespace, ())
        store = next((one for one in stores if one.layout.group == shard.group), None)
        if store is None:
            msg = f"no sound {DESCRIPTION} of its namespace came before it"
            raise ConfigError(msg)
        codec = store.codec(shard)
        sizes = file_sizes(codec)
        if member.nbytes not in sizes:
            msg = f"{member.nbytes} bytes long, expected {' or '.join(map(str, sizes))}"
            raise ConfigError(msg)
        data = self._reader.read()
        check = self._checker.check_bytes(
            memoryview(data), Place(namespace, chunk, shard, store.layout)
        )
        info = check.info
        if check.outcome != "sound" or info is None:
            raise ConfigError("; ".join(check.reasons))
        before = self._before.get((namespace, chunk), "") if info.start else ""
        key = info.key._replace(previous=bytes.fromhex(before))
        self._write(store, key, shard, info.kind, data)

    def _write(self, store: Store, key: ChunkKey, shard: Shard, kind: str, data: bytearray) -> None:
        done, before = self._done, key.before.hex()
        if before and (end := self._end(store, before)) != key.start:
            if end is not None:
                msg = f"the chunk before it ends at token {end}, this one begins at {key.start}"
                raise ConfigError(msg)
            done.refused += 1
            return
        if store.storage.exists([entry_name(key.name, shard)], len(data))[0]:
            done.present += 1
        else:
            codec, array = store.codec(shard, kind), np.frombuffer(data, dtype=np.uint8)
            header, payload = np.split(array, [codec.header_nbytes])
            memory = payload_map(store.layout, shard, payload.ctypes.data, payload, 1)
            if not EntryWriter(store, memory, shard=shard).copy(key, header, kind):
                done.refused += 1
                return
            done.written += 1
            done.nbytes += len(data)
        self._ends[store.namespace, key.name] = key.stop

    def _end(self, store: Store, chunk: str) -> int | None:
        """Where a chunk ends that was taken in before, or has been in the directory all the time.

        A chunk that follows itself, over however many others, cannot come of it.
        """
        known = (store.namespace, chunk)
        if self._ends.get(known) is None:
            self._ends[known] = _stored_end(store, chunk)
        return self._ends[known]


def _stored_end(store: Store, chunk: str) -> int | None:
    """The end that a stored chunk's header tells; None where none does."""
    kinds = ("", AUTHENTIC, ENCRYPTED)
    for shard, kind in itertools.product(store.shards(chunk), kinds):
        with suppress(OSError, EntryError, UntrustedError, LayoutError):
            header = _stored_header(store, store.codec(shard, kind), chunk)
            return parse_entry(header).stop
    return None


def _stored_header(store: Store, codec: EntryCodec, chunk: str) -> bytes:
    """The header of one entry, which nobody has judged; one as long as ``codec`` says.

    Raises CorruptEntryError for an entry of another length, UntrustedError, OSError.
    """
    plan = header_plan(codec.file_nbytes, codec.header_nbytes)
    batch = Batch.of([entry_name(chunk, codec.shard)], Transfer(plan, (), (), ()))
    filled = store.storage.read(batch)
    if filled.problem is not None:
        raise filled.problem
    return bytes(batch.headers[0])
