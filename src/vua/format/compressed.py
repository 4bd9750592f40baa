"""The compressed form of an entry's file: lossless, for buckets and slow links.

::

    [u64 header length][JSON, space padded to 1 KiB][lengths][header][segments]

``header`` is the plain file's header, byte for byte. K and V are cut into segments of 256 KiB, and
each is compressed alone, so a part of an entry needs only a part of this file. The high bytes of a
segment's numbers (sign and exponent) are compressed with zstd. The low bytes are close to random
and follow uncompressed. Decompression yields the plain file, which is then verified as usual:
nothing here proves anything. `docs/format.md` is the specification. Pure functions over buffers; no
I/O here.
"""

from __future__ import annotations

import functools
import importlib
import json
import struct
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from vua.errors import CorruptEntryError
from vua.format.entry import CODEC, ENCRYPTED, MAX_HEADER_NBYTES
from vua.format.layout import ITEMSIZE
from vua.format.parse import json_header, parse_entry

COMPRESSED: Final = "vua.compressed.v1"
PACKAGE: Final = "zstandard"
"""The package that compresses; installed by the extra ``object``."""
_START_NBYTES: Final = 1 << 10
_SEGMENT_NBYTES: Final = 256 << 10
_LEVEL: Final = 1
"""zstd level. Higher levels are slower and save no more on such bytes."""
_MOST: Final = 0.9
"""Largest compressed share of the plain file that is worth the work."""
_MOST_TIMES: Final = 64
"""A segment expands to at most 64 times its size: a file's claims must not fill memory."""


@functools.cache
def is_available() -> bool:
    """Whether zstandard is installed."""
    try:
        _library()
    except ImportError:
        return False
    return True


@functools.cache
def _library() -> Any:
    return importlib.import_module(PACKAGE)


@dataclass(frozen=True, slots=True)
class Compressed:
    """The parsed and checked beginning of a compressed file."""

    width: int
    """Bytes per number of K and V. Only the last byte of each number is compressed."""
    header: bytes
    """The plain file's header."""
    payload_nbytes: int
    """Bytes of K and V in the plain file."""
    edges: npt.NDArray[np.int64]
    """Offsets in this file of each segment's beginning, and of the end, ``[segments + 1]``."""

    @staticmethod
    def head_nbytes(header_nbytes: int, plain_nbytes: int) -> int:
        """Return how many bytes of a compressed file :meth:`parse` needs.

        Args:
            header_nbytes: the plain file's header.
            plain_nbytes: the whole plain file.
        """
        return _START_NBYTES + 4 * _segments(plain_nbytes - header_nbytes) + header_nbytes

    @classmethod
    def parse(cls, data: bytes | memoryview) -> Compressed:
        """Parse the beginning of a file, at least :meth:`head_nbytes` bytes.

        Raises CorruptEntryError if it is not a compressed entry.
        """
        start = bytes(data[:_START_NBYTES])
        fields, _ = json_header(start)
        try:
            metadata = fields["__metadata__"]
            width, header_nbytes = int(metadata["width"]), int(metadata["header"])
            payload_nbytes, stored = int(metadata["payload"]), fields["segments"]["data_offsets"]
            again = _start(width, header_nbytes, payload_nbytes, stored[1] - stored[0])
        except (LookupError, TypeError, ValueError, AttributeError, OverflowError) as problem:
            msg = f"header fields are not those of a compressed entry: {problem!r:.200}"
            raise CorruptEntryError(msg) from problem
        if (
            again != start
            or width not in ITEMSIZE.values()
            or not 0 < header_nbytes <= MAX_HEADER_NBYTES
            or not 0 < payload_nbytes <= _MOST_TIMES * (stored[1] - stored[0])
            or payload_nbytes % width
        ):
            msg = f"not a compressed entry of the form {COMPRESSED!r} with {CODEC!r}, or damaged"
            raise CorruptEntryError(msg)
        head = cls.head_nbytes(header_nbytes, header_nbytes + payload_nbytes)
        table = data[_START_NBYTES : head - header_nbytes]
        lengths = np.frombuffer(bytes(table[: len(table) // 4 * 4]), dtype="<u4").astype(np.int64)
        if len(data) < head or lengths.sum() != stored[1] - stored[0]:
            msg = f"{len(data)} bytes, expected {head} and segments of {stored[1] - stored[0]}"
            raise CorruptEntryError(msg)
        edges = head + np.concatenate(([0], np.cumsum(lengths)))
        return cls(width, bytes(data[head - header_nbytes : head]), payload_nbytes, edges)

    @property
    def nbytes(self) -> int:
        return int(self.edges[-1])

    @property
    def plain_nbytes(self) -> int:
        return len(self.header) + self.payload_nbytes

    def segments(self, offset: int, nbytes: int) -> tuple[int, int]:
        """Return the segments [first, stop) that hold this part of the plain file."""
        begin, end = (max(0, place - len(self.header)) for place in (offset, offset + nbytes))
        return begin // _SEGMENT_NBYTES, -(-end // _SEGMENT_NBYTES)

    def span(self, first: int, stop: int) -> tuple[int, int]:
        """Return where these segments lie in this file: (offset, nbytes)."""
        return int(self.edges[first]), int(self.edges[stop] - self.edges[first])

    def plain(self, data: memoryview, offset: int, nbytes: int, memory: memoryview) -> memoryview:
        """Return a part of the plain file.

        Args:
            data: the segments that hold the part, see :meth:`span`.
            offset: where the part begins in the plain file.
            nbytes: its length.
            memory: memory for the whole plain file; only this part of it, rounded up to segments,
                is used.

        Raises CorruptEntryError if it cannot be decompressed; ImportError without the package.
        """
        first, stop = self.segments(offset, nbytes)
        header_nbytes, start = len(self.header), int(self.edges[first])
        memory[:header_nbytes] = self.header
        into = np.frombuffer(memory, dtype=np.uint8)
        payload = into[header_nbytes : self.plain_nbytes]
        decompressor = _library().ZstdDecompressor()
        for index, (begin, end) in enumerate(pairwise(self.edges[first : stop + 1]), first):
            segment = payload[index * _SEGMENT_NBYTES : (index + 1) * _SEGMENT_NBYTES]
            self._expand(decompressor, data[begin - start : end - start], segment)
        return memory[offset : offset + nbytes]

    def _expand(
        self,
        decompressor: Any,
        stored: memoryview,
        into: npt.NDArray[np.uint8],
    ) -> None:
        numbers = into.reshape(-1, self.width)
        count, high_nbytes = len(numbers), len(stored) - len(numbers) * (self.width - 1)
        high = stored[: max(0, high_nbytes)]
        if (
            high_nbytes != count
        ):  # compress() refuses longer ratios, so a writer never makes such a segment
            library = _library()
            try:
                if high_nbytes > count or library.frame_content_size(high) != count:
                    msg = f"a segment of {count} numbers does not hold as many"
                    raise CorruptEntryError(msg)
                high = decompressor.decompress(high, allow_extra_data=False)
            except library.ZstdError as problem:
                msg = f"a segment cannot be decompressed: {problem}"
                raise CorruptEntryError(msg) from problem
        numbers[:, -1] = np.frombuffer(high, dtype=np.uint8)
        rest = np.frombuffer(stored[high_nbytes:], dtype=np.uint8)
        for place in range(self.width - 1):
            numbers[:, place] = rest[place * count : (place + 1) * count]


def compress(data: bytes | memoryview) -> bytes | None:
    """Return an entry's file in compressed form; None if that saves less than 10 %.

    Also None for encrypted entries, and for payloads of nearly equal bytes. Raises
    CorruptEntryError if it is not an entry; ImportError without the package.
    """
    info = parse_entry(bytes(data[:MAX_HEADER_NBYTES]))
    info.check_length(len(data))
    if info.kind == ENCRYPTED:
        return None
    width = ITEMSIZE[info.layout.dtype]
    payload = np.frombuffer(data, dtype=np.uint8)[info.header_nbytes :]
    compressor = _library().ZstdCompressor(level=_LEVEL, write_checksum=False)
    segments = [
        _shrink(compressor, payload[place : place + _SEGMENT_NBYTES].reshape(-1, width))
        for place in range(0, len(payload), _SEGMENT_NBYTES)
    ]
    lengths = np.array([len(one) for one in segments], dtype="<u4")
    start = _start(width, info.header_nbytes, len(payload), int(lengths.sum()))
    parts = (start, lengths.tobytes(), bytes(data[: info.header_nbytes]), *segments)
    unfit = len(payload) > _MOST_TIMES * lengths.sum() or sum(map(len, parts)) > _MOST * len(data)
    return None if unfit else b"".join(parts)


def _shrink(compressor: Any, numbers: npt.NDArray[np.uint8]) -> bytes:
    """Return the compressed bytes of one segment of numbers ``[count, width]``."""
    high = numbers[:, -1].tobytes()
    frame: bytes = compressor.compress(high)
    rest = (numbers[:, place].tobytes() for place in range(numbers.shape[1] - 1))
    return b"".join((frame if len(frame) < len(high) else high, *rest))


def decompressed(data: memoryview) -> memoryview:
    """Return the plain form of a compressed file.

    Raises CorruptEntryError; ImportError without the package.
    """
    found = Compressed.parse(data)
    if found.nbytes != len(data):
        msg = f"{len(data)} bytes long, expected {found.nbytes}"
        raise CorruptEntryError(msg)
    memory = np.empty(found.plain_nbytes, dtype=np.uint8).data
    return found.plain(data[int(found.edges[0]) :], 0, len(memory), memory)


def _segments(payload_nbytes: int) -> int:
    return -(-payload_nbytes // _SEGMENT_NBYTES)


def _start(width: int, header_nbytes: int, payload_nbytes: int, stored_nbytes: int) -> bytes:
    """Return the first KiB of a compressed file.

    Raises ValueError if the numbers do not fit in it.
    """
    lengths = 4 * _segments(payload_nbytes)
    header_at, segments_at = lengths, lengths + header_nbytes
    fields: dict[str, object] = {
        "__metadata__": {
            "format": COMPRESSED,
            "codec": CODEC,
            "width": str(width),
            "header": str(header_nbytes),
            "payload": str(payload_nbytes),
        }
    }
    for name, dtype, size, begin, nbytes in (
        ("lengths", "U32", 4, 0, lengths),
        ("header", "U8", 1, header_at, header_nbytes),
        ("segments", "U8", 1, segments_at, stored_nbytes),
    ):
        offsets = [begin, begin + nbytes]
        fields[name] = {"dtype": dtype, "shape": [nbytes // size], "data_offsets": offsets}
    text = json.dumps(fields, separators=(",", ":")).encode()
    if len(text) > _START_NBYTES - 8:
        msg = f"{len(text)} bytes of header"
        raise ValueError(msg)
    return struct.pack("<Q", _START_NBYTES - 8) + text.ljust(_START_NBYTES - 8)
