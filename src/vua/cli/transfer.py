"""`vua export` and `vua import`: chosen prefixes as one portable file.

Export reads and verifies, and changes nothing. It holds the files of one chunk in memory, and
writes what it has verified; of a file longer than any of its namespace can be it reads no more.

Import verifies each file completely, in memory, before it writes a byte. Then it publishes the file
like any writer: into a namespace whose identity gives its name, after its prefix, within the
bounds, and never over an existing file. An archive proves that it is whole and that each file is
what it says. It does not prove who computed it: import archives only from sources that you would
let write to the cache.

An archive is an uncompressed tar stream::

    vua-export.json                                  {"format": "vua.export.v1"}
    <namespace>/namespace.json                       before the first file of its namespace
    <namespace>/<hh>/<chunk>/after-<chunk>           empty, if the directory has it
    <namespace>/<hh>/<chunk>/<shard>.safetensors     parents before children, byte for byte
    vua-export.end.json                              {"members": ..., "sha256": ...} of all before

`sha256` covers each member's name, a NUL, its size in decimal, a NUL and its bytes. It shows that
the archive is whole; each file proves its own content. Any tar program unpacks it. Only plain files
in the ustar form are read: no links, no devices, no extended headers, no compression.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import secrets
import sys
import tarfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import IO, Any, BinaryIO, Final, NamedTuple, cast

import numpy as np

from vua.capacity.spaces import Show
from vua.catalog import open_catalog
from vua.catalog.base import MAX_FILE_NBYTES, NamespaceCatalog, resolve
from vua.catalog.check import Checker, ExpectedEntry
from vua.catalog.contents import SHORT
from vua.cli.command import argument, as_owner, command, option, undoing
from vua.cli.output import DAMAGED, SOUND, Output, Report, line, plain, progress
from vua.errors import (
    ConfigError,
    EntryError,
    InputError,
    LayoutError,
)
from vua.format.entry import AUTHENTIC, ENCRYPTED, EntryCodec
from vua.format.keys import ChunkKey
from vua.format.layout import Shard, payload_map
from vua.io.files import make_file
from vua.io.words import counted, size
from vua.storage.base import entry_name
from vua.storage.description import DESCRIPTION, MAX_DESCRIPTION_NBYTES, parse_description
from vua.storage.location import Location
from vua.storage.names import AFTER, SUFFIX, chunk_path
from vua.store.namespace import Namespace, stored_header
from vua.store.store import Store
from vua.store.writer import EntryWriter

_DESCRIPTION: Final = re.compile(rf"([0-9a-f]{{64}})/{re.escape(DESCRIPTION)}")
_INSIDE: Final = re.compile(r"([0-9a-f]{64})/([0-9a-f]{2})/(\2[0-9a-f]{62})/([a-z0-9.-]{1,100})")
_MOST_PROBLEMS: Final = 20


# -- the archive ----------------------------------------------------------------------------------

FORMAT: Final = "vua.export.v1"
_START: Final = "vua-export.json"
_END: Final = "vua-export.end.json"
_BLOCK: Final = tarfile.BLOCKSIZE
_MAX_END_NBYTES: Final = 4096
_COPIED_NBYTES: Final = 1 << 20
_KINDS: Final = ("", AUTHENTIC, ENCRYPTED)


class Writer:
    """Writes members one after the other; :meth:`close` completes the archive."""

    def __init__(self, stream: BinaryIO) -> None:
        """Begin an archive. Raises OSError, like all methods."""
        self._stream, self._digest, self._members = stream, hashlib.sha256(), 0
        self.add(_START, json.dumps({"format": FORMAT}).encode() + b"\n")

    def add(self, name: str, data: bytes | memoryview) -> None:
        """Append a file; its name has at most 100 characters after a directory of at most 155."""
        self._digest.update(b"%s\0%d\0" % (name.encode(), len(data)))
        self._digest.update(data)
        self._members += 1
        self._put(name, data)

    def _put(self, name: str, data: bytes | memoryview) -> None:
        info = tarfile.TarInfo(name)
        info.size, info.mode = len(data), 0o600
        self._stream.write(info.tobuf(tarfile.USTAR_FORMAT, "ascii", "strict"))
        self._stream.write(data)
        self._stream.write(bytes(-len(data) % _BLOCK))

    def close(self) -> None:
        """Write the end, which proves completeness."""
        end = {"members": self._members, "sha256": self._digest.hexdigest()}
        self._put(_END, json.dumps(end).encode() + b"\n")
        self._stream.write(bytes(2 * _BLOCK))
        self._stream.flush()


class _PlainFile(tarfile.TarInfo):
    """A member's header; anything but a plain file is refused before further use."""

    @classmethod
    def frombuf(cls, buf: bytes | bytearray, encoding: str, errors: str) -> _PlainFile:
        """Read a header. Raises InputError, and `tarfile`'s exceptions for an invalid one."""
        info = super().frombuf(buf, encoding, errors)
        if info.type != tarfile.REGTYPE or info.size < 0:
            raise InputError(f"{info.name!r:.100} in the archive is not a plain file")
        return info


class Member(NamedTuple):
    """A file in an archive."""

    name: str
    nbytes: int
    """As its header says."""
    read: Callable[[], bytearray]
    """Returns its bytes, as many as the header says: check that before. Raises InputError."""


def read_archive(stream: BinaryIO) -> Iterator[Member]:
    """Read an archive from front to back, without trusting it; return its files one by one.

    A file may be read until the next one is asked for. Raises InputError unless it is VUA's; then
    where it is cut short, damaged or of another form, OSError.
    """
    found = _members(stream)
    first = next(found, None)
    if first is None or first.name != _START or first.nbytes > _MAX_END_NBYTES:
        raise InputError(f"not an archive of `vua export`: it does not begin with {_START}")
    header = _fields(first.read())
    if header.get("format") != FORMAT:
        msg = f"format {header.get('format')!r:.40}, expected {FORMAT!r}: of another version?"
        raise InputError(msg)
    return found


def _members(stream: BinaryIO) -> Iterator[Member]:
    digest, count = hashlib.sha256(), 0
    with _damage_told("not an archive of `vua export`"):
        tar = tarfile.open(  # noqa: SIM115 - it has nothing to close
            fileobj=stream, mode="r|", tarinfo=_PlainFile, encoding="ascii", errors="strict",
            bufsize=_COPIED_NBYTES,
        )  # fmt: skip
    while True:
        with _damage_told(f"member {count} has no sound header"):
            info = tar.next()
            tar.members.clear()  # type: ignore[attr-defined] # it would remember them all
            file = None if info is None else tar.extractfile(info)
        if info is None or file is None:
            raise InputError(f"the archive ends without {_END}: it was cut short")
        expected = {"members": count, "sha256": digest.hexdigest()}
        digest.update(b"%s\0%d\0" % (info.name.encode(), info.size))
        count += 1
        blocks = _blocks(file, info.size, digest.update)
        read = partial(bytearray().join, blocks)
        if info.name == _END:
            if info.size > _MAX_END_NBYTES or _fields(read()) != expected:
                msg = "the archive is not what its end says: something was changed or is missing"
                raise InputError(msg)
            return
        yield Member(info.name, info.size, read)
        for _ in blocks:  # unless it was read
            pass


def _blocks(file: IO[bytes], left: int, digest: Callable[[bytes], None]) -> Iterator[bytes]:
    """Yield what is there, not what the header claims."""
    while left:
        with _damage_told("the archive ends within a file"):
            data = file.read(min(_COPIED_NBYTES, left))
            if not data:
                raise tarfile.ReadError(f"{counted(left, 'byte', 'is', 'are')} missing")
        digest(data)
        left -= len(data)
        yield data


@contextlib.contextmanager
def _damage_told(what: str) -> Iterator[None]:
    try:
        yield
    except (tarfile.TarError, UnicodeDecodeError) as problem:
        raise InputError(f"{what}: {problem}; was it cut short?") from problem


def _fields(data: bytearray) -> dict[str, object]:
    try:
        fields = json.loads(data)
    except (ValueError, RecursionError):
        return {}
    return fields if isinstance(fields, dict) else {}


def file_sizes(codec: EntryCodec) -> list[int]:
    """Return the lengths that a file of that shard may have, plain or sealed, up to a bound."""
    shard, layout = codec.shard, codec.layout
    codecs = (EntryCodec(codec.namespace, layout, shard, kind) for kind in _KINDS)
    return sorted({one.file_nbytes for one in codecs if one.file_nbytes <= MAX_FILE_NBYTES})


# -- export ---------------------------------------------------------------------------------------


@dataclass(slots=True)
class _ExportCounts:
    chunks: int = 0
    files: int = 0
    nbytes: int = 0
    namespaces: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)


@command("export")
@argument("file", "archive to write; - stdout", metavar="FILE")
@argument("names", "6 or more hex digits of a name", metavar="[NAME]...", nargs=-1)
@option("--following", "also what follows these chunks")
@option("--all", "everything", name="everything")
def export(
    directory: str,
    file: str,
    names: Sequence[str] = (),
    *,
    following: bool = False,
    everything: bool = False,
    output: Output,
) -> Report:
    """Write the chosen prefixes to ``file`` (``-``: stdout); exit status 1 if some was damaged.

    A file appears under its name when it is complete, and never replaces another one. Raises
    ConfigError, OSError.
    """
    if everything == bool(names):
        raise ConfigError("choose what to export: names, or --all")
    if file == "-" and output.is_json:
        raise ConfigError("the archive goes to stdout, and so would --json; name a file")
    done, catalog = _ExportCounts(), open_catalog(directory)
    with progress() as show, catalog.namespaces(show) as (found, _):
        wanted = _chosen(found, names, show, following=following)
        if not any(wanted.values()):
            raise ConfigError("nothing is stored")
        with _created(file) as stream:
            _write(wanted, Writer(stream), done, show)

    def show_done() -> None:
        out = sys.stderr if file == "-" else sys.stdout
        for text in done.problems:
            print(plain(f"left out: {text}"), file=out)
        print(f"{file}: {counted(done.chunks, 'chunk')}, {size(done.nbytes)}", file=out)

    values: dict[str, Any] = {"directory": directory, "file": file, **asdict(done)}
    return Report(show_done, status=DAMAGED if done.problems else SOUND, **values)


def _chosen(
    found: Sequence[NamespaceCatalog], names: Sequence[str], show: Show, *, following: bool
) -> dict[NamespaceCatalog, list[str]]:
    """Return the chunks of each namespace, parents before children, each once."""
    wanted: dict[NamespaceCatalog, dict[str, None]] = {}
    targets = [resolve(found, name) for name in names] or [(one, "") for one in found]
    for source, chunk in targets:
        chunks = wanted.setdefault(source, {})
        if not chunk:
            chunks.update(dict.fromkeys(source.listing(show).in_order()))
            continue
        prefix = [*source.ancestors(chunk)][::-1]
        chunks.update(dict.fromkeys(prefix))
        if following:
            chunks.update(dict.fromkeys(source.listing(show).below(chunk)))
    return {source: list(chunks) for source, chunks in wanted.items()}


def _write(
    wanted: dict[NamespaceCatalog, list[str]], writer: Writer, done: _ExportCounts, show: Show
) -> None:
    total = sum(map(len, wanted.values()))
    for source, chunks in wanted.items():
        if not chunks:
            continue
        if source.description.layout is None:
            done.problems.append(f"{source.name}: {DESCRIPTION} is missing or damaged")
            continue
        done.namespaces.append(source.name)
        data = source.read(DESCRIPTION, MAX_DESCRIPTION_NBYTES)
        writer.add(f"{source.name}/{DESCRIPTION}", data)
        kept: set[str] = set()
        for chunk in chunks:
            _write_chunk(source, chunk, writer, done, kept)
            show(source.name[:SHORT], done.chunks, total, amount=done.nbytes)
    writer.close()


def _write_chunk(
    source: NamespaceCatalog, chunk: str, writer: Writer, done: _ExportCounts, kept: set[str]
) -> None:
    path, names, files = chunk_path(chunk), source.listed(chunk), dict[str, bytes | memoryview]()
    marks = [name for name in names if name.startswith(AFTER)]
    before = marks[0][len(AFTER) :] if marks else ""
    try:
        for name in names:
            shard = Shard.parse(name.removesuffix(SUFFIX)) if name.endswith(SUFFIX) else None
            layout = source.description.layout_of(shard)
            if shard is None or layout is None:
                continue
            longest = file_sizes(EntryCodec(source.name, layout, shard))[-1]
            files[name] = data = source.read(f"{path}/{name}", longest + 1)
            expected = ExpectedEntry(source.name, chunk, shard, layout)
            check = Checker().check_bytes(memoryview(data), expected)
            if check.outcome != "sound" or check.info is None:
                done.problems.append(f"{source.name}/{path}: {'; '.join(check.reasons)}")
                return
            before = before or (check.info.parent if check.info.start else "")
    except FileNotFoundError:
        return  # evicted this moment; what follows has no prefix then
    except (EntryError, LayoutError, OSError) as problem:
        done.problems.append(f"{source.name}/{path}: {problem}")
        return
    if not files or (before and before not in kept):
        return
    for name, data in ((marks[0], b""), *files.items()) if marks else files.items():
        writer.add(f"{source.name}/{path}/{name}", data)
        done.nbytes += len(data)
    done.files += len(files)
    done.chunks += 1
    kept.add(chunk)


@contextlib.contextmanager
def _created(file: str) -> Iterator[BinaryIO]:
    """Yield a file that appears under its name on success, or stdout."""
    if file == "-":
        yield sys.stdout.buffer
        return
    path = Path(file)
    if os.path.lexists(path):
        raise ConfigError(f"{file}: it exists; remove it or name another file")
    temporary = path.with_name(f".{path.name[:100]}-{secrets.token_hex(4)}")
    with undoing():
        try:
            with open(make_file(temporary, os.O_EXCL), "wb") as stream:  # noqa: PTH123
                yield stream
            temporary.rename(path)
        finally:
            temporary.unlink(missing_ok=True)


# -- import ---------------------------------------------------------------------------------------


@dataclass(slots=True)
class _ImportCounts:
    written: int = 0
    present: int = 0
    """Existing files, left unchanged."""
    refused: int = 0
    """Files without space, or without their prefix."""
    nbytes: int = 0
    namespaces: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)


@command("import", makes_it=True)
@argument("file", "archive to read; - stdin", metavar="FILE")
def import_(directory: str, file: str) -> Report:
    """Import an archive; exit status 1 if some of it was damaged or found no space.

    ``file`` may be ``-`` for stdin. Root imports as the directory's owner. Raises InputError for an
    invalid archive, ConfigError, OSError.
    """
    done = _ImportCounts()
    with ExitStack() as stack:
        show = stack.enter_context(progress())
        stream, total = cast(BinaryIO, sys.stdin.buffer), 0
        if file != "-":
            stream = stack.enter_context(Path(file).open("rb"))
            total = os.fstat(stream.fileno()).st_size
        stack.enter_context(undoing())
        stack.enter_context(as_owner(directory))
        catalog = open_catalog(directory, create=True)
        catalog.claim()
        _Taker(catalog.root, read_archive(stream), done, stack).run(show, total)

    def show_done() -> None:
        for text in done.problems[:_MOST_PROBLEMS]:
            line("not taken", text)
        if len(done.problems) > _MOST_PROBLEMS:
            print(f"and {len(done.problems) - _MOST_PROBLEMS} more")
        if done.refused:
            print(f"{counted(done.refused, 'file')} found no space, or no prefix; see `vua du`")
        written = f"{counted(done.written, 'file')} written, {size(done.nbytes)}"
        print(f"{directory}: {written}; {done.present} were there")

    values: dict[str, Any] = {"directory": directory, "file": file, **asdict(done)}
    status = DAMAGED if done.problems or done.refused else SOUND
    return Report(show_done, status=status, **values)


class _Taker:
    def __init__(
        self, root: Location, members: Iterator[Member], done: _ImportCounts, stack: ExitStack
    ) -> None:
        self._root, self._members, self._done, self._stack = root, members, done, stack
        self._checker = Checker()
        self._stores: dict[str, list[Store]] = {}
        self._before: dict[tuple[str, str], str] = {}
        self._ends: dict[tuple[str, str], int | None] = {}
        """By stored chunk, the position after its last token; None if the chunk is missing."""

    def run(self, show: Show, total: int) -> None:
        """Import every member. One that cannot be imported is noted as a problem.

        ``total`` are the bytes of the archive, 0 if unknown.
        """
        done, read_nbytes = self._done, 0
        try:
            for member in self._members:
                try:
                    self._read_member(member)
                except (ConfigError, EntryError, LayoutError) as problem:
                    done.problems.append(f"{member.name}: {problem}")
                read_nbytes += member.nbytes
                show(member.name[:SHORT], read_nbytes, total, amount=read_nbytes)
        except LayoutError:
            raise
        except InputError as problem:  # what came before is whole, each file by itself
            done.problems.append(str(problem))

    def _read_member(self, member: Member) -> None:
        if match := _DESCRIPTION.fullmatch(member.name):
            self._open(match[1], member)
            return
        match = _INSIDE.fullmatch(member.name)
        if match is None:
            raise ConfigError("no name that a cache has")
        namespace, _, chunk, name = match.groups()
        if name.startswith(AFTER) and re.fullmatch("[0-9a-f]{64}", name[len(AFTER) :]):
            self._before.setdefault((namespace, chunk), name[len(AFTER) :])
            return
        shard = Shard.parse(name.removesuffix(SUFFIX)) if name.endswith(SUFFIX) else None
        if shard is None:
            raise ConfigError("no name that a cache has")
        self._take_file(namespace, chunk, shard, member)

    def _open(self, namespace: str, member: Member) -> None:
        if member.nbytes > MAX_DESCRIPTION_NBYTES:
            raise ConfigError(f"{member.nbytes} bytes are too long for a description")
        identity, layouts = parse_description(bytes(member.read()))
        if identity.namespace != namespace:
            raise ConfigError(f"it describes namespace {identity.namespace[:SHORT]}")
        if namespace not in self._stores:
            stores = Namespace.create(self._root, identity, layouts).stores
            self._stack.callback(stores[0].close)  # one capacity for all
            self._stores[namespace] = stores
            self._done.namespaces.append(namespace)

    def _take_file(self, namespace: str, chunk: str, shard: Shard, member: Member) -> None:
        stores = self._stores.get(namespace, ())
        store = next((one for one in stores if one.layout.group == shard.group), None)
        if store is None:
            raise ConfigError(f"no sound {DESCRIPTION} of its namespace came before it")
        codec = store.codec(shard)
        sizes = file_sizes(codec)
        if member.nbytes not in sizes:
            msg = f"{member.nbytes} bytes long, expected {' or '.join(map(str, sizes))}"
            raise ConfigError(msg)
        data = member.read()
        check = self._checker.check_bytes(
            memoryview(data), ExpectedEntry(namespace, chunk, shard, store.layout)
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
        """Return the end of a chunk that was imported earlier, or that the directory had before.

        So a chunk cannot follow itself, directly or through further chunks.
        """
        known = (store.namespace, chunk)
        if self._ends.get(known) is None:
            names = [entry_name(chunk, shard) for shard in store.shards(chunk)]
            headers = filter(None, (stored_header(store.storage, name) for name in names))
            self._ends[known] = next((info.stop for info in headers), None)
        return self._ends[known]
