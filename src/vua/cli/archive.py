"""The file that `vua export` writes and `vua import` reads: an uncompressed tar, as a stream.

::

    vua-export.json                                  {"format": "vua.export.v1"}
    <namespace>/namespace.json                       before the first file of its namespace
    <namespace>/<hh>/<chunk>/after-<chunk>           empty, where the directory has it
    <namespace>/<hh>/<chunk>/<shard>.safetensors     parents before children, byte for byte
    vua-export.end.json                              {"members": ..., "sha256": ...} of all before

`sha256` is over each member's name, a NUL, its size in decimal, a NUL and its bytes. It tells that
the archive is whole. What a file is, it says and proves by itself. Any tar unpacks it; only plain
files in the ustar form are read: no links, no devices, no extended headers, nothing compressed.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import tarfile
from collections.abc import Iterator
from dataclasses import dataclass
from typing import BinaryIO, Final

from vua.errors import InputError
from vua.format.entry import EntryCodec
from vua.format.header import AUTHENTIC, ENCRYPTED

__all__ = ["Member", "Reader", "Writer", "file_sizes"]

FORMAT: Final = "vua.export.v1"
_MAX_FILE_NBYTES: Final = 4 << 30
"""No chunk's file is larger; one that claims to be is not read."""

_START: Final = "vua-export.json"
_END: Final = "vua-export.end.json"
_BLOCK: Final = tarfile.BLOCKSIZE
_MAX_END_NBYTES: Final = 4096
_COPIED_NBYTES: Final = 1 << 20
_KINDS: Final = ("", AUTHENTIC, ENCRYPTED)


class Writer:
    """Writes members one after the other; :meth:`close` makes the archive whole."""

    def __init__(self, stream: BinaryIO) -> None:
        """Begin an archive. Raises OSError, like all that follows."""
        self._stream, self._digest, self._members = stream, hashlib.sha256(), 0
        self.add(_START, json.dumps({"format": FORMAT}).encode() + b"\n")

    def add(self, name: str, data: bytes) -> None:
        """Append a file of that name, at most 100 characters behind its directory's 155."""
        self._digest.update(b"%s\0%d\0" % (name.encode(), len(data)))
        self._digest.update(data)
        self._members += 1
        self._put(name, data)

    def add_file(self, name: str, source: BinaryIO) -> int:
        """Append what ``source`` holds from its start on, block by block; return its bytes.

        Raises OSError, also where it becomes shorter meanwhile: the archive is of no use then.
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
        """Write what proves that nothing is missing."""
        end = {"members": self._members, "sha256": self._digest.hexdigest()}
        self._put(_END, json.dumps(end).encode() + b"\n")
        self._stream.write(bytes(2 * _BLOCK))
        self._stream.flush()


@dataclass(frozen=True, slots=True)
class Member:
    """What stands before a file in an archive."""

    name: str
    nbytes: int


class Reader:
    """Reads an archive from front to back, trusting nothing in it."""

    def __init__(self, stream: BinaryIO) -> None:
        """Read the first member. Raises InputError unless it is one of ours, OSError."""
        self._stream, self._digest, self._members = stream, hashlib.sha256(), 0
        self._left = 0
        first = self._next()
        if first is None or first.name != _START or first.nbytes > _MAX_END_NBYTES:
            msg = f"no archive of `vua export`: it does not begin with {_START}"
            raise InputError(msg)
        said = _fields(self.read(first))
        if said.get("format") != FORMAT:
            msg = f"format {said.get('format')!r:.40}, expected {FORMAT!r}: of another version?"
            raise InputError(msg)

    def members(self) -> Iterator[Member]:
        """Yield what comes next; :meth:`read` it or not. Ends after the proof that all is there.

        Raises InputError where the archive is cut short, damaged or of another form.
        """
        while (member := self._next()) is not None:
            if member.name == _END:
                self._finish(member)
                return
            yield member
            self.skip(member)
        msg = f"the archive ends without {_END}: it was cut short"
        raise InputError(msg)

    def _next(self) -> Member | None:
        block = self._exactly(_BLOCK)
        if block == bytes(_BLOCK):
            return None
        try:
            info = tarfile.TarInfo.frombuf(block, "ascii", "strict")
        except (tarfile.HeaderError, ValueError) as problem:
            msg = f"member {self._members} has no sound header: {problem}"
            raise InputError(msg) from problem
        if info.type != tarfile.REGTYPE or info.size < 0:
            msg = f"member {self._members} ({info.name!r:.100}) is no plain file"
            raise InputError(msg)
        self._left = info.size
        if info.name != _END:
            self._digest.update(b"%s\0%d\0" % (info.name.encode(), info.size))
            self._members += 1
        return Member(info.name, info.size)

    def read(self, member: Member) -> bytearray:
        """Return the bytes of the member that came last, as many as it says: look at that before.

        Raises InputError where the archive ends before.
        """
        data = bytearray()
        while len(data) < member.nbytes:  # allocates what is really there, not what is claimed
            data += self._exactly(min(1 << 20, member.nbytes - len(data)))
        self._digest.update(data)
        self._exactly(-member.nbytes % _BLOCK)
        self._left = 0
        return data

    def skip(self, member: Member) -> None:
        """Pass over the member that came last, unless it was read."""
        if self._left:
            while self._left:
                data = self._exactly(min(1 << 20, self._left))
                self._digest.update(data)
                self._left -= len(data)
            self._exactly(-member.nbytes % _BLOCK)

    def _exactly(self, nbytes: int) -> bytes:
        data = self._stream.read(nbytes) if nbytes else b""
        while len(data) < nbytes:
            more = self._stream.read(nbytes - len(data))
            if not more:
                msg = f"the archive ends within member {self._members}: it was cut short"
                raise InputError(msg)
            data += more
        return data

    def _finish(self, member: Member) -> None:
        expected = {"members": self._members, "sha256": self._digest.hexdigest()}
        if member.nbytes > _MAX_END_NBYTES or _fields(self.read(member)) != expected:
            msg = "the archive is not what its end says: something in it was changed or is missing"
            raise InputError(msg)


def _fields(data: bytearray) -> dict[str, object]:
    try:
        said = json.loads(data)
    except (ValueError, RecursionError):
        return {}
    return said if isinstance(said, dict) else {}


def file_sizes(codec: EntryCodec) -> list[int]:
    """Return the bytes that a file of that shard may have: plain or sealed, and not too many."""
    shard, layout = codec.shard, codec.layout
    codecs = (EntryCodec(codec.namespace, layout, shard, kind) for kind in _KINDS)
    return sorted({one.file_nbytes for one in codecs if one.file_nbytes <= _MAX_FILE_NBYTES})
