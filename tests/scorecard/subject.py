"""What the scorecard tests: anything that keeps byte strings under keys, seen through one class.

A :class:`Subject` is an adapter of some hundred lines between the tests and a cache. VUA's own and
the one for any `vua.storage.base.Storage` are in :mod:`scorecard.stores`; name another one to the
runner as ``package.module:function`` or ``file.py:function``.
"""

from __future__ import annotations

import importlib
import importlib.util
import zlib
from abc import ABC, abstractmethod
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np


class NotApplicableError(Exception):
    """The subject has no such thing: the test says nothing about it."""


@dataclass(frozen=True, slots=True)
class Key:
    """Names one entry. Subjects turn it into whatever their own kind of name is."""

    number: int
    """0 up to 2**62: stands for the tokens of a prompt."""
    model: str = "model"
    salt: str = ""

    def payload(self, nbytes: int) -> bytes:
        """Return the ``nbytes`` bytes that belong to this key: noise, the same in any process."""
        texts = [
            zlib.crc32(text.encode(errors="surrogatepass")) for text in (self.model, self.salt)
        ]
        return noise(nbytes, self.number, *texts)


def noise(nbytes: int, *seed: int) -> bytes:
    """Return ``nbytes`` bytes that depend on the seed alone."""
    return np.random.default_rng(seed).bytes(nbytes)


class Subject(ABC):
    """A cache in one directory, used by one thread at a time. Opened again it finds its entries.

    Several subjects in the same directory, in any processes, are one cache.
    """

    name: str
    """For people, with the version."""
    root: Path
    """Everything it writes lies below."""
    nbytes: int
    """Bytes of every entry's payload."""
    floor: int = 0
    """Bytes of the file system that it leaves free."""
    name_bits: int = 256
    """Bits of a key's digest that go into names, by :meth:`cut`; a test sets 8: names collide."""
    forks: bool = True
    """Whether a forked process can go on with it; not if it has threads of its own."""
    has_gc: bool = False
    """Whether :meth:`sweep` does something."""
    has_salts: bool = False
    """Whether it tells keys apart by their ``salt``."""
    has_models: bool = False
    """Whether it tells keys apart by their ``model``."""

    @abstractmethod
    def put(self, key: Key, data: bytes) -> bool:
        """Store ``data`` and return whether the entry is stored now; raises what it raises."""

    @abstractmethod
    def get(self, key: Key, into: memoryview) -> bool:
        """Return whether ``into`` (``nbytes`` writable bytes) now holds the entry.

        On a miss the content of ``into`` is undefined.
        """

    @abstractmethod
    def files(self, key: Key) -> list[Path]:
        """Return the files (not temporary ones) that hold the entry, none when it is not stored."""

    def cut(self, digest: bytes) -> bytes:
        """Return a key's digest with all but the first ``name_bits`` (whole bytes of them) zero."""
        kept = self.name_bits // 8
        return digest[:kept] + bytes(len(digest) - min(kept, len(digest)))

    def holds(self, key: Key) -> bool:
        """Return what a lookup says, which reads nothing."""
        return bool(self.files(key))

    def temporary_name(self, key: Key) -> Path | None:
        """Return the name under which the next put of ``key`` writes, where one can know it."""
        return None

    def temporary_files(self) -> list[Path]:
        """Return what writers that did not finish have left below ``root``."""
        return [path for path in self.root.rglob("*") if path.is_file() and ".tmp" in path.name]

    def sweep(self) -> None:  # noqa: B027 - most have none
        """Collect garbage as if the leftovers of killed writers were old enough for it."""

    def close(self) -> None:  # noqa: B027 - most need none
        """Release files and threads; a second call does nothing."""


class MakeSubject(Protocol):
    """Makes a subject."""

    def __call__(
        self, root: Path, nbytes: int, *, max_bytes: int | None = None, durable: bool = False
    ) -> Subject:
        """Open the cache in the directory ``root``, which exists.

        Args:
            root: the directory.
            nbytes: bytes of every entry's payload, a multiple of 4096.
            max_bytes: the limit of the whole directory. Raises NotApplicableError without limits.
            durable: whether an entry that is stored survives a power cut. Raises likewise.
        """
        ...


def load_subject(name: str) -> MakeSubject:
    """Return the function that ``name`` (``package.module:function``, ``file.py:...``) names."""
    place, _, attribute = name.partition(":")
    if place.endswith(".py"):
        spec = importlib.util.spec_from_file_location(Path(place).stem, place)
        if spec is None or spec.loader is None:
            raise ImportError(f"{place} is no Python file")
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    else:
        module = importlib.import_module(place)
    make: MakeSubject = getattr(module, attribute or "make")
    return make
