"""22: many processes in one directory, judged by marks that they share outside of it."""

from __future__ import annotations

import mmap
import os
import random
import signal
import time
import traceback
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Final
from unittest import mock

from scorecard.subject import Key, NotApplicableError, Subject
from scorecard.trial import Trial, scored
from vua.capacity import evictor, reclaim, scan

_NBYTES: Final = 8192
_PATIENCE_S: Final = 60
"""On a busy machine so much longer, until there are hits and puts."""
_KINDS: Final = ("stored", "hit", "miss", "wrong", "raised", "unexplained")


class _Board:
    """Memory that all processes share: a mark per key that is stored, and counts per process."""

    def __init__(self, keys: int, processes: int) -> None:
        self.marks = mmap.mmap(-1, keys)
        self.counts = mmap.mmap(-1, 8 * len(_KINDS) * processes)
        self.problem = mmap.mmap(-1, 4096)

    def raised(self, process: int, doing: str) -> None:
        """Count the exception that is being handled; the last one of all processes is kept."""
        self.add(process, "raised")
        told = f"{doing}: {traceback.format_exc()}".encode()[-len(self.problem) :]
        self.problem[: len(told)] = told

    def last_problem(self) -> str:
        """Return the traceback that :meth:`raised` kept, empty for none."""
        return self.problem[:].rstrip(b"\0").decode(errors="replace")

    def add(self, process: int, kind: str) -> None:
        at = 8 * (process * len(_KINDS) + _KINDS.index(kind))
        value = int.from_bytes(self.counts[at : at + 8], "little") + 1
        self.counts[at : at + 8] = value.to_bytes(8, "little")

    def total(self, kind: str) -> int:
        step, first = 8 * len(_KINDS), 8 * _KINDS.index(kind)
        places = range(first, len(self.counts), step)
        return sum(int.from_bytes(self.counts[at : at + 8], "little") for at in places)

    @property
    def is_used(self) -> bool:
        return min(self.total("hit"), self.total("stored")) > 0

    def is_open(self, end_s: float) -> bool:
        """Whether processes work on: until then, and until there are hits and puts."""
        now_s = time.monotonic()
        return now_s < end_s or (now_s < end_s + _PATIENCE_S and not self.is_used)


def _writer(subject: Subject, trial: Trial, board: _Board, process: int, key: Key) -> None:
    del trial
    try:
        if subject.put(key, key.payload(_NBYTES)):
            board.marks[key.number] = 1
            board.add(process, "stored")
    except Exception:  # noqa: BLE001 - whatever reaches the caller counts
        board.raised(process, "put")


def _reader(subject: Subject, trial: Trial, board: _Board, process: int, key: Key) -> None:
    stored = board.marks[key.number]
    look = trial.look(subject, key)
    board.add(process, look)
    if look == "miss" and stored:
        board.add(process, "unexplained")


def _sweeper(subject: Subject, trial: Trial, board: _Board, process: int, key: Key) -> None:
    del trial, key
    try:
        subject.sweep()
    except Exception:  # noqa: BLE001 - whatever reaches the caller counts
        board.raised(process, "sweep")
    time.sleep(0.2)


_Work = Callable[[Subject, Trial, _Board, int, Key], None]


def _crowd(
    trial: Trial, work: list[_Work], keys: int, seconds: float, most: int | None, root: str
) -> tuple[_Board, int]:
    """Let processes work for a time; return what they counted and the most bytes there were."""
    board = _Board(keys, len(work))
    _fill(trial, root, most, keys // 4 if most else 1)
    children, end_s, highest = [], time.monotonic() + seconds, 0
    for process, does in enumerate(work):
        child = os.fork()
        if child == 0:
            status = 1
            try:
                chance = random.Random(trial.seed + process)
                subject = trial.make(_NBYTES, root=root, max_bytes=most)
                while board.is_open(end_s):
                    does(subject, trial, board, process, Key(chance.randrange(keys)))
                subject.close()
                status = 0
            finally:
                os._exit(status)
        children.append(child)
    while board.is_open(end_s):
        if most is not None:
            _to_all(children, signal.SIGSTOP)  # at one moment: a busy machine takes long to look
            highest = max(highest, _bytes_below(trial.directory / root))
            _to_all(children, signal.SIGCONT)
        time.sleep(0.1)
    died = 0
    for child in children:
        deadline_s = time.monotonic() + 30
        while (ended := os.waitpid(child, os.WNOHANG)) == (0, 0) and time.monotonic() < deadline_s:
            time.sleep(0.05)
        if ended == (0, 0):
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
        died += ended[1] != 0 or ended == (0, 0)
    trial.must(f"{root}: every process ends by itself", died == 0, f"{died} of {len(work)} did not")
    return board, highest


def _to_all(children: list[int], number: int) -> None:
    for child in children:
        os.kill(child, number)


def _fill(trial: Trial, root: str, most: int | None, count: int) -> None:
    """Put some entries, in a process of its own: this one shall have no threads when it forks.

    Raises NotApplicableError for a limit that the subject does not know.
    """
    child = os.fork()
    if child == 0:
        status = 1
        try:
            subject = trial.make(_NBYTES, root=root, max_bytes=most)
            for number in range(count):
                subject.put(Key(number), Key(number).payload(_NBYTES))
            subject.close()
            status = 0
        except NotApplicableError:
            status = 2
        finally:
            os._exit(status)
    _, ended = os.waitpid(child, 0)
    if os.waitstatus_to_exitcode(ended) == 2:
        raise NotApplicableError("it has no limit")
    if ended:
        raise RuntimeError(f"filling ended with status {ended}")


def _bytes_below(root: Path) -> int:
    """Return the bytes of all files below a directory, some of which may just go."""
    total = 0
    for directory, _, names in os.walk(root):
        for name in names:
            try:
                total += os.lstat(f"{directory}/{name}").st_size
            except FileNotFoundError:
                continue
    return total


@scored(
    22, "Races", gate=True, quick=4, full=1800,
    bar="writers, readers, evictors, collectors: 0 wrong, 0 exceptions, size <= limit + 5 %",
)  # fmt: skip
def races(trial: Trial) -> None:
    """Half of the time (``scale`` seconds) without a limit, half of it with one.

    VUA's own directory counts as one of very many chunks for a quarter more.
    """
    many = not trial.quick
    crowd = 8 if many else 2
    keys = 10_000 if many else 1000
    work: list[_Work] = [*[_writer] * crowd, *[_reader] * crowd]
    seconds = trial.scale / 2
    board, _ = _crowd(trial, work, keys, seconds, None, "unlimited")
    _judge(trial, board, "unlimited")
    lost = board.total("unexplained")
    trial.should("unlimited: what was stored is a hit", lost == 0, f"{lost} misses unexplained")
    try:
        most = keys // 4 * (_NBYTES + 4096)
        work += [_sweeper] * (2 if many else 1)
        _limited(trial, work, keys, seconds, most, "limited")
        if trial.own:  # victims told from process to process, and taken from parts of a sweep
            with ExitStack() as stack:
                for name, value in {"AT_ONCE": 0, "SHARED": 1, "_VICTIMS": keys // 32}.items():
                    stack.enter_context(mock.patch.object(evictor, name, value))
                stack.enter_context(mock.patch.object(reclaim, "AT_ONCE", 0))
                stack.enter_context(mock.patch.object(scan, "_SAMPLED_CHUNKS", keys // 64))
                _limited(trial, work, keys, seconds / 2, most, "limited, as if very many")
    except NotApplicableError as problem:
        trial.note(f"without a limit: {problem}")


def _limited(
    trial: Trial, work: list[_Work], keys: int, seconds: float, most: int, name: str
) -> None:
    board, highest = _crowd(trial, work, keys, seconds, most, name)
    _judge(trial, board, name)
    trial.must(f"{name}: size <= limit + 5 %", highest <= 1.05 * most, f"{highest / most:.3f}")
    reached = highest > 0.5 * most
    trial.must(f"{name}: control: the limit was reached", reached, f"{highest / most:.3f}")


def _judge(trial: Trial, board: _Board, name: str) -> None:
    counts = {kind: board.total(kind) for kind in _KINDS}
    trial.must(f"{name}: no wrong bytes", counts["wrong"] == 0, counts)
    found = f"{counts['raised']}; {board.last_problem()}"
    trial.should(f"{name}: no exception", counts["raised"] == 0, found)
    trial.must(f"{name}: control: there are hits and puts", board.is_used)
