"""Other stores as arms: a worker process in an environment of its own, asked line by line in JSON.

The worker (benchmarks/peers/worker.py) keeps its own files of the same sizes, does what it is asked
when it is asked, so that its arms take turns with all others, and answers with the seconds it took.
"""

from __future__ import annotations

import json
import subprocess
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from speed import MeasurementError


class Peers:
    """A running worker. A context manager; one thread at a time."""

    def __init__(self, command: Sequence[str], directory: Path) -> None:
        """Start ``command`` with files below ``directory``. Raises MeasurementError, OSError."""
        self._process = subprocess.Popen(
            [*command, str(directory)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        hello = self._answer()
        self.arms: list[str] = hello["arms"]
        """The stores that work here."""
        self.missing: dict[str, str] = hello["missing"]
        """The stores that do not, and why."""

    def prepare(self, *, nbytes: int, chunks: int, layers: int) -> None:
        """Write ``chunks`` files of ``nbytes`` payload with every store, and check what they load.

        Stores that keep a file per layer divide a chunk's payload by ``layers``.
        """
        self._ask(op="prepare", nbytes=nbytes, chunks=chunks, layers=layers)

    def rest(self) -> None:
        """Give up what was prepared: some stores hold several times its memory."""
        self._ask(op="rest")

    def load(self, arm: str) -> float:
        """Load all chunks into memory that is used again; return the seconds it took."""
        return float(self._ask(op="load", arm=arm)["seconds"])

    def save(self, arm: str) -> float:
        """Write all chunks under new names; return the seconds until it was done."""
        return float(self._ask(op="save", arm=arm)["seconds"])

    def cool(self, arm: str) -> None:
        """Put the files of one store out of the page cache."""
        self._ask(op="cool", arm=arm)

    def _ask(self, **question: object) -> dict[str, Any]:
        if self._process.stdin is None:
            raise MeasurementError("the peers' worker has no input")
        self._process.stdin.write(json.dumps(question) + "\n")
        self._process.stdin.flush()
        return self._answer()

    def _answer(self) -> dict[str, Any]:
        line = self._process.stdout.readline() if self._process.stdout else ""
        if not line:
            code = self._process.wait()
            raise MeasurementError(f"the peers' worker ended with exit status {code}; see above")
        answer: dict[str, Any] = json.loads(line)
        if "error" in answer:
            raise MeasurementError(f"the peers' worker: {answer['error']}")
        return answer

    def __enter__(self) -> Peers:  # noqa: PYI034 - Self needs Python 3.11
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        problem: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """End the worker."""
        if self._process.stdin is not None:
            self._process.stdin.close()
        try:
            self._process.wait(timeout=10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        if self._process.stdout is not None:
            self._process.stdout.close()
