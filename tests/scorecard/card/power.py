"""Test 3: the power fails while entries are written.

A file system lies in an image on a loop device, the image on an XFS that can clone files. A clone
(``FICLONE``: at one instant, whole) holds what the file system had sent to its disk by then and
nothing that was still in memory: what a disk without a volatile cache holds after a power cut. It
is mounted, which replays the journal, and read.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import signal
import time
from collections import Counter
from pathlib import Path
from typing import Final

from scorecard.faults.mounts import command, formatted, mounted, own_mounts, why_no_mounts
from scorecard.subject import Key, Subject
from scorecard.trial import NotRunError, Trial, scored

_KINDS: Final = {  # mount options: for writing, and for mounting a clone
    "ext4": (("commit=1",), ()),
    "xfs": ((), ("nouuid",)),
    "btrfs": (("commit=2",), ()),
}
_IMAGE_NBYTES: Final = 3 << 30
_NBYTES: Final = 1 << 20
_PAUSE_S: Final = 0.004  # between two puts: about 100 MB/s, so that the image does not fill up
_MOST: Final = 2000
_CUT_S: Final = (1.0, 12.0)
_QUICK_CUT_S: Final = (1.0, 2.0)
_FIRST_S: Final = 60.0
"""The longest wait for the first put."""


@scored(
    3,
    "Power cut",
    gate=True,
    quick=1,
    full=60,
    bar="0 wrong; what is damaged is a miss, gone after the first touch, and can be put again",
)
def cut_power(trial: Trial) -> None:
    """Cut the power of ext4, XFS and Btrfs in turn, after some seconds of puts."""
    kinds = list(_KINDS)[: trial.scale]
    reason = why_no_mounts("xfs", *kinds)
    if reason:
        raise NotRunError(reason)
    try:
        own_mounts()
        outer = formatted(trial.directory / "outer", "xfs", 4 * _IMAGE_NBYTES)
        with mounted(outer, trial.directory / "disk", "xfs") as disk:
            found = {kind: Counter[str]() for kind in kinds}
            for turn in range(trial.scale):
                kind = kinds[turn % len(kinds)]
                found[kind] += _cut(trial, disk, kind)
    except OSError as problem:
        raise NotRunError(str(problem)) from problem
    for kind, seen in found.items():
        trial.note(f"{kind}: {dict(seen)}")
    total = sum(found.values(), Counter[str]())
    trial.must("nothing wrong is read", total["wrong"] == 0, total["wrong"])
    trial.must("no read raises", total["raised"] == 0, total["raised"])
    trial.must("damage is gone after the first touch", total["stuck"] == 0, total["stuck"])
    trial.must("what was lost can be put again", total["unhealed"] == 0, total["unhealed"])
    trial.must("something was written before each cut", total["acknowledged"] >= trial.scale)


def _cut(trial: Trial, disk: Path, kind: str) -> Counter[str]:
    """Write for a while, cut, and look at what is there afterwards."""
    image = formatted(disk / "image", kind, _IMAGE_NBYTES)
    clone, at = disk / "clone", trial.directory / "live"
    clone.unlink(missing_ok=True)
    writing, mounting = _KINDS[kind]
    with mounted(image, at, kind, *writing), mmap.mmap(-1, 8) as shared:
        writer = _start(trial, at, shared)
        try:
            time.sleep(trial.random.uniform(*(_QUICK_CUT_S if trial.quick else _CUT_S)))
            until_s = time.monotonic() + _FIRST_S
            while not any(shared[:]) and time.monotonic() < until_s:  # on a busy machine
                time.sleep(0.01)
            acknowledged = int.from_bytes(shared[:], "little")
            command("cp", "--reflink=always", image, clone)
        finally:
            os.kill(writer, signal.SIGKILL)
            os.waitpid(writer, 0)
    with mounted(clone, trial.directory / "after", kind, *mounting) as after:
        subject = trial.factory(after, _NBYTES)
        try:
            return _looked(trial, subject, acknowledged)
        finally:
            subject.close()


def _start(trial: Trial, root: Path, shared: mmap.mmap) -> int:
    """Fork a writer; ``shared`` counts what it was told to be stored. Returns its process id."""
    child = os.fork()
    if child:
        return child
    with contextlib.suppress(BaseException):
        subject = trial.factory(root, _NBYTES)
        for number in range(_MOST):
            key = Key(number)
            subject.put(key, key.payload(_NBYTES))
            shared[:] = (number + 1).to_bytes(8, "little")
            time.sleep(_PAUSE_S)
        time.sleep(3600)
    os._exit(1)


def _looked(trial: Trial, subject: Subject, acknowledged: int) -> Counter[str]:
    """Read every entry that was acknowledged, then put those that are lost again."""
    seen, lost = Counter(acknowledged=acknowledged), []
    for number in range(acknowledged):
        key = Key(number)
        there = bool(subject.files(key))
        found = trial.look(subject, key)
        if found == "miss":
            seen["damaged" if there else "absent"] += 1
            seen["stuck"] += bool(subject.files(key))
            lost.append(key)
        else:
            seen[found] += 1
    for key in lost[:: max(1, len(lost) // 50)]:  # some of them: all would take long
        stored = subject.put(key, key.payload(_NBYTES))
        seen["unhealed"] += not stored or trial.look(subject, key) != "hit"
    return +seen
