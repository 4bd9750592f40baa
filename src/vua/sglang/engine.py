"""The SGLang engine that owns the backend: its model, its settings, and changes of its weights.

SGLang passes a backend neither. The backend is created on the scheduler's thread, at the start or
when it is attached later, so the scheduler is found on the call stack. If it is not found nothing
is cached, since the weights would be unknown.
"""

from __future__ import annotations

import functools
import re
import sys
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from types import FrameType
from typing import Any, Final

from safetensors import SafetensorError, safe_open

from vua.connector.adapters import Content
from vua.connector.cache_spec import UncachedError, local_directory
from vua.connector.log import logger
from vua.connector.weights_watch import Snapshot
from vua.errors import ConfigError
from vua.weights import checkpoint_files, process_began_s

log = logger("worker")

_ADAPTERS: Final = b"vua.sglang.lora.v1"
_FROM_DISK: Final = "update_weights_from_disk"
_UPDATES: Final = (
    _FROM_DISK,
    "load_weights_from_distributed",
    "update_weights_from_tensor",
    "update_weights_from_ipc",
    "begin_weight_update",
    "end_weight_update",
)
"""The methods by which a model runner of SGLang gets new weights; other changes are seen in
memory."""
_DISK_FORMATS: Final = ("auto", "safetensors")
"""Those with which an update loads all tensors of the files that `checkpoint_files` names."""
_MAKES_REQUESTS: Final = "_create_generation_req"
_ID: Final = re.compile(r"[0-9a-f]{32}")
"""An adapter's id, as SGLang makes them."""
_NO_ADAPTER: Final = "|no-adapter"
_OTHER_ID: Final = "|adapter"
_LIKE_AN_ADAPTER: Final = re.compile(r"(?:[0-9a-f]{32}|\|no-adapter|\|adapter)\Z")


def passes_prefix_keys() -> bool:
    """Whether SGLang passes this backend, which is being created, the pages before each page."""
    name = "hicache_storage_pass_prefix_keys"
    return any(frame.f_locals.get(name) is True for frame in _callers())


class Engine:
    """The engine that creates a backend, watched from its start on. Thread-safe."""

    def __init__(self, runner: Any, scheduler: Any) -> None:
        """Watch SGLang's model runner; :meth:`find` calls this. Raises UncachedError."""
        self.runner: Any = runner
        self.directory: Path | None = None
        """The directory of the expected weights; None: that of the engine's start."""
        self.loaded_s = process_began_s()
        """When their loading began at the earliest, in seconds since the epoch."""
        self.adapters = _adapters(runner.lora_manager)
        """The content of the LoRA adapters that it was started with, by SGLang's id."""
        self._lock = threading.Lock()
        served = runner.server_args
        self._names = _tensor_names(served.model_path, served.revision, served.download_dir)
        """The tensors that it was started from; None: unknown."""
        self._beyond = False
        """Whether something outside a checkpoint may have been changed."""
        self._snapshot = Snapshot(runner.model)
        self._left: str | None = None
        """The sign that the weights are not the expected ones; None: they are."""
        self._next: Path | None = None
        """The directory of the runner's current weights, if an update named it."""
        self._cleared = False
        """Whether nothing computed by earlier weights is cached any more."""
        self._pool: Any = None
        self._watch_updates()
        _keep_adapters_apart(scheduler)

    @classmethod
    def find(cls) -> Engine:
        """Return the engine that is creating a backend right now.

        Raises UncachedError: it is not found; or it is running already and was not watched, so that
        its weights may have changed since its start.
        """
        runner: Any = None
        owner: Any = None
        starting = False
        for frame in _callers():
            owner = frame.f_locals.get("self")
            runner = getattr(getattr(owner, "tp_worker", None), "model_runner", None)
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
        return cls(runner, owner)

    def proof(self) -> Callable[[], bool]:
        """Return a function that checks, on any thread, for still the same weights.

        If so, they have been since this call.
        """
        snapshot, moment_s = self._snapshot, time.monotonic()
        return lambda: (
            self._left is None and self._snapshot is snapshot and snapshot.still_at(moment_s)
        )

    def unchanged(self) -> bool:
        """Whether the weights are the expected ones; checks some of them."""
        if self._left is None and not self.proof()():
            self._beyond = True
            self._leave(self._snapshot.differs or "other weights")
        return self._left is None

    def take_directory(self) -> Path | None:
        """Return where new weights were loaded from, once nothing of earlier ones is cached.

        From then on these are the expected ones. None: none are new, or they are unknown.
        """
        with self._lock:
            if self._left is None or self._next is None or not self._cleared:
                return None
            self.directory, self._next, self._left = self._next, None, None
            return self.directory

    def watch_pool(self, pool: Any) -> None:
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
        updater = self.runner.weight_updater
        if missing := [name for name in _UPDATES if not hasattr(updater, name)]:
            msg = f"SGLang's weight updater has no {missing[0]}: updates could not be noticed"
            raise UncachedError(msg)
        self.runner.weight_updater = _Updater(updater, self)

    def update(self, name: str, update: Callable[..., Any], *args: Any, **named: Any) -> Any:
        """Let SGLang update the weights; from its start on nothing is loaded or stored.

        The weights are known again after an update that sets all tensors with which the engine was
        started, unless an earlier one set something else.
        """
        self._leave(name)
        began_s = time.time()
        if name == _FROM_DISK:
            return self._update_from_disk(began_s, update, *args, **named)
        given = _names_given(name, args, named)
        if given is None or self._names is None or not given <= self._names:
            self._beyond = True
        return update(*args, **named)

    def _update_from_disk(
        self,
        began_s: float,
        update: Callable[..., Any],
        model_path: str,
        load_format: str,
        *args: Any,
        **named: Any,
    ) -> Any:
        result = update(model_path, load_format, *args, **named)
        partly = named.get("weight_name_filter") is not None or args[:1] not in ((), (None,))
        known = result[0] and not partly and load_format in _DISK_FORMATS and not self._beyond
        with self._lock:
            self._snapshot, self.loaded_s = Snapshot(self.runner.model), began_s
            self._next = Path(model_path) if known and self._sets_all(model_path) else None
        return result

    def _sets_all(self, model_path: str) -> bool:
        """Whether files there hold all tensors that the engine was started from."""
        if self._names is None or self.runner.model_config.quantization is not None:
            return False
        found = _tensor_names(model_path, None, self.runner.server_args.download_dir)
        return found is not None and found >= self._names

    def _leave(self, change: str) -> None:
        with self._lock:
            self._left, self._next, self._cleared = change, None, False
        log.warning(
            "VUA: the weights change (%s): nothing stored is used, and nothing is stored, until "
            "all weights are loaded from a directory and the cache is flushed",
            change,
        )


class _Updater:
    def __init__(self, updater: Any, engine: Engine) -> None:
        self._vua_updater, self.vua_engine = updater, engine

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._vua_updater, name)
        return functools.partial(self.vua_engine.update, name, found) if name in _UPDATES else found


def _adapters(manager: Any) -> dict[str, str]:
    """Return digests of the adapters that SGLang's LoRA manager (or None) has loaded, by id.

    An id is in the names of all pages that its adapter computes. SGLang derives the ids of initial
    adapters from their names and paths, so another adapter at the same path has the same id. The
    ids of adapters that are loaded later are drawn anew each time.

    Raises UncachedError: one of them holds something without canonical bytes.
    """
    found = {}
    for name, adapter in (manager.loras if manager else {}).items():
        held = [
            adapter.config.hf_config,
            [layer.weights for layer in adapter.layers],
            adapter.embedding_layers,
            adapter.added_tokens_embeddings,
        ]
        found[name] = Content(held, _ADAPTERS, copied=False).digest()
    return found


def _names_given(
    name: str, args: tuple[Any, ...], named: Mapping[str, Any]
) -> frozenset[str] | None:
    """Return the names of the tensors that an update sets, as in files; None: unknown."""
    if name == "begin_weight_update":
        return frozenset()  # tensors packed in place are unpacked; packed again at the end
    if name == "end_weight_update":
        return None if named.get("run_post_load", True) else frozenset()
    if name == "update_weights_from_ipc":
        return None
    tensors = named.get("named_tensors", args[0] if args else None)
    load_format = named.get("load_format", args[1] if len(args) > 1 else None)
    try:
        if load_format == "flattened_bucket":
            return frozenset(str(one.name) for one in tensors["metadata"])
        return None if load_format is not None else frozenset(str(one[0]) for one in tensors)
    except (AttributeError, KeyError, TypeError, IndexError):
        return None


def _tensor_names(
    model: str, revision: str | None, download_dir: str | None
) -> frozenset[str] | None:
    """Return the names of the tensors in a model's safetensors files; None: no files."""
    names = set[str]()
    try:
        for file in checkpoint_files(local_directory(model, revision, download_dir)):
            with safe_open(file, "pt") as opened:
                names.update(opened.keys())
    except (ConfigError, OSError, SafetensorError):
        return None
    return frozenset(names)


def kept_apart(extra_key: str | None, lora_id: str | None) -> str | None:
    """Return the ``extra_key`` of a request, changed if it looks like one with an adapter.

    SGLang appends an adapter's id to a request's ``extra_key``, and names pages by the result. A
    client may send a key that ends with such an id: it gets an ending that no adapter has.
    Different keys stay different, and all other keys stay unchanged.

    Args:
        extra_key: as SGLang made it; with an adapter it ends with ``lora_id``.
        lora_id: the adapter's; None: the request has none.

    >>> kept_apart("tenant", None), kept_apart("0" * 32, None), kept_apart("0" * 32, "0" * 32)
    ('tenant', '00000000000000000000000000000000|no-adapter', '00000000000000000000000000000000')
    """
    if lora_id is not None:
        return extra_key if _ID.fullmatch(lora_id) else f"{extra_key}|{len(lora_id)}{_OTHER_ID}"
    if extra_key is not None and _LIKE_AN_ADAPTER.search(extra_key):
        return extra_key + _NO_ADAPTER
    return extra_key


def _keep_adapters_apart(scheduler: Any) -> None:
    """Wrap the method that creates requests.

    Raises UncachedError: SGLang creates them elsewhere.
    """
    make = getattr(scheduler, _MAKES_REQUESTS, None)
    if make is None:
        msg = f"SGLang's scheduler has no {_MAKES_REQUESTS}: adapters cannot be kept apart"
        raise UncachedError(msg)

    @functools.wraps(make)
    def made(*args: Any, **named: Any) -> Any:
        request = make(*args, **named)
        request.extra_key = kept_apart(request.extra_key, request.lora_id)
        return request

    setattr(scheduler, _MAKES_REQUESTS, made)


def _callers() -> list[FrameType]:
    frames, frame = [], sys._getframe(1)  # noqa: SLF001
    while frame is not None:
        frames.append(frame)
        frame = frame.f_back  # type: ignore[assignment]
    return frames
