"""How far a prompt's chunks are stored in one namespace, and why no further, by headers only.

Changes nothing, and is not a use. Concurrent writes and deletions may or may not be seen. K and V
are not read: `vua verify` does that.

:func:`expect` finds vLLM's namespace of a model directory, as far as its files tell. Engines digest
a config that they have completed (defaults of the installed version, overrides, marks of their
own), which `config.json` alone does not give. So a different ``model`` never proves another model;
all other fields are compared as the adapters fill them in.
"""

from __future__ import annotations

import hashlib
import heapq
import json
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from operator import itemgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal

from vua.capacity.listing import Listing
from vua.catalog import open_catalog
from vua.catalog.check import NO_KEYS
from vua.errors import ConfigError, CorruptEntryError, ForeignEntryError
from vua.format.identity import Identity, named_by, rope_order
from vua.format.keys import ChunkKey, KeyChain, token_ids
from vua.format.layout import Kind, KVLayout, Shard, cover, leading, longest_prefix
from vua.security.keyring import NoKeyError
from vua.security.settings import Security
from vua.store.entry_reader import EntryReader
from vua.store.namespace import Namespace
from vua.store.store import Store
from vua.weights import checkpoint_files, identify_weights

if TYPE_CHECKING:
    from vua.security.seal import Seal

State = Literal["stored", "absent", "partial", "damaged"]
"""``stored``: sound files cover the group. ``partial``: they do not. ``damaged``: one is unsound.
Soundness is judged by size and header."""


@dataclass(frozen=True, slots=True)
class ChunkState:
    """One chunk of the prompt, in the files of one group of layers."""

    index: int
    key: ChunkKey
    state: State
    files: tuple[str, ...] = ()
    """Shards that exist."""
    reasons: tuple[str, ...] = ()
    """Why it is not stored."""


@dataclass(frozen=True, slots=True)
class GroupState:
    """What is stored of a prompt for one group of layers."""

    layout: KVLayout
    galloping: int
    """Leading chunks by a lookup: by names, in O(log n) probes."""
    chunks: tuple[ChunkState, ...]

    @property
    def leading(self) -> int:
        """Leading stored chunks, counted one by one."""
        gap = self.first_missing
        return len(self.chunks) if gap is None else gap.index

    @property
    def first_missing(self) -> ChunkState | None:
        """The first chunk that is not stored, None if all are."""
        return next((chunk for chunk in self.chunks if chunk.state != "stored"), None)

    @property
    def damaged(self) -> list[ChunkState]:
        """The chunks with unsound files."""
        return [chunk for chunk in self.chunks if chunk.state == "damaged"]

    @property
    def runs(self) -> list[tuple[int, int]]:
        """The stored chunks as half-open ranges; more than one if there are holes."""
        found: list[tuple[int, int]] = []
        for chunk in self.chunks:
            if chunk.state != "stored":
                continue
            if found and found[-1][1] == chunk.index:
                found[-1] = (found[-1][0], chunk.index + 1)
            else:
                found.append((chunk.index, chunk.index + 1))
        return found


def prompt_keys(namespace: Namespace, ids: bytes, salt: str) -> tuple[KeyChain, Seal | None]:
    """Return a prompt's chunk keys as engines with its keys name them, and their seal, if any.

    Raises NoKeyError if the salt's key is unavailable: then nothing of it is cached.
    """
    extras = {0: [("salt", salt.encode())]} if salt else None
    try:
        keys = namespace.keys(ids, extras, salt.encode())
        seal = namespace.keyring.seal(keys.tenant)
    except NoKeyError as problem:
        if salt and isinstance(problem.__cause__, FileNotFoundError):
            raise NoKeyError("no key for this salt; `vua key DIR --salt S`") from problem
        raise
    return keys, seal


def order_documents(
    where: str, count: int, prompt: Callable[[Sequence[int]], Sequence[int]], *,
    namespace: str = "", salt: str = "", security: Security = NO_KEYS,
) -> tuple[list[int], int, str]:  # fmt: skip
    """Return in which order a prompt's documents hit most, with the stored tokens and where.

    The search extends the order with most stored chunks by each further document that gains one,
    at most ``2 * count`` times: mostly the best order, which is not proved. Documents that gain no
    chunk, as do those shorter than one, come last as they were given. It looks at names alone,
    keeps no text, and is not a use. Raises ConfigError, InputError, StorageError.

    Args:
        where: directory of the cache, or URL.
        count: how many documents there are.
        prompt: returns the token ids of the prompt up to the end of the documents at these places,
            in this order: a chat's template and instructions, and no question yet.
        namespace: first digits of the engine's namespace; by default the one that hits most.
        salt: the requests' cache salt.
        security: the engines' keys.
    """
    best: tuple[tuple[int, ...], int, str] = ((), 0, "")
    for found in open_catalog(where).contents()[0]:
        opened = Namespace.open(found.path, security=security)
        if opened is not None and found.name.startswith(namespace):
            with suppress(NoKeyError):
                chosen, tokens = _best_order(opened, count, prompt, salt)
                best = max(best, (chosen, tokens, found.name), key=itemgetter(1))
    rest = [one for one in range(count) if one not in best[0]]
    return [*best[0], *rest], best[1], best[2] if best[1] else ""


def _best_order(
    opened: Namespace, count: int, prompt: Callable[[Sequence[int]], Sequence[int]], salt: str
) -> tuple[tuple[int, ...], int]:
    lead = [opened.stores[at] for at in leading([store.layout for store in opened.stores])]

    def looked_up(*places: int) -> tuple[int, tuple[int, ...]]:
        keys, _ = prompt_keys(opened, token_ids(prompt(places)), salt)
        return -min((store.lookup(keys) for store in lead), default=0), places

    best = looked_up()
    heap, extensions = [best], 0
    while heap and extensions < 2 * count:
        (reached, chosen), extensions = heapq.heappop(heap), extensions + 1
        tried = [looked_up(*chosen, one) for one in range(count) if one not in chosen]
        for one in (one for one in tried if one[0] < reached):
            heapq.heappush(heap, one)
            best = min(best, one)
    return best[1], -best[0] * opened.stores[0].layout.chunk_tokens


def group_state(store: Store, keys: KeyChain, seal: Seal | None) -> GroupState:
    """Check every chunk of a prompt for one group of layers: one listing, one header per file."""
    states = tuple(_state(store, seal, index, keys[index]) for index in range(len(keys)))
    return GroupState(store.layout, store.lookup(keys), states)


def _state(store: Store, seal: Seal | None, index: int, key: ChunkKey) -> ChunkState:
    full = store.layout.full
    found = [one for one in store.shards(key.name) if one.group == store.layout.group]
    problems = {one: _problem(store, seal, key, one) for one in sorted(found, key=_order)}
    there = [one for one, text in problems.items() if text is not None]
    if not there:
        return ChunkState(index, key, "absent")
    names = tuple(shard.name for shard in there)
    bad = tuple(f"{shard.name}: {text}" for shard, text in problems.items() if text)
    if bad:
        return ChunkState(index, key, "damaged", names, bad)
    if cover(full, there) is None:
        text = f"they do not cover {full.name}; was a writer's part lost?"
        return ChunkState(index, key, "partial", names, (text,))
    return ChunkState(index, key, "stored", names)


def _problem(store: Store, seal: Seal | None, key: ChunkKey, shard: Shard) -> str | None:
    """Return why a file does not match its name; "" if it does, None if it vanished meanwhile."""
    if not store.layout.full.contains(shard):
        return f"lies outside the layout's {store.layout.full.name}"
    codec = store.codec(shard, "" if seal is None else seal.kind)
    problem = EntryReader(store.storage, codec).read([key], seal=seal).problem
    if isinstance(problem, FileNotFoundError):
        return None
    return "" if problem is None else _explained(problem)


def _order(shard: Shard) -> tuple[int, int]:
    return shard.layer_start, shard.head_start


def _explained(problem: Exception) -> str:
    if isinstance(problem, ForeignEntryError):
        return f"foreign: {problem}"
    if isinstance(problem, CorruptEntryError):
        return f"corrupt: {problem}"
    return f"unreadable: {getattr(problem, 'strerror', None) or problem}"


def usable(groups: Sequence[GroupState]) -> int:
    """Return the leading chunks after which a computation can continue, given what is stored.

    An engine loads no more than that, see :func:`loadable`.
    """
    size = groups[0].layout.chunk_tokens
    count = len(groups[0].chunks)
    return _longest(groups, count * size, 1, size) // size


def loadable(groups: Sequence[GroupState], prompt_tokens: int, block_tokens: int) -> int:
    """Return how many tokens of a prompt vLLM can load: whole blocks, and never the last token."""
    return _longest(groups, prompt_tokens - 1, block_tokens, block_tokens)


def _longest(groups: Sequence[GroupState], most: int, block_tokens: int, align: int) -> int:
    """Return how many tokens can be used that are a multiple of ``align``, by the engines' rule."""

    def missing(number: int, chunks: Sequence[int]) -> int | None:
        states = groups[number].chunks
        return next((one for one in chunks if states[one].state != "stored"), None)

    kinds = [Kind(group.layout, block_tokens) for group in groups]
    lead = leading([group.layout for group in groups])
    stored = min((groups[at].leading for at in lead), default=len(groups[0].chunks))
    return longest_prefix(kinds, stored, most, missing, align)


def first_salts(listing: Listing, first: bytes) -> tuple[dict[str, int], list[str]]:
    """Return the listed prompts by the digest of their salt, and which begin with ``first``.

    ``first`` are the ids of one chunk. A digest is cut as by `vua top`, and "-" where a prompt has
    no salt, adapter or image. Prompts with secret names begin with nothing that is known here.
    """
    counts, same = Counter[str](), dict[str, None]()
    for name, salt in listing.firsts():
        shown = salt[:_SHORT] or "-"
        counts[shown] += 1
        if hashlib.sha256(bytes.fromhex(salt) + first).hexdigest() == name:
            same[shown] = None
    return dict(counts.most_common()), [*same]


_DTYPES: Final = {"bfloat16": "BF16", "float16": "F16", "float32": "F32"}
_SHORT: Final = 12


def expect(model: str, progress: Callable[[int, int], None] | None = None) -> Identity:
    """Return what the files in directory ``model`` tell of the identity under which vLLM stores.

    Weights and dtype are "" where they do not tell them.

    Digests of weights are remembered, as by engines; ``progress`` receives the bytes read and to
    read. Raises ConfigError without a usable ``config.json``, OSError.
    """
    root = Path(model)
    config = _read_config(root)
    text = config.get("text_config")
    text = text if isinstance(text, Mapping) else config
    named = [one.get(key) for one in (text, config) for key in ("dtype", "torch_dtype")]
    dtype = _DTYPES.get(str(next(filter(None, named), "")), "")
    weights = ""
    with suppress(ConfigError):
        weights = identify_weights(checkpoint_files(root), progress=progress).fingerprint
    return Identity.of_config(
        named_by("vllm", text),
        weights=weights,
        kv_dtype=dtype,
        rope=rope_order(str(text.get("model_type", ""))),
        name=root.resolve().name,
    )


def _read_config(root: Path) -> Mapping[str, Any]:
    path = root / "config.json"
    if not path.is_file():
        msg = f"{path}: no such file; give the local directory of the model that the engine loads"
        raise ConfigError(msg)
    try:
        config = json.loads(path.read_bytes())
    except (ValueError, RecursionError) as problem:
        raise ConfigError(f"{path} is not JSON: {problem}") from problem
    if not isinstance(config, Mapping):
        raise ConfigError(f"{path} is a JSON {type(config).__name__}, expected an object")
    return config
