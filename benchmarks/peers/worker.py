"""Other stores for `dev.py bench --peers`: `PYTHON benchmarks/peers/worker.py [NAME...] DIRECTORY`.

Speaks JSON lines, one answer per question, and does nothing between them, so that its arms take
turns with all others. Each set of chunks has a process of its own, whose memory ends with it. With
names (`raw`, `safetensors`: how they begin) only those stores. The questions are those of
benchmarks/suite/peers.py.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import IO, Any

import numpy as np
import stores


class Worker:
    """Keeps every store with the same chunks."""

    def __init__(self, root: Path, classes: dict[str, Any]) -> None:
        """Prepare nothing yet."""
        self.root, self.classes = root, classes
        self.stores: dict[str, stores.Store] = {}
        self.synced: set[str] = set()

    def try_out(self) -> dict[str, str]:
        """Find out which stores do not work here, with small chunks, and why."""
        missing = {}
        for name in self.classes:
            try:
                self.prepare(nbytes=65536, chunks=2, layers=2, only=name)
            except Exception as problem:  # noqa: BLE001 - such a peer is left out, with its reason
                missing[name] = f"{type(problem).__name__}: {problem}"[:300]
        return missing

    def prepare(self, *, nbytes: int, chunks: int, layers: int, only: str = "") -> None:
        """Write chunks with every store, and compare what each loads with what was written."""
        source = stores.aligned((chunks, nbytes))
        source[:] = np.random.default_rng(1).integers(0, 256, source.shape, dtype=np.uint8)
        for name, kind in self.classes.items():
            if only in ("", name):
                store = kind(self.root / f"{len(self.stores)}", source, layers)
                check(store)
                self.stores[name] = store

    def answer(self, question: dict[str, Any]) -> dict[str, Any]:
        """Do what is asked."""
        what = question.pop("op")
        if what == "prepare":
            self.prepare(**question)
            return {}
        store = self.stores[question["arm"]]
        if what == "cool":
            for path in store.files():
                fd = os.open(path, os.O_RDONLY)
                if path not in self.synced:
                    os.fsync(fd)
                    self.synced.add(path)
                os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
                os.close(fd)
            return {}
        if what == "save":
            store.next()
        start = time.perf_counter()
        (store.save if what == "save" else store.load)()
        return {"seconds": time.perf_counter() - start}


def check(store: stores.Store) -> None:
    """Raise unless the store loads what it saved."""
    store.save()
    store.target[:] = 0
    store.load()
    if not np.array_equal(store.loaded(), store.source):
        raise RuntimeError("it loaded other bytes than were saved")


def apart(root: Path, work: Callable[[], str]) -> str:
    """Return what `work` returns in a process of its own, and delete the files it leaves.

    Some stores do not give back their memory, or leave threads that would not end.
    """
    ours, theirs = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.write(theirs, work().encode())
        finally:
            os._exit(0)
    os.close(theirs)
    with os.fdopen(ours) as pipe:
        found = pipe.read()
    os.waitpid(child, 0)
    for path in root.iterdir():
        shutil.rmtree(path)
    return found


def serve(worker: Worker, first: str, answers: IO[str]) -> str:
    """Answer questions about one set of chunks; return the next one that is not about it."""
    line = first
    while True:
        try:
            found = worker.answer(json.loads(line))
        except Exception as problem:  # noqa: BLE001 - the other side decides what it means
            found = {"error": f"{type(problem).__name__}: {problem}"}
        print(json.dumps(found), file=answers, flush=True)
        line = sys.stdin.readline()
        if not line or json.loads(line)["op"] in ("prepare", "rest"):
            for store in worker.stores.values():
                store.close()
            return line


def known(only: list[str]) -> tuple[dict[str, type[stores.Store]], dict[str, str]]:
    """Return the stores by name, those that begin as ``only`` says, and why some are missing."""
    if only:
        start = tuple(only)
        return {name: kind for name, kind in stores.KNOWN.items() if name.startswith(start)}, {}
    try:
        from lmcache_stores import KNOWN
    except ImportError as problem:
        return dict(stores.KNOWN), {"LMCache": str(problem)}
    return stores.KNOWN | KNOWN, {}


def main() -> int:
    """Answer until the input ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the other side closes the input then
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever a peer prints goes to the error output
    *only, root = sys.argv[1:]
    with contextlib.redirect_stdout(sys.stderr):
        classes, missing = known(only)
        worker = Worker(Path(root), classes)
        refused = json.loads(apart(worker.root, lambda: json.dumps(worker.try_out())))
        for name in refused:
            del classes[name]
        missing |= refused
        hello = {"arms": list(classes), "missing": missing}
        print(json.dumps(hello), file=answers, flush=True)
        line = sys.stdin.readline()
        while line:
            if json.loads(line)["op"] == "rest":
                print("{}", file=answers, flush=True)
                line = sys.stdin.readline()
            else:
                line = apart(worker.root, partial(serve, worker, line, answers))
    return 0


if __name__ == "__main__":
    main()
