"""Test 23: hosts whose clocks are wrong by days, through libfaketime."""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Final

from scorecard.faults import skewed
from scorecard.stores import VuaSubject
from scorecard.subject import Key
from scorecard.trial import NotRunError, Trial, scored
from vua.capacity.gc import collect
from vua.capacity.limits import Limits, ResolvedLimits
from vua.capacity.removal import GRACE_S
from vua.capacity.spaces import TRASH
from vua.storage.base import entry_name
from vua.storage.local import LocalStorage
from vua.storage.names import TEMPORARY

_LIBRARIES: Final = ("/usr/lib", "/usr/lib64", "/usr/local/lib")
_SKEWS: Final = ("-2d", "+2d")


def _faketime() -> str | None:
    found = itertools.chain.from_iterable(
        Path(place).glob("**/faketime/libfaketimeMT.so.1") for place in _LIBRARIES
    )
    return next((str(path) for path in found), None)


@scored(
    23,
    "Clock skew of 2 days",
    quick=2,
    full=40,
    bar="nothing younger than the grace is removed, orphans are; recency goes by the server",
)
def skew(trial: Trial) -> None:
    """Let processes two days ahead and two days behind put, use, evict and collect."""
    trial.needs_vua("the names of its leftovers")
    library = _faketime()
    if library is None:
        raise NotRunError("libfaketime is not installed")
    lost, left, disorder = 0, 0, 0
    for turn in range(max(1, trial.scale // len(_SKEWS))):
        root = trial.directory / f"cache-{turn}"
        root.mkdir()
        subject = VuaSubject(root, skewed.NBYTES)
        old, young = _prepare(subject)
        said = _skewed(library, "collect", root)
        trial.must("the clocks were wrong", _two_days_off(said), said)
        lost += sum(not path.exists() for path in young)
        left += sum(path.exists() for path in old)
        disorder += _disorder(trial, library, root.with_name(f"order-{turn}"))
    trial.must("nothing younger than the grace or the ttl is removed", lost == 0, lost)
    trial.must("what is older is gone after one collection", left == 0, left)
    trial.must("who was used last stays, whoever says so", disorder == 0, disorder)
    trial.must("a file replaced while it is read stays as it was", _replaced(trial))


def _prepare(subject: VuaSubject) -> tuple[list[Path], list[Path]]:
    """Entries and leftovers; those that are older than grace and time to live, and the others."""
    for number in range(8):
        key = Key(number)
        subject.put(key, key.payload(skewed.NBYTES))
    folders = [subject.files(Key(number))[0].parent for number in range(8)]
    space = folders[0].parents[1]
    old, young = folders[:4], folders[4:]
    for aged, entry, places in ((True, folders[0], old), (False, folders[4], young)):
        digit = f"{aged:d}"
        for folder in (subject.root, space, entry):
            part = f"host-{digit * 8}-1-1" if folder == entry else digit * 16
            path = folder / f"{TEMPORARY}{part}"
            path.write_bytes(b"{\n")
            places.append(path)
        trash = space / f"{TRASH}{digit * 16}"
        trash.mkdir()
        places.append(trash)
    for path in reversed(old):  # a file before the directory that it lies in
        stamp = path.stat().st_mtime_ns - int(2 * max(GRACE_S, skewed.TTL_S) * 1e9)
        os.utime(path, ns=(stamp, stamp))
    return old, young


def _skewed(library: str, what: str, root: Path, *arguments: str) -> list[float]:
    """Do something in two processes at once, one behind and one ahead; return their clocks."""
    started = [
        subprocess.Popen(
            [sys.executable, "-m", skewed.__name__, what, str(root), *arguments],
            env={
                **os.environ,
                "PYTHONPATH": os.pathsep.join(sys.path),
                "LD_PRELOAD": library,
                "FAKETIME": skew,
                "NO_FAKE_STAT": "1",  # what the file system says comes from the server
            },
            stdout=subprocess.PIPE,
            text=True,
        )
        for skew in _SKEWS
    ]
    said = [process.communicate(timeout=300)[0] for process in started]
    if any(process.returncode for process in started):
        raise RuntimeError(f"{what} failed in a process with a wrong clock")
    return [float(json.loads(text)) for text in said]


def _two_days_off(said: list[float]) -> bool:
    behind, ahead = said
    return 3.9 * 86400 < ahead - behind < 4.1 * 86400


def _disorder(trial: Trial, library: str, root: Path) -> int:
    """Put under wrong clocks, then use some with the right one; what is evicted is the rest."""
    root.mkdir()
    _skewed(library, "put", root)  # both put 0..5
    subject = VuaSubject(root, skewed.NBYTES)
    for number in (1, 3, 5):
        store = subject.store()
        store.used([subject.chunk(Key(number))], 1, wait=True)
    collect(root, ResolvedLimits.of(root, Limits(max_bytes=4 * skewed.NBYTES, min_free_bytes=0)))
    found = [trial.look(subject, Key(number)) for number in range(6)]
    subject.close()
    return int(found != ["miss", "hit"] * 3)


def _replaced(trial: Trial) -> bool:
    """Open a file, replace it, read it: the bytes are those of the file that was opened."""
    subject = VuaSubject(trial.directory, skewed.NBYTES)
    key = Key(1)
    subject.put(key, key.payload(skewed.NBYTES))
    (path,) = subject.files(key)
    right = path.read_bytes()
    storage = subject.store().storage
    assert isinstance(storage, LocalStorage)
    fd, _ = storage.open_file(entry_name(subject.chunk(key).name, subject.layout.full))
    other = path.with_name("other")
    other.write_bytes(bytes(len(right)))
    other.replace(path)
    found = os.pread(fd, len(right) + 1, 0)
    os.close(fd)
    return found == right
