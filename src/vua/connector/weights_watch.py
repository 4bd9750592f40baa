"""Notices changes of a running engine's weights, however made, and holds its adapters.

Three checks, from the surest to the broadest:

- calls into the worker that are neither steps nor known to leave the weights unchanged; after
  ``sleep`` and ``wake_up`` every byte is compared;
- each parameter and buffer of the model: the same object, at the same address, and not written to
  according to PyTorch's version counter;
- bytes: lines spread over the memory of each, a few at a time in turns, compared with their earlier
  content. A write through ``param.data``, by a kernel or by another process leaves no other trace.

The engine's thread only compares the number of calls in each step. The rest happens on the threads
that load and save, before a load counts and before a chunk is written: counters and addresses that
are unchanged then were unchanged during the step, too.

If the weights may have changed (a doubt), every byte is read and compared with a digest from the
start of the epoch, on a separate thread. If that digest was not complete, the weights count as
changed.

Not noticed: a write without calls and counters that leaves every sampled line unchanged, until its
turn or until every byte is compared; and weights that a backend keeps packed outside all parameters
and buffers (oneDNN on some CPUs), if they are written without a call into the worker.
"""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from itertools import compress, cycle, islice
from operator import attrgetter, is_not
from typing import Any, Final, NamedTuple

import numpy as np
import torch
import xxhash

from vua.connector.extras import Adapter, AdapterNote
from vua.connector.log import logger
from vua.device.xxh3 import checksums

log = logger("worker")

_LINE_BYTES: Final = 64
"""A cache line: the unit in which memory is read."""
_LINES: Final = 16
"""Lines of a tensor per check, spread evenly over it."""
_PHASES: Final = 8
"""Sets of lines per tensor, taken in turns."""
_SAMPLE_TENSORS: Final = 32
"""Tensors per comparison: 32 KiB in all. The first one finds a change of all weights."""
_PART_NBYTES: Final = 8 << 20
"""Bytes of a tensor in the host's memory that are read at once for the digest."""
_PIECE_NBYTES: Final = 64 << 10
"""Bytes of a tensor on a device that are hashed separately, in parallel."""
_CLOSE_S: Final = 1.0
"""How long the end waits for a digest, which stops after the part being read."""
_VERSION: Final = attrgetter("_version")
"""How often PyTorch wrote to a tensor."""


@dataclass(slots=True, eq=False)
class EngineMemory:
    """The engine's worker in this process, whose calls the engine's own package counts."""

    model: Any
    """Has ``modules()``, as every `torch.nn.Module`."""
    calls: int = 0
    """How many calls may have changed the weights."""
    last_call: str = ""
    moves: int = 0
    """How often the weights were taken from the device or put back: the engine slept."""
    before_moves: list[Callable[[], None]] = field(default_factory=list)
    """Called whenever that begins: the weights cannot be read meanwhile."""


class Snapshot:
    """The state of a model's tensors at one time. Thread-safe."""

    def __init__(self, model: Any) -> None:
        found = list(_tensors_of(model))
        self._places = [(place, name) for place, name, _ in found]
        tensors = [tensor for _, _, tensor in found]
        self._tensors = [weakref.ref(tensor) for tensor in tensors]
        self._counting = [not tensor.is_inference() for tensor in tensors]
        self._versions = list(map(_VERSION, compress(tensors, self._counting)))
        self._addresses = [tensor.data_ptr() for tensor in tensors]
        distinct = {tensor.untyped_storage().data_ptr(): tensor for tensor in tensors}
        self._samples = list(_samples(list(distinct.values())))
        self._next = 0
        device = next((one.device for one in tensors if one.device.type == "cuda"), None)
        self._stream = None if device is None else torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._distinct = [weakref.ref(tensor) for tensor in distinct.values()]
        self.on_host = all(tensor.device.type == "cpu" for tensor in tensors)
        self._digest: list[int] | None = None
        self._lock = threading.Lock()
        self._confirmed_s = -1.0
        """When the latest check began that found nothing."""
        self.differs: str | None = None

    def still_at(self, moment_s: float) -> bool:
        """Whether the tensors are unchanged, by a check at ``moment_s`` or later.

        ``moment_s`` is of ``time.monotonic``. Most answers need no check.
        """
        with self._lock:
            if self.differs is None and self._confirmed_s < moment_s:
                self._compare()
            return self.differs is None

    @property
    def read(self) -> bool:
        """Whether all bytes were read, as :meth:`compare` requires."""
        return self._digest is not None

    def read_all(self, stop: threading.Event) -> None:
        """Remember every byte, by a digest; takes as long as reading them, or until ``stop``."""
        self._digest = self._read(stop)

    def compare(self, stop: threading.Event) -> None:
        """Compare every byte with what was read; sets :attr:`differs` at a difference."""
        now = self._read(stop)
        same = now is not None and now == self._digest
        same = self.still_at(time.monotonic()) and same
        if not same and self.differs is None:
            self.differs = "parameters that hold other bytes"

    def _read(self, stop: threading.Event) -> list[int] | None:
        try:
            digests = []
            with self._aside():
                for reference in self._distinct:
                    flat = _flat(reference())
                    read = _host_digest if flat.device.type == "cpu" else device_digest
                    if (digest := read(flat, stop)) is None:
                        return None
                    digests.append(digest)
        except (AttributeError, RuntimeError, ValueError) as problem:
            # no memory on the device for it, or a tensor is gone: unknown then
            log.debug("the weights could not be read: %s", problem)
            return None
        return digests

    def _compare(self) -> None:
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
            return "parameters that have moved"
        return None

    def _aside(self) -> AbstractContextManager[object]:
        """Queue work on a separate stream: on the engine's it would wait for a step."""
        return nullcontext() if self._stream is None else torch.cuda.stream(self._stream)

    def _bytes_differ(self) -> str | None:
        looked, first = 0, self._next
        with self._aside():
            for look in islice(cycle(self._samples), first, first + len(self._samples)):
                if looked >= _SAMPLE_TENSORS:
                    break
                looked += len(look.parts)
                self._next = (self._next + 1) % len(self._samples)
                if not torch.equal(look.now(), look.lines):
                    return "parameters that hold other bytes"
        return None


class _Sample(NamedTuple):
    parts: Sequence[tuple[weakref.ref[torch.Tensor], int]]
    lines: torch.Tensor
    """Their expected content: uint8 [lines, bytes]."""

    def now(self) -> torch.Tensor:
        return torch.cat([_lines(reference(), phase) for reference, phase in self.parts])


def _samples(tensors: Sequence[torch.Tensor]) -> Iterator[_Sample]:
    """Yield checks of separate tensors, phase by phase, :data:`_SAMPLE_TENSORS` tensors at most."""
    for phase in range(_PHASES):
        alike: dict[tuple[torch.device, int], list[torch.Tensor]] = {}
        for tensor in tensors:
            lines = _lines(tensor, phase)
            if lines.numel():
                alike.setdefault((tensor.device, lines.shape[1]), []).append(tensor)
        for some in alike.values():
            for first in range(0, len(some), _SAMPLE_TENSORS):
                parts = [(weakref.ref(one), phase) for one in some[first : first + _SAMPLE_TENSORS]]
                yield _Sample(parts, _Sample(parts, some[0]).now())


def _tensors_of(model: Any) -> Iterator[tuple[Mapping[str, Any], str, torch.Tensor]]:
    """A model's parameters and buffers: (the module's mapping, the name in it, the tensor)."""
    for module in model.modules():
        for place in (module._parameters, module._buffers):  # noqa: SLF001
            for name, tensor in place.items():
                if tensor is not None and tensor.device.type != "meta":
                    yield place, name, tensor


def _flat(tensor: torch.Tensor | None) -> torch.Tensor:
    storage = tensor.untyped_storage()  # type: ignore[union-attr] # of None: it is gone
    flat = torch.empty(0, dtype=torch.uint8, device=storage.device)
    return flat.set_(storage)


def _host_digest(flat: torch.Tensor, stop: threading.Event) -> int | None:
    digest = xxhash.xxh3_64()
    for start in range(0, flat.numel(), _PART_NBYTES):
        if stop.is_set():
            return None
        digest.update(flat[start : start + _PART_NBYTES].numpy().data)
    return digest.intdigest()


def device_digest(flat: torch.Tensor, stop: threading.Event) -> int | None:
    """Return a digest of bytes, uint8 [bytes], computed on their device; None after ``stop``.

    On the current stream, by one launch: the engine's thread waits for the GIL meanwhile.
    """
    if stop.is_set():
        return None
    starts = np.arange(flat.numel() // _PIECE_NBYTES, dtype=np.int64) * _PIECE_NBYTES
    sums = checksums(flat, starts, np.full_like(starts, _PIECE_NBYTES))
    rest = flat[len(starts) * _PIECE_NBYTES :].cpu().numpy()
    return xxhash.xxh3_64_intdigest(sums.tobytes() + rest.tobytes())


def _lines(tensor: torch.Tensor | None, phase: int) -> torch.Tensor:
    """Return lines of a tensor's memory, uint8 [lines, bytes]; not a copy."""
    flat = _flat(tensor)
    nbytes = flat.numel()
    if nbytes <= _LINES * _LINE_BYTES * _PHASES:
        return flat.view(1, nbytes) if phase == 0 else flat[:0].view(0, 1)
    stride = nbytes // (_LINES * _LINE_BYTES) * _LINE_BYTES
    shift = stride * phase // _PHASES // _LINE_BYTES * _LINE_BYTES
    return flat.as_strided((_LINES, _LINE_BYTES), (stride, 1), shift)


class NoAdapters:
    """An engine without LoRA adapters; a subclass knows of some. For the worker's thread.

    :meth:`holds` is for any thread.
    """

    def record(self) -> None:
        """Record the present adapters: those that the ending step has used."""

    def holds(self, adapter: Adapter | None) -> bool:
        """Whether an adapter was present at the latest :meth:`record`. None: none is needed."""
        return adapter is None

    def news(self, wanted: Iterable[Any]) -> dict[int, AdapterNote]:
        """Return what has changed since the last time, and the answer for each that is wanted.

        After a step's forward pass. ``wanted``: the engine's requests for adapters
        (``lora_int_id``) that the scheduler's half asks about.
        """
        return {request.lora_int_id: AdapterNote(None, 1) for request in wanted}


class EngineState:
    """One worker's weights and adapters in memory.

    For the worker's thread, except the result of :meth:`proof`.
    """

    expected: Snapshot
    """Of the weights; there if they are watched."""

    def __init__(
        self,
        engine: EngineMemory | None = None,
        adapters: NoAdapters | None = None,
        unknown: str | None = None,
    ) -> None:
        """Watch the given parts; None: weights never change, without adapters.

        ``unknown``: why the memory's content is unknown; nothing may then be stored or loaded.
        """
        self._engine, self.adapters, self.unknown = engine, adapters or NoAdapters(), unknown
        self.model = None if engine is None else engine.model
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        if engine is not None:
            engine.before_moves.append(self._stop_reading)
        self._read_from: Snapshot | None = None
        self.rebase()

    def rebase(self) -> None:
        """Expect the current weights from now on. Reads 8 KiB of each tensor."""
        self._comparison: threading.Thread | None = None
        if self._engine is not None:
            self._calls, self._moves = self._engine.calls, self._engine.moves
            self.expected = Snapshot(self._engine.model)
            if self.expected.on_host:
                self._read_all()

    def weights_changed(self) -> str | None:
        """Return what shows that the weights changed since :meth:`rebase`; None if nothing does.

        For each step: compares a number. Includes findings of other threads.
        """
        if (engine := self._engine) is None:
            return None
        if engine.calls != self._calls:
            return f"a call of {engine.last_call!r} into the worker"
        if engine.moves != self._moves:  # they should be the same
            self.doubt()
        if self._read_from is not self.expected:  # not while CUDA graphs are captured: no steps yet
            self._read_all()
        return self.expected.differs

    def doubt(self) -> None:
        """Compare every byte in the background: the weights may have changed.

        :meth:`weights_changed` has the result when :attr:`comparing` ends.
        """
        if self._engine is None:
            return
        expected, self._moves = self.expected, self._engine.moves
        self._comparison = self._start(expected.compare) if expected.read else None
        if self._comparison is None:
            expected.differs = expected.differs or "not all was read before a reset"

    @property
    def comparing(self) -> bool:
        """Whether to call :meth:`weights_changed` again before trusting the weights."""
        return self._comparison is not None and self._comparison.is_alive()

    def proof(self) -> Callable[[], bool]:
        """Return a function that checks, on any thread, for still the same weights.

        If so, they have been since this call.
        """
        if self._engine is None:
            return lambda: True
        return partial(self.expected.still_at, time.monotonic())

    def close(self) -> None:
        self._stop.set()
        if self._thread is not None:
            self._thread.join(_CLOSE_S)

    def _stop_reading(self) -> None:
        self.close()
        self._stop = threading.Event()

    def _read_all(self) -> None:
        self._read_from = self.expected
        self._start(self.expected.read_all)

    def _start(self, read: Callable[[threading.Event], None]) -> threading.Thread | None:
        before, stop = self._thread, self._stop

        def run() -> None:
            if before is not None:
                before.join()
            read(stop)

        thread = threading.Thread(target=run, name="vua-weights", daemon=True)
        try:
            thread.start()
        except RuntimeError:  # the system has no more threads: a doubt then counts as a change
            return None
        self._thread = thread
        return thread
