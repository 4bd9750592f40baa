"""VUA as an L2 tier of LMCache's multi-process mode: its objects, verified and bounded.

::

    lmcache server ... --l2-adapter '{"type": "plugin", "module_path": "vua.lmcache.l2_adapter",
        "class_name": "VUAL2Adapter",
        "adapter_params": {"path": "/mnt/kv", "plain_engines": true}}'

An object comes back as it was stored, for the same key, model files, shapes and dtypes, or not at
all. LMCache names objects by hashes of tokens alone: a prompt with a LoRA adapter has the keys of
the same prompt without. So the operator must state that the engines have none; nothing is stored
before. LMCache does not pass the tokens, so nothing is shared with other engines. Needs LMCache
0.5.6.

:class:`Models` identifies the model of LMCache's objects. LMCache's keys contain a model's name and
hashes of tokens: nothing about weights, adapters or settings. So the digest of the files at that
name counts, or a label that the operator sets. Objects of two checkpoints are never confused if
each engine serves the files at its name and was started after they were put there. A model whose
files change is not served: engines that loaded them before, and those that load them now, use
one name.
"""

from __future__ import annotations

import hashlib
import logging
import threading
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import CancelledError
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np
from lmcache.lmcache_native import Bitmap
from lmcache.v1.distributed.internal_api import L2StoreResult
from lmcache.v1.distributed.l2_adapters.base import L2AdapterInterface
from lmcache.v1.platform import create_event_notifier

from vua.capacity.limits import Limits
from vua.connector.cache_spec import UncachedError, local_directory
from vua.connector.load_policy import savings_at
from vua.connector.log import WarnOnce
from vua.errors import ConfigError, VUAError
from vua.format.identity import Identity
from vua.format.keys import ChunkKey
from vua.format.layout import KVLayout
from vua.io.pool import Job, Pool
from vua.native import MemoryMap
from vua.security.settings import Security
from vua.storage.base import entry_name
from vua.storage.location import nearest
from vua.store.namespace import Access
from vua.store.place import LazyNamespace, locate
from vua.store.store import Store
from vua.store.writer import EntryWriter, process_writer
from vua.weights import Identification, Weights, checkpoint_files, identify_weights
from vua.weights.content import State
from vua.weights.fingerprint import CLOCK_TICK_S

_DECORATION: Final = "##lmcache-"
"""LMCache appends this to a name to tell layouts apart; it stays in the identity."""
_FIRST_WAIT_S: Final = 1.0
"""How long a model's first caller waits for its digest."""
_BESIDE: Final = ("*.json", "*.py")
"""Files that say what the weights mean."""
_NO_CONFIG: Final = frozenset(("tokenizer.json", "tokenizer_config.json", "vocab.json"))
"""Files that turn text into tokens, which are in the key."""


def _files_at(name: str) -> list[tuple[Path, State]]:
    """Return the files of a model, and what the file system says of each."""
    folder = local_directory(name.partition(_DECORATION)[0], None, None)
    found = set(checkpoint_files(folder))
    for path in (one for pattern in _BESIDE for one in folder.glob(pattern)):
        if path.name not in _NO_CONFIG and path.is_file():
            found.add(path)
    return [(path, State.of(path)) for path in sorted(found)]


class Models:
    """The models of one LMCache server. Thread-safe."""

    def __init__(self, labels: str | Mapping[str, str] | None) -> None:
        """Use labels: one for all models, or one per name.

        Raises ConfigError: one is not a text, or empty.
        """
        given = {"": labels} if isinstance(labels, str) else dict(labels or {})
        if not all(isinstance(each, str) and each for each in (*given.values(),)):
            raise ConfigError(
                f'adapter_params has "label": {labels!r}; expected a text that is not empty, or an '
                "object with such a text for each model's name"
            )
        self._labels, self._began_s = given, time.time()
        self._lock = threading.Lock()
        self._known: dict[str, tuple[list[tuple[Path, State]], Identification]] = {}
        """By name: its files, and the search for their digest."""
        self._refused: set[str] = set()

    def close(self) -> None:
        for _, search in self._known.values():
            search.close()

    def digest(self, name: str) -> str | None:
        """Return a model's digest; None: it is not known yet, or cannot be known.

        Checks the files' times at each call. Logs once why a model is not served.
        """
        label = self._labels.get(name, self._labels.get(""))
        if label is not None:
            return f"label {label}"
        if name in self._refused:
            return None
        try:
            files = _files_at(name)
            with self._lock:
                if new := name not in self._known:
                    search = Identification(partial(self._identified, [path for path, _ in files]))
                    self._known[name] = files, search
            first, search = self._known[name]
            if files != first:
                raise UncachedError("its files were changed after it was served first")
            if not search.wait(_FIRST_WAIT_S if new else 0.0):
                return None
            return f"files {search.answer.result().fingerprint}"
        except CancelledError:
            return None
        except (VUAError, OSError) as problem:
            with self._lock:
                level = logging.DEBUG if name in self._refused else logging.ERROR
                self._refused.add(name)
            log.log(level, _REFUSED, name, problem, name)
            return None

    def _identified(self, files: Sequence[Path], stop: threading.Event) -> Weights:
        found = identify_weights(files, stop=stop)
        if found.changed_s > self._began_s - CLOCK_TICK_S:
            raise UncachedError("its files were changed after this server's start")
        return found


log = logging.getLogger(__name__)

_SETTINGS: Final = (
    *("path", "plain_engines", "label", "max_bytes", "min_free_bytes", "ttl_s", "durable", "epoch"),
    "threads",
)
_THREADS: Final = 4
_REFUSED: Final = (
    "VUA: nothing of LMCache's model %s is stored or loaded: %s. If its files are on this host, "
    'restart this server after the engines; if not, set "label": {"%s": "..."} in adapter_params, '
    "a text that changes whenever its weights or its configuration do"
)
_STORE, _LOOKUP, _LOAD = "store", "lookup", "load"


@dataclass(frozen=True, slots=True)
class _Form:
    """The meaning of an object's bytes, as far as LMCache tells it."""

    model: str
    shapes: tuple[tuple[int, ...], ...]
    dtypes: tuple[str, ...]
    nbytes: int

    @classmethod
    def of(cls, model: str, described: Any) -> _Form:
        """Read LMCache's description of an object, or the object itself."""
        meta = getattr(described, "metadata", described)
        shapes = getattr(meta, "shapes", None) or [meta.shape]  # several: one per group of layers
        dtypes = getattr(meta, "dtypes", None) or [meta.dtype]
        nbytes = sum(
            shape.numel() * dtype.itemsize for shape, dtype in zip(shapes, dtypes, strict=True)
        )
        named = tuple(str(dtype).removeprefix("torch.") for dtype in dtypes)
        return cls(model, tuple(tuple(shape) for shape in shapes), named, nbytes)

    def identity(self, files: str, epoch: str) -> Identity:
        """Return the identity of such objects, of a model with the digest ``files`` (`Models`).

        LMCache's keys contain neither dtype nor shape.
        """
        settings = {
            "vua_stored_by": "lmcache",
            "model": self.model,
            "files": files,
            "shapes": self.shapes,
            "dtypes": self.dtypes,
        }
        return Identity.of_config(
            settings,
            kv_dtype="+".join(dict.fromkeys(self.dtypes)),
            epoch=epoch,
            chunk_tokens=1,
            name=f"lmcache {self.model}",
        )

    @property
    def tokens(self) -> int:
        """How many tokens an object has: LMCache's shapes end in tokens and the width of one."""
        return max((shape[-2] for shape in self.shapes if len(shape) > 2), default=0)

    @property
    def layout(self) -> KVLayout:
        return KVLayout(
            layers=1, kv_heads=1, k_dim=self.nbytes, v_dim=0, dtype="U8", chunk_tokens=1
        )


class _Task(NamedTuple):
    kind: str
    keys: Sequence[Any]
    objects: Sequence[Any]
    forms: Sequence[_Form | None]
    found: list[bool]


class VUAL2Adapter(L2AdapterInterface):
    """An L2 adapter over a directory that any number of LMCache servers may share.

    Stored objects survive restarts and are counted: the directory keeps within its limits, for all
    writers. Thread-safe. Locks hold nothing: another host may evict an object between lookup and
    load, which then misses.
    """

    def __init__(self, params: Mapping[str, Any], l1_memory_desc: object = None) -> None:
        """Use the directory ``params["path"]``, which is created (mode 0700) if missing.

        Args:
            params: ``path``: the directory, a URL in a bucket, or a list: a directory and slower
                tiers; ``plain_engines``: true, the operator's statement that each engine computes
                what the model's files say, without LoRA adapters and without settings that change
                it; ``label``: for models whose files are not on this host, a text, or an object
                with one per model name, that changes with the weights; and as in `VUAConfig`
                ``max_bytes``, ``min_free_bytes``, ``ttl_s``, ``durable``, ``epoch``, ``threads``
                (concurrent; 4).
            l1_memory_desc: LMCache's memory; not used.

        Raises:
            ConfigError: a setting is unknown or unusable.
            StorageError: the directory cannot be created.
        """
        del l1_memory_desc
        super().__init__()
        unknown = sorted(set(params) - set(_SETTINGS))
        if unknown or "path" not in params:
            raise ConfigError(
                f"adapter_params has {', '.join(unknown) or 'no path'}; known are {_SETTINGS}"
            )
        given = dict(params)
        if given.pop("plain_engines", None) is not True:
            raise ConfigError(
                'adapter_params lacks "plain_engines": true. LMCache tells its tiers the name of a '
                "model and tokens, not whether a prompt has a LoRA adapter or an engine has other "
                "settings (--hf-overrides, a quantization): these would get each other's K and V. "
                'Set it if the engines have none of that, and use "kv_connector": '
                '"VUAStorageConnector_V1" for those that have'
            )
        self._models = Models(given.pop("label", None))
        self._root = locate(given.pop("path"))
        durable, self._epoch = bool(given.pop("durable", False)), given.pop("epoch", "")
        self._pool = Pool[_Task](int(given.pop("threads", _THREADS)), "vua-lmcache")
        self._access = Access(durable, Limits(**given))
        self._savings = savings_at(nearest(self._root), Security())
        self._namespaces: dict[tuple[_Form, str], LazyNamespace] = {}
        self._fds = {kind: create_event_notifier() for kind in (_STORE, _LOOKUP, _LOAD)}
        self._done: dict[str, dict[int, Any]] = {kind: {} for kind in self._fds}
        self._lock = threading.Lock()
        self._last_id, self._warn_once = 0, WarnOnce(log)

    # -- what LMCache calls -------------------------------------------------------------------

    def get_store_event_fd(self) -> int:
        return int(self._fds[_STORE].fileno())

    def get_lookup_and_lock_event_fd(self) -> int:
        return int(self._fds[_LOOKUP].fileno())

    def get_load_event_fd(self) -> int:
        return int(self._fds[_LOAD].fileno())

    def submit_store_task(self, keys: list[Any], objects: list[Any]) -> int:
        """Store objects, except those already stored; see `pop_completed_store_tasks`."""
        return self._start(_STORE, keys, objects, objects)

    def pop_completed_store_tasks(self) -> dict[int, Any]:
        with self._lock:
            done, self._done[_STORE] = self._done[_STORE], {}
        return done

    def submit_lookup_and_lock_task(
        self, keys: list[Any], group_layout_descs: Mapping[int, Any]
    ) -> int:
        """Look for objects, by name. Without a group's layout: in the layouts used so far."""
        described = [group_layout_descs.get(key.object_group_id) for key in keys]
        return self._start(_LOOKUP, keys, [], [one and one.shapes and one for one in described])

    def query_lookup_and_lock_result(self, task_id: int) -> Any:
        """Return which objects are stored, once; None while that is not known."""
        with self._lock:
            return self._done[_LOOKUP].pop(task_id, None)

    def submit_unlock(self, keys: list[Any]) -> None:
        """Do nothing, as nothing is locked."""

    def submit_load_task(self, keys: list[Any], objects: list[Any]) -> int:
        """Read objects into their memory; a miss leaves its memory undefined."""
        return self._start(_LOAD, keys, objects, objects)

    def query_load_result(self, task_id: int) -> Any:
        """Return which objects were loaded and verified, once; None while that is not known."""
        with self._lock:
            return self._done[_LOAD].pop(task_id, None)

    def delete(self, keys: list[Any]) -> None:
        """Delete objects, in all layouts used so far."""
        for key in keys:
            for form, opened in self._used(key.model_name):
                if (namespace := opened.to_read([form.layout])) is None:
                    continue
                name, storage = entry_name(_name(key).name, form.layout.full), namespace.storage
                if storage.exists([name])[0] and storage.delete(name):
                    self._notify_keys_deleted([key], [form.nbytes])

    def report_status(self) -> dict[str, Any]:
        return {"is_healthy": True, "type": "vua", "path": str(self._root)}

    def close(self) -> None:
        self._pool.close()
        self._models.close()
        self._savings.close()
        for namespace in self._namespaces.values():
            namespace.close()
        for notifier in self._fds.values():
            notifier.close()

    # -- inside -------------------------------------------------------------------------------

    def _start(
        self, kind: str, keys: Sequence[Any], objects: Sequence[Any], described: Sequence[Any]
    ) -> int:
        forms = [
            _Form.of(key.model_name, one) if one else None
            for key, one in zip(keys, described, strict=True)
        ]
        task = _Task(kind, keys, objects, forms, [False] * len(keys))
        with self._lock:
            self._last_id += 1
            self._pool.submit(partial(self._run, self._last_id), task)
            return self._last_id

    def _run(self, number: int, job: Job[_Task]) -> None:
        task, began_s = job.what, time.monotonic()
        work = {_STORE: self._store, _LOOKUP: self._look_up, _LOAD: self._load}
        try:
            work[task.kind](task)
        except (VUAError, OSError) as problem:
            self._warn_once(type(problem).__name__, f"objects are not available: {problem}")
        except Exception:
            log.exception("a %s task of LMCache's failed", task.kind)
        self._count(task, time.monotonic() - began_s)
        result = self._result(task)
        with self._lock:
            self._done[task.kind][number] = result
        self._fds[task.kind].notify()

    def _count(self, task: _Task, seconds: float) -> None:
        """Count a task's chunks, of which LMCache has an object for each rank and group."""
        tokens: dict[Any, int] = {}
        missing = set[Any]()
        for key, form, found in zip(task.keys, task.forms, task.found, strict=True):
            chunk = (key.model_name, key.chunk_hash, key.cache_salt)
            tokens[chunk] = max(tokens.get(chunk, 0), form.tokens if form else 0)
            missing.update([] if found else [chunk])
        whole = tokens.keys() - missing
        if task.kind == _LOOKUP:
            self._savings.looked_up("", len(whole), len(tokens), 1, ends=False)
        if task.kind == _LOAD:
            self._savings.loaded(sum(map(tokens.__getitem__, whole)), 0, seconds)

    def _result(self, task: _Task) -> Any:
        found = [at for at, one in enumerate(task.found) if one]
        keys = [task.keys[at] for at in found]
        if task.kind == _STORE:
            sizes = [form.nbytes for at in found if (form := task.forms[at]) is not None]
            self._notify_keys_stored(keys, sizes)
            return L2StoreResult(all(task.found), sum(sizes))
        if task.kind == _LOAD:
            self._notify_keys_accessed(keys)
        bits = Bitmap(len(task.keys))
        for at in found:
            bits.set(at)
        return bits

    def _store(self, task: _Task) -> None:
        for form, opened, places in self._places(task):
            keys, store = [_name(task.keys[at]) for at in places], opened.to_write([form.layout])
            memory = _memory([task.objects[at] for at in places])
            writer = EntryWriter(store.stores[0], memory, writer=process_writer("lmcache"))
            writer.save_all(keys)
            for at, held in zip(places, _held(store.stores[0], keys), strict=True):
                task.found[at] = held

    def _load(self, task: _Task) -> None:
        for form, opened, places in self._places(task):
            namespace, begin = opened.to_read([form.layout]), 0
            while namespace is not None and (rest := places[begin:]):
                keys, store = [_name(task.keys[at]) for at in rest], namespace.stores[0]
                loaded = store.load(keys, _memory([task.objects[at] for at in rest])).chunks
                store.used(keys, loaded)
                for at in rest[:loaded]:
                    task.found[at] = True
                begin += loaded + 1  # the next one misses; later ones need not

    def _look_up(self, task: _Task) -> None:
        for form, opened, places in self._places(task):
            if (namespace := opened.to_read([form.layout])) is not None:
                keys = [_name(task.keys[at]) for at in places]
                for at, held in zip(places, _held(namespace.stores[0], keys), strict=True):
                    task.found[at] |= held

    def _places(self, task: _Task) -> Iterator[tuple[_Form, LazyNamespace, list[int]]]:
        """Yield each namespace in which some of the objects may be, by their numbers."""
        groups: dict[tuple[str, _Form | None], list[int]] = defaultdict(list)
        for at, (key, form) in enumerate(zip(task.keys, task.forms, strict=True)):
            groups[key.model_name, form].append(at)
        for (model, form), places in groups.items():
            if (files := self._models.digest(model)) is None:
                continue
            if form is not None and (form, files) not in self._namespaces:
                identity = form.identity(files, self._epoch)
                opened = LazyNamespace(self._root, identity, self._access)
                self._namespaces.setdefault((form, files), opened)
            found = self._used(model) if form is None else [(form, self._namespaces[form, files])]
            yield from ((*one, places) for one in found)

    def _used(self, model: str) -> list[tuple[_Form, LazyNamespace]]:
        return [
            (form, one) for (form, _), one in [*self._namespaces.items()] if form.model == model
        ]


def _name(key: Any) -> ChunkKey:
    parts = (
        key.chunk_hash,
        key.kv_rank.to_bytes(8, "little"),
        key.object_group_id.to_bytes(8, "little"),
        key.cache_salt.encode(),
    )
    framed = b"".join(
        len(part).to_bytes(8, "little") + part for part in (b"vua.lmcache.v1", *parts)
    )
    return ChunkKey(hashlib.sha256(framed).digest(), b"", 0, 1)


def _held(store: Store, keys: Sequence[ChunkKey]) -> list[bool]:
    wanted = [store.layout.full]
    if store.search is not None:  # all at once: a bucket answers slowly
        return store.search.holds(keys, wanted)
    return [store.holds(key, wanted) for key in keys]


def _memory(objects: Sequence[Any]) -> MemoryMap:
    addresses = np.array([one.data_ptr for one in objects], dtype=np.uint64)
    base = addresses.min()
    return MemoryMap(
        base=(np.array([base], dtype=np.uint64),),
        head_stride=(0,),
        segment_offset=(addresses - base,),
        segment_tokens=1,
        owner=objects,
    )
