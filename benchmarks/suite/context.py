"""One run of the suite, as its parts see it: how to run, where, and what was found so far."""

from __future__ import annotations

import itertools
import os
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from suite.measure import Row
from suite.peers import Peers


@dataclass(frozen=True, slots=True)
class Settings:
    """How to run."""

    directory: Path | None = None
    """On the file system to measure; the system's directory for temporary files by default."""
    tiny: bool = False
    """Sizes that take seconds: shows that everything works, its ratios say nothing."""
    only: Sequence[str] = ()
    """Numbers to run; all by default."""
    peers: Sequence[str] = ()
    """Command of the peers' worker (benchmarks/peers/worker.py)."""
    engine: Sequence[str] = ()
    """Command of the program that measures an engine (benchmarks/connector.py)."""
    trace: Path | None = None
    """A request trace for C7 and C11; a generated one otherwise."""
    largest: int = 100_000
    """The most chunks for C10."""


@dataclass(slots=True)
class Bench:
    """One run: where it works, and what it has found so far."""

    settings: Settings
    root: Path
    peers: Peers | None = None
    engine: dict[str, Any] | None = None
    """What the engine's program found, once it has run."""
    rows: list[Row] = field(default_factory=list)
    unmeasured: list[dict[str, str]] = field(default_factory=list)
    show: Callable[[str], None] = lambda _line: None

    @property
    def tiny(self) -> bool:
        """Whether sizes are tiny."""
        return self.settings.tiny

    def rounds(self, usual: int) -> int:
        """Return how many rounds to measure."""
        return 2 if self.tiny else usual

    def skip(self, number: str, what: str, reason: str) -> None:
        """Note what could not be measured, and why."""
        self.unmeasured.append({"id": number, "what": what, "reason": reason})

    def place(self, name: str) -> Path:
        """Return an empty directory."""
        path = self.root / name
        shutil.rmtree(path, ignore_errors=True)
        path.mkdir(parents=True)
        return path

    def drop(self, path: Path) -> None:
        """Empty the files of a directory that :meth:`place` made, and move it aside.

        It is deleted at the end: ext4 passes over inodes that were deleted in the last minutes, one
        by one, each time it creates a file.
        """
        for file in path.rglob("*"):
            if file.is_file():
                os.truncate(file, 0)
        path.rename(self.root / f"dropped-{next(_DROPPED)}")


_DROPPED: Final = itertools.count()
