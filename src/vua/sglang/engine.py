"""The SGLang engine around the backend: its model, its settings, and whether its weights change.

SGLang gives a backend neither. The backend is made on the scheduler's thread, at the start or when
it is attached later, so the scheduler is found among the callers. Where it is not found nothing is
cached: what the pages were computed with could not be told then.
"""

from __future__ import annotations

import functools
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any, Final

from vua.connector.adapters import content_digest
from vua.connector.cache_spec import UncachedError
from vua.connector.log import logger
from vua.connector.weights_watch import Snapshot
from vua.weights import process_began_s

__all__ = ["Engine", "passes_prefix_keys"]

log = logger("worker")

_ADAPTERS: Final = b"vua.sglang.lora.v1"
_FROM_DISK: Final = "update_weights_from_disk"
_UPDATES: Final = (
    _FROM_DISK,
    "load_weights_from_distributed",
    "update_weights_from_tensor",
    "update_weights_from_ipc",
)
"""The ways in which a model runner of SGLang gets other weights; others are seen in memory."""


def passes_prefix_keys() -> bool:
    """Whether SGLang tells this backend, which is being made, what stands before each page."""
    name = "hicache_storage_pass_prefix_keys"
    return any(frame.f_locals.get(name) is True for frame in _callers())


class Engine:
    """The engine that makes a backend, watched from its start on. Safe for threads."""

    def __init__(self, runner: Any) -> None:  # noqa: ANN401
        """Watch SGLang's model runner; :meth:`find` calls this. Raises UncachedError."""
        self.runner: Any = runner
        self.directory: Path | None = None
        """Where the expected weights come from; None: from where the engine was started."""
        self.loaded_s = process_began_s()
        """When their loading began at the earliest, in seconds since the epoch."""
        self.adapters = _adapters(runner.lora_manager)
        """The content of the LoRA adapters that it was started with, by SGLang's id."""
        self._lock = threading.Lock()
        self._snapshot = Snapshot(runner.model)
        self._left: str | None = None
        """What shows that the weights are not those that are expected; None: they are."""
        self._next: Path | None = None
        """Where the weights come from that the runner has now, if an update told it."""
        self._cleared = False
        """Whether nothing that earlier weights computed is cached any more."""
        self._pool: Any = None
        self._watch_updates()

    @classmethod
    def find(cls) -> Engine:
        """Return the engine that makes a backend right now.

        Raises UncachedError: it is not found; or it runs already and was not watched, so that its
        weights may be others than those of its start.
        """
        runner: Any = None
        starting = False
        for frame in _callers():
            owner = frame.f_locals.get("self")
            runner = getattr(getattr(owner, "tp_worker", None), "model_runner", None)
            if callable(getattr(getattr(runner, "model", None), "modules", None)):
                starting = frame.f_code.co_name == "__init__"
                break
        else:
            msg = "SGLang did not make this backend in its scheduler: its model is not found"
            raise UncachedError(msg)
        if isinstance(watched := runner.weight_updater, _Updater):
            return watched.vua_engine
        if not starting:
            msg = (
                "VUA was attached to a running server, whose weights may have been updated before; "
                "start SGLang with VUA, then it can be detached and attached again"
            )
            raise UncachedError(msg)
        return cls(runner)

    def proof(self) -> Callable[[], bool]:
        """Return what tells, on any thread, whether the weights still are those expected now.

        If so, they have been since this call.
        """
        snapshot, moment_s = self._snapshot, time.monotonic()
        return lambda: (
            self._left is None and self._snapshot is snapshot and snapshot.still_at(moment_s)
        )

    def unchanged(self) -> bool:
        """Whether the weights are those that are expected; looks at some of them."""
        if self._left is None and not self.proof()():
            self._leave(self._snapshot.differs or "other weights")
        return self._left is None

    def take_directory(self) -> Path | None:
        """Return where other weights were loaded from, once nothing of earlier ones is cached.

        From then on these are the expected ones. None: there is nothing new, or nobody knows.
        """
        with self._lock:
            if self._left is None or self._next is None or not self._cleared:
                return None
            self.directory, self._next, self._left = self._next, None, None
            return self.directory

    def watch_pool(self, pool: Any) -> None:  # noqa: ANN401
        """Note when the host pool is cleared: SGLang does so when it flushes its caches."""
        if pool is self._pool:
            return
        self._pool, clear = pool, pool.clear

        @functools.wraps(clear)
        def cleared() -> None:
            clear()
            with self._lock:
                self._cleared = True

        pool.clear = cleared

    def _watch_updates(self) -> None:
        """Stand before what updates the runner's weights."""
        updater = self.runner.weight_updater
        if missing := [name for name in _UPDATES if not hasattr(updater, name)]:
            msg = f"SGLang's weight updater has no {missing[0]}: updates could not be noticed"
            raise UncachedError(msg)
        self.runner.weight_updater = _Updater(updater, self)

    def update(self, name: str, update: Callable[..., Any], *args: Any, **named: Any) -> Any:  # noqa: ANN401
        """Let SGLang update the weights; nothing is loaded or stored from before it on."""
        self._leave(name)
        began_s = time.time()
        result = update(*args, **named)
        if name == _FROM_DISK and result[0]:
            path = named.get("model_path", args[0] if args else None)
            partly = named.get("weight_name_filter") is not None or len(args) > 2
            with self._lock:
                self._snapshot, self.loaded_s = Snapshot(self.runner.model), began_s
                self._next = None if partly or path is None else Path(path)
        return result

    def _leave(self, change: str) -> None:
        with self._lock:
            self._left, self._next, self._cleared = change, None, False
        log.warning(
            "VUA: the weights change (%s): nothing stored is used, and nothing is stored, until "
            "weights are loaded from a directory and the cache is flushed",
            change,
        )


class _Updater:
    """Takes the place of SGLang's weight updater, and passes everything on."""

    def __init__(self, updater: Any, engine: Engine) -> None:  # noqa: ANN401
        """Stand before ``updater``; tell ``engine`` of updates."""
        self._vua_updater, self.vua_engine = updater, engine

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401
        """Return what the updater has, or what tells of the update beside it."""
        found = getattr(self._vua_updater, name)
        return functools.partial(self.vua_engine.update, name, found) if name in _UPDATES else found


def _adapters(manager: Any) -> dict[str, str]:  # noqa: ANN401
    """Return digests of the adapters that SGLang's LoRA manager (or None) has loaded, by id.

    An id is in the names of all pages that its adapter computes. SGLang makes the ids of those that
    it starts with of their names and paths, so another adapter at the same path has the same id.
    The ids of adapters that are loaded later are drawn anew each time.

    Raises UncachedError: one of them holds what has no lasting bytes.
    """
    found = {}
    for name, adapter in (manager.loras if manager else {}).items():
        held = [
            adapter.config.hf_config,
            [layer.weights for layer in adapter.layers],
            adapter.embedding_layers,
            adapter.added_tokens_embeddings,
        ]
        found[name] = content_digest(held, _ADAPTERS)
    return found


def _callers() -> list[FrameType]:
    """Return the frames below which this package's code runs, the nearest first."""
    frames, frame = [], sys._getframe(1)  # noqa: SLF001
    while frame is not None:
        frames.append(frame)
        frame = frame.f_back  # type: ignore[assignment]
    return frames
