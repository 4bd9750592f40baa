"""What workers tell the scheduler's half at the end of a step: one object, as vLLM carries one."""

from __future__ import annotations

from dataclasses import dataclass, field

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorWorkerMetadata

from vua.vllm.adapters import AdapterNote, together
from vua.vllm.events import FileEvents
from vua.vllm.messages import LoadTimes, Verdict

__all__ = ["WorkerNotes"]


@dataclass(slots=True)
class WorkerNotes(KVConnectorWorkerMetadata):
    """Of one worker, or of all of them together."""

    times: LoadTimes
    """How long loads took that ended in this step."""
    files: FileEvents
    """What was seen of files; nothing where no events are wanted."""
    verdicts: list[Verdict] = field(default_factory=list)
    """Of comparisons that ended; one per worker and order."""
    left_epoch: str | None = None
    """The epoch with whose weights this engine does not run any more; None: none."""
    adapters: dict[int, AdapterNote] = field(default_factory=dict)
    """What changed among LoRA adapters, and what was asked about them, by number."""

    def aggregate(self, other: KVConnectorWorkerMetadata) -> WorkerNotes:
        """Return what both say together."""
        if not isinstance(other, WorkerNotes):
            return self
        return WorkerNotes(
            self.times.aggregate(other.times),
            self.files.aggregate(other.files),
            self.verdicts + other.verdicts,
            other.left_epoch if self.left_epoch is None else self.left_epoch,
            together(self.adapters, other.adapters),
        )
