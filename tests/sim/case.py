"""Random scenarios: requests, what goes wrong meanwhile, and what must hold at the end."""

from __future__ import annotations

import dataclasses
import errno
import logging
import random
import shutil
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import torch

import vua.store.namespace
from e2e.damage import STRIKES, stored
from sim.engine import Engine, Settings, Wrong
from sim.truth import MODELS, VOCABULARY, Chain, Shape, first_read, make_shape, rows
from vua.device.buffers import StagingBuffer
from vua.format.keys import ChunkKey, KeyChain, token_ids
from vua.format.layout import KVLayout
from vua.storage.base import Batch, ReadResult, parse_name
from vua.storage.description import descriptions
from vua.storage.local import LocalStorage
from vua.store.namespace import Namespace
from vua.store.store import Store


@dataclass
class Inventory:
    """What a directory holds."""

    shape: Shape
    chunk_tokens: int
    good: set[tuple[int, str]] = field(default_factory=set)
    """The chunks that are right: the window of the layers, the name."""
    damaged: int = 0

    def stored(self, chain: Chain, window: int) -> list[bool]:
        """Which chunks of a prompt are stored for the layers of a window."""
        return [(window, key.name) in self.good for key in keys_of(chain, self.chunk_tokens)]

    def usable(self, chain: Chain, block_size: int) -> Iterator[int]:
        """How many tokens may be loaded, by the definition, the most first.

        Whoever computes the token behind them finds all that it attends to. What is loaded begins
        and ends with a block, as vLLM offers these blocks to other requests.
        """
        stored = {window: self.stored(chain, window) for window in self.shape.kinds}
        size = self.chunk_tokens
        most = min(len(chain.prompt) - 1, len(chain.prompt) // size * size)
        for end in range(most // block_size * block_size, 0, -block_size):
            if all(
                all(chunks[first_read(end, w) // block_size * block_size // size : -(-end // size)])
                for w, chunks in stored.items()
            ):
                yield end
        yield 0

    @property
    def leading(self) -> list[int]:
        """The windows of the layers of which everything is stored: no window, if there are such."""
        whole = [window for window in self.shape.kinds if not window]
        return whole or list(self.shape.kinds)

    def missing(self, chain: Chain, block_size: int, *, windows: bool) -> list[tuple[int, int]]:
        """What an engine with such blocks should have stored of a prompt: (window, chunk).

        It stores up to the last token where a block ends. With ``windows``,
        also what other layers than the leading ones need to go on there.
        """
        size, missing = self.chunk_tokens, []
        end = len(chain.prompt) // size * size // block_size * block_size
        for window in self.shape.kinds:
            stored = self.stored(chain, window)
            if 0 < window < size:
                continue  # vLLM may free the start of a chunk before its end is computed
            first = 0 if window in self.leading else first_read(end, window) // size
            if windows or window in self.leading:
                chunks = range(first, -(-end // size))
                missing += [(window, chunk) for chunk in chunks if not stored[chunk]]
        return missing

    def has_hole(self, chain: Chain) -> bool:
        """Whether something is stored behind what is missing, where all should be stored."""
        stored = [self.stored(chain, window) for window in self.leading]
        return any(chunks != sorted(chunks, reverse=True) for chunks in stored)


def keys_of(chain: Chain, chunk_tokens: int) -> list[ChunkKey]:
    extras = {0: [("salt", chain.salt.encode())]} if chain.salt else {}
    keys = KeyChain(token_ids(chain.prompt), chunk_tokens, extras)
    return keys.first(len(keys))


def kind_of(layout: KVLayout) -> int:
    """The window of a store's layers; 0 for none."""
    return layout.window or 0


def take_inventory(
    root: Path, shape: Shape, chunk_tokens: int, chains: Sequence[Chain]
) -> Inventory:
    """Read every stored chunk. Raises Wrong for one with a wrong value or an unknown name."""
    known = {key.name: (key, chain) for chain in chains for key in keys_of(chain, chunk_tokens)}
    inventory = Inventory(shape, chunk_tokens)
    for namespace in descriptions(root):
        if namespace.identity is None:
            raise Wrong(f"{namespace.path} is not described")
        stores = Namespace.create(root, namespace.identity, namespace.layouts).stores
        if {kind_of(store.layout) for store in stores} != set(shape.kinds):
            raise Wrong(f"{namespace.path} has other groups of layers: {namespace.layouts}")
        there = {
            (shard.group if shard else None, chunk)
            for chunk, shard in (parse_name(entry.name) for entry in stores[0].storage.list())
        }
        for store in stores:
            window, buffer = (
                kind_of(store.layout),
                StagingBuffer(store.layout, store.layout.full, 1),
            )
            for name in sorted(name for group, name in there if group == store.layout.group):
                if name not in known:
                    raise Wrong(f"chunk {name} is stored and no prompt has it")
                if _is_right(store, buffer, *known[name], shape):
                    inventory.good.add((window, name))
                else:
                    inventory.damaged += 1
    return inventory


def _is_right(
    store: Store, buffer: StagingBuffer, key: ChunkKey, chain: Chain, shape: Shape
) -> bool:
    if not store.load([key], buffer.memory).chunks:
        return False
    layers = shape.kinds[kind_of(store.layout)]
    expected = rows(chain.hashes(key.start, key.stop), shape, layers)
    for array, wanted in zip(buffer.arrays, expected, strict=True):
        found = array[0].view(torch.int16).numpy()
        if not np.array_equal(found, wanted.transpose(2, 1, 0, 3)):
            raise Wrong(f"the stored tokens {key.start}..{key.stop} of a prompt are wrong")
    return True


STUCK_STEPS = 3_000
"""Steps without progress after which an engine hangs. Waiting ones take a millisecond or two."""


OF_ENGINE = (
    *("max_num_batched_tokens", "max_num_seqs", "prefix_caching", "asynchronous", "drafts", "seed"),
)
"""Fields of a scenario that are settings of its engine."""


class Case(SimpleNamespace):
    """One scenario; the same seed draws the same one (threads still run as they like)."""

    @property
    def saves_all(self) -> bool:
        drops = self.max_pending_save_mib > 0 or self.lookup_timeout_s < 60
        return not (drops or self.damage)


def draw(seed: int) -> Case:
    chance = random.Random(f"case {seed}")
    pick = chance.choice
    asynchronous = chance.random() < 0.3
    slow = chance.random() < 0.5
    lookup_s = pick((0.0, 0.002, 0.02)) if slow else 0.0
    return Case(
        seed=seed,
        model=MODELS[seed % len(MODELS)],
        window=pick((20, 50, 80, 130)),
        block_sizes=(pick((16, 32, 64)), pick((16, 32, 64))),  # before and after the restart
        chunk_tokens=pick((16, 64, 64, 96)),
        longest=chance.randrange(150, 450),  # tokens of the longest prompt
        room=chance.uniform(1.1, 3.5),  # of the block pool, in longest requests
        max_num_batched_tokens=pick((48, 100, 256, 512)),
        max_num_seqs=pick((2, 4, 8)),
        prefix_caching=chance.random() < 0.5,
        asynchronous=asynchronous,
        drafts=0 if asynchronous else pick((0, 0, 1, 3)),
        requests=14,
        lookup_s=lookup_s,  # of the storage at most, for a probe, then for a read, a file written
        read_s=pick((0.0, 0.002, 0.006)) if slow else 0.0,
        write_s=pick((0.0, 0.005, 0.03)) if slow else 0.0,
        lookup_timeout_s=0.004 if lookup_s and chance.random() < 0.5 else 60.0,
        max_pending_save_mib=pick((1, 0)) if slow else 0,
        load_threads=pick((1, 2, 3)),
        damage=pick((0.0, 0.0, 0.03, 0.2)),  # chances per step, then of a request, and a reset
        aborts=pick((0.0, 0.03, 0.1)),
        resets=pick((0.0, 0.0, 0.05, 0.2)),
        read_errors=pick((0.0, 0.0, 0.1)),  # as a broken disk has
    )


def play(case: Case) -> Counter[str]:
    """Play a scenario; return what happened in it. Raises Wrong, naming it, for what may not be."""
    root = Path(tempfile.mkdtemp(prefix="vua-sim-"))
    try:
        with collected_log() as logged:
            counts = _Play(case, root).run() + logged.events
            counts[f"{case.model} loaded"] += counts["loaded tokens"]
            logged.check()
    except Exception as problem:
        raise Wrong(f"{type(problem).__name__}: {problem}\nseed {case.seed}: {case}") from problem
    finally:
        shutil.rmtree(root, ignore_errors=True)
    return counts


class _Play:
    def __init__(self, case: Case, root: Path) -> None:
        self.case, self.root = case, root
        self.chance = random.Random(f"play {case.seed}")
        self.documents = [self.noise(case.longest) for _ in range(3)]
        self.chains: list[Chain] = []
        self.finished: list[tuple[Chain, int]] = []
        """Prompts, and the block size of the engine that stored them."""
        self.counts: Counter[str] = Counter()
        self.idle = 0
        """Steps since something moved."""

    def noise(self, count: int) -> list[int]:
        return self.chance.choices(range(5, VOCABULARY), k=count)

    def run(self) -> Counter[str]:
        """Two engines one after the other, then a third one that only looks."""
        with ailing_storage(self.case) as read_errors:
            for life in (0, 1):
                with self.engine(self.settings(life)) as engine:
                    self.live(engine, life)
                    self.counts += engine.counts
        self.counts["read errors"] += len(read_errors)
        looking = dataclasses.replace(
            self.settings(1), prefix_caching=False, blocks=999, role="kv_consumer", drafts=0
        )
        looking.extra["timeouts"] = {"lookup_s": 60.0}
        with self.engine(looking) as engine:  # describes the namespace, should that be deleted
            inventory = take_inventory(
                self.root, looking.shape, self.case.chunk_tokens, self.chains
            )
            if inventory.damaged and not self.case.damage:
                raise Wrong(f"{inventory.damaged} stored chunks are damaged and nobody did it")
            self.counts["stored chunks"] += len(inventory.good)
            self.counts["hit at the end"] += self.hits(engine, inventory, looking.block_size)
        return self.counts

    def settings(self, life: int) -> Settings:
        case, block_size = self.case, self.case.block_sizes[life]
        extra = {
            "chunk_tokens": case.chunk_tokens,
            "timeouts": {"lookup_s": case.lookup_timeout_s},
            "worker": {
                "max_pending_save_mib": case.max_pending_save_mib,
                "load_threads": case.load_threads,
            },
        }
        largest = -(-(case.longest + 40 + case.drafts) // block_size) + 1
        return Settings(
            root=self.root,
            shape=make_shape(case.model, case.window),
            block_size=block_size,
            blocks=round(case.room * largest) + 1,
            **{name: getattr(case, name) for name in OF_ENGINE},
            extra=extra,
        )

    @contextmanager
    def engine(self, settings: Settings) -> Iterator[Engine]:
        """An engine that is closed, and was left clean."""
        engine = Engine(settings)
        try:
            yield engine
            engine.check_empty()
            engine.check_answers()
        finally:
            engine.close()

    def live(self, engine: Engine, life: int) -> None:
        """Send an engine requests and troubles until all are answered."""
        chance, case = self.chance, self.case
        coming = [f"{life}.{number}" for number in range(case.requests)]
        while coming or engine.busy:
            if coming and chance.random() < 0.4:
                for request_id in coming[: chance.randrange(1, 5)]:
                    coming.remove(request_id)
                    engine.add(
                        request_id, self.prompt(), chance.choice((1, chance.randrange(1, 32)))
                    )
            if chance.random() < case.aborts and engine.unfinished:
                engine.abort(chance.choice(engine.unfinished))
            if chance.random() < case.damage:
                self.strike()
            if chance.random() < case.resets:
                engine.reset_prefix_cache(running=chance.random() < 0.5)
            self.advance(engine)
        block = case.block_sizes[life]
        self.finished += [(engine.chains[request_id], block) for request_id in engine.wanted]

    def advance(self, engine: Engine) -> None:
        """Step, and while nothing moves but storage, go on stepping."""
        while self.idle < STUCK_STEPS:
            empty, loading = engine.counts["empty steps"], len(engine.loading)
            engine.step()
            if empty == engine.counts["empty steps"] or loading != len(engine.loading):
                self.idle = 0
                return
            self.idle += 1
            if self.chance.random() < 0.01:  # so that aborts strike while something is loading
                return
        raise Wrong(f"stuck: unfinished {engine.unfinished}, loading {list(engine.loading)}")

    def prompt(self) -> Chain:
        """A prompt seen before, or a part of a document with a question."""
        chance = self.chance
        if self.chains and chance.random() < 0.3:
            return chance.choice(self.chains)
        count = chance.randrange(self.case.longest)
        tail = self.noise(chance.randrange(1, max(2, min(80, self.case.longest - count))))
        salt = "pepper" if chance.random() < 0.15 else None
        chain = Chain(chance.choice(self.documents)[:count] + tail, salt)
        self.chains.append(chain)
        return chain

    def strike(self) -> None:
        """Damage a stored file, or take everything away."""
        files = stored(self.root)
        if files and self.chance.random() < 0.05:
            shutil.rmtree(files[0].parents[2], ignore_errors=True)
            self.counts["deleted namespaces"] += 1
        elif files:
            with suppress(FileNotFoundError):
                self.chance.choice(list(STRIKES.values()))(self.chance.choice(files))
                self.counts["damaged files"] += 1

    def hits(self, engine: Engine, inventory: Inventory, block: int) -> int:
        """An engine that stores nothing loads exactly what is stored; return how many tokens."""
        if self.case.saves_all:
            for chain, size in self.finished:
                # a window that vLLM had in its own prefix cache is not stored again
                missing = inventory.missing(chain, size, windows=not self.case.prefix_caching)
                if missing:
                    raise Wrong(f"of a finished request's prompt are missing: {missing}")
        distinct = list({id(chain): chain for chain, _ in self.finished}.values())[:6]
        for number, chain in enumerate(distinct):
            engine.add(f"end.{number}", chain, 1)
            engine.reset_prefix_cache(running=False)
        while engine.busy:
            self.advance(engine)
        for number, chain in enumerate(distinct):
            loaded = engine.loaded.get(f"end.{number}", 0)
            usable = list(inventory.usable(chain, block))
            if inventory.has_hole(chain) and any(inventory.shape.windows):
                usable.append(0)  # a lookup may overlook it, then the load fails
            else:
                usable = usable[:1]
            if loaded not in usable:
                raise Wrong(f"a new engine loaded {loaded} tokens, stored are {usable}")
        return engine.counts["loaded tokens"]


@contextmanager
def ailing_storage(case: Case) -> Iterator[list[OSError]]:
    """A directory that takes its time, on a disk that fails at times; yields the failures."""
    chance = random.Random(f"storage {case.seed}")
    failures: list[OSError] = []

    def pause(longest_s: float) -> None:
        if longest_s:
            time.sleep(random.uniform(0.0, longest_s))

    class AilingStorage(LocalStorage):
        def read(self, batch: Batch) -> ReadResult:
            if batch.transfer.spread is not None:  # of the page cache, which has half of it
                cold = ReadResult(0, BlockingIOError(errno.EAGAIN, "not cached"))
                return cold if chance.random() < 0.5 else super().read(batch)
            pause(case.read_s)
            if chance.random() < case.read_errors:
                failures.append(OSError(errno.EIO, "the disk is broken"))
                return ReadResult(0, failures[-1])
            return super().read(batch)

        def exists(self, names: Sequence[str], nbytes: int | None = None) -> Sequence[bool]:
            pause(case.lookup_s if nbytes is None else 0)
            return super().exists(names, nbytes)

        def write(self, batch: Any) -> Any:
            pause(case.write_s)
            return super().write(batch)

    with ExitStack() as patches:
        if case.lookup_s or case.read_s or case.write_s or case.read_errors:
            patches.enter_context(
                mock.patch.object(vua.store.namespace, "LocalStorage", AilingStorage)
            )
        yield failures


WARNINGS = {"lookups fail or hang": "lookup pauses", "slower than the engine": "full save queues"}
"""What the connector's warnings tell, by a part of their text."""


class _Log(logging.Handler):
    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.errors: list[str] = []
        self.events: Counter[str] = Counter()

    def check(self) -> None:
        if self.errors:
            raise Wrong(f"errors were logged: {self.errors[:3]}")

    def emit(self, record: logging.LogRecord) -> None:
        text = record.getMessage()
        self.events.update(event for part, event in WARNINGS.items() if part in text)
        # The connector itself warns when it gives up; the others, whenever a file is damaged.
        if record.levelno >= logging.ERROR or record.name == "vllm.vua":
            self.errors.append(f"{text} {record.exc_info[1] if record.exc_info else ''!r}")


@contextmanager
def collected_log() -> Iterator[_Log]:
    """Collect what VUA logs, and keep it off the screen."""
    handler, ours = _Log(), [logging.getLogger(name) for name in ("vua", "vllm.vua")]
    theirs = logging.getLogger("vllm")
    level = theirs.level
    theirs.setLevel(logging.ERROR)  # it warns of every load that has failed
    for logger in ours:
        logger.addHandler(handler)
        logger.propagate = False
        logger.setLevel(logging.WARNING)
    try:
        yield handler
    finally:
        theirs.setLevel(level)
        for logger in ours:
            logger.removeHandler(handler)
            logger.propagate = True
            logger.setLevel(logging.NOTSET)
