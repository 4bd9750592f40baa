"""A secondary tier of vLLM's offloading: pages of any model, verified, bounded and shared.

vLLM's OffloadingConnector copies blocks of any kind of cache between a device and the host's
memory. A tier below it gets rows of that memory (some blocks of one cache group each), with names,
and keeps them: here in a directory or bucket of VUA's. Nothing here knows a kind of model.
:mod:`vua.vllm.offloading` says what a name stands for beside vLLM's hash.

Rows of engines of the same setup are loaded at once. One of another writer is first computed and
compared (`vua.connector.proved`): a load refuses it, vLLM computes the prompt and hands its rows
over to be stored. With a vLLM that was not run, so are this engine's own.

vLLM calls the methods of :class:`VUATier` on its scheduler's thread; none waits for the storage.
A read or write that may wait for the storage goes through memory of the tier's own: a thread that
hangs there must not touch a row that vLLM has given to another request meanwhile.
"""

from __future__ import annotations

import ctypes
import secrets
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import dropwhile, islice
from types import SimpleNamespace
from typing import Any, ClassVar, Final, TypeAlias
from weakref import WeakValueDictionary

import numpy as np
import torch
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.metrics import OffloadingConnectorStats
from vllm.v1.kv_offload.base import (
    Locality,
    LookupResult,
    Medium,
    OffloadingCounterMetadata,
    OffloadingEvent,
    OffloadingMetricMetadata,
    OffloadKey,
    RequestOffloadingContext,
)
from vllm.v1.kv_offload.tiering.base import JobResult, SecondaryTierManager, TransferJob

from vua import native
from vua.connector.config import ConnectorConfig, OptionReader, RequestOptions
from vua.connector.group_transfer import outcomes_of
from vua.connector.load_policy import Savings
from vua.connector.log import WarnOnce, logger
from vua.connector.metrics import METRICS, Recorder
from vua.connector.opening import OpenedNamespace, Opening, close_within
from vua.connector.proved import Kind, KnownWriters
from vua.device.buffers import StagingBuffer
from vua.errors import ConfigError, VUAError
from vua.format.entry import written_name
from vua.format.keys import ChunkKey, Naming, extras_parent
from vua.format.layout import KVLayout, payload_map
from vua.io.pool import Breaker, Job, Pool
from vua.native import MemoryMap
from vua.security.keyring import check_keys
from vua.serdes import DTYPES
from vua.storage.base import entry_name
from vua.store.agreement import compare
from vua.store.place import locate
from vua.store.store import UNJUDGED, Loader, LoadResult, Store
from vua.store.writer import EntryWriter, in_words, new_writer
from vua.vllm.cache_spec import rows_layout, rows_model
from vua.weights import Identification, Weights


@dataclass
class Engine:
    """Whose pages a tier keeps, and whether it may."""

    counted: Mapping[str, object]
    """What the pages depend on beside weights and tokens."""
    name: str
    find_weights: Callable[[threading.Event], Weights]
    loads: bool = True
    saves: bool = True
    whole: frozenset[int] = frozenset()
    """Cache groups of which a hit needs all rows. Some rows of windows and states are stored."""
    left: str = ""
    """Why nothing is loaded or stored any more; empty while that is not so."""
    unsure: bool = False
    """Whether nothing is loaded or stored, since the weights are being compared."""
    epoch: int = 0
    """How often the weights have changed: what was computed before is neither loaded nor stored."""
    setup: str = ""
    """All that computes, see `vua.vllm.engine_identity`; empty until the workers have told."""
    trusts_itself: bool = True
    """Whether rows of this setup need no comparison."""
    elements: Mapping[int, str] = field(default_factory=dict)
    """Cache groups whose rows can be compared, and their dtype, a safetensors name."""
    layers: int = 1
    quantised: bool = False


ENGINES: Final[WeakValueDictionary[str, Engine]] = WeakValueDictionary()
"""By vLLM's engine id: the connector adds its own before it makes its tiers."""


@dataclass(slots=True)
class Terms:
    """What the rows of a request depend on beside vLLM's hash. The connector sets it."""

    out: bool = False
    """Whether none of its rows may be loaded or stored."""
    salt: bytes = b""
    """Chooses the key that seals them."""
    extras: tuple[tuple[int, str, bytes], ...] = ()
    """(The first token that depends on it, a tag, a value) each."""
    epoch: int = 0
    """The engine's, when the request came."""
    states: tuple[int, ...] = ()
    """Tokens after which a state is stored, beside those that vLLM stores by itself."""

    @property
    def kind(self) -> Kind:
        return ("", *sorted({tag for _, tag, _ in self.extras}))


_OUT: Final = Terms(out=True)


@dataclass(slots=True)
class Request:
    """What one tier knows of a request."""

    context: Any
    options: RequestOptions = field(default_factory=RequestOptions)
    found: dict[OffloadKey, bool | None] = field(default_factory=dict)
    """Answers of lookups; None: there was none, or a load failed, so it counts as missing."""
    asked: set[OffloadKey] = field(default_factory=set)
    pending: list[OffloadKey] = field(default_factory=list)
    late_s: float = 0.0
    """When it stops waiting for answers."""
    lock: threading.Lock = field(default_factory=threading.Lock)
    ends: dict[tuple[bytes, int], OffloadKey] = field(default_factory=dict)
    """By cache group and last token: all rows that vLLM has named so far."""
    rows: int = 0
    """How many it had named when it first asked: the prompt's."""
    named: dict[tuple[OffloadKey, Naming | None], ChunkKey] = field(default_factory=dict)
    """What `Names.of` has made: a row is named when it is looked up, and loaded."""

    @property
    def terms(self) -> Terms:
        """A request that the connector does not know of is left out."""
        return self.context.get_state(Terms) or _OUT


class Names:
    """Names rows as chunks: eviction takes ends first.

    The parent of a row is the one before it; of a group that is not whole, the row of a whole one
    where it ends.
    """

    def __init__(self, spec: Any, engine: Engine, chunk_tokens: int) -> None:
        self._chunk_tokens, self._engine = chunk_tokens, engine
        self._tokens = {
            one.group_id.to_bytes(4, "big"): one.tokens_per_block * spec.blocks_per_chunk
            for one in spec.config.groups
        }
        """Tokens of a row, by the end of vLLM's keys, which names the cache group."""

    def of(self, request: Request, keys: Iterable[OffloadKey], store: Store) -> list[ChunkKey]:
        """Return the chunks' keys.

        Raises KeyError for a row without a place in the prompt, NoKeyError for a salt without key.
        """
        naming, terms = store.keyring.naming(request.terms.salt), request.terms
        tokens, tenant = self._chunk_tokens, naming.tenant if naming else ""

        def digest(key: OffloadKey, end: int) -> bytes:
            if known := request.named.get((key, naming)):
                return known.prefix_hash
            extras = [(tag, value) for first, tag, value in terms.extras if first < end]
            return extras_parent(bytes(key), [("vllm", b"tier.v1"), *extras], naming)

        found, ends = list[ChunkKey](), self._ends(request)
        for key in keys:
            if known := request.named.get((key, naming)):
                found.append(known)
                continue
            group, end = key[-4:], request.context.get_offload_key_position(key)
            if end is None:
                raise KeyError(f"vLLM named no place of row {key.hex()}")
            place, parent, whole = (end - 1) // self._tokens[group], b"", self._whole(group)
            if whole != group:  # a chunk that begins at 0 has no parent
                place += 1
            if whole and (before := (end - (whole == group)) // self._tokens[whole]):
                before *= self._tokens[whole]
                parent = digest(ends[whole, before], before)
            where = (place * tokens, (place + 1) * tokens)
            made = ChunkKey(digest(key, end), parent, *where, b"", tenant)
            found.append(request.named.setdefault((key, naming), made))
        return found

    def _whole(self, group: bytes) -> bytes | None:
        whole = [one for one in self._tokens if int.from_bytes(one, "big") in self._engine.whole]
        return group if group in whole else next(iter(whole), None)

    def chains(self, request: Request) -> list[list[OffloadKey]]:
        """Return all rows that vLLM has named, by cache group, from the first on."""
        ends = sorted(self._ends(request).items())
        return [
            [key for (other, end), key in ends if other == group and end % tokens == 0]
            for group, tokens in self._tokens.items()
        ]

    def looked_up(self, request: Request) -> tuple[int, int, int, int] | None:
        """Return what `Savings.looked_up` takes of a prompt; None: an answer is not known."""
        group, asked = self._whole(b"") or b"", request.asked
        named = islice(request.ends.items(), request.rows)
        rows = [(end, key) for (one, end), key in named if one == group]
        rows = [*dropwhile(lambda row: row[1] not in asked, rows)]  # vLLM has these in memory
        known = [request.found.get(key, None if key in asked else False) for _, key in rows]
        if not rows or None in known:
            return None
        tokens = self._tokens[group]
        return [*known, False].index(False), len(rows), tokens, rows[0][0] - tokens

    def tokens_of(self, keys: Iterable[OffloadKey]) -> int:
        """Return how many tokens rows are, counted in one group of which all rows are stored."""
        group = self._whole(b"")
        return sum(self._tokens[group] for key in keys if key[-4:] == group)

    @staticmethod
    def _ends(request: Request) -> dict[tuple[bytes, int], OffloadKey]:
        with request.lock:
            positions = request.context._offload_key_positions.copy()  # noqa: SLF001 - no public one
            for key, end in islice(positions.items(), len(request.ends), None):
                request.ends[key[-4:], end] = key
            return request.ends


log = logger("tier")

_BUFFER_NBYTES: Final = 8 << 20
"""Memory of each thread: so much is read or written by one call, and stays in its cache."""
_STRAIGHT_NBYTES: Final = 128 << 20
"""So much is read from the page cache by one call, some 20 ms: giving the load up waits for it."""
_SAVE_THREADS: Final = 4
_GIVES_UP: Final = {*UNJUDGED} - {"writer"}
_PIECE: Final = 64
"""Elements of a row that are compared together."""
_START_S: Final = 1.0
"""How long the first requests wait for the cache, which is opened beside the engine's start."""
_COUNTERS: Final = (
    *("vua_loads_total", "vua_loaded_bytes_total", "vua_load_stops_total"),
    *("vua_chunks_saved_total", "vua_stored_bytes_total", "vua_hints_total"),
)
"""VUA's metrics that a tier has; vLLM itself measures times, for each tier."""


class _Move:
    """A transfer of vLLM's, in one piece or more that threads take. Thread-safe."""

    def __init__(self, job: TransferJob, request: Request) -> None:
        places = [
            (key[-4:], request.context.get_offload_key_position(key) or 0) for key in job.keys
        ]
        moved = sorted(zip(places, job.keys, job.chunk_ids.tolist(), strict=True))
        self.job, self.request = job, request
        self.keys, self.rows = [one[1] for one in moved], [one[2] for one in moved]
        self.began_s = time.monotonic()
        self.jobs: list[Job[_Piece]] = []
        self.left, self.lock = 1, threading.Lock()
        self.done: list[OffloadKey] = []

    def result(self, row_nbytes: int) -> JobResult:
        done, took_s = self.done, time.monotonic() - self.began_s
        came = tuple(done) if self.job.is_promotion else None
        well, nbytes = len(done) == len(self.keys), len(done) * row_nbytes
        return JobResult(self.job.job_id, well, came, took_s, nbytes)


_Piece: TypeAlias = "tuple[_Move, slice]"
_Question: TypeAlias = "tuple[Request, list[OffloadKey]]"


class _Buffer(threading.local):
    """Memory of one thread for some rows."""

    def __init__(self, layout: KVLayout) -> None:
        nbytes = layout.full.payload_nbytes(layout)
        self.rows = StagingBuffer(layout, layout.full, max(1, _BUFFER_NBYTES // nbytes))


class _Believed(dict[bytes, bool]):
    """The writers whose rows may be loaded, asked for once. For one request and thread."""

    def __init__(self, known: KnownWriters, kind: Kind, own: bytes) -> None:
        super().__init__({own: True})
        self._known, self._kind = known, kind

    def __missing__(self, writer: bytes) -> bool:
        self._known.learn(self._kind, (writer,))
        known = self._known.holds(self._kind, writer) and not self._known.is_aside(writer)
        return self.setdefault(writer, known)

    def __contains__(self, writer: Any) -> bool:
        return self[writer]


class VUATier(SecondaryTierManager):
    """Keeps rows of vLLM's host memory in a cache of VUA's."""

    medium: ClassVar[Medium] = Medium.STORAGE

    def __init__(
        self,
        offloading_spec: Any,
        primary_kv_view: memoryview,
        tier_type: str,
        path: str | Sequence[str] = "",
        backpressure_detector: Any = None,
        locality: str | None = None,
        *,
        enable_kv_events: bool = False,
        **settings: Any,
    ) -> None:
        """Begin to open the cache; waits a second for that at most.

        Args:
            offloading_spec: vLLM's.
            primary_kv_view: the host's memory, uint8 [rows, bytes].
            tier_type: the name in the configuration.
            path: the directory, a bucket's URL, or a list of both; else ``VUA_PATH``.
            backpressure_detector: vLLM's.
            locality: vLLM's name of where the storage is, by which a request may choose tiers.
            enable_kv_events: whether vLLM's KV cache events tell of rows that were stored; of rows
                that were evicted, `vua events` tells.
            settings: limits, security, timeouts, worker, durable, epoch, as the connector's.

        Raises ConfigError for a wrong setting or path, or below another connector; StorageError.
        """
        super().__init__(offloading_spec, primary_kv_view, tier_type, backpressure_detector)
        self.locality = None if locality is None else Locality(locality)
        tells = enable_kv_events and offloading_spec.config.enable_kv_cache_events
        self.events: list[OffloadingEvent] | None = [] if tells else None
        engine = ENGINES.get(offloading_spec.config.engine_id)
        if engine is None:
            raise ConfigError(
                'VUATier needs "kv_connector": "VUAOffloadingConnector" with '
                '"kv_connector_module_path": "vua.vllm.offloading": below another connector it is '
                "not told which model the pages are of"
            )
        if path:
            settings["shared_storage_path"] = path if isinstance(path, str) else list(path)
        how = 'give "path" to the VUATier in secondary_tiers'
        self._config = config = ConnectorConfig.from_extra_config(settings, how=how)
        locate(config.shared_storage_path, security=config.security)
        check_keys(config.security)
        self._engine, self._row_nbytes = engine, self.block_size_bytes
        # the address alone: vLLM releases its view at the end
        self._address = np.asarray(primary_kv_view).ctypes.data
        self._layout = rows_layout(offloading_spec, self._row_nbytes)
        self._names = Names(offloading_spec, engine, self._layout.chunk_tokens)
        self._stats, self._warn_once = Recorder(), WarnOnce(log)
        self._lock, self._epoch = threading.Lock(), engine.epoch
        self._opened: OpenedNamespace | None = None
        self._setup = self._writer = ""
        self._own = b""
        self._known: KnownWriters
        """Whose rows are proved: there with the namespace, as are setup and writer."""
        self._savings = Savings()
        self._savings.keep_at(config.shared_storage_path, "", config.security)
        self._options = OptionReader()
        self._requests: dict[str, Request] = {}
        self._asking: list[Request] = []
        self._moves: dict[_Move, None] = {}
        self._finished: deque[_Move] = deque()
        self._buffer = _Buffer(self._layout)
        storage, timeouts = logger("storage"), config.timeouts
        self._load_threads = max(config.worker.load_threads, native.THREADS)
        self._lookups = Pool[_Question](
            *(2, "vua-lookup"),
            timeout_s=timeouts.lookup_s,
            breaker=Breaker("lookups", storage),
            late=lambda job: self._answer(job.what),
        )
        self._loads, self._saves = (
            Pool[_Piece](
                *(threads, f"vua-{what}"),
                timeout_s=timeouts.io_s,
                breaker=Breaker(f"{what}s", storage),
                late=self._is_late,
            )
            for threads, what in ((self._load_threads, "load"), (_SAVE_THREADS, "save"))
        )
        self._waits_until_s = time.monotonic() + _START_S
        self._opening: Opening | None = None
        with self._tolerant():
            rows = np.asarray(primary_kv_view).view(np.uint8)
            if not (engine.trusts_itself or self._moves_rows(rows)):
                engine.left = "a row that was copied from vLLM's memory and back is another"
                log.warning("VUA: this engine is served without VUA's tier: %s", engine.left)
            if not engine.left:
                model = rows_model(engine, self._layout, config.epoch)
                self._opening = Opening(model, config, Identification(engine.find_weights))
        log.info(
            "VUA: below vLLM's offloading, which holds %.2f GiB of the host's memory: rows of %.0f "
            "KiB (%d cache groups) are kept in %s; %s",
            *(primary_kv_view.nbytes / 2**30, self._row_nbytes / 1024),
            *(len(offloading_spec.config.groups), config.shared_storage_path, native.status().text),
        )

    # -- requests and lookups -----------------------------------------------------------------

    def on_new_request(self, req_context: Any) -> RequestOffloadingContext:
        hints = getattr(req_context, "kv_hints", None)
        options = self._options.read(req_context.kv_transfer_params, hints)
        for outcome in options.outcomes:
            self._stats.add("vua_hints_total", label=outcome)
        self._requests[req_context.req_id] = Request(req_context, options)
        return RequestOffloadingContext()

    def lookup(self, key: OffloadKey, req_context: Any) -> LookupResult:
        """Return whether a row is stored, or RETRY while that is being asked: for ``lookup_s``."""
        request = self._requests.get(req_context.req_id)
        usable = request is not None and self._usable(request) and self._engine.loads
        if request is None or not (usable and request.options.load):
            return LookupResult.MISS
        if key in request.found:
            return LookupResult.HIT if request.found[key] else LookupResult.MISS
        now_s = time.monotonic()
        request.late_s = request.late_s or now_s + self._config.timeouts.lookup_s
        if self._store() is None:
            soon = self._opening is not None and self._opening.soon
            wait = soon or now_s < self._waits_until_s
            return LookupResult.RETRY if wait and now_s < request.late_s else LookupResult.MISS
        if key not in request.asked:
            if not request.pending:
                self._asking.append(request)
            request.asked.add(key)
            request.pending.append(key)
            request.late_s = now_s + self._config.timeouts.lookup_s
        return LookupResult.RETRY if now_s < request.late_s else LookupResult.MISS

    def on_schedule_end(self, context: Any) -> None:
        self._give_up()
        asking, self._asking = self._asking, []
        for request in asking:
            question, request.pending = (request, request.pending), []
            allowed = self._lookups.breaker.allows()
            if not (allowed and self._submit(self._lookups, self._look, question)):
                self._answer(question)

    def _look(self, job: Job[_Question]) -> None:
        (request, keys), found = job.what, None
        with self._tolerant() as work:
            if (store := self._store()) is not None:
                chunks, full = self._names.of(request, keys, store), store.layout.full
                request.rows = request.rows or len(request.ends)
                if store.search is None:
                    found = store.storage.exists([entry_name(key.name, full) for key in chunks])
                else:
                    found = store.search.holds(chunks, [full])
        if job.settle(well=work.well):
            self._answer(job.what, found)

    @staticmethod
    def _answer(question: _Question, found: Sequence[bool | None] | None = None) -> None:
        """Without the storage's answer all rows are missing."""
        request, keys = question
        request.found.update(zip(keys, found or [None] * len(keys), strict=True))

    def on_request_finished(self, req_context: Any) -> None:
        """Note the use of a prompt, and heed hints about it, on a thread."""
        request = self._requests.pop(req_context.req_id, None)
        if request is not None and self._usable(request) and self._store() is not None:
            self._submit(self._lookups, self._note_use, (request, []))

    def _note_use(self, job: Job[_Question]) -> None:
        request, store = job.what[0], self._store()
        within_s = 0.0 if request.options.drop else request.options.retain_s
        if store is None or store.capacity is None:
            return
        with self._tolerant():
            if (found := self._names.looked_up(request)) is not None:
                self._savings.looked_up(store.namespace, *found)
            for rows in self._names.chains(request):
                chain = self._names.of(request, rows, store)
                store.used(chain, len(chain), storing=True)
                if within_s is not None and chain:
                    names = [key.name for key in chain]
                    outcome = store.capacity.hinted(names, within_s, self._row_nbytes)
                    self._stats.add("vua_hints_total", label=outcome)

    # -- transfers ----------------------------------------------------------------------------

    def submit_load(self, job_metadata: TransferJob) -> None:
        self._begin(self._loads, self._read, job_metadata)

    def submit_store(self, job_metadata: TransferJob) -> None:
        self._begin(self._saves, self._write, job_metadata)

    def _begin(
        self, pool: Pool[_Piece], work: Callable[[Job[_Piece]], None], job: TransferJob
    ) -> None:
        request = self._requests.get(job.req_context.req_id) or Request(job.req_context)
        move = _Move(job, request)
        self._moves[move] = None
        may = job.is_promotion or (self._engine.saves and request.options.store)
        ready = may and self._usable(request) and self._store() is not None
        allowed = ready and pool.breaker.allows()
        whole = slice(0, len(move.keys))
        if not (allowed and move.keys and self._submit(pool, work, (move, whole))):
            self._piece_ended(move, [])

    def _submit(self, pool: Pool[Any], work: Callable[[Job[Any]], None], what: Any) -> bool:
        """Run work on a thread; False if not a single one can be started."""
        try:
            job = pool.submit(work, what)
        except RuntimeError as problem:
            self._warn_once("threads", str(problem))
            return False
        if isinstance(what[0], _Move):
            what[0].jobs.append(job)
        return True

    def _piece_ended(self, move: _Move, done: Sequence[OffloadKey]) -> None:
        """Note what became of a piece, once for each."""
        with move.lock:
            move.done += done
            move.left -= 1
        if move.left == 0:
            self._finished.append(move)

    def _is_late(self, job: Job[_Piece]) -> None:
        move, part = job.what
        if move.job.is_promotion:
            self._stats.add("vua_load_stops_total", label="timeout")
        else:
            self._stats.add("vua_chunks_saved_total", len(move.keys[part]), "timeout")
        self._piece_ended(move, [])

    def _read(self, job: Job[_Piece]) -> None:
        """Load rows, those after a missing one, too, while they are wanted.

        Straight from the page cache, where nothing waits, by one thread of Python and several of C;
        from the first other one on by all threads, through their memory.
        """
        (move, part), done, reason, at, cached = job.what, list[OffloadKey](), "", 0, True
        keys, rows, memory = move.keys[part], move.rows[part], self._buffer.rows.memory
        stop = len(keys)
        at_once = {False: self._buffer.rows.chunks, True: 1 + _STRAIGHT_NBYTES // self._row_nbytes}
        with self._tolerant() as work:
            store, kind = self._store(), move.request.terms.kind
            believed = _Believed(self._known, kind, self._own) if store else None
            chunks = self._names.of(move.request, keys, store) if store else []
            while store and at < stop and job.wanted and reason not in _GIVES_UP:
                some, found = slice(at, min(stop, at + at_once[cached])), LoadResult(0)
                if not cached:
                    found = Loader(store, memory).load(chunks[some], believed)
                    job.progress()
                with job.use() as wanted:
                    usable = wanted and self._usable(move.request)
                    if usable and cached:
                        straight = Loader(store, self._straight(rows[some]))
                        found = LoadResult(straight.load_cached(chunks[some], believed))
                    elif usable:
                        self._copy(rows[at : at + found.chunks], out=True)
                    done += keys[at : at + found.chunks] if usable else []
                    at += found.chunks + bool(found.reason)
                    if usable and cached and at < some.stop:
                        stop = at + self._share(move, part.start + at, part.start + stop)
                cached = bool(found.chunks if cached else found.reason)
                if reason := found.reason or "":
                    self._stats.add("vua_load_stops_total", label=reason)
        self._stats.add("vua_loaded_bytes_total", len(done) * self._row_nbytes, "slab")
        if job.settle(well=work.well and reason != "error"):
            self._piece_ended(move, done)

    def _share(self, move: _Move, first: int, stop: int) -> int:
        """Leave rows of a load to other threads; return how many of them are this one's own."""
        each = max(self._buffer.rows.chunks, -(-(stop - first) // self._load_threads))
        for at in range(first + each, stop, each):
            with move.lock:
                move.left += 1
            rest = slice(at, min(stop, at + each))
            if not self._submit(self._loads, self._read, (move, rest)):
                self._piece_ended(move, [])
        return min(each, stop - first)

    def _write(self, job: Job[_Piece]) -> None:
        """Store rows, copied out while vLLM keeps them."""
        (move, part), outcomes, rest = job.what, list[str](), "error"
        keys, rows, size = move.keys[part], move.rows[part], self._buffer.rows.chunks
        with self._tolerant() as work:
            store = self._store()
            while store and len(outcomes) < len(keys):
                at, run = len(outcomes), keys[len(outcomes) : len(outcomes) + size]
                with job.use() as wanted:
                    if wanted := wanted and self._usable(move.request):
                        self._copy(rows[at : at + len(run)], out=False)
                writer = EntryWriter(store, self._buffer.rows.memory, writer=self._writer)
                chunks = self._names.of(move.request, run, store) if wanted else []
                self._judge(move.request.terms.kind, run, chunks, store)
                for statuses in writer.save_each(chunks):
                    outcomes += outcomes_of(statuses)
                job.progress()
                if len(outcomes) < at + len(run):
                    rest = "refused" if wanted else "reset"
                    break
        good = len(outcomes)
        outcomes += [rest] * (len(keys) - good)
        for outcome in {*outcomes}:
            self._stats.add("vua_chunks_saved_total", outcomes.count(outcome), outcome)
        self._stats.add("vua_stored_bytes_total", outcomes.count("written") * self._row_nbytes)
        if job.settle(well=work.well):
            self._piece_ended(move, keys[:good])

    def _judge(
        self, kind: Kind, keys: Sequence[OffloadKey], chunks: Sequence[ChunkKey], store: Store
    ) -> None:
        """Compare computed rows, in this thread's memory, with stored ones that a load refused.

        Their writer's rows of this kind are loaded from now on, or never.
        """
        for at, chunk in enumerate(chunks):
            dtype = self._engine.elements.get(int.from_bytes(keys[at][-4:], "big"))
            if dtype is None or (writer := store.refused.get(chunk.prefix_hash)) is None:
                continue
            stored, nbytes = StagingBuffer(self._layout, self._layout.full, 1), self._row_nbytes
            if Loader(store, stored.memory).load([chunk]).chunks:
                store.refused.pop(chunk.prefix_hash, None)
                computed = self._buffer.rows.bytes[at * nbytes : (at + 1) * nbytes]
                if not (why := _difference(computed, stored.bytes, dtype, self._engine)):
                    self._known.add(kind, writer)
                elif not self._known.is_aside(writer):
                    self._known.put_aside(writer)
                    text = "VUA: rows of the writer [%s] are not what this engine computes: %s. %s"
                    log.error(text, in_words(writer), why, "They are not loaded")

    def _straight(self, rows: Sequence[int]) -> MemoryMap:
        """Return where rows of vLLM's are; no read that waits may write there."""
        offsets = np.array(rows, dtype=np.uint64) * np.uint64(self._row_nbytes)
        first = payload_map(self._layout, self._layout.full, self._address, None, 1)
        return replace(first, segment_offset=(offsets,), cached=True)

    def _copy(self, rows: Sequence[int], *, out: bool) -> None:
        here, nbytes = self._buffer.rows.bytes.ctypes.data, self._row_nbytes
        for at, row in enumerate(rows):
            own, other = here + at * nbytes, self._address + row * nbytes
            ctypes.memmove(*((other, own) if out else (own, other)), nbytes)

    def get_finished_jobs(self) -> Iterable[JobResult]:
        self._give_up()
        results = []
        while self._finished:
            self._moves.pop(move := self._finished.popleft(), None)
            results.append(move.result(self._row_nbytes))
            if self.events is not None and results[-1].success and not move.job.is_promotion:
                where = {"medium": self.medium, "locality": self.locality}
                self.events.append(OffloadingEvent([*move.job.keys], removed=False, **where))
            if move.job.is_promotion:
                failed = {*move.keys} - {*move.done}
                move.request.found.update(dict.fromkeys(failed))
                for request in self._requests.values() if failed else ():
                    request.found.update(dict.fromkeys(failed & request.found.keys()))
                outcome = ("partial" if move.done else "failed") if failed else "complete"
                self._stats.add("vua_loads_total", label=outcome)
                tokens = self._names.tokens_of(move.done)
                self._savings.loaded(tokens, 0, time.monotonic() - move.began_s)
        return results

    def take_events(self) -> Iterable[OffloadingEvent]:
        taken, self.events = self.events or (), None if self.events is None else []
        return taken

    def _give_up(self) -> None:
        for pool in (self._lookups, self._loads, self._saves):
            pool.give_up()

    def drain_jobs(self) -> None:
        """Wait until no thread touches vLLM's memory: ``io_s`` at most where the storage hangs."""
        for move in list(self._moves):
            for job in move.jobs:  # the first ones may add others until they end
                while not job.wait(0.01):
                    self._give_up()

    def shutdown(self) -> None:
        """Finish what is under way, unless the storage hangs; touch vLLM's memory no more."""
        drain_s = self._config.timeouts.drain_s
        self._loads.close(finish=False)
        self._saves.close(timeout_s=drain_s)
        self._lookups.close(timeout_s=self._config.timeouts.lookup_s)
        self._savings.close()
        for move in self._moves:
            for job in move.jobs:
                job.settle()  # waits for a copy under way
        if self._opening is not None:
            self._opening.close()
            opened = self._opening.take()  # what opens later closes itself
            if opened is not None:
                close_within(opened.namespace.close, drain_s)

    # -- common -------------------------------------------------------------------------------

    @classmethod
    def build_metric_definitions(
        cls,
        extra_config: dict[str, Any],  # noqa: ARG003 - vLLM's
    ) -> dict[str, OffloadingMetricMetadata]:
        return {
            name: OffloadingCounterMetadata(
                METRICS[name].documentation, (METRICS[name].label,) * bool(METRICS[name].label)
            )
            for name in _COUNTERS
        }

    def get_stats(self) -> OffloadingConnectorStats | None:
        series = self._stats.take()
        stats = OffloadingConnectorStats()
        for name, values in (series or {}).items():
            for label, value in values.items():
                stats.increase_counter(name, value, (label,) * bool(METRICS[name].label))
        return stats if series else None

    def _store(self) -> Store | None:
        opening, engine = self._opening, self._engine
        if opening is None or opening.identity is None:
            return None
        with self._lock:
            if self._epoch != engine.epoch:
                self._epoch, epoch = engine.epoch, f"{self._config.epoch}+{secrets.token_hex(8)}"
                opening.begin(replace(opening.identity, epoch=epoch))
            if (opened := opening.take()) is None:
                return None
            store = opened.namespace.stores[0]
            if opened is not self._opened or engine.setup != self._setup:
                self._opened, self._setup = opened, engine.setup
                self._writer = new_writer("vllm", engine.setup)
                place = self._config.directory, store.namespace, self._config.security
                self._known = KnownWriters(*place)
                self._own = written_name(self._writer).encode() if engine.trusts_itself else b""
                self._known.be_of(engine.setup, self._own)
            return store

    def _usable(self, request: Request) -> bool:
        engine, terms = self._engine, request.terms
        return not (engine.left or engine.unsure or terms.out or terms.epoch != engine.epoch)

    def _moves_rows(self, rows: np.ndarray[Any, Any]) -> bool:
        """Whether a row of vLLM's memory, which it does not use yet, is copied out and back."""
        last, sample = len(rows) - 1, np.frombuffer(secrets.token_bytes(self._row_nbytes), np.uint8)
        for content, out in ((sample, False), (0, True)):
            rows[last] = content
            self._copy([last], out=out)
        same = np.array_equal(rows[last], sample)
        rows[last] = 0
        return same

    @contextmanager
    def _tolerant(self) -> Iterator[Any]:
        """End work that raises: it counts as a miss, or as not stored."""
        work = SimpleNamespace(well=True)  # False after a failure of the storage
        try:
            yield work
        except Exception as problem:
            work.well, name = not isinstance(problem, OSError), type(problem).__name__
            known = isinstance(problem, VUAError | OSError)
            own = "" if known else f"an error in the tier, {name}: "
            self._warn_once(name, f"rows are not loaded or stored: {own}{problem}")
            log.debug("VUA: an error in the tier", exc_info=problem)


def _difference(
    computed: np.ndarray[Any, Any], stored: np.ndarray[Any, Any], dtype: str, engine: Engine
) -> str:
    """Return how two computations of a row differ beyond arithmetic; empty: they do not.

    A layer's place in a row is vLLM's own: all pieces are allowed what the last layer is.
    """
    rows = [torch.from_numpy(one).view(DTYPES[dtype]) for one in (computed, stored)]
    rows = [one[: len(one) // _PIECE * _PIECE].view(1, 1, -1, _PIECE) for one in rows]
    used = (rows[0] != 0).any(-1) | (rows[1] != 0).any(-1)  # pages are padded
    if not used.any():
        return ""
    ours, theirs = (one[used].view(1, 1, -1, _PIECE) for one in rows)
    found = compare([ours], [theirs], dtype, [engine.layers], quantised=engine.quantised)
    return "" if found.holds else str(found)
