"""The tier below vLLM's offloading, against a real directory and without an engine."""

from __future__ import annotations

import ctypes
import errno
import itertools
import shutil
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import pytest
from vllm.v1.kv_offload.base import LookupResult, ReqContext, make_offload_key
from vllm.v1.kv_offload.config import (
    OffloadingCacheConfig,
    OffloadingConfig,
    OffloadingGroupConfig,
    OffloadingModelConfig,
    OffloadingParallelConfig,
)
from vllm.v1.kv_offload.factory import OffloadingSpecFactory  # noqa: F401 - imports in order
from vllm.v1.kv_offload.tiering.base import JobResult, TransferJob

from commands import told
from e2e.damage import flip, stored, truncate
from helpers import SOON_S, DirectoryTest
from vua.capacity.upkeep import parted_at
from vua.connector.log import logger
from vua.connector.proved import written
from vua.errors import ConfigError
from vua.security.keyring import tenant_of, write_key
from vua.storage.base import Batch, ReadResult
from vua.storage.local import LocalStorage
from vua.store.store import Loader, LoadResult
from vua.vllm.tier import ENGINES, Engine, Terms, VUATier
from vua.weights import Weights

pytestmark = pytest.mark.vllm

ROWS, NBYTES, TOKENS = 32, 8192, 16


def config(engine_id: str, *, events: bool = False) -> OffloadingConfig:
    """What vLLM tells a tier of an engine with two cache groups."""
    groups = [OffloadingGroupConfig(TOKENS, (f"layer.{at}",), at) for at in range(2)]
    parallel = OffloadingParallelConfig(0, 1, 1, 1, 1, 1, 0, 1, None, is_parallelism_agnostic=False)
    return OffloadingConfig(
        tuple(groups),
        worker_kv_bytes_per_block=NBYTES,
        enable_kv_cache_events=events,
        extra_config={},
        engine_id=engine_id,
        model=OffloadingModelConfig("m", "float32"),
        cache=OffloadingCacheConfig(TOKENS, 1),
        parallel=parallel,
    )


def weights(name: str) -> Weights:
    return Weights(name, (), 0, 0, 0.0, 0.0)


def late_after(began: threading.Event) -> Callable[[], float]:
    """A pool's clock: from an event on each look at it comes long after the one before."""
    jumps = itertools.count(1)
    return lambda: time.monotonic() + 2 * SOON_S * (next(jumps) if began.is_set() else 0)


class Host:
    """vLLM's side: rows of host memory, requests, and a tier below."""

    def __init__(
        self,
        root: Path,
        *,
        digest: str = "w",
        size: int = 1,
        engine: dict[str, Any] | None = None,
        **settings: Any,
    ) -> None:
        """Start a tier on a directory, for a model whose weights have this digest."""
        self.memory = np.zeros((ROWS, NBYTES), dtype=np.uint8)
        name = f"engine {id(self)}"
        self.engine = ENGINES[name] = Engine(
            {"model_type": "llama", "world": size},
            "m",
            lambda _: weights(digest),
            **{"whole": frozenset((0,)), "setup": "ab" * 32, "elements": {0: "F32"}}
            | (engine or {}),
        )
        events = settings.get("enable_kv_events", False)
        spec = SimpleNamespace(config=config(name, events=events), blocks_per_chunk=1)
        times = {"lookup_s": SOON_S, "io_s": SOON_S}
        settings = {"path": str(root), "timeouts": times, **settings}
        self.tier = VUATier(spec, memoryview(self.memory), "VUATier", **settings)
        self._jobs = 0

    def request(
        self, name: str, rows: int = 8, terms: Terms | None = None, group: int = 0, **params: Any
    ) -> tuple[ReqContext, list[Any]]:
        """Begin a request, whose rows have names that depend on the prompt alone."""
        context = ReqContext(f"{name} {time.monotonic_ns()}", params)
        self.tier.on_new_request(context)
        context.set_state(terms or Terms())
        keys: list[list[Any]] = [[], []]
        for at in range(2 * rows):  # of both groups, in turn
            hashed = f"{name} {at // 2}".ljust(32).encode()
            keys[at % 2].append(make_offload_key(hashed, at % 2))
            context.set_offload_key_position(keys[at % 2][-1], (at // 2 + 1) * TOKENS)
        return context, keys[group]

    def fill(self, keys: Sequence[bytes], at: int = 0) -> None:
        for row, key in enumerate(keys, at):
            self.memory[row] = content(key)

    def move(self, context: ReqContext, keys: Sequence[Any], *, load: bool, at: int = 0) -> int:
        """Order a transfer of rows from ``at`` on; return its number."""
        self._jobs += 1
        rows = np.arange(at, at + len(keys), dtype=np.int32)
        job = TransferJob(self._jobs, list(keys), rows, load, context)
        (self.tier.submit_load if load else self.tier.submit_store)(job)
        return self._jobs

    def finish(self) -> JobResult:
        until = time.monotonic() + SOON_S
        while time.monotonic() < until:
            for result in self.tier.get_finished_jobs():
                return result
            time.sleep(0.002)
        raise TimeoutError

    def store(self, context: ReqContext, keys: Sequence[Any]) -> JobResult:
        self.fill(keys)
        self.move(context, keys, load=False)
        return self.finish()

    def load(self, context: ReqContext, keys: Sequence[Any]) -> list[Any]:
        self.memory[:] = 0xA5
        self.move(context, keys, load=True)
        result = self.finish()
        came = list(keys) if result.success else list(result.successful_keys or ())
        for row, key in enumerate(keys):
            if key in came:
                np.testing.assert_array_equal(self.memory[row], content(key))
        return came

    def find(self, context: ReqContext, keys: Sequence[Any]) -> list[bool]:
        until = time.monotonic() + SOON_S
        while time.monotonic() < until:
            found = [self.tier.lookup(key, context) for key in keys]
            if LookupResult.RETRY not in found:
                return [one is LookupResult.HIT for one in found]
            self.tier.on_schedule_end(None)
            time.sleep(0.002)
        raise TimeoutError


def content(key: bytes) -> Any:
    """The bytes of a row: of this name alone."""
    seed = int.from_bytes(key[-12:], "big")
    return np.random.default_rng(seed).integers(0, 256, NBYTES, dtype=np.uint8)


class TierTest(DirectoryTest):
    def setUp(self) -> None:
        super().setUp()
        self.root /= "kv"

    def host(self, **settings: Any) -> Host:
        host = Host(self.root, **settings)
        self.addCleanup(host.tier.shutdown)
        return host

    def filled(self, **settings: Any) -> list[Any]:
        """Store a prompt of 8 rows by one engine; return its keys."""
        host = self.host(**settings)
        context, keys = host.request("prompt")
        self.assertTrue(host.store(context, keys).success)
        return keys

    def found(self, host: Host, terms: Terms | None = None) -> list[bool]:
        """Which rows of the prompt another request finds."""
        context, keys = host.request("prompt", terms=terms)
        return host.find(context, keys)

    def test_another_engine_loads_what_was_stored(self) -> None:
        """Bytes and names; a row of another prompt, or of another cache group, is missing."""
        keys = self.filled()
        host = self.host()
        context, _ = host.request("prompt")

        self.assertEqual([True] * 8, host.find(context, keys))
        self.assertEqual(keys, host.load(context, keys))
        self.assertEqual([False] * 8, host.find(*host.request("other")))
        self.assertEqual([False] * 8, host.find(*host.request("prompt", group=1)))

    def test_parents(self) -> None:
        """Each chunk's parent is the row before it: what is evicted first is an end."""
        self.filled()

        youngest_first = sorted(stored(self.root), key=lambda path: -path.parent.stat().st_mtime_ns)
        self.assertEqual(8, len({path.parent.stat().st_mtime_ns for path in youngest_first}))
        host = self.host()
        context, keys = host.request("prompt")
        for key, path in zip(keys, youngest_first, strict=True):
            self.assertIn(content(key).tobytes(), path.read_bytes())
        self.assertEqual(keys[3:], host.load(context, keys[3:]))  # named without those before

    def test_states(self) -> None:
        """Of a group that is not whole some rows are stored, before the others or after them."""
        host = self.host()
        context, states = host.request("prompt", group=1)
        self.assertTrue(host.store(context, states[6:]).success)
        self.assertTrue(host.store(*host.request("prompt")).success)

        reader = self.host()
        context, _ = reader.request("prompt")
        self.assertEqual([False] * 6 + [True] * 2, reader.find(context, states))
        self.assertEqual(states[6:], reader.load(context, states[6:]))
        self.assertEqual([True] * 8, self.found(reader))

    def test_rows_in_any_order(self) -> None:
        """VLLM may pass rows unordered: they are stored front to back."""
        host = self.host()
        context, keys = host.request("prompt")
        self.assertTrue(host.store(context, keys[::-1]).success)

        self.assertEqual([True] * 8, self.found(self.host()))
        self.assertEqual(keys[::-1], host.load(context, keys[::-1]))

    def test_events(self) -> None:
        """Where that is asked for, vLLM's events tell of what was stored, once."""
        keys = self.filled()
        self.assertEqual([], [*self.host().tier.take_events()])
        host = self.host(enable_kv_events=True)
        context, _ = host.request("prompt")
        host.store(context, keys)
        host.load(context, keys)

        (event,) = host.tier.take_events()
        self.assertEqual((keys, False), (event.keys, event.removed))
        self.assertEqual([], [*host.tier.take_events()])

    def test_straight(self) -> None:
        """What the page cache has is read straight into vLLM's memory; all else is copied there."""
        keys = self.filled()
        for local, copies in ((True, 0), (False, len(keys))):
            with mock.patch("vua.io.posix.is_local", return_value=local):
                host = self.host()
                context, _ = host.request("prompt")
                self.assertEqual([True] * 8, host.find(context, keys))
            with mock.patch("ctypes.memmove", wraps=ctypes.memmove) as copy:
                self.assertEqual(keys, host.load(context, keys))
            self.assertEqual(copies, copy.call_count)

    def test_damage(self) -> None:
        """Flipped, cut and lost files are misses, other rows come; they are stored anew."""
        keys = self.filled()
        files = stored(self.root)
        flip(files[0])
        truncate(files[1])
        host = self.host()
        context, _ = host.request("prompt")

        came = host.load(context, keys)

        self.assertEqual(6, len(came))
        missing = [key for key in keys if key not in came]
        self.assertEqual([False, False], host.find(context, missing))
        self.assertTrue(host.store(context, keys).success)
        self.assertEqual([True] * 8, self.found(self.host()))
        shutil.rmtree(self.root)
        self.assertEqual([], host.load(host.request("prompt")[0], keys))

    def test_another_setup(self) -> None:
        """Its rows are computed and compared first; then they are loaded, by its like at once."""
        keys = self.filled()
        for engine in ({"setup": "cd" * 32}, {"trusts_itself": False}):
            host = self.host(engine=engine)
            context, _ = host.request("prompt")
            self.assertEqual([True] * 8, host.find(context, keys))
            self.assertEqual([], host.load(context, keys))
            self.assertTrue(host.store(context, keys).success)
            self.assertEqual(keys, host.load(host.request("prompt")[0], keys))
            written()
            alike = self.host(engine=engine)
            self.assertEqual(keys, alike.load(alike.request("prompt")[0], keys))
        self.assertEqual(8, len(stored(self.root)))  # none of those that were tried

    def test_a_setup_that_computes_something_else(self) -> None:
        """Its rows are never loaded; the rows of a group that cannot be compared are not either."""
        keys = self.filled()
        host = self.host(engine={"setup": "cd" * 32})
        for _ in range(2):
            context, _ = host.request("prompt")
            self.assertEqual([], host.load(context, keys))
            with mock.patch(f"{__name__}.content", return_value=content(b"something else")):
                host.store(context, keys)
        other = self.host(engine={"setup": "ef" * 32, "elements": {}})
        for _ in range(2):
            self.assertEqual([], other.load(other.request("prompt")[0], keys))
            other.store(other.request("prompt")[0], keys)

    def test_roundings(self) -> None:
        """Two computations of a row agree up to some roundings, and but for its padding."""
        host = self.host()
        chance = np.random.default_rng(1)
        row = chance.standard_normal(NBYTES // 4, dtype=np.float32)
        row[NBYTES // 8 :] = 0
        for error, setup in ((1e-5, "cd"), (0.5, "ef")):
            with mock.patch(f"{__name__}.content", return_value=row.view(np.uint8)):
                context, keys = host.request(f"prompt {error}")
                host.store(context, keys)
            other = self.host(engine={"setup": setup * 32})
            near = row * (1 + error * chance.standard_normal(len(row), dtype=np.float32))
            context, _ = other.request(f"prompt {error}")
            other.load(context, keys)
            with mock.patch(f"{__name__}.content", return_value=near.view(np.uint8)):
                other.store(context, keys)
            with mock.patch(f"{__name__}.content", return_value=row.view(np.uint8)):
                came = other.load(other.request(f"prompt {error}")[0], keys)
            self.assertEqual(keys if error < 0.1 else [], came)

    def test_rows_that_do_not_come_back(self) -> None:
        """A vLLM that was not run, whose memory or storage gives other bytes: nothing is done."""
        newer = {"trusts_itself": False}
        with mock.patch("ctypes.memmove"):
            self.assertTrue(self.host(engine=newer).engine.left)
        damaged = mock.patch.object(Loader, "load", return_value=LoadResult(0, "corrupt"))
        with damaged, mock.patch("vua.connector.opening._AGAIN_S", SOON_S):
            host = self.host(engine=newer)
            context, keys = host.request("prompt")
            self.assertFalse(host.store(context, keys).success)
            self.assertEqual([False] * 8, host.find(context, keys))
            host.tier.shutdown()
        self.assertEqual([], stored(self.root))

    def test_other_weights(self) -> None:
        """What was computed before they changed is neither loaded nor stored; new rows are."""
        keys = self.filled()
        host = self.host()
        before, _ = host.request("prompt")
        host.engine.epoch = 1
        self.assertFalse(host.store(before, keys).success)
        context, _ = host.request("prompt", terms=Terms(epoch=1))
        self.assertEqual([False] * 8, host.find(context, keys))
        self.assertTrue(host.store(context, keys).success)
        self.assertEqual(keys, host.load(host.request("prompt", terms=Terms(epoch=1))[0], keys))
        host.engine.unsure = True
        self.assertEqual([False] * 8, self.found(host, Terms(epoch=1)))
        self.assertEqual([True] * 8, self.found(self.host()))

    def test_identity(self) -> None:
        """Other weights, another world, another epoch: nothing is found."""
        self.filled()

        for changed in ({"digest": "x"}, {"size": 2}, {"epoch": "2"}):
            self.assertEqual([False] * 8, self.found(self.host(**changed)), changed)
        self.assertEqual([True] * 8, self.found(self.host()))

    def test_terms(self) -> None:
        """An adapter's content counts for all rows, an image's from its first token on."""
        self.filled()
        host = self.host()

        adapter = Terms(extras=((0, "lora", b"a"),))
        self.assertEqual([False] * 8, self.found(host, adapter))
        image = Terms(extras=((3 * TOKENS, "media", b"i"),))
        self.assertEqual([True] * 3 + [False] * 5, self.found(host, image))
        context, keys = host.request("prompt", terms=image)
        self.assertTrue(host.store(context, keys).success)
        self.assertEqual([True] * 8, self.found(host, image))
        self.assertEqual([False] * 8, self.found(host, Terms(out=True)))

    def test_a_request_left_out_stores_nothing(self) -> None:
        """Nor does one of which nothing is known, or after the weights have changed."""
        host = self.host()
        left_out, keys = host.request("prompt", terms=Terms(out=True))
        self.assertFalse(host.store(left_out, keys).success)
        unknown = ReqContext("unknown")
        self.assertFalse(host.store(unknown, keys).success)
        context, keys = host.request("prompt")
        host.engine.left = "other weights"
        self.assertFalse(host.store(context, keys).success)

        self.assertEqual([], stored(self.root))
        self.assertEqual([False] * 8, self.found(host))

    def test_salts_choose_keys(self) -> None:
        """A salt's rows are encrypted with its key, under secret names; without key none."""
        folder = self.root.parent / "keys"
        folder.mkdir(mode=0o700)
        write_key(folder / f"{tenant_of(b'mine')}.key")
        security = {"security": {"tenant_keys": str(folder)}}
        host = self.host(**security)
        context, keys = host.request("prompt", terms=Terms(salt=b"mine"))
        self.assertTrue(host.store(context, keys).success)

        text = b"".join(path.read_bytes() for path in stored(self.root))
        self.assertEqual(8, len(stored(self.root)))
        self.assertNotIn(content(keys[0]).tobytes()[:64], text)
        other = self.host(**security)
        mine, _ = other.request("prompt", terms=Terms(salt=b"mine"))
        self.assertEqual([True] * 8, other.find(mine, keys))
        self.assertEqual(keys, other.load(mine, keys))
        self.assertEqual([False] * 8, self.found(other, Terms(salt=b"yours")))
        yours, _ = other.request("prompt", terms=Terms(salt=b"yours"))
        self.assertFalse(other.store(yours, keys).success)

    def test_options(self) -> None:
        """A client may keep its prompt from being stored, or stored rows from being used."""
        host = self.host()
        self.assertFalse(host.store(*host.request("prompt", vua={"store": False})).success)
        self.assertEqual([], stored(self.root))
        self.filled()
        self.assertEqual([False] * 8, host.find(*host.request("prompt", vua={"load": False})))

    def test_a_read_that_hangs(self) -> None:
        """It is reported as failed, and its thread touches vLLM's memory no more."""
        keys = self.filled()
        host, goes_on, read = self.host(), threading.Event(), LocalStorage.read
        context, _ = host.request("prompt")
        self.assertEqual([True] * 8, host.find(context, keys))
        began, ended = threading.Event(), threading.Event()

        def hangs(storage: LocalStorage, batch: Batch) -> ReadResult:
            if batch.transfer.memory.cached:
                return ReadResult(0, BlockingIOError(errno.EAGAIN, "not in the page cache"))
            began.set()
            goes_on.wait(SOON_S)
            try:
                return read(storage, batch)
            finally:
                ended.set()

        with (
            mock.patch.object(LocalStorage, "read", hangs),
            # race: the deadline passes while the storage is at it
            mock.patch.object(host.tier._loads, "_clock", late_after(began)),
        ):
            self.assertEqual([], host.load(context, keys))
            self.assertEqual([False] * 8, host.find(context, keys))
            host.tier.drain_jobs()
            before = host.memory.copy()
            goes_on.set()
            self.assertTrue(ended.wait(SOON_S))
            host.tier._loads.close()  # race: its thread has ended before the look at the memory
        np.testing.assert_array_equal(before, host.memory)

    def test_a_write_that_hangs(self) -> None:
        """VLLM gets its rows back, and what it puts there next is not what is stored."""
        host, goes_on, write = self.host(), threading.Event(), LocalStorage.write
        context, keys = host.request("prompt")
        began = threading.Event()

        def hangs(*arguments: Any) -> Any:
            began.set()
            goes_on.wait(SOON_S)
            return write(*arguments)

        with (
            mock.patch.object(LocalStorage, "write", hangs),
            # race: the deadline passes while the storage is at it
            mock.patch.object(host.tier._saves, "_clock", late_after(began)),
        ):
            self.assertFalse(host.store(context, keys).success)
            host.memory[:] = 0xA5
            goes_on.set()
            until = time.monotonic() + SOON_S
            while len(stored(self.root)) < 8 and time.monotonic() < until:
                time.sleep(0.01)
        other = self.host()
        context, _ = other.request("prompt")
        self.assertEqual(keys, other.load(context, keys))

    def test_a_lookup_that_hangs(self) -> None:
        """It is a miss after its time, and no call of the scheduler waits meanwhile."""
        keys = self.filled()
        host = self.host(timeouts={"lookup_s": 0.2, "io_s": SOON_S})
        context, _ = host.request("prompt")
        goes_on = threading.Event()
        self.addCleanup(goes_on.set)

        def hangs(*_: Any) -> bool:
            return goes_on.wait(SOON_S)

        with mock.patch.object(LocalStorage, "exists", hangs):
            self.assertEqual([False] * 8, host.find(context, keys))
            goes_on.set()
        host.tier.on_request_finished(context)
        host.tier.shutdown()
        self.assertEqual({}, parted_at(self.root), "nothing is known of where it parts")

    def test_a_full_disk(self) -> None:
        """Nothing is stored, nothing raises; what is evicted for space is a miss."""
        keys = self.filled()
        host = self.host()
        context, others = host.request("other")

        with mock.patch.object(LocalStorage, "write", side_effect=OSError(errno.ENOSPC, "full")):
            self.assertFalse(host.store(context, others).success)

        self.assertEqual([False] * 8, host.find(context, others))
        context, _ = host.request("prompt")
        self.assertEqual(len(stored(self.root)), len(host.load(context, keys)))

    def test_bounds(self) -> None:
        """The directory stays below its limit; ends go before prefixes."""
        host = self.host(limits={"max_bytes": 20 * (NBYTES + 4096)})
        for name in ("one", "two", "three", "four"):
            host.store(*host.request(name))

        left = stored(self.root)
        self.assertLessEqual(len(left), 20)
        self.assertGreaterEqual(len(left), 8)
        reader = self.host()
        for name in ("one", "two", "three", "four"):
            held = reader.find(*reader.request(name))
            self.assertEqual(sorted(held, reverse=True), held, name)

    def test_where_prompts_part(self) -> None:
        """A prompt is noted at its end, by the first row of whole groups that is missing."""
        self.filled()
        host = self.host()
        for name, rows in (("prompt", 8), ("prompt", 12), ("other", 8), ("unasked", 0)):
            context, asked = host.request(name, rows=rows)
            host.find(context, asked)
            if name == "prompt":
                self.assertEqual(asked[:8], host.load(context, asked[:8]))
            host.tier.on_request_finished(context)
        with self.assertLogs(logger("savings"), "INFO") as logged:
            host.tier.shutdown()
        said = told(self.root)
        self.assertIn(f"began: {said}", logged.records[-1].getMessage())
        self.assertIn(f"{16 * TOKENS:,} tokens loaded, 16 of 28 chunks found", said)
        ((_, noted),) = parted_at(self.root).items()
        ((_, ends),) = noted.items()
        self.assertEqual({"whole": 1, str(16 * TOKENS): 1, str(TOKENS): 1}, ends)

    def test_metrics(self) -> None:
        """What is counted has vLLM's own form, and is defined."""
        keys = self.filled()
        host = self.host()
        context, _ = host.request("prompt")
        host.load(context, keys)

        stats = host.tier.get_stats()
        assert stats is not None
        counted = stats.data["data"]
        self.assertEqual({("slab",): 8 * NBYTES}, counted["vua_loaded_bytes_total"])
        self.assertEqual({("complete",): 1}, counted["vua_loads_total"])
        self.assertLessEqual({*counted}, {*VUATier.build_metric_definitions({})})
        self.assertIsNone(host.tier.get_stats())

    def test_the_end_waits_for_stores(self) -> None:
        """What was handed over is stored; vLLM can release its memory afterwards."""
        host = Host(self.root)
        context, keys = host.request("prompt")
        host.fill(keys)
        host.move(context, keys, load=False)

        host.tier.shutdown()

        host.tier._primary_kv_view.release()
        self.assertEqual([True] * 8, self.found(self.host()))

    def test_mistakes_end_the_start(self) -> None:
        """Another connector above, no path's parent, a wrong setting: one sentence."""
        spec: Any = SimpleNamespace(config=config("unknown"), blocks_per_chunk=1)
        view = memoryview(np.zeros((ROWS, NBYTES), dtype=np.uint8))
        with self.assertRaisesRegex(ConfigError, "vua.vllm.offloading"):
            VUATier(spec, view, "VUATier", path=str(self.root))
        with self.assertRaisesRegex(ConfigError, "max_byte"):
            Host(self.root, limits={"max_byte": 1})
        with self.assertRaisesRegex(ConfigError, "missing"):
            Host(self.root / "a" / "b")
