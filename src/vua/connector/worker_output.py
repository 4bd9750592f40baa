"""What workers tell the scheduler's half at the end of a step."""

from __future__ import annotations

from dataclasses import dataclass, field

from vua.connector.adapters import AdapterNote, together
from vua.connector.events import FileEvents
from vua.connector.metadata import LoadTimes, Verdict

__all__ = ["WorkerOutput"]


@dataclass(slots=True)
class WorkerOutput:
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

    def aggregate(self, other: object) -> WorkerOutput:
        """Return what both say together."""
        if not isinstance(other, WorkerOutput):
            return self
        return WorkerOutput(
            self.times.aggregate(other.times),
            self.files.aggregate(other.files),
            self.verdicts + other.verdicts,
            other.left_epoch if self.left_epoch is None else self.left_epoch,
            together(self.adapters, other.adapters),
        )
