"""What keys cost: loads and saves of sealed chunks against plain ones, turn by turn.

    python benchmarks/sealed.py [--rounds 15] [--directory /dev/shm]

For chunks of 2 and 8 MiB, warm in the page cache, into memory in which chunks lie as in their
files and into paged memory: the time of each kind as a multiple of the plain one's (median and
quartiles of the rounds), and what the fastest round takes more than the fastest plain one. `noop`
is the plain arm against itself: far from 1.00, the machine was not quiet.
"""

from __future__ import annotations

import argparse
import shutil
import tempfile
from pathlib import Path

from speed import expect
from suite.measure import Arm, Timings, measure
from suite.prompts import CASES, Case, Memory, make, noise
from vua import native
from vua.format.identity import Identity
from vua.format.keys import KeyChain, token_ids
from vua.security.keyring import write_key
from vua.security.settings import Security
from vua.storage.base import WRITTEN
from vua.store.namespace import Namespace
from vua.store.store import Loader, Store
from vua.store.writer import EntryWriter

CHUNKS = 4


class Kind:
    """One kind of store, with chunks in it."""

    def __init__(self, name: str, root: Path, case: Case, security: Security) -> None:
        """Store the chunks below ``root``."""
        self.name, self.source = name, noise(case)
        identity = Identity(model=f"{name} {case.name}", chunk_tokens=case.layout.chunk_tokens)
        self.store: Store = Namespace.create(
            root, identity, [case.layout], security=security
        ).stores[0]
        ids = token_ids(range(case.layout.chunk_tokens * CHUNKS))
        naming = self.store.keyring.naming()
        self.keys = KeyChain(ids, case.layout.chunk_tokens, naming=naming).first(CHUNKS)
        self.folder = root / identity.namespace
        self.saver = EntryWriter(self.store, self.source.map)
        self.save()

    def save(self) -> None:
        """Write all chunks."""
        for place, key in enumerate(self.keys):
            expect("a save", holds=self.saver.save([key], place) == [WRITTEN])

    def clear(self) -> None:
        """Take them away again."""
        for key in self.keys:
            shutil.rmtree(self.folder / key.name[:2] / key.name)

    def load(self, memory: Memory) -> Arm:
        """Load them all, after seeing once that it brings the right bytes."""
        loader = Loader(self.store, memory.map)
        memory.words[:] = 0
        loader.load(self.keys)
        same = (memory.tokens() == self.source.tokens()).all()
        expect(f"bytes of {self.name}", holds=bool(same))
        return Arm(
            lambda: expect("a load", holds=loader.load(self.keys).chunks == CHUNKS),
        )


def report(what: str, timings: Timings, mib: float) -> None:
    """Print a line per kind."""
    plain = min(timings.seconds["plain"])
    for arm, seconds in timings.seconds.items():
        if arm in ("plain", "plain, again"):
            continue
        row = timings.row("", what, arm, "plain", better="lower")
        extra = (min(seconds) - plain) * 1e3 / mib
        print(
            f"{what:34} {arm:12} {row.ratio:5.2f} x ({row.low:.2f}-{row.high:.2f})"
            f"  +{extra:.3f} ms/MiB  noop {timings.noop:.2f}"
        )


def run(root: Path, rounds: int) -> None:
    """Measure."""
    write_key(root / "key")
    key = str(root / "key")
    settings = {
        "plain": Security(),
        "keyed": Security(key_file=key),
        "encrypted": Security(key_file=key, encrypt=True),
    }
    for case in [replaced(case) for case in CASES[1:3]]:
        kinds = [Kind(name, root / "cache", case, one) for name, one in settings.items()]
        mib = CHUNKS * case.layout.full.payload_nbytes(case.layout) / 2**20
        for place in ("staged", "paged"):
            memory = make(place, case)
            arms = {kind.name: kind.load(memory) for kind in kinds}
            report(f"load, {case.name}, {place}", measure(arms, "plain", rounds), mib)
        arms = {kind.name: Arm(kind.save, kind.clear) for kind in kinds}
        report(f"save, {case.name}", measure(arms, "plain", rounds), mib)
        shutil.rmtree(root / "cache")


def replaced(case: Case) -> Case:
    """The case with as many chunks as are used here."""
    return Case(case.name, case.layout, CHUNKS)


def main() -> None:
    """Run from the command line."""
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--rounds", type=int, default=15)
    arguments.add_argument("--directory", help="where to make the caches; by default /tmp")
    given = arguments.parse_args()
    print(f"native load loop: {'yes' if native.library() else 'no'}")
    with tempfile.TemporaryDirectory(dir=given.directory) as directory:
        run(Path(directory), given.rounds)


if __name__ == "__main__":
    main()
