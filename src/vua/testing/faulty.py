"""A storage whose verbs fail on command, around any other one."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from vua.storage.base import FAILED, Batch, Capabilities, Entry, Filled, Storage, Written, explained

__all__ = ["FaultyStorage"]


class FaultyStorage:
    """Raises what it is told to, for as long as it is told to; see :class:`Storage`.

    ``fail`` maps a verb to the error that it gives: ``write``, ``open`` and ``read`` (of an entry
    that is not, or is, open), ``remove`` (which then returns False). What is not named works as in
    ``inner``.
    """

    def __init__(self, inner: Storage, fail: Mapping[str, OSError]) -> None:
        """Stand in front of ``inner``."""
        self.inner, self.fail = inner, dict(fail)

    @property
    def capabilities(self) -> Capabilities:
        """Nothing that goes round this."""
        return Capabilities()

    @property
    def gone(self) -> bool:
        """Whether the place itself was deleted."""
        return self.inner.gone

    def read(self, batch: Batch) -> Filled:
        """Fail, or read."""
        if "open" in self.fail:
            return Filled(0, self.fail["open"], lambda _: None)
        filled = self.inner.read(batch)
        return Filled(0, self.fail["read"], filled.version) if "read" in self.fail else filled

    def exists(self, names: Sequence[str], nbytes: int | None = None) -> Sequence[bool]:
        """Ask."""
        return self.inner.exists(names, nbytes)

    def list(self, prefix: str = "") -> Iterator[Entry]:
        """List."""
        return self.inner.list(prefix)

    def delete(self, name: str, if_version: bytes | None = None) -> bool:
        """Fail, or take out of sight."""
        return "remove" not in self.fail and self.inner.delete(name, if_version)

    def write(self, batch: Batch) -> Written:
        """Fail, or write."""
        problem = self.fail.get("write")
        if problem is not None:
            return Written([FAILED] * len(batch.names), explained(problem, batch.names[0]))
        return self.inner.write(batch)
