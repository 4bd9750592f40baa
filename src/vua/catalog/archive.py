"""The archive that `vua export` writes and `vua import` reads: an uncompressed tar stream.

::

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
import errno
import hashlib
import json
import os
import tarfile
from collections.abc import Iterator
from typing import IO, BinaryIO, Final, NamedTuple

from vua.catalog.base import MAX_FILE_NBYTES
from vua.errors import InputError
from vua.format.entry import AUTHENTIC, ENCRYPTED, EntryCodec
from vua.io.words import counted

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

    def add(self, name: str, data: bytes) -> None:
        """Append a file; its name has at most 100 characters after a directory of at most 155."""
        self._digest.update(b"%s\0%d\0" % (name.encode(), len(data)))
        self._digest.update(data)
        self._members += 1
        self._put(name, data)

    def add_file(self, name: str, source: BinaryIO) -> int:
        """Append the content of ``source`` from its start, block by block; return its bytes.

        Raises OSError, also if it becomes shorter meanwhile: the archive is unusable then.
        """
        left = nbytes = source.seek(0, os.SEEK_END)
        source.seek(0)
        self._digest.update(b"%s\0%d\0" % (name.encode(), nbytes))
        self._members += 1
        self._begin(name, nbytes)
        while left:
            data = source.read(min(_COPIED_NBYTES, left))
            if not data:
                raise OSError(errno.EIO, f"{name} became shorter while it was read")
            self._digest.update(data)
            self._stream.write(data)
            left -= len(data)
        self._stream.write(bytes(-nbytes % _BLOCK))
        return nbytes

    def _put(self, name: str, data: bytes) -> None:
        self._begin(name, len(data))
        self._stream.write(data)
        self._stream.write(bytes(-len(data) % _BLOCK))

    def _begin(self, name: str, nbytes: int) -> None:
        info = tarfile.TarInfo(name)
        info.size, info.mode = nbytes, 0o600
        self._stream.write(info.tobuf(tarfile.USTAR_FORMAT, "ascii", "strict"))

    def close(self) -> None:
        """Write the end, which proves completeness."""
        end = {"members": self._members, "sha256": self._digest.hexdigest()}
        self._put(_END, json.dumps(end).encode() + b"\n")
        self._stream.write(bytes(2 * _BLOCK))
        self._stream.flush()


class Member(NamedTuple):
    """A file's header in an archive."""

    name: str
    nbytes: int


class _PlainFile(tarfile.TarInfo):
    """A member's header; anything but a plain file is refused before further use."""

    @classmethod
    def frombuf(cls, buf: bytes | bytearray, encoding: str, errors: str) -> _PlainFile:
        """Read a header. Raises InputError, and `tarfile`'s exceptions for an invalid one."""
        info = super().frombuf(buf, encoding, errors)
        if info.type != tarfile.REGTYPE or info.size < 0:
            raise InputError(f"{info.name!r:.100} in the archive is not a plain file")
        return info


class Reader:
    """Reads an archive from front to back, without trusting it."""

    def __init__(self, stream: BinaryIO) -> None:
        """Read the first member. Raises InputError unless it is VUA's, OSError."""
        self._digest, self._members, self._left = hashlib.sha256(), 0, 0
        self._file: IO[bytes] | None = None
        with _damage_told("not an archive of `vua export`"):
            self._tar = tarfile.open(  # noqa: SIM115 - it has nothing to close
                fileobj=stream, mode="r|", tarinfo=_PlainFile, encoding="ascii", errors="strict",
                bufsize=_COPIED_NBYTES,
            )  # fmt: skip
        first = self._next()
        if first is None or first.name != _START or first.nbytes > _MAX_END_NBYTES:
            raise InputError(f"not an archive of `vua export`: it does not begin with {_START}")
        header = _fields(self.read())
        if header.get("format") != FORMAT:
            msg = f"format {header.get('format')!r:.40}, expected {FORMAT!r}: of another version?"
            raise InputError(msg)

    def members(self) -> Iterator[Member]:
        """Yield the next member, which the caller may :meth:`read`. Ends after checking the end.

        Raises InputError if the archive is cut short, damaged or of another form.
        """
        while (member := self._next()) is not None:
            if member.name == _END:
                self._finish(member)
                return
            yield member
            for _ in self._blocks():  # unless it was read
                pass
        raise InputError(f"the archive ends without {_END}: it was cut short")

    def _next(self) -> Member | None:
        with _damage_told(f"member {self._members} has no sound header"):
            info = self._tar.next()
            self._tar.members.clear()  # type: ignore[attr-defined] # it would remember them all
            if info is None:
                return None
            self._left, self._file = info.size, self._tar.extractfile(info)
        if info.name != _END:
            self._digest.update(b"%s\0%d\0" % (info.name.encode(), info.size))
            self._members += 1
        return Member(info.name, info.size)

    def read(self) -> bytearray:
        """Return the last member's bytes, as many as its header says: check that before.

        Raises InputError if the archive ends earlier.
        """
        data = bytearray()
        for block in self._blocks():  # allocates what is there, not what the header claims
            data += block
        return data

    def _blocks(self) -> Iterator[bytes]:
        while self._left and self._file is not None:
            with _damage_told(f"the archive ends within member {self._members}"):
                data = self._file.read(min(_COPIED_NBYTES, self._left))
                if not data:
                    raise tarfile.ReadError(f"{counted(self._left, 'byte', 'is', 'are')} missing")
            self._digest.update(data)
            self._left -= len(data)
            yield data

    def _finish(self, member: Member) -> None:
        expected = {"members": self._members, "sha256": self._digest.hexdigest()}
        if member.nbytes > _MAX_END_NBYTES or _fields(self.read()) != expected:
            msg = "the archive is not what its end says: something in it was changed or is missing"
            raise InputError(msg)


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
