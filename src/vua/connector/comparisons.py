"""A worker's half of the witness: chunks that it has computed against the files that hold them.

The engine's thread only copies the chunk out of its blocks, as for a save; reading the file and
comparing are done on a thread of their own. See `vua.connector.witness`.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from vua.connector.config import ConnectorConfig
from vua.connector.group_transfer import GroupTransfer
from vua.connector.log import logger
from vua.connector.metadata import Compared, Verdict, WitnessOrder
from vua.device.buffers import StagingBuffer
from vua.format.keys import ChunkKey
from vua.io.workers import Attempt, Workers
from vua.store.agreement import Agreement, compare
from vua.store.store import Loader
from vua.store.writer import Noted

__all__ = ["Comparisons"]

log = logger("worker")


@dataclass(frozen=True, slots=True)
class _Computed:
    """One chunk of one group as it was computed."""

    group: GroupTransfer
    key: ChunkKey
    buffer: Any


@dataclass(frozen=True, slots=True)
class _Comparison:
    number: int
    chunks: Sequence[_Computed]


class Comparisons:
    """One rank's comparisons. Each order gets one verdict. Called from the worker's thread only."""

    def __init__(self, config: ConnectorConfig, *, quantised: bool) -> None:
        """Start no thread yet; ``quantised`` as in :func:`vua.store.agreement.tolerance`."""
        self._quantised = quantised
        self._threads: Workers[_Comparison] = Workers(
            1, timeout_s=config.timeouts.io_s, name="vua-witness"
        )
        self._lock = threading.Lock()
        self._verdicts: list[Verdict] = []

    def begin(self, order: WitnessOrder, groups: Sequence[GroupTransfer]) -> None:
        """Copy an order's chunks out of the engine's blocks and compare them in the background."""
        chunks: list[_Computed] = []
        try:
            for number, keys in order.parts:
                for key in keys:
                    buffer = groups[number].save_buffers.take()
                    if buffer is None:
                        self._give_back(chunks)
                        self._tell(Verdict(order.number, text="all buffers are in use"))
                        return
                    chunks.append(_Computed(groups[number], key, buffer))
                    groups[number].gather([buffer], [key], [order.block_ids])
            self._threads.submit(self._compare, _Comparison(order.number, chunks))
        except Exception as problem:  # costs a comparison, never a request
            log.exception("a chunk could not be copied to be compared")
            self._give_back(chunks)
            self._tell(Verdict(order.number, text=f"{problem}"))

    def cannot(self, order: WitnessOrder) -> None:
        """Answer an order whose chunks this worker cannot copy."""
        self._tell(Verdict(order.number, text="the worker cannot read its blocks"))

    def take(self) -> list[Verdict]:
        """Return the verdicts since the last call; what hangs is given up."""
        for attempt in self._threads.overdue():
            if not attempt.started:
                self._give_back(attempt.what.chunks)
            self._tell(Verdict(attempt.what.number, text="the storage does not answer"))
        if not self._verdicts:
            return []
        with self._lock:
            verdicts, self._verdicts = self._verdicts, []
        return verdicts

    def close(self, timeout_s: float) -> None:
        """Finish what is being compared, for so long at most."""
        self._threads.close(timeout_s=timeout_s)

    def _compare(self, attempt: Attempt[_Comparison]) -> None:
        number = attempt.what.number
        verdict = Verdict(number, text="an error, see the log")
        try:
            verdict = self._judge(attempt)
        except Exception:  # likewise
            log.exception("a chunk could not be compared")
        finally:
            self._give_back(attempt.what.chunks)
            if attempt.settle():
                self._tell(verdict)

    def _judge(self, attempt: Attempt[_Comparison]) -> Verdict:
        found: list[Compared] = []
        missing = "there was no whole chunk to compare"
        for chunk in attempt.what.chunks:
            agreement, writers = self._agreement(chunk)
            attempt.progress()
            name = f"chunk {chunk.key.name[:12]}"
            if isinstance(agreement, str):
                missing = f"{name}: {agreement}"
                continue
            text = f"{name}, tokens from {chunk.key.start}: {agreement}"
            found.append(Compared(chunk.key.start, writers, agreement.ratio, text))
        return Verdict(attempt.what.number, tuple(found), "" if found else missing)

    def _agreement(self, chunk: _Computed) -> tuple[Agreement | str, frozenset[bytes]]:
        """Compare one chunk, and say who wrote it; why not, where its file cannot be loaded."""
        group, noted = chunk.group, Noted()
        stored = StagingBuffer(group.group.layout, group.shard, 1)
        loader = Loader(group.store, stored.memory, target=group.shard)
        loaded = loader.load([chunk.key], noted)
        if not loaded.chunks:
            return f"its file is {loaded.reason}", frozenset()
        group.fetch([chunk.buffer])
        layers = group.group.layers[group.shard.layer_start : group.shard.layer_stop]
        computed, theirs = group.arrays(chunk.buffer), group.arrays(stored)
        dtype = group.group.layout.dtype
        agreement = compare(computed, theirs, dtype, layers, quantised=self._quantised)
        return agreement, frozenset(noted)

    def _tell(self, verdict: Verdict) -> None:
        with self._lock:
            self._verdicts.append(verdict)

    @staticmethod
    def _give_back(chunks: Sequence[_Computed]) -> None:
        for chunk in chunks:
            chunk.group.save_buffers.give_back(chunk.buffer)
