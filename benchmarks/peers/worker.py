"""Other stores for `vua bench --peers`: `PYTHON benchmarks/peers/worker.py [NAME...] DIRECTORY`.

Speaks JSON lines, one answer per question, and does nothing between them, so that its arms take
turns with all others. With names (`raw`, `safetensors`: how they begin) only those stores. See
vua/bench/peers.py for the questions.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import stores


class Worker:
    """Keeps every store with the same chunks."""

    def __init__(self, root: Path, only: tuple[str, ...]) -> None:
        """Find out which stores work here, with small chunks."""
        self.root, self.made = root, 0
        known = (one for one in stores.known(lmcache=not only) if one[0].startswith(only or ""))
        self.classes = dict(known)
        self.missing: dict[str, str] = {}
        self.stores: dict[str, stores.Store] = {}
        self.synced: set[str] = set()
        self.prepare(nbytes=65536, chunks=2, layers=2, trial=True)

    def prepare(self, *, nbytes: int, chunks: int, layers: int, trial: bool = False) -> None:
        """Write chunks with every store, and compare what each loads with what was written."""
        self.close()
        self.made += 1
        source = stores.aligned((chunks, nbytes))
        source[:] = np.random.default_rng(self.made).integers(0, 256, source.shape, dtype=np.uint8)
        for name, kind in list(self.classes.items()):
            try:
                store = kind(self.root / f"{self.made}-{len(self.stores)}", source, layers)
                check(store)
            except (
                Exception
            ) as problem:  # a peer that does not run here is left out, with its reason
                if not trial:
                    raise
                self.missing[name] = f"{type(problem).__name__}: {problem}"[:300]
                del self.classes[name]
                continue
            self.stores[name] = store

    def close(self) -> None:
        """Drop the stores and their files."""
        for store in self.stores.values():
            store.close()
        self.stores.clear()
        for path in self.root.iterdir():
            shutil.rmtree(path)

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


def main() -> int:
    """Answer until the input ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the other side closes the input then
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever a peer prints goes to the error output
    with contextlib.redirect_stdout(sys.stderr):
        worker = Worker(Path(sys.argv[-1]), tuple(sys.argv[1:-1]))
        hello = {"arms": list(worker.classes), "missing": worker.missing}
        print(json.dumps(hello), file=answers, flush=True)
        for line in sys.stdin:
            try:
                found = worker.answer(json.loads(line))
            except Exception as problem:  # noqa: BLE001 - the other side decides what it means
                found = {"error": f"{type(problem).__name__}: {problem}"}
            print(json.dumps(found), file=answers, flush=True)
        worker.close()
    return 0


if __name__ == "__main__":
    main()
    os._exit(0)  # peers leave threads behind that would not end
