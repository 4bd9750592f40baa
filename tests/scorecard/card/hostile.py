"""18, 25, 28: files that somebody made on purpose."""

from __future__ import annotations

import contextlib
import gc
import os
import select
import shutil
import signal
import stat
import sys
import threading
import time
import tracemalloc
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, Final

from scorecard.attacks import hostile_bytes
from scorecard.card.damage import hurt, only_file, restore
from scorecard.stores import StoreSubject
from scorecard.subject import Key, Subject
from scorecard.trial import Look, Trial, scored
from vua.errors import EntryError
from vua.format.entry import EntryCodec
from vua.format.keys import ChunkKey
from vua.format.parse import mismatch, parse_entry

_SLOW_S: Final = 0.1


def mutated(trial: Trial, header: bytes) -> bytes:
    """Return a header with one to four changes that a fuzzer would make."""
    data, chance = bytearray(header), trial.random
    for _ in range(chance.randint(1, 4)):
        at = chance.randrange(len(data) or 1)
        match chance.randrange(6):
            case 0:
                data[at : at + 1] = bytes([chance.randrange(256)])
            case 1:
                del data[at : at + chance.choice((1, 2, 8, 64, 4096))]
            case 2:
                start = chance.randrange(len(data) or 1)
                data[at:at] = data[start : start + chance.choice((1, 8, 64, 512))]
            case 3:
                numbers = (
                    b"0",
                    b"-1",
                    b"99999999999999999999",
                    b"1e9",
                    b"null",
                    b"[]",
                    b"{}",
                    b'"',
                )
                data[at : at + chance.randrange(3)] = chance.choice(numbers)
            case 4:
                length = chance.choice((0, 1, 1 << 20, 1 << 31, 1 << 32, 1 << 63, (1 << 64) - 1))
                data[:8] = length.to_bytes(8, "little")
            case _:
                data[at : at + 8] = chance.randbytes(8)
    return bytes(data)


def _check(codec: EntryCodec, data: bytes, chunk: ChunkKey) -> None:
    """Judge a header as a reader does who knows the chunk. Raises EntryError."""
    header = memoryview(data)
    if codec.table_of(header, chunk) is None:
        raise mismatch(codec, header, chunk)


@scored(
    18, "Fuzzed headers", gate=True, quick=2000, full=10_000_000,
    bar="0 crashes, 0 hangs above 100 ms, memory at most twice the file's",
)  # fmt: skip
def fuzz(trial: Trial) -> None:
    """Get each named attack, then give mutated headers to the parser, every twentieth to a get."""
    subject = trial.make(nbytes=4096)
    if not isinstance(subject, StoreSubject):
        trial.needs("a header in its files", there=False)
        return
    (key,) = trial.stored(subject, 1)
    path, codec = only_file(subject, key), subject.store().codec(subject.layout.full)
    sound = path.read_bytes()
    header, chunk = sound[: codec.header_nbytes], subject.chunk(key)
    crashes, looks = [], []
    for name, data in hostile_bytes(sound).items():
        restore(path, data)
        look = trial.look(subject, key)
        crashes += [f"{name}: {look}"] * (look != "miss")
    accepted = slowest_s = 0.0
    gc.freeze()  # or a pass over all objects of the process counts
    tracemalloc.start()
    for turn in range(trial.scale):
        data = mutated(trial, header)
        began_s = time.process_time()
        for check in (parse_entry, lambda data: _check(codec, data, chunk)):
            try:
                check(data)
                accepted += data != header
            except EntryError:
                pass
            except Exception as problem:  # noqa: BLE001 - nothing else may come out
                crashes.append(f"{type(problem).__name__}: {problem} for {data[:200]!r}")
        slowest_s = max(slowest_s, time.process_time() - began_s)
        if turn % 20 == 0:
            restore(path, data + sound[len(header) :])
            looks.append(trial.look(subject, key))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    gc.unfreeze()
    trial.note(f"{len(hostile_bytes(sound))} named attacks")
    trial.must("0 crashes", not crashes and "raised" not in looks, crashes[:1])
    trial.must("0 wrong bytes", "wrong" not in looks)
    trial.must("0 changed headers are accepted", accepted == 0, accepted)
    trial.must("0 hangs above 100 ms", slowest_s < _SLOW_S, f"{1000 * slowest_s:.1f} ms of CPU")
    size = len(sound)
    found = f"peak {peak >> 10} KiB, file {size >> 10} KiB"
    most = 2 * size + (2 << 20)  # a header may have 1 MiB, and is held beside what was parsed
    trial.should("bounded memory", peak < most, found)


def in_time(subject: Subject, ask: Callable[[], Look], limit_s: float = 3.0) -> str:
    """Return what ``ask`` says in a forked process, or ``hung`` when that sleeps for so long."""
    if not subject.forks:
        return _in_thread(ask, limit_s)
    ours, theirs = os.pipe()
    child = os.fork()
    if child == 0:
        with contextlib.suppress(BaseException):
            os.write(theirs, ask().encode())
        os._exit(0)
    os.close(theirs)
    asleep = 0  # looks in turn: on a busy machine it may only wait for its turn
    while not select.select([ours], [], [], 0.02)[0] and asleep < limit_s / 0.02:
        state = Path(f"/proc/{child}/stat").read_text(encoding="ascii").rpartition(") ")[2][0]
        asleep = asleep + 1 if state == "S" else 0
    os.kill(child, signal.SIGKILL)
    text = os.read(ours, 64).decode()
    os.close(ours)
    _, status = os.waitpid(child, 0)
    return text or ("hung" if os.WIFSIGNALED(status) else "died")


def _in_thread(ask: Callable[[], Look], limit_s: float) -> str:
    answers: list[str] = []
    thread = threading.Thread(target=lambda: answers.append(ask()), daemon=True)
    thread.start()
    thread.join(limit_s)
    return answers[0] if answers else ("hung" if thread.is_alive() else "died")


def plants(outside: Path) -> dict[str, Callable[[Path], object]]:
    """Return what may be planted at a path; ``outside`` is a file with the entry's sound bytes."""
    found: dict[str, Callable[[Path], object]] = {
        "symbolic link": lambda path: path.symlink_to(outside),
        "FIFO": lambda path: os.mkfifo(path, 0o600),
        "directory": lambda path: path.mkdir(),
        "hard link": lambda path: os.link(outside, path),
    }
    if os.geteuid() == 0:
        zero = Path("/dev/zero").stat().st_rdev
        found["device"] = lambda path: os.mknod(path, stat.S_IFCHR | 0o600, zero)
    return found


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


@scored(
    25, "Planted files", gate=True, quick=200, full=10_000,
    bar="links, FIFOs, devices, directories in a file's place: not followed, not waited for",
)  # fmt: skip
def planted(trial: Trial) -> None:
    """Plant things at the name, at the temporary name and above it; then race with a planter."""
    subject = trial.make(nbytes=16384)
    (key,) = trial.stored(subject, 1)
    path = only_file(subject, key)
    sound = path.read_bytes()
    outside = trial.directory / "outside"
    outside.mkdir()
    victim = outside / path.name
    for kind, plant in plants(victim).items():
        restore(victim, sound)
        _remove(path)
        plant(path)
        look = in_time(subject, partial(trial.look, subject, key))
        if kind == "hard link":
            trial.must(f"{kind}: no wrong bytes", look in ("hit", "miss"), look)
        else:
            trial.must(f"{kind}: a miss", look == "miss", look)
        subject = subject if look != "hung" else trial.make(subject.nbytes)  # it may be stuck
        put = in_time(subject, partial(_put, subject, key))
        trial.must(f"{kind}: a put does not hang or fail", put in ("hit", "miss"), put)
        trial.must(f"{kind}: nothing is written through it", victim.read_bytes() == sound)
        _remove(path)
        temporary = subject.temporary_name(key)
        if temporary is not None:
            victim.write_bytes(b"a victim")
            plant(temporary)
            in_time(subject, partial(_put, subject, key))
            same = victim.read_bytes() == b"a victim"
            trial.must(f"{kind} at the temporary name: nothing is written through it", same)
            _remove(temporary)
            _remove(path)
    _parents(trial, subject, outside)
    _race(trial, subject, outside)


def _put(subject: Subject, key: Key) -> Look:
    return "hit" if subject.put(key, key.payload(subject.nbytes)) else "miss"


def _parents(trial: Trial, subject: Subject, outside: Path) -> None:
    """Replace each directory between the root and a file by a link to a copy outside."""
    key = Key(7)
    payload = key.payload(subject.nbytes)
    subject.put(key, payload)
    parent = only_file(subject, key).parent
    while parent != subject.root:
        copy, aside = outside / "copy", parent.with_name("aside")
        shutil.copytree(parent, copy)
        before = _listing(copy)
        parent.rename(aside)
        parent.symlink_to(copy)
        levels = len(parent.relative_to(subject.root).parts)
        name = f"link {levels} levels below the root"
        for number in (7, 100 + levels):
            fresh = trial.make(subject.nbytes, root=subject.root)
            for one in (subject, fresh):
                with contextlib.suppress(Exception):
                    one.put(Key(number), Key(number).payload(subject.nbytes))
        trial.must(f"{name}: nothing is written outside", _listing(copy) == before)
        parent.unlink()
        aside.rename(parent)
        shutil.rmtree(copy)
        parent = parent.parent


def _listing(root: Path) -> set[tuple[str, int, int]]:
    found = set()
    for path in root.rglob("*"):
        status = path.lstat()
        found.add((str(path), status.st_ino, status.st_size))
    return found


_RACE_S: Final = 60.0
"""The race ends after this even if the other thread had no turn."""


def _race(trial: Trial, subject: Subject, outside: Path) -> None:
    """Put and get while somebody keeps exchanging the file for a link to a file outside."""
    key = Key(9)
    payload = key.payload(subject.nbytes)
    subject.put(key, payload)
    path = only_file(subject, key)
    secret = outside / "secret"
    secret.write_bytes(b"secret! " * (path.stat().st_size // 8))
    content, stop, planted_times = secret.read_bytes(), threading.Event(), 0

    def plant() -> None:
        nonlocal planted_times
        aside = path.with_name(".planted")
        while not stop.is_set():
            with contextlib.suppress(OSError):
                aside.symlink_to(secret)
                aside.replace(path)
                planted_times += 1
            time.sleep(0.0005)

    thread = threading.Thread(target=plant)
    thread.start()
    looks: list[Look] = []
    try:
        until = time.monotonic() + _RACE_S
        while len(looks) < trial.scale or planted_times <= trial.scale // 20:
            with contextlib.suppress(Exception):
                subject.put(key, payload)
            looks.append(trial.look(subject, key))
            if time.monotonic() > until:
                break
    finally:
        stop.set()
        thread.join()
    wrong = looks.count("wrong")
    trial.must("race: never followed by a get", wrong == 0, f"{wrong} of {len(looks)}")
    trial.must("race: never by a put", secret.read_bytes() == content)
    trial.must("control: links were planted", planted_times > trial.scale // 20, planted_times)


_FORBIDDEN: Final = ("exec", "compile", "import", "marshal", "os.system", "os.exec", "os.spawn")
_FORBIDDEN_BEGIN: Final = ("pickle.", "subprocess.", "socket.", "ctypes.dlopen", "os.posix_spawn")


@contextlib.contextmanager
def audited(seen: list[str]) -> Iterator[None]:
    """Note audit events that mean "run this" while the block runs. The hook stays, asleep."""
    awake = True

    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        if awake and (event in _FORBIDDEN or event.startswith(_FORBIDDEN_BEGIN)):
            seen.append(f"{event} {arguments!r:.100}")

    sys.addaudithook(hook)
    try:
        yield
    finally:
        awake = False


@scored(
    28, "No code from data", gate=True, quick=300, full=10_000,
    bar="hostile gets raise no audit event of exec, compile, import, unpickling, a shell, a socket",
)  # fmt: skip
def no_code(trial: Trial) -> None:
    """Get files that are damaged, mutated or hold a pickle, under an audit hook."""
    subject = trial.make(nbytes=4096)
    keys = trial.stored(subject, 4)
    paths = [only_file(subject, key) for key in keys]
    sound = [path.read_bytes() for path in paths]
    pickled = b"cposix\nsystem\n(S'true'\ntR."

    def hostile(turn: int) -> Look:
        number = turn % len(keys)
        kind = trial.random.randrange(3)
        if kind == 0:
            hurt(trial, paths[number], sound[number])
        elif kind == 1:
            restore(paths[number], mutated(trial, sound[number][:4096]) + sound[number][4096:])
        else:
            restore(paths[number], (pickled + sound[number])[: len(sound[number])])
        return trial.look(subject, keys[number])

    looks = [hostile(turn) for turn in range(60)]  # whatever is imported late, is
    seen: list[str] = []
    with audited(seen):
        looks += [hostile(turn) for turn in range(trial.scale)]
    trial.must("no event", not seen, seen[:2])
    trial.must("no exception", "raised" not in looks)
    with audited(seen):
        compile("1", "control", "eval")
    trial.must("control: the hook hears", bool(seen))
