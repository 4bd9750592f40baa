"""The SGLang engine that owns the backend: its model, its settings, and changes of its weights.

SGLang passes a backend neither. The backend is created on the scheduler's thread, at the start or
when it is attached later, so the scheduler is found on the call stack. If it is not found nothing
is cached, since the weights would be unknown.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from types import FrameType
from typing import Any, Final

from vua.connector.cache_spec import UncachedError
from vua.connector.log import logger
from vua.connector.weights_watch import Snapshot
from vua.weights import process_began_s

log = logger("worker")

_UPDATES: Final = (
    "update_weights_from_disk",
    "load_weights_from_distributed",
    "update_weights_from_tensor",
    "update_weights_from_ipc",
    "begin_weight_update",
    "end_weight_update",
)
"""The methods by which a model runner of SGLang gets new weights; other changes are seen in
memory."""


def passes_prefix_keys() -> bool:
    """Whether SGLang passes this backend, which is being created, the pages before each page."""
    name = "hicache_storage_pass_prefix_keys"
    return any(frame.f_locals.get(name) is True for frame in _callers())


class Engine:
    """The engine that creates a backend, watched from its start on. Thread-safe."""

    def __init__(self, runner: Any) -> None:
        """Watch SGLang's model runner; :meth:`find` calls this. Raises UncachedError."""
        self.runner: Any = runner
        self.loaded_s = process_began_s()
        """When the weights' loading began at the earliest, in seconds since the epoch."""
        self._snapshot, self._left = Snapshot(runner.model), False
        updater = runner.weight_updater
        if missing := [name for name in _UPDATES if not hasattr(updater, name)]:
            msg = f"SGLang's weight updater has no {missing[0]}: updates could not be noticed"
            raise UncachedError(msg)
        runner.weight_updater = _Updater(updater, self)

    @classmethod
    def find(cls) -> Engine:
        """Return the engine that is creating a backend right now.

        Raises UncachedError: it is not found; or it is running already and was not watched, so that
        its weights may have changed since its start.
        """
        runner: Any = None
        starting = False
        for frame in _callers():
            worker = getattr(frame.f_locals.get("self"), "tp_worker", None)
            runner = getattr(worker, "model_runner", None)
            if callable(getattr(getattr(runner, "model", None), "modules", None)):
                starting = frame.f_code.co_name == "__init__"
                break
        else:
            msg = "SGLang did not create this backend in its scheduler: its model cannot be found"
            raise UncachedError(msg)
        if isinstance(watched := runner.weight_updater, _Updater):
            return watched.vua_engine
        if not starting:
            raise UncachedError(
                "VUA was attached to a running server, whose weights may have been updated before; "
                "start SGLang with VUA, then it can be detached and attached again"
            )
        return cls(runner)

    def proof(self) -> Callable[[], bool]:
        """Return a function that checks, on any thread, for still the same weights.

        If so, they have been since this call.
        """
        moment_s = time.monotonic()
        return lambda: not self._left and self._snapshot.still_at(moment_s)

    def unchanged(self) -> bool:
        """Whether the weights are those of the start; checks some of them."""
        if not self._left and not self.proof()():
            self.leave(self._snapshot.differs or "other weights")
        return not self._left

    def leave(self, change: str) -> None:
        """Have nothing loaded or stored any more."""
        if not self._left:
            text = "VUA: the weights change (%s): nothing is loaded or stored until a restart"
            log.warning(text, change)
        self._left = True


class _Updater:
    """SGLang's weight updater: an update, from its start on, ends the use of what is stored."""

    def __init__(self, updater: Any, engine: Engine) -> None:
        self._vua_updater, self.vua_engine = updater, engine

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._vua_updater, name)

        def update(*args: Any, **named: Any) -> Any:
            self.vua_engine.leave(name)
            return found(*args, **named)

        return update if name in _UPDATES else found


def _callers() -> list[FrameType]:
    frames, frame = [], sys._getframe(1)  # noqa: SLF001
    while frame is not None:
        frames.append(frame)
        frame = frame.f_back  # type: ignore[assignment]
    return frames
