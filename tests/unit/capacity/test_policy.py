"""Mirrors `vua.capacity.lru`; that another eviction policy takes one class, too."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from unittest import mock

import numpy as np
import pytest

from helpers import DirectoryTest, write_log
from replay import LAYOUT, NBYTES, Cache, Trace, lru_hits, ratio, synthetic_trace
from vua.capacity import evictor
from vua.capacity.evictor import Evictor
from vua.capacity.limits import Limits
from vua.capacity.lru import LRU, LeastHitDensity, mtime_ns_of, set_mtime
from vua.capacity.reclaim import Capacity
from vua.capacity.upkeep import next_tick_ns, server_now_ns
from vua.device.buffers import StagingBuffer
from vua.format.identity import Identity
from vua.format.keys import KeyChain, token_ids
from vua.native import ChunkNames
from vua.storage.base import WRITTEN
from vua.store.namespace import Namespace
from vua.store.store import Store
from vua.store.writer import EntryWriter

STORED = 24
ROOM = 10
TICK_S = 0.011
"""Longer than the step in which a kernel's clock goes on: mtimes differ then."""


class FIFO(LRU):
    """Evicts what was stored first, however often it was used."""

    def used(self, directory: int, chunks: Sequence[str]) -> int:
        """Leave the mtimes as they are: those of storing."""
        del directory
        return len(chunks)


class TestPolicy(DirectoryTest):
    """A small cache, of which the first chunk is used all the time."""

    def evicted(self, policy: LRU) -> list[int]:
        """The numbers of the chunks that go, in order, and that `policy` was asked for."""
        root = self.root / type(policy).__name__
        space = Namespace.create(root, Identity(model="m", chunk_tokens=1), [LAYOUT])
        limits = Limits(max_bytes=ROOM * NBYTES, min_free_bytes=0)
        capacity = Capacity(root, space.storage, limits, policy)
        self.addCleanup(capacity.close)
        store = Store(space.storage, space.name, LAYOUT, capacity)
        saver = EntryWriter(store, StagingBuffer(LAYOUT, LAYOUT.full, 1).memory)
        keys = [space.keys(token_ids([number])) for number in range(STORED)]
        with self.assertLogs("vua.capacity.evictor", "DEBUG") as logged:
            for key in keys:
                self.assertEqual([WRITTEN], saver.save([key[0]]))
                store.used(keys[0], store.lookup(keys[0]), wait=True)
                time.sleep(TICK_S)
            capacity.close()
        numbers = {key[0].name[:12]: number for number, key in enumerate(keys)}
        told = [one.getMessage() for one in logged.records if "evicted chunk" in one.msg]
        return [numbers[one.rpartition(" ")[2]] for one in told]

    @pytest.mark.thorough
    def test_fifo(self) -> None:
        """The chunk in use goes first, and all others in the order in which they were stored."""
        gone = self.evicted(FIFO())
        self.assertGreaterEqual(len(gone), STORED - ROOM)
        self.assertEqual([*range(len(gone))], gone)


SECOND_NS = 10**9
LOVED = 450
"""Prompts that are asked for every 100 s, of two chunks each."""
HISTORY_S = 1200


class TestLeastHitDensity(DirectoryTest):
    """A cache whose users ask for some prompts again and again."""

    def setUp(self) -> None:
        """Log the last twenty minutes: prompts in turn, and between these others, once each."""
        super().setUp()
        self.space = Namespace.create(self.root, Identity(model="m", chunk_tokens=1), [LAYOUT])
        self.fd = self.space.storage.fileno()
        self.now_ns = server_now_ns(self.fd)
        self.loved = [self.prompt(number, 1) for number in range(LOVED)]
        self.once = [self.prompt(1000 + number, *range(9)) for number in range(600)]
        began_s, apart_s = self.now_ns / 1e9 - HISTORY_S, 100 / LOVED
        often = [
            (began_s + number * apart_s, self.names(self.loved[number % LOVED]))
            for number in range(int(HISTORY_S / apart_s))
        ]
        once = [(began_s + 2 * at, self.names(keys)) for at, keys in enumerate(self.once)]
        self.requests = sorted([*often, *once])
        write_log(self.root, self.requests)
        patched = mock.patch("vua.capacity.reclaim._WAIT_S", 600.0)  # a slow machine gives up else
        patched.start()
        self.addCleanup(patched.stop)

    def prompt(self, *tokens: int) -> KeyChain:
        """The keys of a prompt, one token each."""
        return self.space.keys(token_ids(tokens))

    def names(self, keys: KeyChain) -> list[str]:
        return [keys[at].name for at in range(len(keys))]

    def store(self, prompts: Sequence[KeyChain], ago_s: float) -> None:
        """Store prompts, used so long ago and each a second later than the one before."""
        capacity = Capacity(self.root, self.space.storage, Limits(min_free_bytes=0))
        self.addCleanup(capacity.close)
        store = Store(self.space.storage, self.space.name, LAYOUT, capacity)
        saver = EntryWriter(store, StagingBuffer(LAYOUT, LAYOUT.full, 1).memory)
        for number, keys in enumerate(prompts):
            for at in range(len(keys)):
                saver.save([keys[at]])
                mtime_ns = self.now_ns - int((ago_s - number) * SECOND_NS) - 1000 * at
                set_mtime(self.fd, keys[at].name, mtime_ns)

    def stored(self, prompts: Sequence[KeyChain]) -> int:
        """How many of these prompts are there, with all chunks."""
        there = [one.name for one in self.space.storage.list()]
        chunks = {name.partition("/")[0] for name in there}
        return sum({*self.names(keys)} <= chunks for keys in prompts)

    def evict(self, chunks: int, policy: LRU) -> None:
        Evictor(self.root, policy=policy).evict(chunks * NBYTES, next_tick_ns(self.fd))

    @pytest.mark.thorough
    def test_what_comes_back_stays(self) -> None:
        """What was read once goes, and not what is due, although that was used before it."""
        for policy, left in ((LeastHitDensity(self.root), 40), (LRU(), 0)):
            self.store(self.loved[:40], 100)
            self.store(self.once[:10], 30)
            late_s = (server_now_ns(self.fd) - self.now_ns) / 1e9  # of a busy machine
            write_log(self.root, [(time_s + late_s, names) for time_s, names in self.requests])
            self.evict(80, policy)
            self.assertEqual(left, self.stored(self.loved[:40]), type(policy).__name__)

    def test_prefix_stays(self) -> None:
        """What is left of a prompt is its front."""
        self.store(self.once[:1], 30)
        self.evict(4, LeastHitDensity(self.root))
        names = {one.name.partition("/")[0] for one in self.space.storage.list()}
        self.assertEqual({*self.names(self.once[0])[:6]}, names)

    def test_unknown_goes_first(self) -> None:
        """What nobody has logged goes before all that somebody has, the oldest first."""
        strangers = [self.prompt(5000 + number) for number in range(6)]
        self.store(self.once[:2], 500)
        self.store(strangers, 200)
        self.evict(4, LeastHitDensity(self.root))
        self.assertEqual((2, 2), (self.stored(strangers), self.stored(self.once[:2])))
        self.assertEqual(2, self.stored(strangers[4:]))

    def test_from_the_future(self) -> None:
        """What was used in the future, by a day or by centuries, goes first, in its order."""
        loved, day_s = self.loved[:3], 86400
        for days, keys in zip((1, 150_000, 2), loved, strict=True):
            self.store([keys], -days * day_s)
        self.store(self.loved[3:4], 500)
        for left in ([0, 1, 1, 1], [0, 1, 0, 1], [0, 0, 0, 1]):
            self.evict(2, LRU())
            self.assertEqual(left, [self.stored([keys]) for keys in self.loved[:4]])

    @pytest.mark.thorough
    def test_spared_for_one_prompt(self) -> None:
        """What stays in one run, as it is of the prompt being stored, goes first in the next."""
        stranger = self.prompt(5000, 1, 2)
        self.store(self.once[:1], 500)
        self.store([stranger], 200)
        before_ns = mtime_ns_of(self.fd, self.names(stranger)[2])
        victims = Evictor(self.root, policy=LeastHitDensity(self.root))
        with mock.patch.object(evictor, "_PASSES_SHARE", 1e-6):  # one pass is enough
            for most, left in ((before_ns, [1, 1, 1]), (None, [1, 1, 0]), (None, [1, 0, 0])):
                victims.evict(NBYTES, next_tick_ns(self.fd), before_ns=most)
                there = [mtime_ns_of(self.fd, name) is not None for name in self.names(stranger)]
                self.assertEqual(left, there)
        self.assertIsNone(mtime_ns_of(self.fd, self.names(self.once[0])[-1]))

    @pytest.mark.thorough
    def test_in_use(self) -> None:
        """What is used or stored after the log was read stays, whatever its rank was by that."""
        policy = LeastHitDensity(self.root)
        self.store([*self.once[:2], self.prompt(5000)], 30)
        now_ns = next_tick_ns(self.fd)
        policy.used(self.fd, self.names(self.once[0]))
        self.store([self.prompt(5001)], 300)
        Evictor(self.root, policy=policy).evict(1 << 30, now_ns)
        self.assertEqual(1, self.stored([self.once[0]]))
        self.assertEqual(1, self.stored([self.prompt(5001)]))
        self.assertEqual(0, self.stored([self.once[1], self.prompt(5000)]))

    def test_retained_until_its_time(self) -> None:
        """A later process retains what one was told to, above what is due, until its time.

        Control: afterwards, and without the hint, what was read once ranks below what is due.
        """
        due, once = self.names(self.loved[440]), self.names(self.once[0])
        LeastHitDensity(self.root).hinted(once, 60.0, 1000)
        policy = LeastHitDensity(self.root)
        both = ChunkNames.of([due[-1], once[-1]])
        times = np.full(2, self.now_ns - SECOND_NS)
        found = []
        for later_s in (30, 70):
            ranks = policy.rank(server_now_ns(self.fd) + later_s * SECOND_NS)(both, times)
            found.append(bool(ranks[1] > ranks[0]))
        self.assertEqual([True, False], found)

    def test_retained_stays(self) -> None:
        """What was stored since the last search goes before what is retained, within its budget.

        The front of that stays.
        """
        retained, before, since = self.once[:3]
        self.store([retained, before], 500)
        LeastHitDensity(self.root).hinted(self.names(retained), 60.0, 1000)
        victims = Evictor(self.root, policy=LeastHitDensity(self.root))

        def left(chunks: int, budget: int) -> list[int]:
            pins_nbytes = budget * NBYTES
            victims.evict(chunks * NBYTES, next_tick_ns(self.fd), pins_nbytes=pins_nbytes)
            there = {one.name.partition("/")[0] for one in self.space.storage.list()}
            return [
                max(
                    [at + 1 for at, name in enumerate(self.names(keys)) if name in there], default=0
                )
                for keys in (retained, before, since)
            ]

        with mock.patch.object(evictor, "_PASSES_SHARE", 1e-6):  # as if the search had taken long
            self.assertEqual([10, 9, 0], left(1, budget=10))
            self.store([since], 30)
            self.assertEqual([10, 0, 7], left(12, budget=10))
            self.assertEqual([10, 0, 0], left(100, budget=10))
            self.assertEqual([4, 0, 0], left(100, budget=4))

    def test_hints_within_the_budget(self) -> None:
        """So many chunks are retained at most; the same prompt counts once.

        What is beyond the budget ranks as if nothing had been said.
        """
        one, other = LeastHitDensity(self.root), LeastHitDensity(self.root)
        names = [self.names(keys) for keys in self.once[:3]]
        self.assertTrue(one.hinted(names[0], 600.0, 15))
        self.assertFalse(other.hinted(names[1], 600.0, 15))
        some = ChunkNames.of([names[0][-1], names[1][-1], self.names(self.loved[0])[-1]])
        times = np.full(3, self.now_ns - SECOND_NS)
        ranked = LeastHitDensity(self.root).rank(self.now_ns + SECOND_NS)
        self.assertEqual([1, 2, 0], np.argsort(ranked(some, times)).tolist())
        self.assertTrue(other.hinted(names[0], 700.0, 15))
        self.assertTrue(other.hinted(names[1], 600.0, 20))
        self.assertFalse(one.hinted(names[2], 600.0, 20))
        self.assertTrue(one.hinted(names[0], 0.0, 0))
        self.assertTrue(one.hinted(names[2], 600.0, 20))

    def test_words_for_hints(self) -> None:
        """A cache says what became of a hint: half of its limit may be retained."""
        limits = Limits(max_bytes=850 * NBYTES, min_free_bytes=0)
        capacity = Capacity(self.root, self.space.storage, limits)
        self.addCleanup(capacity.close)
        names = [name for keys in self.once[:50] for name in self.names(keys)]
        self.assertEqual("dropped", capacity.hinted(names, 0.0, NBYTES))
        self.assertEqual("over_budget", capacity.hinted(names, 60.0, NBYTES))
        self.assertEqual("retained", capacity.hinted(names[:420], 60.0, NBYTES))


class TestReplay(DirectoryTest):
    """Hit ratios."""

    def setUp(self) -> None:
        """However slow the disk is, nothing is refused for a time because a search took long."""
        super().setUp()
        patient = mock.patch("vua.capacity.reclaim._COSTLY_S", math.inf)
        patient.start()
        self.addCleanup(patient.stop)

    def compare(self, trace: Trace, capacity: int) -> float:
        """Our hit ratio as a share of that of the list."""
        cache = Cache(self.root / str(capacity), capacity)
        return ratio(map(cache.request, trace), trace) / ratio(lru_hits(trace, capacity), trace)

    @pytest.mark.thorough
    def test_synthetic(self) -> None:
        """Conversations that go on, in a cache for a fifth of them."""
        self.assertGreaterEqual(self.compare(synthetic_trace(80), 70), 0.98)

    @pytest.mark.thorough
    def test_control(self) -> None:
        """Where nobody is told what is used the same cache falls short: the measure can tell."""
        popular = [[number, *range(100, 103)] for number in range(6)]
        prompts = [[popular[at % 6], [1000 + at, *range(100, 103)]] for at in range(80)]
        trace = [one for both in prompts for one in both]
        self.assertGreaterEqual(self.compare(trace, 70), 0.98)
        with mock.patch.object(Store, "used"):
            self.assertLess(self.compare(trace, 71), 0.98)
