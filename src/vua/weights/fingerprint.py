"""One digest of a model's weights, from what each file holds, read or remembered.

Tensors count, not files: the same tensors in other files, with other metadata or with other files
beside them have the same fingerprint, and any one changed byte another one.
"""

from __future__ import annotations

import hashlib
import json
import os
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

from vua.weights.content import Content, State, Work, framed, read_content, read_digest
from vua.weights.files import blob_of, checkpoint_files, link_changed_s
from vua.weights.memo import locked, recall, remember

__all__ = ["Weights", "identify_weights", "weights_fingerprint"]

_VERSION: Final = "vua.weights.v2"
_SETTLED_S: Final = 2.0
"""File systems' clocks tick coarsely: only so long after a change the next one is sure to show."""


@dataclass(frozen=True, slots=True)
class Weights:
    """What `identify_weights` found."""

    fingerprint: str
    """64 hex digits."""
    files: tuple[Path, ...]
    """Those that were asked about."""
    nbytes: int
    """Bytes of the files."""
    read_nbytes: int
    """Of these, those that were read; the others' digests were remembered."""
    seconds: float
    """How long it took, with any wait for another process that read the same files."""
    changed_s: float
    """When one of the files, or a link to it, was changed last (seconds since the epoch; renaming
    and `chmod` count)."""

    def changed_since(self, when_s: float, *, stop: threading.Event | None = None) -> bool:
        """Return whether a file may hold something else than at a time, by its or a link's change.

        A blob that the hub's cache has fetched since does not count: it is read as a whole, and has
        the SHA-256 that is its name.

        Raises:
            ConfigError, OSError, CancelledError: as `identify_weights`.
        """
        if self.changed_s <= when_s:
            return False
        for file in self.files:
            known = KnownFile.at(file)
            if known.changed_s > when_s and not known.is_named_by_content(Work(stop)):
                return True
        return False

    def joined(self, other: Weights) -> Weights:
        """Return what stands for both, of two models that compute together."""
        both = f"{self.fingerprint} {other.fingerprint}"
        return Weights(
            hashlib.sha256(both.encode()).hexdigest(),
            (*self.files, *other.files),
            self.nbytes + other.nbytes,
            self.read_nbytes + other.read_nbytes,
            self.seconds + other.seconds,
            max(self.changed_s, other.changed_s),
        )


def weights_fingerprint(path: str | os.PathLike[str], *, cache: bool = True) -> str:
    """Return 64 hex digits that stand for the weights at ``path``; see `identify_weights`.

    Args:
        path: a local directory of a model or adapter, or one weight file.
        cache: believe and keep what is remembered of the files.

    Raises:
        ConfigError: there are no weights at ``path``, or they change while they are read.
        OSError: a file cannot be read.
    """
    return identify_weights(checkpoint_files(path), cache=cache).fingerprint


def identify_weights(
    files: Sequence[Path],
    *,
    cache: bool = True,
    progress: Callable[[int, int], None] | None = None,
    stop: threading.Event | None = None,
) -> Weights:
    """Digest weight files, or take from a private memo what they hold.

    The name, dtype, shape and bytes of each tensor of the safetensors files; name and bytes of
    other files. Where two files hold different tensors of one name, their names count too, for then
    the order of loading does. Neither place nor times nor sharding count.

    Remembered is what a file holds by device, inode, size, mtime and ctime; a new copy of a file is
    read, whatever its name. A file that was changed within the last 2 s is not remembered. Safe for
    concurrent threads and processes: those of one user read the same files once, the others wait.
    A crash leaves no half-written memo; the files that had been read are remembered.

    Args:
        files: all of them, in any order.
        cache: believe and keep what is remembered.
        progress: told the bytes read so far, and the bytes to read, from any thread.
        stop: once set, the call ends with CancelledError.

    Raises:
        ConfigError: a file changes while it is read.
        OSError: a file cannot be read.
        CancelledError: ``stop`` was set (`concurrent.futures`).
    """
    began = time.monotonic()
    known = [KnownFile.at(file) for file in sorted(files)]
    found = {one.path: content for one in known if cache and (content := one.recall()) is not None}
    work = Work(stop)
    if len(found) < len(known):
        key = json.dumps([asdict(one.state) for one in known])
        with locked(key, stop):
            if cache:  # somebody else may have read them meanwhile
                found |= {one.path: got for one in known if (got := one.recall()) is not None}
            unread = [one for one in known if one.path not in found]
            total = sum(one.state.nbytes for one in unread)
            if progress is not None:
                tell = progress
                work.progress = lambda nbytes: tell(nbytes, total)
            for one in unread:
                found[one.path] = one.read(work, cache=cache)
    return Weights(
        fingerprint=_combined(found),
        files=tuple(files),
        nbytes=sum(one.state.nbytes for one in known),
        read_nbytes=work.done_nbytes,
        seconds=time.monotonic() - began,
        changed_s=max(one.changed_s for one in known),
    )


@dataclass(frozen=True, slots=True)
class KnownFile:
    """A file, as it was when it was first looked at."""

    path: Path
    state: State

    @classmethod
    def at(cls, path: Path) -> KnownFile:
        return cls(path, State.of(path))

    @property
    def changed_s(self) -> float:
        return max(self.state.changed_s, link_changed_s(self.path))

    @property
    def _key(self) -> str:
        # what a file holds depends on its suffix, too
        return json.dumps(["file", self.path.suffix, *asdict(self.state).values()])

    def recall(self) -> Content | None:
        return _content(recall(self._key))

    def read(self, work: Work, *, cache: bool) -> Content:
        settled = time.time() - self.state.changed_s > _SETTLED_S
        content = read_content(self.path, self.state, work)
        if cache and settled:
            remember(self._key, asdict(content))
        return content

    def is_named_by_content(self, work: Work) -> bool:
        """Whether it is a blob of the hub's cache that holds what its name says; reads it."""
        blob = blob_of(self.path)
        return blob is not None and read_digest(self.path, self.state, work) == blob


def _content(remembered: Mapping[str, Any] | None) -> Content | None:
    if remembered is None:
        return None
    return Content(remembered["tensors"], remembered["whole"])


def _combined(found: Mapping[Path, Content]) -> str:
    """Return one digest of all files' tensors, and of the files that are none."""
    holders: dict[str, dict[str, list[bytes]]] = defaultdict(lambda: defaultdict(list))
    entries: set[bytes] = set()
    for path, content in found.items():
        file = framed(os.fsencode(path.name))
        if content.whole:
            entries.add(b"file" + file + bytes.fromhex(content.whole))
        for name, digest in content.tensors.items():
            holders[name][digest].append(file)
    for digests in holders.values():
        for digest, names in digests.items():
            # which of several comes last depends on the files' order, so on their names
            suffix = b"".join(sorted(names)) if len(digests) > 1 else b""
            entries.add(b"tensor" + bytes.fromhex(digest) + suffix)
    combined = hashlib.sha256(framed(_VERSION.encode()))
    for entry in sorted(entries):
        combined.update(framed(entry))
    return combined.hexdigest()
