"""Lookups of prompts on their own threads: naming chunks and querying the storage for them.

A lookup may take long or hang while the rest of the engine continues. After several that took too
long, VUA makes no lookup for a while (see `vua.io.pool.Breaker`): it then neither loads nor stores
requests.

A layer with full attention needs every chunk of the prefix. One with a sliding window needs only
the chunks inside the window at the point where the computation continues; these chunks are stored
only at such points: at the end of a prompt, where it diverged from another one, and where a later
one may diverge, see `branches`. So a hit ends where every group has what it needs.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from concurrent.futures import wait as wait_for
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Final

from vua.connector.cache_spec import Group, Model, UncachedError, refused
from vua.connector.config import ConnectorConfig, RequestOptions
from vua.connector.extras import Adapter, Media
from vua.connector.load_policy import Replies
from vua.connector.log import WarnOnce, logger
from vua.connector.proved import KnownWriters, kind_of
from vua.errors import VUAError
from vua.format.keys import KeyChain, Keys, token_ids
from vua.format.layout import longest_prefix
from vua.io.pool import Breaker, Job, Pool
from vua.security.keyring import NoKeyError
from vua.store.namespace import Namespace, open_names
from vua.store.store import Store
from vua.store.writer import Run, Writers

_MAX_PROBES: Final = 1000
"""Probes for windows per lookup, a few ms locally; a prompt that needs more counts as not stored
there."""


@dataclass(slots=True)
class PrefixMatch:
    """The result of looking up a prompt."""

    keys: KeyChain
    """The prompt's chunks; later possibly those of generated tokens, too."""
    tokens: int
    """Tokens from its start on that can be loaded; ends with a block of every cache group."""
    stored: int
    """Leading chunks whose files exist in the leading groups."""
    windows: tuple[frozenset[int], ...]
    """Per group of layers, the chunks to store: only needed for groups with a window."""
    prompt_chunks: int
    """How many chunks of the prompt are worth storing, see `Model.useful_chunks`."""
    writers: tuple[Run, ...] = ()
    """Who wrote the chunks of the first group; empty if writers are not read."""
    beside: frozenset[bytes] = frozenset()
    """Who wrote the required chunks of the other groups."""
    kind: tuple[str, ...] = ("",)
    """What is compared separately: the adapter's digest or "", then the inputs besides text."""
    most: int = 0
    """Tokens from its start on that could be loaded if all were stored, and the client permits."""


def find(
    model: Model,
    stores: Sequence[Store],
    keys: KeyChain,
    num_tokens: int,
    *,
    window_every_tokens: int | None,
) -> PrefixMatch:
    """Look a prompt up. Touches the storage; raises StorageError, OSError.

    Args:
        model: the engine's KV cache.
        stores: one per group; none: nothing is known to be stored.
        keys: the prompt's chunks.
        num_tokens: tokens of the request; at least one of them is left to compute.
        window_every_tokens: the largest distance of the points at which windows are stored; None:
            at the end and where prompts diverged only.
    """
    size, align = model.chunk_tokens, model.align
    leading, stored, tokens = model.leading, 0, 0
    most = min(len(keys) * size, num_tokens - 1) // align * align
    if stores:
        stored = min(
            store.lookup(keys, group.written)
            for group, store in zip(model.groups, stores, strict=True)
            if group in leading
        )
        tokens = longest(model, stores, keys, stored, most)
    ends = {len(keys)}
    if window_every_tokens is not None:
        every = max(1, window_every_tokens // size)
        ends |= {*branches(len(keys), 8, every), *range(0, len(keys), every)}
    if tokens < min(stored * size, most) // align * align:
        # another prompt diverged here, more may follow
        ends.add(stored)
    windows = tuple(_window_chunks(model, group, ends) for group in model.groups)
    useful = model.useful_chunks(len(keys))
    return PrefixMatch(keys, tokens, stored, windows, useful, most=most)


def branches(stop: int, parts: int, every: int) -> Iterator[int]:
    """Yield numbers from 1 up to ``stop``, ``parts`` in each doubling, at least each ``every``.

    Where nothing is known of later prompts: a hit loses at most one part of ``parts``.

    >>> list(branches(40, 4, 6))
    [1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 14, 16, 20, 24, 28, 32, 38]
    """
    at = 1
    while at < stop:
        yield at
        at += max(1, min(every, (1 << at.bit_length() - 1) // parts))


def longest(model: Model, stores: Sequence[Store], keys: Keys, stored: int, most: int) -> int:
    """Return how many tokens can be loaded: every window after them is stored.

    Touches the storage; raises StorageError, OSError.

    Args:
        model: the engine's KV cache.
        stores: one per group.
        keys: the prompt's chunks.
        stored: how many of them, from the first on, the leading groups have.
        most: tokens to load at most.
    """
    seen: dict[tuple[int, int], bool] = {}

    def is_there(number: int, chunk: int) -> bool:
        known = seen.get((number, chunk))
        if known is None:
            known = len(seen) < _MAX_PROBES
            known = known and stores[number].holds(keys[chunk], model.groups[number].written)
            seen[number, chunk] = known
        return known

    def missing(number: int, chunks: Sequence[int]) -> int | None:
        if (search := stores[number].search) is not None:  # all at once
            held = search.holds([keys[chunk] for chunk in chunks], model.groups[number].written)
            seen.update(zip(((number, chunk) for chunk in chunks), held, strict=True))
        return next((one for one in chunks if not is_there(number, one)), None)

    return longest_prefix(model.kinds, stored, most, missing, model.align)


def _window_chunks(model: Model, group: Group, ends: set[int]) -> frozenset[int]:
    """The chunks that hold the group's window before each of the given chunk counts."""
    if group in model.leading:
        return frozenset()
    size, wanted = model.chunk_tokens, set[int]()
    for end in ends:
        # one chunk more: a request that ends with this chunk has to compute its last token, and
        # continues at the end of a block, which may be longer than a chunk
        hit = min((end - 1) * size, (end * size - 1) // model.align * model.align)
        first = model.first_loaded(group, max(0, hit))
        wanted.update(range(first // size, end))
    return frozenset(wanted)


log = logger("scheduler")

_STEP_WAIT_S: Final = 0.001
"""How long a step waits for lookups. Most have ended by then; and an engine with nothing else to do
would otherwise spin, and starve the lookup's thread of the GIL."""
_IDLE_STEP_WAIT_S: Final = 0.01
"""The same if no request computes or loads: no other request is delayed then, and prompts that
arrive together are computed in one step."""


class Lookup:
    """The lookup of one prompt. For the scheduler's thread, except `answer`."""

    def __init__(
        self,
        request: Any,
        options: RequestOptions,
        asked_s: float,
        adapter: Adapter | None,
        media: Media,
    ) -> None:
        """Ask at ``asked_s``, by the clock of :class:`Lookups`, which answers.

        A request that wants nothing has its answer.
        """
        self.adapter = adapter
        self.request = request
        self.options = options
        self.pins = options.pin and options.store
        """Whether chunks that are already stored are pinned; workers pin new ones."""
        self.token_ids: Sequence[int] | None = request.prompt_token_ids
        self.media = media.look_at(request.mm_features)
        self.asked_s = asked_s
        self.answer: Future[PrefixMatch | None] = Future()
        """None if the prompt has no name, or if the storage was not asked."""
        self.not_asked = ""
        """Why the storage was not asked: it did not answer earlier lookups (``paused``), or the
        model is not identified yet (``unidentified``; `answer` may then tell what to store)."""
        self.breaker: Breaker | None = None
        self._late = False
        if not (options.load or options.store):
            self.answer.set_result(None)

    def __bool__(self) -> bool:
        return self.answer.done()

    @property
    def outcome(self) -> str:
        """The metrics' word for the answer."""
        if self.not_asked:
            return self.not_asked
        found = self.answer.result()
        if found is None:
            return "unnamed"
        if found.tokens == 0:
            return "miss" if found.most else "short"
        return "hit" if found.stored >= found.prompt_chunks else "partial"

    def leave(self, why: str, found: PrefixMatch | None = None) -> None:
        """Answer without the storage, for a reason that is a word of the metrics."""
        self.not_asked = why
        self.answer.set_result(found)

    def give_up(self) -> bool:
        """Note that the answer takes too long; True the first time."""
        if self._late:
            return False
        self._late = True
        if self.breaker is not None:
            self.breaker.went(well=False)
        return True


def answer_early(lookup: Lookup, model: Model, config: ConnectorConfig) -> None:
    """Answer before the model is identified: nothing is known to be stored, and what could be.

    Names that need a key are not known before the namespace is: such prompts are not stored.
    """
    found, secret = None, config.security.key_file or config.security.tenant_keys
    try:
        if lookup.options.store and not secret:
            size = model.chunk_tokens
            keys = _keys_of(lookup, model, lambda ids, extras, _: open_names(ids, size, extras))
            every, tokens = config.window_every_tokens, lookup.request.num_tokens
            if keys is not None:
                found = find(model, (), keys, tokens, window_every_tokens=every)
    except Exception as problem:  # noqa: BLE001 - an error of one prompt costs its chunks
        log.debug("request %s is not stored: %s", lookup.request.request_id, problem)
    lookup.leave("unidentified", found)


class StepPatience:
    """How long the engine's thread waits for lookups in one step: for all of them together."""

    def __init__(self) -> None:
        self._left_s: float | None = None

    def renew(self) -> None:
        self._left_s = None

    def wait(self, lookup: Lookup, busy: Callable[[], bool]) -> None:
        """Wait for an answer; ``busy`` tells whether some request computes or loads."""
        if self._left_s is None:
            self._left_s = _STEP_WAIT_S if busy() else _IDLE_STEP_WAIT_S
        if not lookup and self._left_s > 0:
            began = time.monotonic()
            wait_for([lookup.answer], timeout=self._left_s)
            self._left_s -= time.monotonic() - began

    def pause(self) -> None:
        """Do not let an idle engine spin while a request waits; once a step."""
        if self._left_s is None:
            self._left_s = _STEP_WAIT_S
        if self._left_s:
            time.sleep(max(0.0, min(self._left_s, _STEP_WAIT_S)))
            self._left_s = 0.0


class Lookups:
    """Looks up prompts for one thread, without blocking it."""

    def __init__(
        self,
        model: Model,
        namespace: Namespace,
        config: ConnectorConfig,
        *,
        known: KnownWriters | None = None,
        count: Callable[[str], None] = lambda _: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Look up in ``namespace``, of one store per group.

        For ``known`` the writers of stored chunks are read, and what is known of them.
        ``count`` gets the outcome of each hint. ``clock`` returns seconds.
        """
        pairs = zip(namespace.stores, model.groups, strict=True)
        self._known = known
        self.replies = Replies() if config.save_generated else None
        """Decides about generated chunks; None: none are stored."""
        self._writers = [Writers(store, group.written) for store, group in pairs if known]
        self._model, self._namespace, self._config = model, namespace, config
        self._clock, self._count = clock, count
        whole = [group.layout for group in model.groups if group.layout.window is None]
        self._chunk_nbytes = sum(layout.full.payload_nbytes(layout) for layout in whole)
        self._breaker = Breaker("lookups", logger("storage"), clock=clock)
        self._pool = Pool[Lookup](
            2, "vua-lookup", timeout_s=config.timeouts.io_s, breaker=self._breaker, clock=clock
        )
        self._warn_once = WarnOnce(log)

    def ask(self, lookup: Lookup) -> None:
        """Begin a lookup; not while the storage hangs."""
        lookup.breaker = self._breaker
        if self._config.save_generated and lookup.request.num_output_tokens:  # it was preempted
            lookup.token_ids = list(lookup.request.all_token_ids)
        if self._breaker.allows():
            self.submit(lookup)
        else:
            lookup.leave("paused")

    def submit(self, lookup: Lookup) -> None:
        """Answer a lookup on a thread; also one that came before there were threads for it."""
        self._pool.submit(self._answer, lookup)

    def ended(self, lookup: Lookup) -> None:
        """Heed the hints about the time after a request, which has ended; in the background."""
        options, request = lookup.options, lookup.request
        if (options.retain_s is None and not options.drop) or not self._breaker.allows():
            return
        if self._config.save_generated:
            lookup.token_ids = list(request.all_token_ids)
        with suppress(RuntimeError):  # closed
            self._pool.submit(lambda job: self._count(self._heed(job.what)), lookup)

    def _heed(self, lookup: Lookup) -> str:
        """Pass the hints to the storage; return what became of them, in a word of the metrics."""
        capacity = self._namespace.capacity
        retain_s = 0.0 if lookup.options.drop else lookup.options.retain_s or 0.0
        try:
            keys = _keys_of(lookup, self._model, self._namespace.keys)
        except (VUAError, OSError):
            return "not_kept"  # its lookup has said why
        if keys is None or not len(keys):
            return "not_kept"
        names = [keys[at].name for at in range(len(keys))]
        return capacity.hinted(names, retain_s, self._chunk_nbytes)

    def _prefetch(self, keys: KeyChain, stored: int) -> None:
        travel = self._namespace.travel
        if travel is None:
            self._count("not_kept")
            return
        travel.fetch([(keys[at].name, keys[at].before.hex()) for at in range(stored)])
        self._count("prefetched")

    def close(self) -> None:
        """Stop the threads without waiting."""
        self._pool.close(finish=False)

    def _answer(self, job: Job[Lookup]) -> None:
        lookup = job.what
        found = self._look_up(lookup)
        if self._clock() - lookup.asked_s < self._config.timeouts.lookup_s:
            self._breaker.went(well=True)
        lookup.answer.set_result(found)
        if found is not None and lookup.options.retain_s is not None and not lookup.options.drop:
            self._heed(lookup)  # while it runs, too

    def _look_up(self, lookup: Lookup) -> PrefixMatch | None:
        """Name the prompt's chunks and find the stored ones; None for a prompt without a name."""
        request = lookup.request
        try:
            keys = _keys_of(lookup, self._model, self._namespace.keys)
            if keys is None:
                return None
            found = find(
                self._model,
                self._namespace.stores,
                keys,
                request.num_tokens,
                window_every_tokens=self._config.window_every_tokens,
            )
        except NoKeyError as problem:
            self._namespace.keyring.faults.tell(problem, "VUA: not cached", log)
            return None
        except (VUAError, OSError) as problem:
            kind = "media" if problem is lookup.media else type(problem).__name__
            self._warn_once(kind, f"not cached: {problem}")
            return None
        except Exception:  # an error of one prompt must not affect other requests
            log.exception("request %s is not cached", request.request_id)
            return None
        self._name_writers(lookup, found)
        if self.replies is not None and not request.num_output_tokens:
            self.replies.asked(keys.run(0, len(keys)).prefix_hashes)
        self._namespace.stores[0].used(keys, found.stored)  # as are all groups' files
        if found.stored and lookup.pins:
            self._namespace.capacity.pin(keys[found.stored - 1].name)
        if found.stored and lookup.options.prefetch:
            self._prefetch(keys, found.stored)
        log.debug(
            "request %s: %d of %d chunks stored, %d tokens usable",
            *(request.request_id, found.stored, len(keys), found.tokens),
        )
        return found

    def _name_writers(self, lookup: Lookup, found: PrefixMatch) -> None:
        if self._known is None or not found.stored:
            return
        first, *others = self._writers
        found.writers = first.runs(found.keys, 0, found.stored)
        size, beside = self._model.chunk_tokens, set[bytes]()
        for group, writers in zip(self._model.groups[1:], others, strict=True):
            needed = self._model.first_loaded(group, found.tokens) // size, -(-found.tokens // size)
            for _, names in writers.runs(found.keys, *needed):
                beside |= names
        found.beside = frozenset(beside)
        found.kind = kind_of(lookup.request, found.stored * size, lookup.adapter)
        self._known.learn(found.kind, beside.union(*(names for _, names in found.writers)))

    def learn(self, refused: Mapping[bytes, bytes]) -> None:
        """Note the writers of chunks, by prefix hash, that loads refused."""
        for prefix_hash, writer in refused.items():
            for writers in self._writers:
                writers.learn(prefix_hash, writer)


def _keys_of(
    lookup: Lookup,
    model: Model,
    name: Callable[[bytes, dict[int, list[tuple[str, bytes]]], bytes], KeyChain],
) -> KeyChain | None:
    """Return what ``name`` makes of a prompt's ids, extras and salt; None: it has no name.

    Raises what ``name`` raises, and UncachedError: its images or its adapter are not known.
    """
    request, ids, media = lookup.request, lookup.token_ids, lookup.media
    size, extras = model.chunk_tokens, dict[int, list[tuple[str, bytes]]]()
    if ids is None or request.prompt_embeds is not None:
        return None
    if isinstance(media, UncachedError):
        raise media
    if lookup.adapter is not None:
        extras.setdefault(0, []).append(("lora", lookup.adapter.digest.encode()))
        if model.engine.adapters:  # the parts of an adapter that the engine applies
            extras[0].append(("lora settings", model.engine.adapters.encode()))
    elif request.lora_request is not None:
        raise refused("adapter")
    salt = (request.cache_salt or "").encode()
    if salt:
        extras.setdefault(0, []).append(("salt", salt))
    # a session may have got more features
    for feature, named in zip(request.mm_features, media, strict=False):
        chunk = feature.mm_position.offset // size
        extras.setdefault(chunk, []).append(("multimodal", named))
    return name(token_ids(ids), extras, salt)
