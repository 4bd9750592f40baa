"""Helpers for tests of code that uses VUA; installed with it, and not imported by it.

The contract of a storage as a suite of tests (:mod:`vua.testing.conformance`), and a storage that
wraps another one and fails on command.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from vua.errors import explained
from vua.storage.base import FAILED, Batch, Capabilities, Entry, ReadResult, Storage, WriteResult

__all__ = ["FaultyStorage"]


class FaultyStorage:
    """Raises given errors for as long as a test asks; see :class:`Storage`.

    ``fail`` maps an operation to its error: ``write``, ``open`` and ``read`` (of an entry that is
    not, or is, open), ``remove`` (which then returns False). Other operations work as in ``inner``.
    """

    def __init__(self, inner: Storage, fail: Mapping[str, OSError]) -> None:
        """Wrap ``inner``."""
        self.inner, self.fail = inner, dict(fail)

    @property
    def capabilities(self) -> Capabilities:
        """None that would bypass this storage."""
        return Capabilities()

    @property
    def gone(self) -> bool:
        """Whether the storage itself was deleted."""
        return self.inner.gone

    def read(self, batch: Batch) -> ReadResult:
        """Fail, or read."""
        if "open" in self.fail:
            return ReadResult(0, self.fail["open"])
        filled = self.inner.read(batch)
        return ReadResult(0, self.fail["read"], filled.version) if "read" in self.fail else filled

    def exists(self, names: Sequence[str], nbytes: int | None = None) -> Sequence[bool]:
        """Ask."""
        return self.inner.exists(names, nbytes)

    def list(self, prefix: str = "") -> Iterator[Entry]:
        """List."""
        return self.inner.list(prefix)

    def delete(self, name: str, if_version: bytes | None = None) -> bool:
        """Fail, or remove from sight."""
        return "remove" not in self.fail and self.inner.delete(name, if_version)

    def write(self, batch: Batch) -> WriteResult:
        """Fail, or write."""
        problem = self.fail.get("write")
        if problem is not None:
            return WriteResult([FAILED] * len(batch.names), explained(problem, batch.names[0]))
        return self.inner.write(batch)
