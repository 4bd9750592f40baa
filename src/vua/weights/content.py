"""The content of a weight file, as digests of all of its bytes.

A safetensors file is digested tensor by tensor, so it does not matter which file holds a tensor;
any other file is digested whole. The bytes of a tensor or file are cut into pieces of 4 MiB. Each
piece has its SHA-256, and the digest of the whole is the SHA-256 of those (a hash tree of depth
two), so many threads can work on one large tensor.

The safetensors format: an 8-byte length, that many bytes of JSON, then the tensors without gaps
(https://github.com/huggingface/safetensors). A file that deviates in any way is digested whole,
which notices every change, too.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import itertools
import json
import os
import random
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import CancelledError
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from vua.errors import ConfigError
from vua.format.identity import framed
from vua.io.pool import Job, Pool
from vua.io.posix import closing_fd

_PIECE_NBYTES: Final = 4 << 20
_SMALL_NBYTES: Final = 16 << 20
_SAMPLE_NBYTES: Final = 64 << 20
_MAX_THREADS: Final = 8
_NICENESS: Final = 10
_MAX_HEADER_NBYTES: Final = 100_000_000  # the safetensors library refuses longer ones too
METADATA: Final = "__metadata__"
"""The header's one key that is not a tensor's name."""


@dataclass(frozen=True, slots=True)
class State:
    """Changes whenever a file is written to or exchanged; its times cannot be set back.

    (A file's ctime is the kernel's: `utime` sets it to the present.)
    """

    device: int
    inode: int
    nbytes: int
    mtime_ns: int
    ctime_ns: int

    @classmethod
    def of(cls, file: int | Path) -> State:
        """Return the state of an open file, or of the file at a path. Raises OSError."""
        found = os.stat(file)  # noqa: PTH116 - descriptors, too
        return cls(found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns)

    @property
    def changed_s(self) -> float:
        """When the file was last written or renamed, or its attributes set."""
        return max(self.mtime_ns, self.ctime_ns) / 1e9


@dataclass(frozen=True, slots=True)
class Content:
    """The digests (64 hex digits) of one file."""

    tensors: Mapping[str, str] = field(default_factory=dict)
    """Digests of each tensor's name, dtype, shape and bytes, by name. `METADATA` stands for
    metadata that says what the tensors mean (torchao's)."""
    whole: str = ""
    """Digest of all bytes if the file is not digested by tensors; else empty."""


@dataclass(slots=True)
class Work:
    """How to read, and the progress."""

    stop: threading.Event | None = None
    """Once set, reading ends with CancelledError."""
    progress: Callable[[int], None] | None = None
    """Called with the bytes read so far after each piece, from any thread."""
    done_nbytes: int = 0
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def did(self, nbytes: int) -> None:
        """Count bytes that were read. Raises CancelledError."""
        with self._lock:
            self.done_nbytes += nbytes
            if self.progress is not None:
                self.progress(self.done_nbytes)
        if self.stop is not None and self.stop.is_set():
            raise CancelledError


def read_content(file: Path, expected: State, work: Work) -> Content:
    """Read all of a file and return its digests.

    Reads through the page cache, on up to 8 threads of low priority and at most one per processor.
    Memory: 4 MiB each.

    Args:
        file: any file; its suffix tells whether it holds tensors.
        expected: its state; another one before or after reading is an error.

    Raises:
        ConfigError: it changed while it was read.
        OSError: it cannot be read.
        CancelledError: `work` was stopped.
    """
    with _opened(file, expected) as fd:
        size = expected.nbytes
        header = _read_header(fd, size) if file.suffix == ".safetensors" else None
        if header is None:
            parts = [_Part(b"file", 0, size)]
            content = Content(whole=_digests(fd, parts, work)[0])
        else:
            start, tensors, metadata = header
            work.did(start)
            digests = _digests(fd, [one.part(name, start) for name, one in tensors.items()], work)
            content = Content(dict(zip(tensors, digests, strict=True)) | metadata)
    _check(file, expected, State.of(file))  # the name leads to it still
    return content


def sample_agrees(file: Path, expected: State, content: Content, work: Work) -> bool:
    """Whether tensors of a file that are drawn at random have the digests that ``content`` says.

    Reads some 64 MiB, at least one tensor. False for a file that is digested whole. Arguments and
    errors are otherwise those of :func:`read_content`.
    """
    with _opened(file, expected) as fd:
        header = _read_header(fd, expected.nbytes) if file.suffix == ".safetensors" else None
        if header is None:
            return False
        start, tensors, metadata = header
        said = dict(content.tensors)
        if {*tensors, *metadata} != {*said} or any(
            said[name] != metadata[name] for name in metadata
        ):
            return False
        drawn, nbytes = list[str](), 0
        for name in random.SystemRandom().sample(sorted(tensors), len(tensors)):
            nbytes += tensors[name].end - tensors[name].begin
            if drawn and nbytes > _SAMPLE_NBYTES:
                break
            drawn.append(name)
        found = _digests(fd, [tensors[name].part(name, start) for name in drawn], work)
    return found == [said[name] for name in drawn]


def read_digest(file: Path, expected: State, work: Work) -> str:
    """Return the SHA-256 of all of a file's bytes, read by the calling thread.

    Arguments and errors are those of :func:`read_content`.
    """
    digest = hashlib.sha256()
    buffer = memoryview(bytearray(min(_PIECE_NBYTES, expected.nbytes)))
    with _opened(file, expected) as fd:
        for at in range(0, expected.nbytes, _PIECE_NBYTES):
            piece = buffer[: expected.nbytes - at]
            _read_into(fd, piece, at)
            digest.update(piece)
            work.did(len(piece))
    return digest.hexdigest()


@contextlib.contextmanager
def _opened(file: Path, expected: State) -> Iterator[int]:
    """Open a file, which has to be in this state then and after the block."""
    # Never waits for a writer, should a pipe have taken the file's place.
    with closing_fd(os.open(file, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)) as fd:
        _check(file, expected, State.of(fd))
        yield fd
        _check(file, expected, State.of(fd))


def _check(file: Path, expected: State, found: State) -> None:
    if found != expected:
        raise ConfigError(
            f"{file} changed while it was read ({expected} before, {found} now), so it is "
            "unknown which weights were loaded; start again when nothing writes to it"
        )


# -- safetensors ------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Part:
    head: bytes
    start: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class _Tensor:
    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int

    def part(self, name: str, start: int) -> _Part:
        texts = (name, self.dtype, json.dumps(self.shape))
        head = framed(*(text.encode(errors="surrogatepass") for text in texts))
        return _Part(b"tensor" + head, start + self.begin, self.end - self.begin)


def _read_header(fd: int, size: int) -> tuple[int, dict[str, _Tensor], dict[str, str]] | None:
    """Return where the tensors begin, what they are, and a digest of metadata that counts.

    None if the file deviates from the format in any byte.
    """
    try:
        start = 8 + int.from_bytes(_read(fd, min(size, 8), 0), "little")
        if size < 8 or start > min(size, _MAX_HEADER_NBYTES):
            return None
        header = json.loads(_read(fd, start - 8, 8), object_pairs_hook=_distinct)
        metadata = header.pop(METADATA, {})
        tensors = {name: _tensor(described) for name, described in header.items()}
        counting = {}
        if "tensor_names" in metadata:  # torchao: tensors are put together as it says
            text = json.dumps(metadata, sort_keys=True).encode()
            counting[METADATA] = hashlib.sha256(b"metadata" + text).hexdigest()
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        return None
    reached = 0
    for tensor in sorted(tensors.values(), key=lambda one: (one.begin, one.end)):
        if tensor.begin != reached:
            return None
        reached = tensor.end
    return (start, tensors, counting) if start + reached == size else None


def _tensor(described: Any) -> _Tensor:
    begin, end = described["data_offsets"]
    numbers = [begin, end, *described["shape"]]
    if any(type(number) is not int or number < 0 for number in numbers) or begin > end:
        raise ValueError(f"no tensor: {described}")
    if type(described["dtype"]) is not str:
        raise ValueError(f"no dtype: {described}")
    return _Tensor(described["dtype"], tuple(described["shape"]), begin, end)


def _distinct(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ValueError("a name stands twice")
    return found


# -- hashing ----------------------------------------------------------------------------------


def _digests(fd: int, parts: Sequence[_Part], work: Work) -> list[str]:
    pieces = [
        (at, min(_PIECE_NBYTES, part.start + part.nbytes - at))
        for part in parts
        for at in range(part.start, part.start + part.nbytes, _PIECE_NBYTES)
    ]
    hashed = iter(_hash(fd, pieces, work))
    found = []
    for part in parts:
        digest = hashlib.sha256(part.head + part.nbytes.to_bytes(8, "little"))
        for piece in itertools.islice(hashed, -(-part.nbytes // _PIECE_NBYTES)):
            digest.update(piece)
        found.append(digest.hexdigest())
    return found


def _hash(fd: int, pieces: Sequence[tuple[int, int]], work: Work) -> list[bytes]:
    most, own = max((nbytes for _, nbytes in pieces), default=0), threading.local()

    def digest(at: int, nbytes: int) -> bytes:
        if not hasattr(own, "buffer"):
            own.buffer = memoryview(bytearray(most))
        _read_into(fd, own.buffer[:nbytes], at)
        found = hashlib.sha256(own.buffer[:nbytes]).digest()
        work.did(nbytes)
        return found

    def digest_beside(job: Job[tuple[int, int]]) -> bytes:
        with contextlib.suppress(OSError):  # Linux knows a niceness of each thread
            niceness = max(_NICENESS, os.getpriority(os.PRIO_PROCESS, 0))
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), niceness)
        return digest(*job.what)

    if sum(nbytes for _, nbytes in pieces) <= _SMALL_NBYTES:
        return [digest(*piece) for piece in pieces]
    count = min(_MAX_THREADS, len(os.sched_getaffinity(0)))
    with contextlib.closing(Pool[tuple[int, int]](count, "vua-weights")) as pool:
        return pool.map(digest_beside, pieces)


def _read(fd: int, nbytes: int, at: int) -> bytes:
    parts = bytearray(nbytes)
    _read_into(fd, memoryview(parts), at)
    return bytes(parts)


def _read_into(fd: int, buffer: memoryview, at: int) -> None:
    done = 0
    while done < len(buffer):
        count = os.preadv(fd, [buffer[done:]], at + done)
        if not count:
            raise OSError(errno.EIO, "a weight file became shorter while it was read")
        done += count
