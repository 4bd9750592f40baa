"""4, 5, 7, 8, 9, 11: restarts, full disks, failing calls, no directory, few descriptors."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import gc
import logging
import os
import resource
import shutil
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from unittest import mock

from scorecard.card.damage import only_file, restore
from scorecard.stores import StoreSubject
from scorecard.subject import Key, NotApplicableError, Subject
from scorecard.trial import Trial, scored
from vua.capacity.usage import measure
from vua.testing.faulty import FaultyStorage

_CLONE_NEWNS, _MS_REC, _MS_PRIVATE = 0x20000, 0x4000, 1 << 18


@scored(
    4, "Restart", quick=300, full=1_000_000,
    bar="all entries are reusable after a restart, the first hit within 1 s, no byte unaccounted",
)  # fmt: skip
def restart(trial: Trial) -> None:
    """Put entries, open the directory anew, look at a sample of them."""
    subject = trial.make(nbytes=4096)
    keys = trial.stored(subject, trial.scale)
    trial.close()
    began_s = time.monotonic()
    subject = trial.make(nbytes=4096)
    first, first_s = trial.look(subject, keys[-1]), time.monotonic() - began_s
    looks = [trial.look(subject, key) for key in trial.random.sample(keys, min(10_000, len(keys)))]
    trial.must("no wrong bytes", "wrong" not in looks)
    trial.should("all are there", {*looks, first} == {"hit"}, f"{looks.count('hit')} hits")
    trial.should("the first hit within 1 s", first_s < 1, f"{first_s:.3f} s")
    if isinstance(subject, StoreSubject):
        counted = measure(subject.root, counted=1 << 62)
        there = sum(path.stat().st_size for path in subject.root.rglob("*.safetensors"))
        found = f"{counted.nbytes} counted, {there} there"
        trial.should("no byte is unaccounted", counted.nbytes == there, found)


def small_disk(trial: Trial, mebibytes: int) -> Path:
    """Mount a small file system that goes away with this process, or raise NotRunError."""
    trial.needs("root, to mount a tmpfs", os.geteuid() == 0)
    libc = ctypes.CDLL(None, use_errno=True)
    where = trial.directory / "small"
    where.mkdir()
    ready = libc.unshare(_CLONE_NEWNS) == 0
    ready = ready and libc.mount(b"none", b"/", None, _MS_REC | _MS_PRIVATE, None) == 0
    options = f"size={mebibytes}m,mode=0755".encode()
    ready = ready and libc.mount(b"tmpfs", os.fsencode(where), b"tmpfs", 0, options) == 0
    trial.needs("the right to mount a tmpfs", ready)
    return where


@scored(
    5, "Disk full", quick=40, full=1000,
    bar="8 MiB tmpfs: no exception, no partial entry, no stuck key; a put after freeing succeeds",
)  # fmt: skip
def disk_full(trial: Trial) -> None:
    """Put more than fits, let somebody else fill the rest, then free it again."""
    disk = small_disk(trial, 8)
    for bounds in (None, 1 << 40):
        root = disk / f"cache-{bounds}"
        try:
            subject = trial.make(nbytes=1 << 18, root=root, max_bytes=bounds)
        except NotApplicableError:
            continue
        _fill(trial, subject, disk, "with its defaults" if bounds is None else "without limits")
        subject.close()
        shutil.rmtree(root)


def _fill(trial: Trial, subject: Subject, disk: Path, how: str) -> None:
    raised: list[str] = []
    keys = [Key(number) for number in range(trial.scale)]

    def put(key: Key) -> bool:
        try:
            return subject.put(key, key.payload(subject.nbytes))
        except Exception as problem:  # noqa: BLE001 - whatever reaches the caller counts
            raised.append(f"{type(problem).__name__}: {problem}")
            return False

    stored = [put(key) for key in keys[: trial.scale // 2]]
    floor_kept = _free(disk) >= subject.floor
    filler = disk / "filler"
    with contextlib.suppress(OSError), filler.open("wb", buffering=0) as stream:
        while stream.write(bytes(1 << 16)):
            pass
    stored += [put(key) for key in keys[trial.scale // 2 :]]
    left = subject.temporary_files()
    looks = [trial.look(subject, key) for key in keys]
    filler.unlink()
    again = put(keys[-1])
    trial.must(f"{how}: no wrong bytes", "wrong" not in looks)
    trial.should(f"{how}: no exception", not raised and "raised" not in looks, raised[:1])
    trial.should(f"{how}: no partial entry", not left, left[:1])
    trial.should(f"{how}: the floor is kept", floor_kept, f"{_free(disk)} bytes free")
    found = trial.look(subject, keys[-1])
    trial.should(f"{how}: the first put after freeing space is a hit", again and found == "hit")
    hits = f"{looks.count('hit')} of {len(looks)} hits, {sum(stored)} stored"
    trial.should(f"{how}: control: only some are there", {"hit", "miss"} <= set(looks), hits)


def _free(disk: Path) -> int:
    status = os.statvfs(disk)
    return status.f_bavail * status.f_frsize


@scored(
    7, "fsync fails", quick=12, full=200,
    bar="durable mode: the entry is not published, its file is abandoned, nothing is tried again",
)  # fmt: skip
def fsync_fails(trial: Trial) -> None:
    """Let one fsync of a durable put fail with EIO: that of the file, or of a directory."""
    subject = trial.make(nbytes=16384, durable=True)
    trial.stored(subject, 1)
    real, calls = os.fsync, 0
    wrong = published = again = 0
    for turn in range(trial.scale):
        key, calls, which = Key(100 + turn), 0, 1 + turn % 4

        def fsync(fd: int, which: int = which) -> None:
            nonlocal calls
            calls += 1
            if calls == which:
                raise OSError(errno.EIO, os.strerror(errno.EIO))
            real(fd)

        with mock.patch("os.fsync", fsync):
            stored = subject.put(key, key.payload(subject.nbytes))
        there = bool(subject.files(key))
        published += (stored or there) and which == 1
        again += which == 1 and calls > 1
        wrong += trial.look(subject, key) in ("wrong", "raised")
        subject.put(key, key.payload(subject.nbytes))
        wrong += trial.look(subject, key) != "hit"
    trial.must("never a wrong byte; a later put heals", wrong == 0, f"{wrong} of {trial.scale}")
    trial.should("not published", published == 0, f"{published} were")
    trial.should("not tried again", again == 0, f"{again} were")
    left = subject.temporary_files()
    trial.should("the file is abandoned", not left, f"{len(left)} temporary files left")


@scored(
    8, "Reads that fail", quick=10, full=1000,
    bar="EIO or ESTALE: a miss each time, the file stays; three in a row on one file: quarantined",
)  # fmt: skip
def reads_fail(trial: Trial) -> None:
    """Let reads fail, now and then and then for good."""
    subject = trial.make(nbytes=16384)
    if not isinstance(subject, StoreSubject):
        trial.needs("a way to let its reads fail", there=False)
        return
    keys = trial.stored(subject, 2)
    store = subject.store()
    sound = store.storage
    looks = []
    for turn in range(trial.scale):
        code = (errno.EIO, errno.ESTALE)[turn % 2]
        verb = ("open", "read")[turn // 2 % 2]
        store.storage = FaultyStorage(sound, fail={verb: OSError(code, os.strerror(code))})
        looks.append(trial.look(subject, keys[0]))
        store.storage = sound
        looks.append(trial.look(subject, keys[0]))
    trial.must("no wrong bytes, no exception", not {"wrong", "raised"} & set(looks))
    trial.should("a miss each time", set(looks[::2]) == {"miss"}, looks[::2].count("miss"))
    trial.should("the file stays", set(looks[1::2]) == {"hit"}, looks[1::2].count("hit"))
    store.storage = FaultyStorage(sound, fail={"read": OSError(errno.EIO, "bad sector")})
    for _ in range(4):
        trial.look(subject, keys[1])
    store.storage = sound
    gone = trial.look(subject, keys[1]) == "miss"
    trial.should("a file that fails three times in a row is quarantined", gone)


class _Heard(logging.Handler):
    """Counts warnings."""

    count = 0

    def emit(self, record: logging.LogRecord) -> None:
        self.count += record.levelno >= logging.WARNING


@contextlib.contextmanager
def _no_rights(root: Path) -> Iterator[None]:
    paths = [path for path in root.rglob("*") if path.is_dir()]
    for path in [*reversed(paths), root]:
        path.chmod(0)
    try:
        yield
    finally:
        for path in [root, *paths]:
            path.chmod(0o700)


@contextlib.contextmanager
def _moved_away(root: Path) -> Iterator[None]:
    aside = root.with_name("aside")
    root.rename(aside)
    try:
        yield
    finally:
        with contextlib.suppress(OSError):
            shutil.rmtree(root)
        aside.rename(root)


@contextlib.contextmanager
def _a_file_instead(root: Path) -> Iterator[None]:
    with _moved_away(root):
        root.write_bytes(b"not a directory")
        yield
        root.unlink()


@contextlib.contextmanager
def _deleted(root: Path) -> Iterator[None]:
    shutil.rmtree(root)
    yield
    root.mkdir(mode=0o700, exist_ok=True)


_TROUBLE: dict[str, Callable[[Path], contextlib.AbstractContextManager[None]]] = {
    "EACCES": _no_rights,
    "root moved away": _moved_away,
    "ENOTDIR": _a_file_instead,
    "root deleted": _deleted,
}


@scored(
    9, "No access, no directory", quick=20, full=500,
    bar="all operations become misses, with at most a warning a minute, and it recovers by itself",
)  # fmt: skip
def no_directory(trial: Trial) -> None:
    """Take the directory away in four ways, use the cache, and give it back."""
    if os.geteuid() == 0:
        os.chown(trial.directory, 65534, 65534)
        os.seteuid(65534)  # whom modes apply to
    heard = _Heard()
    logging.getLogger().addHandler(heard)
    for name, trouble in _TROUBLE.items():
        subject = trial.make(nbytes=16384, root=name.replace(" ", "-"))
        keys = trial.stored(subject, 3)
        looks, raised, heard.count = [], [], 0
        with trouble(subject.root):
            began_s = time.monotonic()
            for turn in range(trial.scale):
                looks.append(trial.look(subject, keys[turn % 3]))
                try:
                    subject.put(Key(100 + turn), Key(100 + turn).payload(subject.nbytes))
                except Exception as problem:  # noqa: BLE001 - whatever reaches the caller counts
                    raised.append(f"{type(problem).__name__}: {problem}")
            each_ms = 500 * (time.monotonic() - began_s) / trial.scale
        trial.note(f"{name}: {each_ms:.2f} ms an operation")
        trial.must(f"{name}: no wrong bytes", "wrong" not in looks)
        trial.should(f"{name}: no exception", not raised and "raised" not in looks, raised[:1])
        found = f"{heard.count} in {2 * trial.scale} operations"
        trial.should(f"{name}: at most a warning a minute", heard.count <= 2, found)
        trial.should(f"{name}: recovers within 10 s", _recovers(trial, subject))


def _recovers(trial: Trial, subject: Subject) -> bool:
    end_s, number = time.monotonic() + 10, 1000
    while time.monotonic() < end_s:
        key = Key(number)
        with contextlib.suppress(Exception):
            if subject.put(key, key.payload(subject.nbytes)) and trial.look(subject, key) == "hit":
                return True
        number += 1
        time.sleep(0.1)
    return False


@scored(
    11, "Scarce descriptors, long use", quick=200, full=10_000,
    bar="EMFILE and EFBIG degrade to misses; no descriptor, thread or memory leaks",
)  # fmt: skip
def scarce(trial: Trial) -> None:
    """Take all descriptors away, forbid large files, then use the cache for long."""
    subject = trial.make(nbytes=65536)
    keys = trial.stored(subject, 8)
    looks, raised = [], []

    def use(number: int) -> None:
        looks.append(trial.look(subject, keys[number % 8]))
        fresh = Key(1000 + number)
        try:
            subject.put(fresh, fresh.payload(subject.nbytes))
        except Exception as problem:  # noqa: BLE001 - whatever reaches the caller counts
            raised.append(f"{type(problem).__name__}: {problem}")
        for path in subject.files(fresh):
            path.unlink(missing_ok=True)

    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    for limit, value in ((resource.RLIMIT_NOFILE, 3), (resource.RLIMIT_FSIZE, 8192)):
        before = resource.getrlimit(limit)
        resource.setrlimit(limit, (value, before[1]))
        for number in range(5):
            use(number)
        resource.setrlimit(limit, before)
    trial.should("the caller sees no exception", not raised and "raised" not in looks, raised[:1])
    trial.must("no wrong bytes", "wrong" not in looks)
    trial.should("it recovers", [trial.look(subject, key) for key in keys] == ["hit"] * 8)
    left = subject.temporary_files()
    trial.should("no partial file is left", not left, left[:1])
    counts = []
    path = only_file(subject, keys[0])
    sound = path.read_bytes()
    for number in range(trial.scale):
        if number == trial.scale // 2:
            counts.append(_resources())
        use(number)
        if number % 50 == 0:
            restore(path, sound[:-1])
            trial.look(subject, keys[0])
            restore(path, sound)
    counts.append(_resources())
    (files, threads, rss), (files_now, threads_now, rss_now) = counts
    trial.should("no descriptor leaks", files_now <= files, f"{files} -> {files_now}")
    trial.should("no thread leaks", threads_now <= threads, f"{threads} -> {threads_now}")
    steady = rss_now <= rss * 1.01 + (1 << 20)
    trial.should("no memory leaks", steady, f"{rss >> 10} -> {rss_now >> 10} KiB")


def _resources() -> tuple[int, int, int]:
    gc.collect()
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    return (
        len(list(Path("/proc/self/fd").iterdir())),
        threading.active_count(),
        pages * resource.getpagesize(),
    )
