"""Opens an engine's namespace as soon as its weights are known, and not before.

Until then nothing is loaded, and what is computed waits in the workers' buffers for saves, as far
as these hold it. Weights are digested and directories opened by threads beside the engine's, in the
scheduler's process and in each worker: a slow storage delays nothing. A namespace that cannot be
determined is never opened; after a failure opening is tried again.
"""

from __future__ import annotations

import contextlib
import secrets
import threading
import time
from collections.abc import Callable
from concurrent.futures import CancelledError, Future
from dataclasses import replace
from pathlib import Path
from typing import Final, NamedTuple

import numpy as np

from vua.connector.cache_spec import Model
from vua.connector.config import ConnectorConfig
from vua.connector.log import logger
from vua.device.buffers import StagingBuffer
from vua.errors import StorageError, VUAError
from vua.format.identity import Identity
from vua.format.keys import ChunkKey
from vua.io.words import counted
from vua.storage.base import entry_name
from vua.storage.description import descriptions, nearest
from vua.store.namespace import Namespace
from vua.store.place import locate, look_at
from vua.store.store import Loader, Store
from vua.store.writer import EntryWriter
from vua.weights import Identification, Weights

log = logger("scheduler")

_START_WAIT_S: Final = 1.0
"""How long the engine's start waits: enough for small models and remembered weights."""
_AGAIN_S: Final = 1.0
"""How long after a failure opening is tried again."""


class OpenedNamespace(NamedTuple):
    """An opened namespace of a model's identity."""

    model: Model
    namespace: Namespace
    """With one store per group of the model."""


def reads_back(store: Store) -> bool:
    """Whether a chunk of random bytes is read as it was written. True if none can be written."""
    layout, full = store.layout, store.layout.full
    key = ChunkKey(secrets.token_bytes(32), b"", 0, layout.chunk_tokens)
    written, read = (StagingBuffer(layout, full, 1) for _ in range(2))
    written.bytes[:] = np.frombuffer(secrets.token_bytes(len(written.bytes)), np.uint8)
    with contextlib.suppress(StorageError):
        if EntryWriter(store, written.memory).save_all([key]):
            came = Loader(store, read.memory).load([key]).chunks
            store.storage.delete(entry_name(key.name, full))
            return came == 1 and np.array_equal(written.bytes, read.bytes)
    return True


def close_within(close: Callable[[], None], timeout_s: float) -> None:
    """Close an object that uses the storage, waiting at most ``timeout_s``."""
    try:
        thread = threading.Thread(target=close, name="vua-close", daemon=True)
        thread.start()
    except RuntimeError:  # the system has no more threads: it is closed with the process
        return
    thread.join(timeout_s)


class Opening:
    """Opens the namespaces of one half of a connector, the latest wanted. Thread-safe."""

    def __init__(
        self,
        model: Model,
        config: ConnectorConfig,
        identification: Identification | None = None,
        *,
        then: Callable[[OpenedNamespace], object] = lambda _: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Open now what is identified, else when ``identification``, if any, has its result.

        Waits up to a second for that. ``then`` gets what a thread has opened; it must not block.
        ``clock`` returns seconds, for retries. Raises StorageError, LayoutError only for an
        identified model.
        """
        self._model, self._config, self._then, self._clock = model, config, then, clock
        self._changed = threading.Condition()
        self._identification = identification
        self.identity: Identity | None = None
        """Whose namespace is wanted; None before that is known."""
        self._opened: OpenedNamespace | None = None
        self._running: Identity | None = None
        """What a thread is opening; possibly no longer wanted."""
        self._again_s: float | None = None
        self._warned = self._closed = False
        self._weights: Weights | None = None
        if identification is not None:
            identification.answer.add_done_callback(self._identified)
            with self._changed:
                done = self._changed.wait_for(lambda: self._opened or self._warned, _START_WAIT_S)
            if not done:
                log.info(
                    "VUA: the weights are being identified (read once, then remembered); until "
                    "that is done nothing is loaded"
                )
        elif model.identified:
            self.identity = model.identity
            self._opened = self._open(model.identity)

    @property
    def soon(self) -> bool:
        """Whether the wanted namespace is being opened, for the first time."""
        return self.identity is not None and self._opened is None and not self._warned

    @property
    def searching(self) -> bool:
        search = self._identification
        return search is not None and self.identity is None and not (self._warned or self._closed)

    def begin(self, identity: Identity) -> None:
        """Switch to another namespace; returns at once."""
        with self._changed:
            if identity == self.identity or self._closed:
                return
            self.identity, self._opened, self._again_s = identity, None, None
            self._warned = False
            self._start()

    def take(self) -> OpenedNamespace | None:
        """Return the wanted namespace; None before it is open. Never waits."""
        if self._opened is not None or self._again_s is None:
            return self._opened
        with self._changed:
            if self._again_s is not None and self._clock() >= self._again_s:
                self._again_s = None
                self._start()
            return self._opened

    def wait(self, timeout_s: float) -> bool:
        """Wait until the wanted namespace is open; whether it is."""
        with self._changed:
            return self._changed.wait_for(lambda: self._opened is not None, timeout_s)

    def close(self) -> None:
        """Open nothing more, and stop the search for the weights."""
        with self._changed:
            self._closed, self._again_s = True, None
        if self._identification is not None:
            self._identification.close()

    def _identified(self, answer: Future[Weights]) -> None:
        try:
            weights = answer.result()
            if self._closed:
                return
            self._weights = weights
            identity = self._model.with_weights(weights.fingerprint).identity
            with self._changed:
                self.identity = self._running = identity
            self._run(identity)
        except CancelledError:
            pass
        except VUAError as problem:
            self._warn(problem)
        except Exception:  # whatever breaks, requests are served
            log.exception("VUA: this engine is served without a stored KV cache")

    def _open(self, identity: Identity) -> OpenedNamespace:
        model, config = replace(self._model, identity=identity, identified=True), self._config
        namespace = Namespace.create(
            locate(config.shared_storage_path, security=config.security),
            identity,
            [group.layout for group in model.groups],
            durable=config.durable,
            bounds=config.limits,
            security=config.security,
        )
        if not (model.trusts_itself or all(map(reads_back, namespace.stores))):
            namespace.close()
            raise StorageError("a chunk that was stored to try it is not what is read")
        return OpenedNamespace(model, namespace)

    def _start(self) -> None:
        """Open the wanted namespace on a thread; called with the lock. One thread at a time."""
        if self._running is not None or self.identity is None or self._closed:
            return
        self._running = self.identity
        try:
            threading.Thread(
                target=self._run, args=(self._running,), name="vua-open", daemon=True
            ).start()
        except RuntimeError:  # the system has no more threads
            self._running, self._again_s = None, self._clock() + _AGAIN_S

    def _run(self, identity: Identity) -> None:
        opened = None
        try:
            opened = self._open(identity)
        except VUAError as problem:
            self._warn(problem)
        except Exception:  # whatever breaks, requests are served
            if not self._warned:
                log.exception("VUA: the namespace could not be opened")
            self._warned = True
        with self._changed:
            self._running = None
            if identity == self.identity and not self._closed:
                self._opened = opened
                self._again_s = None if opened else self._clock() + _AGAIN_S
                if opened is not None and self._warned:
                    log.info("VUA: the namespace is open now: loads and stores begin")
                if opened is not None:
                    self._then(opened)
                opened = None
            else:
                self._start()
            self._changed.notify_all()
        if opened is not None:  # no longer wanted
            opened.namespace.close()
        with contextlib.suppress(OSError):
            self._tell(identity)

    def _warn(self, problem: VUAError) -> None:
        if not self._warned:
            self._warned = True
            log.warning("VUA: this engine is served without a stored KV cache: %s", problem)
        with self._changed:
            self._changed.notify_all()

    def _tell(self, identity: Identity) -> None:
        weights, self._weights = self._weights, None
        if weights is None or self._opened is None:
            return
        path, own = self._config.shared_storage_path, identity.namespace
        place = look_at(path, namespace=own)
        log.info(
            "VUA: KV cache in %s, namespace %s, chunks of %d tokens; weights identified in %.1f s "
            "(%.1f of %.1f MB read since this process began, the rest remembered or noted)",
            *(place.path, f"{own[:12]} ({place.amount})" if place.amount else own[:12]),
            *(self._model.chunk_tokens, weights.seconds),
            *(weights.read_nbytes / 1e6, weights.nbytes / 1e6),
        )
        if place.usage is None or place.usage.chunks or not isinstance(place.path, Path):
            return
        others = (one for one in descriptions(place.path) if one.name != own)
        for found, differences in nearest(identity, others):
            there = look_at(path, namespace=found.name)
            if there.usage is not None and there.usage.chunks:
                log.info(
                    "VUA: the nearest namespace with chunks is %s%s (%s). It differs in %s, "
                    "first: %s",
                    *(found.name[:12], f" of {found.engine}" if found.engine else ""),
                    *(there.amount, counted(len(differences), "field"), differences[0]),
                )
                break
