"""The pages of SGLang's host pools, and their way to the storage and back.

Each call has a time limit. SGLang's threads wait for a load or a save to end, and requests for
them. So hanging storage is given up after ``timeouts.io_s`` without progress. A thread that returns
later must not touch the pool any more: its pages belong to other requests by then. Therefore files
pass through buffers: a read fills one and is verified there, and is copied into pages only while
the result is wanted; pages are copied out before anything is written.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
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

_ELSEWHERE: Final = 1 << 16
"""Chunks in other stores that are remembered."""
_BUFFERS: Final = 2
"""Per direction: one in use, and one that a hanging thread may still hold."""


@dataclass(frozen=True, slots=True)
class _Work:
    keys: Sequence[ChunkKey]
    pages: Sequence[int]
    buffer: StagingBuffer
    proven: Callable[[], bool]
    files: ShardFiles
    behind: Sequence[ChunkKey] = ()
    """Chunks that are to be loaded next."""


class Transfers:
    """Loads and saves of one rank. :meth:`load` is for one thread, :meth:`save` for another."""

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
        compares: bool = False,
    ) -> None:
        """Move ``shard`` between the chunks of ``store`` and ``pages``; count in ``stats``.

        Store in the name of ``writer``, load what is ``believed``, and compare what that wants if
        this ``compares``.
        """
        self.store, self.shard, self._pages, self._stats = store, shard, pages, stats
        self._writer, self._believed, self._compares = writer, believed, compares
        payload = shard.payload_nbytes(store.layout)
        self.chunks = load_chunks(config, payload)
        """How many go at once."""
        pools = [
            StagingPool(store.layout, shard, chunks=self.chunks, limit=_BUFFERS) for _ in range(2)
        ]
        self._load_buffers, self._save_buffers = pools
        limit_s, storage = config.timeouts.io_s, logger("storage")
        self._loads = Pool[_Work](
            *(_BUFFERS, "vua-load"),
            timeout_s=limit_s,
            breaker=Breaker("loads", storage),
            late=self._load_is_late,
        )
        self._saves = Pool[_Work](
            *(_BUFFERS, "vua-save"),
            timeout_s=limit_s,
            breaker=Breaker("saves", storage),
            late=self._save_is_late,
        )
        self._files = ShardFiles(store, shard)
        self._others: dict[Store, ShardFiles] = {}
        self._elsewhere: OrderedDict[str, ShardFiles] = OrderedDict()
        """By the name of a chunk that lies in another store, as far as lookups told."""
        self._warn_once = WarnOnce(log)

    def close(self) -> None:
        """Stop the threads; waits for no storage that hangs."""
        self._loads.close()
        self._saves.close()

    # -- loads --------------------------------------------------------------------------------

    def load(
        self, keys: Sequence[ChunkKey], pages: Sequence[int], proven: Callable[[], bool]
    ) -> int:
        """Load chunks into pages of the pool, up to the first that is missing.

        ``proven``: whether the weights are still those of the store. Returns how many leading
        chunks are in place; the content of the other pages is undefined. Never raises for storage
        failures.
        """
        done = 0
        while done < len(keys):
            files, stop = self._files_of(keys[done]), done
            while stop < min(done + self.chunks, len(keys)) and self._files_of(keys[stop]) is files:
                stop += 1
            part = slice(done, stop)
            loaded = self._load_some(keys[part], pages[part], proven, files, keys[stop:])
            done += loaded
            if loaded < len(keys[part]):
                break
        return done

    def note(self, keys: Iterable[ChunkKey], store: Store) -> None:
        """Note that these chunks lie in this store, the own one or another."""
        own = store is self.store
        for key in keys if self._elsewhere or not own else ():
            self._elsewhere.pop(key.name, None)
            if not own:
                self._elsewhere[key.name] = self._others.setdefault(
                    store, ShardFiles(store, self.shard)
                )
            while len(self._elsewhere) > _ELSEWHERE:
                self._elsewhere.popitem(last=False)

    def _files_of(self, key: ChunkKey) -> ShardFiles:
        return self._elsewhere.get(key.name, self._files)

    def _load_some(
        self,
        keys: Sequence[ChunkKey],
        pages: Sequence[int],
        proven: Callable[[], bool],
        files: ShardFiles,
        behind: Sequence[ChunkKey],
    ) -> int:
        buffer = self._load_buffers.take() if self._loads.breaker.allows() else None
        if buffer is None:
            self._stats.add("vua_load_stops_total", label="paused")
            return 0
        behind = behind if files is self._files else ()
        work = _Work(keys, pages, buffer, proven, files, behind)
        return self._result(self._loads, self._read, work, self._load_buffers)

    def _load_is_late(self, job: Job[_Work]) -> None:
        if not job.started:
            self._load_buffers.give_back(job.what.buffer)
        self._stats.add("vua_load_stops_total", label="timeout")

    def _read(self, job: Job[_Work]) -> None:
        """Load, and copy into the pool while a caller waits for it."""
        work, done, reason = job.what, 0, "error"

        def scatter(chunks: int) -> None:
            nonlocal done
            if work.proven():
                self._pages.scatter(work.pages[:chunks], [a[:chunks] for a in work.buffer.arrays])
                done = chunks

        try:
            believed = self._believed
            loaded = work.files.load_run(work.buffer, work.keys, job, scatter, believed=believed)
            reason = loaded.reason or ("" if done == len(work.keys) else "reset")
            nbytes = loaded.chunks * self.shard.payload_nbytes(self.store.layout)
            self._stats.add("vua_loaded_bytes_total", nbytes, "slab")
        except Exception:
            log.exception("a load failed")
        try:
            if job.settle(well=reason != "error"):
                if reason:
                    self._stats.add("vua_load_stops_total", label=reason)
                job.tell(done)
                if reason not in ("", "error", "reset"):
                    rest = [*work.keys[done:], *work.behind]
                    for _ in work.files.weed(work.buffer, rest, reason, job, believed=believed):
                        pass  # reading them puts damaged files aside; SGLang is not told
            if believed is not None:
                believed.learn_refused(work.files.store)
        finally:
            self._load_buffers.give_back(work.buffer)  # not earlier: a hanging read may write to it

    # -- saves --------------------------------------------------------------------------------

    def save(
        self, keys: Sequence[ChunkKey], pages: Sequence[int], proven: Callable[[], bool]
    ) -> None:
        """Store pages of the pool as chunks, in order, unless they are stored already.

        Ends at the first that cannot be stored, since none after it would be found. Never raises
        for storage failures.
        """
        for at in range(0, len(keys), self.chunks):
            part = slice(at, at + self.chunks)
            if self._save_some(keys[part], pages[part], proven) < len(keys[part]):
                return

    def _save_some(
        self, keys: Sequence[ChunkKey], pages: Sequence[int], proven: Callable[[], bool]
    ) -> int:
        buffer = self._save_buffers.take() if self._saves.breaker.allows() else None
        if buffer is None:
            self._stats.add("vua_chunks_saved_total", len(keys), "paused")
            return 0
        for place, page in enumerate(pages):
            self._pages.gather(page, [array[place] for array in buffer.arrays])
        work = _Work(keys, pages, buffer, proven, self._files)
        return self._result(self._saves, self._write, work, self._save_buffers)

    def _save_is_late(self, job: Job[_Work]) -> None:
        if not job.started:
            self._save_buffers.give_back(job.what.buffer)
        self._count(["timeout"] * len(job.what.keys))

    def _write(self, job: Job[_Work]) -> int:
        work, outcomes, rest = job.what, list[str](), "error"
        try:
            if work.proven():
                if self._compares:
                    self._compare(job)
                with self._files.saver(work.buffer.memory, self._writer) as saver:
                    for statuses in saver.save_each(work.keys):
                        outcomes += outcomes_of(statuses)
                rest = "refused"
            else:
                rest = "reset"
        except StorageError as problem:
            self._warn_once(type(problem).__name__, f"chunks are not stored: {problem}")
        except Exception:
            log.exception("chunks were not stored")
        finally:
            self._save_buffers.give_back(work.buffer)  # not earlier: a hanging write may read it
            outcomes += [rest] * (len(work.keys) - len(outcomes))
            if job.settle(well="error" not in outcomes):
                self._count(outcomes)
        return outcomes.count("written") + outcomes.count("present")

    def _compare(self, job: Job[_Work]) -> None:
        work, believed = job.what, self._believed
        for place, key in enumerate(work.keys):
            if believed is not None and believed.wants(key):
                try:
                    files = self._files_of(key)
                    believed.compare(files, key, [one[place] for one in work.buffer.arrays])
                except Exception:  # an error costs a comparison
                    log.exception("a chunk could not be compared")
                job.progress()

    def _count(self, outcomes: Sequence[str]) -> None:
        written, layout = outcomes.count("written"), self.store.layout
        for outcome in {"written", *outcomes}:
            self._stats.add("vua_chunks_saved_total", outcomes.count(outcome), outcome)
        self._stats.add("vua_stored_bytes_total", written * self.shard.payload_nbytes(layout))
        if layout.window is None:  # else these are counted with the other layers
            self._stats.add("vua_stored_tokens_total", written * layout.chunk_tokens)

    # -- both ---------------------------------------------------------------------------------

    @staticmethod
    def _result(
        pool: Pool[_Work],
        what: Callable[[Job[_Work]], object],
        work: _Work,
        buffers: StagingPool,
    ) -> int:
        """Run work on a thread; return how many chunks were moved, 0 if it hangs."""
        try:
            job = pool.submit(what, work)
        except RuntimeError as problem:  # not a single thread can be started
            log.warning("VUA: %s", problem)
            buffers.give_back(work.buffer)
            return 0
        try:
            return int(job.result())
        except Exception:  # noqa: BLE001 - overdue, or in the log already
            return 0
