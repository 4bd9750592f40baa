"""Which files hold a model's weights, and one digest of these, read or remembered.

Tensors count, not files: the same tensors in other files, or with other metadata, have the same
fingerprint. Any changed byte gives another one.

Digests of files that were read before are kept in ``$XDG_CACHE_HOME/vua/weights``
(``~/.cache/vua/weights``), directories 0700, files 0600. Only entries that this user wrote, and
that no other user may write, are trusted; damaged ones count as missing. This memo only saves time:
without it, weights are read again.

`write_note` leaves the digests of a directory's files beside them, in ``.vua-weights``, so that
they come with an image or a volume. A note of this user or root counts for files of the same size
and mtime (in seconds: archives keep no more), if this user can write neither them nor the note, or
if some tensors that are drawn at random have the digests that it says.

Which files count is by the rule of vLLM's default loader and of transformers, for directories that
hold a model in one format. Safetensors files come first: those that the index names, if there is
one. Else torch's files count, without what trainers leave beside them, else GGUF. An engine that
knows better gives its own list.

`code_digest`, `processor_digest` and `quantization_digest` cover the other files that change what a
model computes. They are read when an engine starts: an edit between the engine's own reading and
this one goes unseen.
"""

from __future__ import annotations

import atexit
import contextlib
import fcntl
import hashlib
import json
import math
import os
import re
import stat
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import (
    CancelledError,
    Future,
    TimeoutError,  # noqa: A004 - 3.10's is its own
)
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

from vua.errors import ConfigError
from vua.format.identity import framed
from vua.io.files import atomic_write, make_file, make_folders, user_cache
from vua.io.posix import close_quietly
from vua.weights.content import (
    Content,
    State,
    Work,
    read_content,
    read_digest,
    sample_agrees,
)

_INDEX: Final = "model.safetensors.index.json"
_MAX_INDEX_NBYTES: Final = 1 << 28
_SUFFIXES: Final = (".safetensors", ".bin", ".pt", ".pth", ".gguf")
"""Only files with the first of these suffixes that occurs; never two of them together."""
_OF_TRAINING: Final = frozenset(
    ("training_args.bin", "optimizer.bin", "optimizer.pt", "scheduler.pt", "scaler.pt")
)
"""Files that vLLM's loader skips (`filter_files_not_needed_for_inference`)."""
_GGUF_PART: Final = re.compile(r"(.*)-\d{5}-of-\d{5}\.gguf")
_BLOB: Final = re.compile("[0-9a-f]{64}")


def checkpoint_files(path: str | os.PathLike[str]) -> list[Path]:
    """Return the weight files at ``path``, a directory of a model or adapter, or one file.

    Hidden files and subdirectories are skipped, as engines do. An adapter's ``adapter_config.json``
    is included.

    Raises:
        ConfigError: none found.
        OSError: the directory cannot be read.
    """
    root = Path(path).absolute()
    listed = sorted(root.iterdir()) if root.is_dir() else [root]
    seen = [file for file in listed if not file.name.startswith(".") and file.is_file()]
    seen = [file for file in seen if file.name not in _OF_TRAINING]
    found: list[Path] = []
    for suffix in _SUFFIXES:
        found = found or [file for file in seen if file.suffix == suffix]
    if not found:
        raise ConfigError(
            f"no weights ({', '.join(_SUFFIXES)}) at {root}, so caches cannot be told apart; pass "
            "the local directory or file that the engine loads"
        )
    if not root.is_dir():
        return _gguf_parts(root)
    if found[0].suffix == ".safetensors":
        found = _indexed(root, found)
    return found + [file for file in seen if file.name == "adapter_config.json"]


def _indexed(root: Path, found: list[Path]) -> list[Path]:
    """Return the files that the index names; all of them if it names missing ones or is invalid."""
    try:
        with (root / _INDEX).open("rb") as stream:
            named = set(json.loads(stream.read(_MAX_INDEX_NBYTES))["weight_map"].values())
    except (OSError, ValueError, TypeError, LookupError, AttributeError, RecursionError):
        return found
    chosen = [file for file in found if file.name in named]
    return chosen if {file.name for file in chosen} == named else found


def _gguf_parts(file: Path) -> list[Path]:
    """Return the file with its other parts, and the files that vLLM takes image weights from."""
    if file.suffix != ".gguf":
        return [file]
    parts = _GGUF_PART.fullmatch(file.name)
    beside = sorted(file.parent.glob("*.gguf"))
    of_one = [
        other for other in beside
        if (match := _GGUF_PART.fullmatch(other.name)) and parts and match[1] == parts[1]
    ]  # fmt: skip
    return (of_one or [file]) + [other for other in beside if other.name.startswith("mmproj")]


def blob_of(file: Path) -> str | None:
    """Return the SHA-256 that names a file of the Hugging Face hub's cache; None for any other.

    Such a file lies at ``models--*/blobs/<64 hex digits>``, mostly reached by a link. Files that
    are not weights have 40 digits there: git's SHA-1, which covers more than their content.
    """
    blob = Path(os.path.realpath(file))
    layout = blob.parent.name == "blobs" and blob.parent.parent.name.startswith("models--")
    return blob.name if layout and _BLOB.fullmatch(blob.name) else None


def link_changed_s(file: Path) -> float:
    """Return when a link on the way to a file was last made; 0.0 without links."""
    links = [part for part in (file, *file.parents) if part.is_symlink()]
    return max((link.lstat().st_ctime for link in links), default=0.0)


_MOST_BYTES: Final = 64 << 20

# JSON files that no processor of images, sounds or videos reads for more than tokens, which are in
# the key; config.json counts as the engine resolved it. Any other one counts.
_NO_PROCESSORS: Final = frozenset(
    "added_tokens.json adapter_config.json config.json generation_config.json special_tokens_map.json "  # noqa: E501, SIM905
    "tokenizer.json tokenizer_config.json vocab.json".split()
)


def code_digest(folder: Path) -> str:
    """Return 64 hex digits that identify a directory's Python files, at any depth.

    Raises:
        ConfigError: none found, or one is too large.
        OSError: one cannot be read.
    """
    found = [path for path in folder.rglob("*.py") if path.is_file()]
    if not found:
        raise ConfigError(f"the model brings code of its own, but {folder} holds no Python files")
    return _digest(folder, found)


def processor_digest(folder: Path) -> str:
    """Return 64 hex digits that identify the files that a processor is made from.

    Raises OSError, and ConfigError for a file too large.
    """
    files = (path for path in folder.glob("*.json") if path.is_file())
    names = (path for path in files if not path.name.startswith("."))
    return _digest(
        folder,
        [
            path
            for path in names
            if path.name not in _NO_PROCESSORS and not path.name.endswith(".index.json")
        ],
    )


def quantization_digest(folder: Path) -> str:
    """Return 64 hex digits that identify the files that say how weights are quantised.

    Engines look into these if ``config.json`` does not say it. Raises OSError, and ConfigError for
    a file too large.
    """
    return _digest(folder, [path for path in folder.glob("*quant*.json") if path.is_file()])


def _digest(folder: Path, files: Iterable[Path]) -> str:
    digest = hashlib.sha256(b"vua.files.v1\n")
    for path in sorted(files):
        if path.stat().st_size > _MOST_BYTES:
            raise ConfigError(f"{path} has {path.stat().st_size} bytes; expected a small file")
        digest.update(framed(os.fsencode(path.relative_to(folder)), path.read_bytes()))
    return digest.hexdigest()


_FORMAT: Final = "vua.weights.v2"
_MAX_NBYTES: Final = 64 << 20
_MAX_FILES: Final = 4096
_TOUCHED_S: Final = 86_400.0
CLOCK_TICK_S: Final = 0.02
"""File systems' clocks tick coarsely: a change may seem to be earlier by so much."""
_READ: Final = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK


def recall(key: str) -> dict[str, Any] | None:
    """Return what was remembered for a key; None if there is nothing sound."""
    folder = _folder(create=False)
    if folder is None:
        return None
    try:
        path = _entry_path(folder, key)
        digest, _, body = _read_trusted(path, os.geteuid()).partition(b"\n")
        if digest != hashlib.sha256(body).hexdigest().encode():
            return None
        if time.time() - path.stat().st_mtime > _TOUCHED_S:  # the oldest ones are deleted first
            os.utime(path)
        read = json.loads(body)
        sound = read["format"] == _FORMAT and read["key"] == key
        return dict(read["value"]) if sound else None
    except (OSError, ValueError, TypeError, LookupError, RecursionError):
        return None


def _read_trusted(path: Path, *owners: int) -> bytes:
    fd = os.open(path, _READ)
    with open(fd, "rb") as stream:  # noqa: PTH123
        found = os.fstat(fd)
        if not stat.S_ISREG(found.st_mode) or not _is_of(found, *owners):
            raise PermissionError(f"{path}: somebody else may have written it")
        return stream.read(_MAX_NBYTES)


def remember(key: str, value: dict[str, Any]) -> None:
    """Remember a JSON object for a key; atomic, and silent on failure."""
    body = json.dumps({"format": _FORMAT, "key": key, "value": value}).encode()
    folder = _folder(create=True)
    if folder is None or len(body) > _MAX_NBYTES - 100:
        return
    with contextlib.suppress(OSError):
        text = hashlib.sha256(body).hexdigest().encode() + b"\n" + body
        atomic_write(_entry_path(folder, key), text)
        found = [file for file in folder.iterdir() if file.suffix != ".lock"]
        if len(found) > _MAX_FILES:
            min(found, key=lambda file: file.lstat().st_mtime).unlink()


@contextlib.contextmanager
def locked(key: str) -> Iterator[None]:
    """Keep this user's other processes, and threads, from doing the same work at the same time.

    Waits until the holder ends or dies. Does not wait without a directory for the lock.
    """
    folder, fd = _folder(create=True), -1
    if folder is not None:
        with contextlib.suppress(OSError):  # 256 files at most: they stay; not all can be locked
            fd = make_file(folder / f"{hashlib.sha256(key.encode()).hexdigest()[:2]}.lock")
            fcntl.flock(fd, fcntl.LOCK_EX)
    try:
        yield
    finally:
        if fd >= 0:
            with contextlib.suppress(OSError):  # closing alone does not, where a child has it
                fcntl.flock(fd, fcntl.LOCK_UN)
            close_quietly(fd)


def _entry_path(folder: Path, key: str) -> Path:
    return folder / f"{hashlib.sha256(key.encode()).hexdigest()[:40]}.json"


def _folder(*, create: bool) -> Path | None:
    """Return the private directory; None if other users may write to all of them."""
    if (folder := user_cache("weights")) is None:
        return None
    try:
        if create and not folder.exists() and _may_create(folder):
            make_folders(folder)
        private = all(_is_of(part.lstat(), os.geteuid()) for part in (folder.parent, folder))
        return folder if private and folder.is_dir() else None
    except OSError:
        return None


def _may_create(folder: Path) -> bool:
    """Whether the place's owner could use a new directory there: not root's in a user's home."""
    there = next(part for part in folder.parents if part.exists())
    return os.geteuid() != 0 or there.stat().st_uid == 0


def _is_of(found: os.stat_result, *owners: int) -> bool:
    return found.st_uid in owners and not found.st_mode & (stat.S_IWGRP | stat.S_IWOTH)


_VERSION: Final = "vua.weights.v2"
_SETTLED_S: Final = 2.0
"""Clocks of file systems tick coarsely: the next change shows for sure only after this."""


@dataclass(frozen=True, slots=True)
class Weights:
    """The result of `identify_weights`."""

    fingerprint: str
    """64 hex digits."""
    files: tuple[Path, ...]
    nbytes: int
    read_nbytes: int
    """Bytes of the files that were read, by any process since `since_s`; the other files' digests
    were remembered."""
    seconds: float
    """Duration, including waiting for another process that read the same files."""
    changed_s: float
    """When a file, or a link to it, last changed (seconds since 1970; rename and `chmod` count)."""

    def changed_since(self, when_s: float, *, stop: threading.Event | None = None) -> bool:
        """Whether a file may have changed since ``when_s``, by its own change time or a link's.

        The file system's clock may lag by :data:`CLOCK_TICK_S`. If files may change near
        ``when_s``, pass a time that much earlier. A blob that the hub's cache has fetched since
        does not count: it is read as a whole, and its name is its SHA-256.

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
        """Return the combination of two models that compute together."""
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
    """Return 64 hex digits that identify the weights at ``path``; see `identify_weights`.

    Args:
        path: a local directory of a model or adapter, or one weight file.
        cache: use and keep remembered digests.

    Raises:
        ConfigError: no weights at ``path``, or they change while they are read.
        OSError: a file cannot be read.
    """
    return identify_weights(checkpoint_files(path), cache=cache).fingerprint


def identify_weights(
    files: Sequence[Path],
    *,
    cache: bool = True,
    progress: Callable[[int, int], None] | None = None,
    stop: threading.Event | None = None,
    since_s: float = math.inf,
) -> Weights:
    """Digest weight files, or take their digests from a private memo.

    The digest covers name, dtype, shape and bytes of each safetensors tensor, and name and bytes of
    other files. If two files hold different tensors of one name, the files' names count too, for
    then the order of loading matters. Location, times and sharding do not count.

    A digest is remembered by device, inode, size, mtime and ctime; a new copy of a file is read
    again, unless a note beside it is believed (`write_note`). A file that changed within the last
    2 s is not remembered. Safe for concurrent threads
    and processes: those of one user read the same files once, the rest wait. After a crash the memo
    is sound, and the files already read are remembered.

    Args:
        cache: use and keep remembered digests.
        progress: called with the bytes read so far and the bytes to read, from any thread.
        stop: once set, the call ends with CancelledError.
        since_s: what other threads and processes have read since then counts as read by this call.

    Raises:
        ConfigError: a file changes while it is read.
        OSError: a file cannot be read.
        CancelledError: ``stop`` was set (`concurrent.futures`).
    """
    began = time.monotonic()
    known = [KnownFile.at(file) for file in sorted(files)]
    found = {one.path: content for one in known if cache and (content := one.recall()) is not None}
    work = Work(stop)
    for one in known if cache else ():
        if one.path not in found and (content := one.noted(work)) is not None:
            found[one.path] = content
    if len(found) < len(known):
        key = json.dumps([asdict(one.state) for one in known])
        with locked(key):
            if cache:  # another process may have read them meanwhile
                found |= {one.path: got for one in known if (got := one.recall()) is not None}
            unread = [one for one in known if one.path not in found]
            total = sum(one.state.nbytes for one in unread)
            if progress is not None:
                tell = progress
                work.progress = lambda nbytes: tell(nbytes, total)
            for one in unread:
                found[one.path] = one.read(work, cache=cache)
    ahead = {} if since_s == math.inf else {one: one.read_since(since_s) for one in known}
    return Weights(
        fingerprint=_combined(found),
        files=tuple(files),
        nbytes=sum(one.state.nbytes for one in known),
        read_nbytes=max(work.done_nbytes, sum(one.state.nbytes for one in ahead if ahead[one])),
        seconds=max(time.monotonic() - began, sum(ahead.values())),
        changed_s=max(one.changed_s for one in known),
    )


@dataclass(frozen=True, slots=True)
class KnownFile:
    """A file, as it was when first looked at."""

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
        noted = recall(self._key)
        return None if noted is None else Content(noted["tensors"], noted["whole"])

    def noted(self, work: Work) -> Content | None:
        """Return what a note beside the file says of it, if that is believed."""
        note = self.path.parent / NOTE
        try:
            read = json.loads(_read_trusted(note, 0, os.geteuid()))
            said = read["files"][self.path.name] if read["format"] == _NOTE_FORMAT else {}
            same = [self.state.nbytes, self.state.mtime_ns // 10**9]
            if [said["nbytes"], said["mtime_s"]] != same:
                return None
            content = Content(dict(said["tensors"]), str(said["whole"]))
            fixed = not any(os.access(each, os.W_OK) for each in (note, note.parent, self.path))
            sound = fixed or sample_agrees(self.path, self.state, content, work)
        except (OSError, ValueError, TypeError, LookupError, AttributeError, RecursionError):
            return None
        if sound and time.time() - self.state.changed_s > _SETTLED_S:
            remember(self._key, asdict(content))
        return content if sound else None

    def read(self, work: Work, *, cache: bool) -> Content:
        settled = time.time() - self.state.changed_s > _SETTLED_S
        began = time.monotonic()
        content = read_content(self.path, self.state, work)
        if cache and settled:
            took = {"read_s": time.time(), "seconds": time.monotonic() - began}
            remember(self._key, asdict(content) | took)
        return content

    def read_since(self, when_s: float) -> float:
        """Return how long it took to read it, if that was since ``when_s``; else 0."""
        noted = recall(self._key) or {}
        return noted["seconds"] if noted.get("read_s", 0.0) >= when_s else 0.0

    def is_named_by_content(self, work: Work) -> bool:
        """Whether it is a blob of the hub's cache and its content matches its name; reads it."""
        blob = blob_of(self.path)
        return blob is not None and read_digest(self.path, self.state, work) == blob


NOTE: Final = ".vua-weights"
_NOTE_FORMAT: Final = "vua.weights-note.v1"


def write_note(folder: Path) -> tuple[Path, Weights]:
    """Digest the weights in a directory anew, and write the note beside them, for all processes.

    Raises ConfigError, OSError: as `weights_fingerprint`, or the note cannot be written.
    """
    known = [KnownFile.at(file) for file in checkpoint_files(folder)]
    began, work = time.monotonic(), Work()
    total = sum(one.state.nbytes for one in known)
    found = {one.path: one.read(work, cache=False) for one in known}
    files = {
        one.path.name: asdict(found[one.path])
        | {"nbytes": one.state.nbytes, "mtime_s": one.state.mtime_ns // 10**9}
        for one in known
    }
    note = folder / NOTE
    text = json.dumps({"format": _NOTE_FORMAT, "files": files})
    atomic_write(note, text.encode(), mode=0o644)
    took_s, changed_s = time.monotonic() - began, max(one.changed_s for one in known)
    paths = tuple(found)
    return note, Weights(_combined(found), paths, total, work.done_nbytes, took_s, changed_s)


def _combined(found: Mapping[Path, Content]) -> str:
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
    return hashlib.sha256(framed(_VERSION.encode(), *sorted(entries))).hexdigest()


class Identification:
    """One search for a model's weights; it starts at once, and the process may end before it."""

    def __init__(self, find: Callable[[threading.Event], Weights]) -> None:
        """Call ``find`` with the event that stops it; an exception from it becomes the answer."""
        self.answer: Future[Weights] = Future()
        """Done once the weights are known, or cannot be known."""
        self._find, self._stop = find, threading.Event()
        atexit.register(self._stop.set)  # the process does not wait for the reading threads
        threading.Thread(target=self._run, name="vua-identify", daemon=True).start()

    def wait(self, timeout_s: float | None) -> bool:
        """Wait for the answer, without limit if None; return whether it is there."""
        with contextlib.suppress(TimeoutError, CancelledError):
            self.answer.exception(timeout_s)
        return self.answer.done()

    def close(self) -> None:
        """Ask the thread to stop; does not wait for it."""
        self._stop.set()

    def _run(self) -> None:
        try:
            weights = self._find(self._stop)
        except BaseException as problem:  # noqa: BLE001 - whoever asks gets it
            self.answer.set_exception(problem)
            return
        self.answer.set_result(weights)


def process_began_s() -> float:
    """Return when this process was started, in seconds since 1970.

    A file changed later than that may differ from what the process has loaded.
    """
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    since_boot_s = int(fields[19]) / os.sysconf("SC_CLK_TCK")  # starttime, proc(5)
    return time.time() - time.clock_gettime(time.CLOCK_BOOTTIME) + since_boot_s
