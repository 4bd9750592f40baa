"""A storage whose verbs fail on command, around any other one."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from vua.format.layout import Shard
from vua.io.posix import Iovecs
from vua.native import Batch
from vua.storage.base import Reader, Storage

__all__ = ["FaultyStorage"]


class _FaultyReader:
    """A reader whose reads fail."""

    def __init__(self, inner: Reader, problem: OSError | None) -> None:
        self._inner, self._problem = inner, problem
        self.nbytes = inner.nbytes

    def read_into(self, iovecs: int, count: int, nbytes: int, offset: int) -> int:
        """Fail, or read."""
        if self._problem is not None:
            raise self._problem
        return self._inner.read_into(iovecs, count, nbytes, offset)

    def close(self) -> None:
        """Release the file."""
        self._inner.close()


class FaultyStorage:
    """Raises what it is told to, for as long as it is told to; see :class:`Storage`.

    ``fail`` maps a verb to the error that it raises: ``publish``, ``open``, ``read`` (of an open
    file), ``remove`` (which then returns False). What is not named works as in ``inner``. There is
    no short cut for many files, so every load goes through ``open``.
    """

    def __init__(self, inner: Storage, fail: Mapping[str, OSError]) -> None:
        """Stand in front of ``inner``."""
        self.inner, self.fail = inner, dict(fail)

    def _raise(self, verb: str) -> None:
        problem = self.fail.get(verb)
        if problem is not None:
            raise problem

    @property
    def gone(self) -> bool:
        """Whether the place itself was deleted."""
        return self.inner.gone

    def publish(self, chunk: str, shard: Shard, iovecs: Iovecs) -> None:
        """Fail, or write."""
        self._raise("publish")
        self.inner.publish(chunk, shard, iovecs)

    def open(self, chunk: str, shard: Shard) -> Reader:
        """Fail, or open."""
        self._raise("open")
        return _FaultyReader(self.inner.open(chunk, shard), self.fail.get("read"))

    def read_files(
        self, chunks: Sequence[str], shard: Shard, batch: Batch, place: int, headers: int
    ) -> int:
        """Leave everything to ``open``."""
        del chunks, shard, batch, place, headers
        return 0

    writes_files = False

    def write_files(
        self,
        chunks: Sequence[str],
        shard: Shard,
        batch: Batch,
        place: int,
        headers: int,
        check_offset: int,
    ) -> Sequence[int]:
        """Leave everything to ``publish``."""
        del chunks, shard, batch, place, headers, check_offset
        return []

    def exists(self, chunk: str, shard: Shard, nbytes: int | None = None) -> bool:
        """Ask."""
        return self.inner.exists(chunk, shard, nbytes)

    def shards(self, chunk: str) -> Sequence[Shard]:
        """List."""
        return self.inner.shards(chunk)

    def remove(self, chunk: str, shard: Shard, reader: Reader | None = None) -> bool:
        """Fail, or take out of sight."""
        if "remove" in self.fail:
            return False
        inner = reader._inner if isinstance(reader, _FaultyReader) else reader  # noqa: SLF001
        return self.inner.remove(chunk, shard, inner)

    def scan(self) -> Iterator[tuple[str, Shard, int]]:
        """List everything."""
        return self.inner.scan()
