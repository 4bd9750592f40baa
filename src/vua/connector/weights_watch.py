"""Notices that the weights of a running engine have changed, however that was done.

Three looks, from the surest to the widest:

- calls into the worker that are no steps and not known to leave the weights alone;
- each parameter and buffer of the model: the same object, at the same address, and by PyTorch's
  version counter not written to;
- bytes: lines spread over the memory of each, a few at a time in turns, compared with what they
  were. A write through ``param.data``, by a kernel or by another process leaves no other trace.

The engine's thread only compares the number of calls in each step. The rest happens on the threads
that load and save, before a load counts and before a chunk is written: counters and addresses that
are unchanged then were unchanged during the step, too.

What none of this sees: a write past calls and counters that leaves every sampled line as it was,
for ever or until its turn; and weights that a backend keeps packed outside of all parameters and
buffers (oneDNN on some CPUs), when something writes there without a call into the worker.
"""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Iterator, Mapping
from itertools import compress
from operator import attrgetter, is_not
from typing import Any, Final, Protocol

import torch

__all__ = ["EngineMemory", "Snapshot", "WeightsWatch"]

_LINE_BYTES: Final = 64
"""A cache line: the unit in which memory is read."""
_LINES: Final = 16
"""Lines of a tensor per look, spread evenly over it."""
_PHASES: Final = 8
"""Sets of lines per tensor, taken in turns."""
_LOOKS: Final = 32
"""Looks per comparison: 32 KiB in all. A change of all weights is found by the first one."""
_VERSION: Final = attrgetter("_version")
"""How often PyTorch wrote to a tensor."""


class EngineMemory(Protocol):
    """The engine's worker in this process, as far as its weights go."""

    model: Any
    """Has ``modules()``, as every `torch.nn.Module`."""

    @property
    def calls(self) -> int:
        """How often something was called that may have changed the weights."""

    @property
    def last_call(self) -> str:
        """The name of the latest of these."""


class WeightsWatch:
    """Watches one worker's model. For the worker's thread."""

    def __init__(self, engine: EngineMemory) -> None:
        """Take the weights as they are now for those that everybody expects."""
        self._engine = engine
        self.rebase()

    def rebase(self) -> None:
        """Expect the weights that are there now from here on. Reads 8 KiB of each tensor."""
        self._calls, self.expected = self._engine.calls, Snapshot(self._engine.model)

    def changed(self) -> str | None:
        """Return what shows that the weights have changed since :meth:`rebase`; None if nothing.

        For each step: compares a number. What looks of other threads have found counts too.
        """
        if self._engine.calls != self._calls:
            return f"a call of {self._engine.last_call!r} into the worker"
        return self.expected.differs


class Snapshot:
    """What a model's tensors were at one time. Safe for threads."""

    def __init__(self, model: Any) -> None:  # noqa: ANN401
        found = list(_found(model))
        self._places = [(place, name) for place, name, _ in found]
        tensors = [tensor for _, _, tensor in found]
        self._tensors = [weakref.ref(tensor) for tensor in tensors]
        self._counting = [not tensor.is_inference() for tensor in tensors]
        self._versions = list(map(_VERSION, compress(tensors, self._counting)))
        self._addresses = [tensor.data_ptr() for tensor in tensors]
        distinct = {tensor.untyped_storage().data_ptr(): tensor for tensor in tensors}
        self._looks = [
            (weakref.ref(tensor), phase, lines.clone())
            for phase in range(_PHASES)
            for tensor in distinct.values()
            if (lines := _lines(tensor, phase)).numel()
        ]
        self._next = 0
        self._lock = threading.Lock()
        self._confirmed_s = -1.0
        """When the latest look began that found nothing."""
        self.differs: str | None = None
        """What a look has found to be otherwise; stays."""

    def still_at(self, moment_s: float) -> bool:
        """Whether the tensors are what they were, by a look at ``moment_s`` or later.

        ``moment_s`` is of ``time.monotonic``. Most answers are known without a look.
        """
        with self._lock:
            if self.differs is None and self._confirmed_s < moment_s:
                self._look()
            return self.differs is None

    def _look(self) -> None:
        """Look at every tensor's counter and address, and at some of the bytes."""
        began = time.monotonic()
        try:
            self.differs = self._tensors_differ() or self._bytes_differ()
        except (AttributeError, TypeError):  # None, where a tensor was
            self.differs = "parameters that are gone"
        self._confirmed_s = began

    def _tensors_differ(self) -> str | None:
        tensors: list[Any] = [place.get(name) for place, name in self._places]
        if any(map(is_not, tensors, (one() for one in self._tensors))):
            return "parameters that were replaced"
        if list(map(_VERSION, compress(tensors, self._counting))) != self._versions:
            return "parameters that were written to"
        if [tensor.data_ptr() for tensor in tensors] != self._addresses:
            return "parameters that lie elsewhere"
        return None

    def _bytes_differ(self) -> str | None:
        looks, first = self._looks, self._next
        count = min(_LOOKS, len(looks))
        self._next = (first + count) % max(1, len(looks))
        for number in range(first, first + count):
            reference, phase, lines = looks[number % len(looks)]
            tensor = reference()
            if tensor is None or not torch.equal(_lines(tensor, phase), lines):
                return "parameters that hold other bytes"
        return None


def _found(model: Any) -> Iterator[tuple[Mapping[str, Any], str, torch.Tensor]]:  # noqa: ANN401
    """A model's parameters and buffers: (where a module keeps it, under which name, itself)."""
    for module in model.modules():
        for place in (module._parameters, module._buffers):  # noqa: SLF001
            for name, tensor in place.items():
                if tensor is not None and tensor.device.type != "meta":
                    yield place, name, tensor


def _lines(tensor: torch.Tensor, phase: int) -> torch.Tensor:
    """Return lines of the memory that a tensor lies in, uint8 [lines, bytes]; not a copy."""
    storage = tensor.untyped_storage()
    nbytes = storage.nbytes()
    flat = torch.empty(0, dtype=torch.uint8, device=tensor.device)
    flat.set_(storage)
    if nbytes <= _LINES * _LINE_BYTES * _PHASES:
        return flat.view(1, nbytes) if phase == 0 else flat[:0].view(0, 1)
    stride = nbytes // (_LINES * _LINE_BYTES) * _LINE_BYTES
    shift = stride * phase // _PHASES // _LINE_BYTES * _LINE_BYTES
    return flat.as_strided((_LINES, _LINE_BYTES), (stride, 1), shift)
