"""Whose the rows of vLLM's host memory are, and their names: what the connector tells its tiers."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from itertools import dropwhile, islice
from typing import Any, Final
from weakref import WeakValueDictionary

from vllm.v1.kv_offload.base import OffloadKey

from vua.connector.proved import Kind
from vua.connector.request import RequestOptions
from vua.format.keys import ChunkKey, Naming, extras_parent
from vua.store.store import Store
from vua.weights import Weights


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
    """All that computes, see `vua.vllm.setup`; empty until the workers have told."""
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
