"""The pages of SGLang's host pools, and their way to the storage and back.

Each call has a time limit. SGLang's threads wait for a load or a save to end, and requests for
them. So hanging storage is given up after ``timeouts.io_s`` without progress. A thread that returns
later must not touch the pool any more: its pages belong to other requests by then. Therefore files
pass through buffers: a read fills one and is verified there, and is copied into pages only while
the result is wanted; pages are copied out before anything is written.

Stored pages are compared with computed ones, see `vua.connector.witness`. SGLang names no request
to a backend. But a lookup that answers "nothing" has it compute the pages, and SGLang hands these
over to be stored when they are in host memory. Then those that the witness asked for are compared
with the stored ones. Each rank compares what it holds, and SGLang loads what all ranks may load.
"""

from __future__ import annotations

import contextlib
import random
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from vua.connector.cache_spec import Model, UncachedError
from vua.connector.config import ConnectorConfig
from vua.connector.group_transfer import ShardFiles, load_chunks, outcomes_of
from vua.connector.log import WarnOnce, logger
from vua.connector.lookup import PrefixMatch
from vua.connector.metadata import ComparisonResult, Verdict
from vua.connector.metrics import Recorder
from vua.connector.witness import Witness
from vua.device.buffers import StagingBuffer, StagingPool
from vua.device.paged import PagedKV, latent_form
from vua.errors import InputError, LayoutError, StorageError, VUAError
from vua.format.keys import ChunkKey
from vua.format.layout import Shard
from vua.io.pool import Breaker, Job, Pool
from vua.store.place import LazyNamespace
from vua.store.store import Store
from vua.store.writer import Writers

log = logger("worker")

KIND: Final = ("",)
"""One for all prompts: none has an adapter."""
_MOST_OPEN: Final = 64
"""Comparisons at once; the oldest is given up for another."""
_LOOK_EVERY_S: Final = 10.0
"""Seconds between two looks for another engine's chunks."""


class Stretch(NamedTuple):
    """Consecutive chunks of a prompt that lie in one store."""

    first: int
    store: Store


class Comparisons:
    """One rank's. Thread-safe."""

    def __init__(
        self,
        model: Model,
        stores: Sequence[Store],
        config: ConnectorConfig,
        stats: Recorder,
        *,
        setup: str,
        writer: str,
        seed: object,
        beside: LazyNamespace | None = None,
    ) -> None:
        """Trust what this engine and those of its setup have stored.

        Args:
            model: the pools, with this rank's rectangles alone.
            stores: one per group.
            config: the settings.
            stats: where the metrics are recorded.
            setup: the engine's, see `vua.sglang.identity`; "": unknown.
            writer: its name in the headers of what it stores.
            seed: equal on all ranks, so that they draw the same prompts.
            beside: what another engine stores of the first group's layers.
        """
        self._model = model
        self._witness = Witness(
            *(model, config, stats, setup, writer),
            waits=False,
            chance=random.Random(str(seed)),  # noqa: S311
        )
        pairs = zip(stores, model.groups, strict=True)
        self._writers = {store: Writers(store, group.written) for store, group in pairs}
        self._stores = stores
        self._lock = threading.Lock()
        self._found: dict[int, list[ComparisonResult]] = {}
        """By the number of a comparison that has not ended."""
        self._orders: dict[str, int] = {}
        """By the name of a chunk, the comparison that wants it."""
        self.leave: str | None = None
        """Why this engine must not use the namespace."""
        self._beside, self._look_s = beside, 0.0
        self._other: Store | None = None

    def close(self) -> None:
        if self._beside is not None:
            self._beside.close()

    def look_beside(self) -> Store | None:
        """Return the chunks of another engine, if there are any. Touches the storage."""
        layouts, found = tuple(group.layout for group in self._model.groups), None
        if self._beside is not None and time.monotonic() >= self._look_s:
            with contextlib.suppress(VUAError, OSError):  # it is not this engine's to complain of
                found = self._beside.to_read(layouts)
            self._look_s = 0.0 if found is not None else time.monotonic() + _LOOK_EVERY_S
        self._other = None if found is None or found.layouts != layouts else found.stores[0]
        return self._other

    def beside(self, store: Store) -> Store | None:
        """Return the chunks of another engine that are to be loaded where a store has none."""
        return self._other if store is self._stores[0] else None

    def learn(self, found: PrefixMatch, places: Sequence[Stretch]) -> None:
        """Add the writers of the chunks in these places. Touches the storage."""
        if not self._witness.on:
            return
        edges = [*(one.first for one in places[1:]), found.stored]
        for (first, store), stop in zip(places, edges, strict=True):
            found.writers += self._of(store).runs(found.keys, first, min(stop, found.stored))
        size, beside = self._model.chunk_tokens, set[bytes]()
        for group, store in zip(self._model.groups[1:], self._stores[1:], strict=True):
            start = self._model.first_loaded(group, found.tokens) // size
            for _, names in self._of(store).runs(found.keys, start, found.stored):
                beside |= names
        found.beside = frozenset(beside)
        self._witness.known.learn(KIND, beside.union(*(names for _, names in found.writers)))

    def _of(self, store: Store) -> Writers:
        """Return the writers in a store; one that is new here has chunks of the first group."""
        if store not in self._writers:
            self._writers[store] = Writers(store, self._model.groups[0].written)
        return self._writers[store]

    def limit(self, found: PrefixMatch, before: int) -> int:
        """Return how many chunks after the first ``before`` may be loaded; begins comparisons."""
        size, stored = self._model.chunk_tokens, found.stored
        if not self._witness.on:
            return stored - before
        prompt = SimpleNamespace(request_id=found.keys[stored - 1].name[:16], mm_features=())
        with self._lock:
            tokens = self._witness.limit(prompt, found, before * size) or 0
            ones = [[1] * stored] * len(self._model.block_sizes)
            order = self._witness.order(prompt.request_id, found, stored * size, ones)
            self._witness.gone(prompt.request_id)
            if order is not None:
                if len(self._found) >= _MOST_OPEN:
                    self._end(next(iter(self._found)))
                self._found[order.number] = []
                names = [key.name for _, keys in order.parts for key in keys]
                self._orders |= dict.fromkeys(names, order.number)
        return max(0, tokens // size - before)

    def _end(self, number: int, nothing: str = "SGLang did not hand over what it computed") -> None:
        self._orders = {name: one for name, one in self._orders.items() if one != number}
        found = tuple(self._found.pop(number))
        verdict = Verdict(number, found, "" if found else nothing)
        self.leave = self._witness.learn([verdict]) or self.leave

    def wants(self, store: Store, key: ChunkKey) -> bool:
        """Whether a computed chunk of a store's group is to be compared."""
        return store is self._stores[0] and key.name in self._orders

    def compare(
        self, places: Sequence[ShardFiles], key: ChunkKey, computed: Sequence[torch.Tensor]
    ) -> None:
        """Compare a computed chunk that is wanted with the stored one in the first place it is in.

        ``computed``: see :meth:`ShardFiles.agreement`.
        """
        layers, quantised = self._model.groups[0].layers, self._model.quantised
        for files in places:
            result = files.agreement(key, lambda: computed, layers, quantised=quantised)
            if result != "missing":
                break
        with self._lock:
            number = self._orders.pop(key.name, 0)
            if number not in self._found:
                return
            found = self._found[number]
            if not isinstance(result, str):
                found.append(result)
            if number not in self._orders.values() or (found and not found[-1].same):
                self._end(number, f"chunk {key.name[:12]}: its file is {result}")

    def __contains__(self, writer: object) -> bool:
        with self._lock:
            return isinstance(writer, bytes) and self._witness.trusts(KIND, writer)

    def learn_refused(self, store: Store) -> None:
        """Note the writers of chunks that a load refused."""
        while store.refused:
            self._of(store).learn(*store.refused.popitem())


_AXES: Final = {"layer_first": "LTHD", "page_first": "TLHD", "page_first_direct": "PLSHD"}
"""Axes of K, of V, or of one latent (MLA), by the layout's name: pages P of slots S, or tokens T
(both in one); layers, heads H, and the elements D of a row."""


class HostPages:
    """The pages of one host pool, of K and V or of one latent.

    Copies whole pages only. Threads may use it at once for different pages. Raises UncachedError
    for a pool of unknown form.
    """

    def __init__(self, pool: Any, *, latent: bool) -> None:
        """Inspect ``pool``, an ``MHATokenToKVPoolHost`` or an ``MLATokenToKVPoolHost``."""
        arrays = _arrays(pool, latent=latent)
        self.page_tokens: int = pool.page_size
        self._pages: int = pool.page_num
        try:
            self._parts = [
                PagedKV(
                    _layers(array, _AXES[pool.layout], self.page_tokens),
                    latent_form(self.page_tokens, array.shape[-1]),
                    self.page_tokens,
                )
                for array in arrays
            ]
        except (LayoutError, RuntimeError) as problem:  # RuntimeError: torch cannot view it so
            msg = f"the host pool's layout {pool.layout!r} has an unknown form: {problem}"
            raise UncachedError(msg) from problem

    def numbers(self, host_indices: torch.Tensor, pages: int) -> npt.NDArray[np.int64]:
        """Return the numbers of the pages whose token slots ``host_indices`` names, in order.

        Raises InputError: these are not ``pages`` whole pages of the pool.
        """
        slots = host_indices.numpy().astype(np.int64, copy=False)
        size = self.page_tokens
        if slots.shape != (pages * size,):
            raise InputError(f"{slots.shape} slots for {pages} pages of {size} tokens")
        found = slots[::size] // size
        expected = (found[:, None] * size + np.arange(size)).ravel()
        if not np.array_equal(slots, expected) or not np.all((found >= 0) & (found < self._pages)):
            raise InputError("the slots are not whole pages of the host pool")
        return found

    def gather(self, page: int, arrays: Sequence[torch.Tensor]) -> None:
        """Copy a page into K and V of a chunk, ``[heads, layers, tokens, dim]`` each."""
        for part, array in zip(self._parts, arrays, strict=True):
            part.gather([page], 0, self.page_tokens, array, None)

    def scatter(self, pages: Sequence[int], arrays: Sequence[torch.Tensor]) -> None:
        """Copy K and V of chunks into pages, ``[chunks, heads, layers, tokens, dim]`` each."""
        tokens = len(pages) * self.page_tokens
        for part, array in zip(self._parts, arrays, strict=True):
            part.scatter_chunks(pages, 0, tokens, 0, array, None)


def _arrays(pool: Any, *, latent: bool) -> list[torch.Tensor]:
    """Return the pool's tensors of K and of V, or the one of latents. Raises UncachedError."""
    if pool.layout not in _AXES:
        msg = f"host memory layout {pool.layout!r} is not supported; use one of {', '.join(_AXES)}"
        raise UncachedError(msg)
    if pool.kv_buffer is None:
        raise UncachedError("this rank has no host pages of its own, which is not supported")
    return [pool.kv_buffer] if latent else [pool.k_buffer, pool.v_buffer]


def _layers(array: torch.Tensor, axes: str, page_tokens: int) -> list[torch.Tensor]:
    """Return each layer of K, V or latents as ``[pages, heads, slots, dim]``, not copied."""
    if "T" in axes:
        at = axes.index("T")
        array = array.view(*array.shape[:at], -1, page_tokens, *array.shape[at + 1 :])
        axes = axes.replace("T", "PS")
    return list(array.permute([axes.index(axis) for axis in "LPHSD"]).unbind(0))


log = logger("worker")

_BUFFERS: Final = 2
"""Per direction: one in use, and one that a hanging thread may still hold."""


@dataclass(slots=True)
class _Work:
    keys: Sequence[ChunkKey]
    pages: Sequence[int]
    proven: Callable[[], bool]
    buffer: StagingBuffer
    done: int = 0
    """Loaded chunks that are in place."""
    outcomes: list[str] = field(default_factory=list)
    """What became of leading chunks that are to be stored."""


class _Way:
    """Loads, or saves: their buffers, and threads for which nobody waits once they hang."""

    def __init__(
        self,
        name: str,
        buffers: StagingPool,
        timeout_s: float,
        what: Callable[[Job[_Work]], None],
        given_up: Callable[[_Work], None],
    ) -> None:
        self._buffers, self._what, self._given_up = buffers, what, given_up
        self._pool = Pool[_Work](
            *(_BUFFERS, f"vua-{name[:-1]}"),
            timeout_s=timeout_s,
            breaker=Breaker(name, logger("storage")),
            late=self._late,
        )
        self.close = self._pool.close

    def run(
        self, keys: Sequence[ChunkKey], pages: Sequence[int], proven: Callable[[], bool]
    ) -> _Work | None:
        """Run work on a thread, and wait for its end, or until it hangs; None: it is paused."""
        buffer = self._buffers.take() if self._pool.breaker.allows() else None
        if buffer is None:
            return None
        work = _Work(keys, pages, proven, buffer)
        try:
            job = self._pool.submit(self._run, work)
        except RuntimeError as problem:  # not a single thread can be started
            log.warning("VUA: %s", problem)
            self._buffers.give_back(buffer)
            return work
        with contextlib.suppress(Exception):  # it is overdue, or in the log already
            job.result()
        return work

    def _run(self, job: Job[_Work]) -> None:
        try:
            self._what(job)
        finally:
            self._buffers.give_back(job.what.buffer)  # not earlier: what hangs may still use it

    def _late(self, job: Job[_Work]) -> None:
        if not job.started:
            self._buffers.give_back(job.what.buffer)
        self._given_up(job.what)


class Transfers:
    """Loads and saves of one pool. :meth:`load` is for one thread, :meth:`save` for another."""

    def __init__(
        self,
        store: Store,
        shard: Shard,
        pages: HostPages,
        config: ConnectorConfig,
        stats: Recorder,
        *,
        proof: Callable[[], Callable[[], bool]],
        writer: str,
        believed: Comparisons,
    ) -> None:
        """Move ``shard`` between the chunks of ``store`` and ``pages``; count in ``stats``.

        Store in the name of ``writer``, and compare what ``believed`` wants. Load what is
        ``believed``, also from beside ``store``. ``proof``: see `vua.sglang.identity.Engine.proof`.
        """
        self._store, self._shard, self._pages, self._stats = store, shard, pages, stats
        self._proof, self._writer, self._believed = proof, writer, believed
        self._payload = shard.payload_nbytes(store.layout)
        self.chunks = load_chunks(config, self._payload)
        """How many go at once."""

        def way(
            name: str, what: Callable[[Job[_Work]], None], given_up: Callable[[_Work], None]
        ) -> _Way:
            buffers = StagingPool(store.layout, shard, chunks=self.chunks, limit=_BUFFERS)
            return _Way(name, buffers, config.timeouts.io_s, what, given_up)

        self._loads = way("loads", self._read, lambda _: self._stopped("timeout"))
        self._saves = way("saves", self._write, lambda work: self._count(work, "timeout"))
        self._files = [ShardFiles(store, shard)]
        self._warn_once = WarnOnce(log)

    def close(self) -> None:
        """Stop the threads; waits for no storage that hangs."""
        self._loads.close()
        self._saves.close()

    def _sources(self) -> list[ShardFiles]:
        other = self._believed.beside(self._store)
        if other is not None and other is not self._files[-1].store:
            self._files = [self._files[0], ShardFiles(other, self._shard)]
        return [*self._files]

    # -- loads --------------------------------------------------------------------------------

    def load(self, keys: Sequence[ChunkKey], host_indices: torch.Tensor) -> int:
        """Load chunks into the pool's token slots, up to the first that is missing.

        Returns how many leading chunks are in place; the content of the other slots is undefined.
        Never raises for storage failures.
        """
        pages = self._pages.numbers(host_indices, len(keys)).tolist()
        if (work := self._loads.run(keys, pages, self._proof())) is None:
            self._stopped("paused")
            return 0
        return work.done

    def _stopped(self, reason: str) -> None:
        self._stats.add("vua_load_stops_total", label=reason)

    def _read(self, job: Job[_Work]) -> None:
        work, believed, sources, reason = job.what, self._believed, self._sources(), "error"
        try:
            reason = self._load(job, sources)
        except Exception:
            log.exception("a load failed")
        if job.settle(well=reason != "error"):
            if reason:
                self._stopped(reason)
            job.tell()
            if reason not in ("", "error", "reset"):
                rest = work.keys[work.done :]
                sources[0].weed(work.buffer, rest, reason, job, believed=believed)
        for files in sources:
            believed.learn_refused(files.store)

    def _load(self, job: Job[_Work], sources: list[ShardFiles]) -> str:
        """Load while a caller waits; return why it stopped, "" at the end of the keys.

        The first of ``sources`` is then the latest one that was read.
        """
        work, missed = job.what, 0

        def scatter(chunks: int) -> None:
            if work.proven():
                pages = work.pages[work.done : work.done + chunks]
                self._pages.scatter(pages, [array[:chunks] for array in work.buffer.arrays])
                work.done += chunks

        while work.done < len(work.keys) and job.wanted:
            first, keys = work.done, work.keys[work.done : work.done + self.chunks]
            loaded = sources[0].load_run(work.buffer, keys, job, scatter, believed=self._believed)
            self._stats.add("vua_loaded_bytes_total", loaded.chunks * self._payload, "slab")
            if work.done < first + loaded.chunks:
                return "reset"
            if loaded.reason is not None:
                missed = 1 if loaded.chunks else missed + 1
                if loaded.reason != "missing" or missed == len(sources):
                    return loaded.reason
                sources.append(sources.pop(0))
        return ""

    # -- saves --------------------------------------------------------------------------------

    def save(self, keys: Sequence[ChunkKey], host_indices: torch.Tensor) -> None:
        """Store the pool's token slots as chunks, in order, unless they are stored already.

        Ends at the first that cannot be stored, since none after it would be found. Never raises
        for storage failures.
        """
        pages = self._pages.numbers(host_indices, len(keys)).tolist()
        if self._saves.run(keys, pages, self._proof()) is None:
            self._stats.add("vua_chunks_saved_total", len(keys), "paused")

    def _write(self, job: Job[_Work]) -> None:
        rest = "error"
        try:
            rest = self._save(job)
        except StorageError as problem:
            self._warn_once(type(problem).__name__, f"chunks are not stored: {problem}")
        except Exception:
            log.exception("chunks were not stored")
        if job.settle(well=rest != "error"):
            self._count(job.what, rest)

    def _save(self, job: Job[_Work]) -> str:
        """Store while a caller waits; return what became of chunks that are not stored."""
        work = job.what
        for at in range(0, len(work.keys), self.chunks):
            keys = work.keys[at : at + self.chunks]
            with job.use() as wanted:
                if not wanted:  # the pages may be another request's by now
                    break
                for place, page in enumerate(work.pages[at : at + self.chunks]):
                    self._pages.gather(page, [array[place] for array in work.buffer.arrays])
            if not work.proven():
                return "reset"
            self._compare(job, keys)
            with self._files[0].saver(work.buffer.memory, self._writer) as saver:
                for statuses in saver.save_each(keys):
                    work.outcomes += outcomes_of(statuses)
            job.progress()
            if len(work.outcomes) < at + len(keys):
                break
        return "refused"

    def _compare(self, job: Job[_Work], keys: Sequence[ChunkKey]) -> None:
        believed = self._believed
        for place, key in enumerate(keys):
            if believed.wants(self._store, key):
                try:
                    computed = [one[place] for one in job.what.buffer.arrays]
                    believed.compare(self._sources(), key, computed)
                except Exception:  # an error costs a comparison
                    log.exception("a chunk could not be compared")
                job.progress()

    def _count(self, work: _Work, rest: str) -> None:
        outcomes = [*work.outcomes]
        outcomes += [rest] * (len(work.keys) - len(outcomes))
        written, layout = outcomes.count("written"), self._store.layout
        for outcome in {"written", *outcomes}:
            self._stats.add("vua_chunks_saved_total", outcomes.count(outcome), outcome)
        self._stats.add("vua_stored_bytes_total", written * self._payload)
        if layout.window is None:  # else these are counted with the other layers
            self._stats.add("vua_stored_tokens_total", written * layout.chunk_tokens)
