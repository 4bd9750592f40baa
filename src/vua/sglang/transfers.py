"""The pages of SGLang's host pools, and their way to the storage and back.

Each call has a time limit. SGLang's threads wait for a load or a save to end, and requests for
them. So hanging storage is given up after ``timeouts.io_s`` without progress. A thread that returns
later must not touch the pool any more: its pages belong to other requests by then. Therefore files
pass through buffers: a read fills one and is verified there, and is copied into pages only while
the result is wanted; pages are copied out before anything is written.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import torch

from vua.connector.cache_spec import UncachedError
from vua.connector.config import ConnectorConfig
from vua.connector.group_transfer import ShardFiles, load_chunks, outcomes_of
from vua.connector.log import WarnOnce, logger
from vua.connector.metrics import Recorder
from vua.device.buffers import StagingBuffer, StagingPool
from vua.device.cpu_pages import PagedKV, latent_form
from vua.errors import InputError, LayoutError, StorageError
from vua.format.keys import ChunkKey
from vua.format.layout import Shard
from vua.io.pool import Breaker, Job, Pool
from vua.sglang.comparisons import Comparisons
from vua.store.store import Store

_PAIRS: Final = {
    "layer_first": "LTHD",
    "page_first": "TLHD",
    "page_first_direct": "PLSHD",
    "page_head": "PHSLD",
    "page_unified": "PGLSHD",
}
"""Axes of K, and of V, by the layout's name: pages P of slots S, or tokens T (both in one); layers,
heads H (in groups G), and the elements D of a row."""
_LATENT: Final = {
    "layer_first": "LTHD",
    "page_first": "TLHD",
    "page_first_direct": "PLSHD",
    "page_unified": "PLSD",
}
"""The same of one latent (MLA)."""


class HostPages:
    """The pages of one host pool, of K and V or of one latent.

    Copies whole pages only. Threads may use it at once for different pages. Raises UncachedError
    for a pool of unknown form.
    """

    def __init__(self, pool: Any, *, latent: bool) -> None:
        """Inspect ``pool``, an ``MHATokenToKVPoolHost`` or an ``MLATokenToKVPoolHost``."""
        arrays = _arrays(pool, latent=latent)
        axes = (_LATENT if latent else _PAIRS)[pool.layout]
        self.page_tokens: int = pool.page_size
        self._pages: int = pool.page_num
        try:
            self._parts = [
                PagedKV(
                    _layers(array, axes, self.page_tokens),
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
    known = _LATENT if latent else _PAIRS
    if pool.layout not in known:
        msg = f"host memory layout {pool.layout!r} is not supported; use one of {', '.join(known)}"
        raise UncachedError(msg)
    if pool.kv_buffer is None:
        raise UncachedError("this rank has no host pages of its own, which is not supported")
    if latent:
        return [pool.kv_buffer]
    if pool.layout == "page_unified":
        return [pool.kv_buffer[:, :, :, at] for at in range(2)]
    return [pool.k_buffer, pool.v_buffer]


def _layers(array: torch.Tensor, axes: str, page_tokens: int) -> list[torch.Tensor]:
    """Return each layer of K, V or latents as ``[pages, heads, slots, dim]``, not copied."""
    if "T" in axes:
        at = axes.index("T")
        array = array.view(*array.shape[:at], -1, page_tokens, *array.shape[at + 1 :])
        axes = axes.replace("T", "PS")
    if "H" not in axes:
        array, axes = array.unsqueeze(-2), axes.replace("D", "HD")
    if "G" not in axes:
        array, axes = array.unsqueeze(0), "G" + axes
    array = array.permute([axes.index(axis) for axis in "LPGHSD"])
    layers, pages, groups, heads, slots, dim = array.shape
    return list(array.view(layers, pages, groups * heads, slots, dim).unbind(0))


log = logger("worker")

_BUFFERS: Final = 2
"""Per direction: one in use, and one that a hanging thread may still hold."""


@dataclass(slots=True)
class _Work:
    keys: Sequence[ChunkKey]
    pages: Sequence[int]
    buffer: StagingBuffer
    proven: Callable[[], bool]
    done: int = 0
    """Loaded chunks that are in place."""
    outcomes: list[str] = field(default_factory=list)
    """What became of leading chunks that are to be stored."""


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
        writer: str = "",
        believed: Comparisons | None = None,
        other: Callable[[], Store | None] = lambda: None,
    ) -> None:
        """Move ``shard`` between the chunks of ``store`` and ``pages``; count in ``stats``.

        Store in the name of ``writer``, and compare what ``believed`` wants. Load what is
        ``believed``; ``other`` returns a store for what is missing in ``store``.
        """
        self._store, self._shard, self._pages, self._stats = store, shard, pages, stats
        self._writer, self._believed, self._other = writer, believed, other
        self._payload = shard.payload_nbytes(store.layout)
        self.chunks = load_chunks(config, self._payload)
        """How many go at once."""
        self._load_buffers, self._save_buffers = (
            StagingPool(store.layout, shard, chunks=self.chunks, limit=_BUFFERS) for _ in range(2)
        )
        self._loads, self._saves = (
            Pool[_Work](
                *(_BUFFERS, f"vua-{name[:-1]}"),
                timeout_s=config.timeouts.io_s,
                breaker=Breaker(name, logger("storage")),
                late=late,
            )
            for name, late in (("loads", self._load_is_late), ("saves", self._save_is_late))
        )
        self._files, self._beside = ShardFiles(store, shard), list[ShardFiles]()
        self._warn_once = WarnOnce(log)

    def close(self) -> None:
        """Stop the threads; waits for no storage that hangs."""
        self._loads.close()
        self._saves.close()

    def _sources(self) -> list[ShardFiles]:
        stores = [one for one in (self._other(),) if one is not None]
        if stores != [one.store for one in self._beside]:
            self._beside = [ShardFiles(one, self._shard) for one in stores]
        return [self._files, *self._beside]

    @staticmethod
    def _run(
        pool: Pool[_Work], what: Callable[[Job[_Work]], object], work: _Work, buffers: StagingPool
    ) -> None:
        """Run work on a thread, and wait for its end; or until it hangs."""
        try:
            job = pool.submit(what, work)
        except RuntimeError as problem:  # not a single thread can be started
            log.warning("VUA: %s", problem)
            buffers.give_back(work.buffer)
            return
        with contextlib.suppress(Exception):  # it is overdue, or in the log already
            job.result()

    # -- loads --------------------------------------------------------------------------------

    def load(
        self, keys: Sequence[ChunkKey], pages: Sequence[int], proven: Callable[[], bool]
    ) -> int:
        """Load chunks into pages of the pool, up to the first that is missing.

        ``proven``: whether the weights are still those of the store. Returns how many leading
        chunks are in place; the content of the other pages is undefined. Never raises for storage
        failures.
        """
        buffer = self._load_buffers.take() if self._loads.breaker.allows() else None
        if buffer is None:
            self._stats.add("vua_load_stops_total", label="paused")
            return 0
        work = _Work(keys, pages, buffer, proven)
        self._run(self._loads, self._read, work, self._load_buffers)
        return work.done

    def _load_is_late(self, job: Job[_Work]) -> None:
        if not job.started:
            self._load_buffers.give_back(job.what.buffer)
        self._stats.add("vua_load_stops_total", label="timeout")

    def _read(self, job: Job[_Work]) -> None:
        work, believed, sources, reason = job.what, self._believed, self._sources(), "error"
        try:
            reason = self._load(job, sources)
        except Exception:
            log.exception("a load failed")
        try:
            if job.settle(well=reason != "error"):
                if reason:
                    self._stats.add("vua_load_stops_total", label=reason)
                job.tell()
                if reason not in ("", "error", "reset"):
                    rest = work.keys[work.done :]
                    for _ in sources[0].weed(work.buffer, rest, reason, job, believed=believed):
                        pass  # reading them puts damaged files aside; SGLang is not told
            if believed is not None:
                for files in sources:
                    believed.learn_refused(files.store)
        finally:
            self._load_buffers.give_back(work.buffer)  # not earlier: a hanging read may write to it

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

    def save(
        self, keys: Sequence[ChunkKey], pages: Sequence[int], proven: Callable[[], bool]
    ) -> None:
        """Store pages of the pool as chunks, in order, unless they are stored already.

        Ends at the first that cannot be stored, since none after it would be found. Never raises
        for storage failures.
        """
        buffer = self._save_buffers.take() if self._saves.breaker.allows() else None
        if buffer is None:
            self._stats.add("vua_chunks_saved_total", len(keys), "paused")
            return
        work = _Work(keys, pages, buffer, proven)
        self._run(self._saves, self._write, work, self._save_buffers)

    def _save_is_late(self, job: Job[_Work]) -> None:
        if not job.started:
            self._save_buffers.give_back(job.what.buffer)
        self._count(job.what, "timeout")

    def _write(self, job: Job[_Work]) -> None:
        work, rest = job.what, "error"
        try:
            rest = self._save(job)
        except StorageError as problem:
            self._warn_once(type(problem).__name__, f"chunks are not stored: {problem}")
        except Exception:
            log.exception("chunks were not stored")
        finally:
            self._save_buffers.give_back(work.buffer)  # not earlier: a hanging write may read it
            if job.settle(well=rest != "error"):
                self._count(work, rest)

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
            with self._files.saver(work.buffer.memory, self._writer) as saver:
                for statuses in saver.save_each(keys):
                    work.outcomes += outcomes_of(statuses)
            job.progress()
            if len(work.outcomes) < at + len(keys):
                break
        return "refused"

    def _compare(self, job: Job[_Work], keys: Sequence[ChunkKey]) -> None:
        believed = self._believed
        for place, key in enumerate(keys):
            if believed is not None and believed.wants(self._store, key):
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
