"""What happens beside an eviction or a measurement, at the worst moment."""

from __future__ import annotations

import os
import threading
from typing import Any
from unittest import mock

from helpers import DirectoryTest, without_native_deletion
from replay import LAYOUT, NBYTES, Cache
from vua.capacity.evictor import Candidates, Evictor, Sweep
from vua.capacity.limits import Limits
from vua.capacity.lru import LRU, mtime_ns_of, set_mtime
from vua.capacity.reclaim import Capacity
from vua.capacity.removal import evict_chunk
from vua.capacity.upkeep import next_tick_ns, server_now_ns
from vua.capacity.usage import UsageEstimate, measure
from vua.format.keys import KeyChain, token_ids
from vua.storage.base import WRITTEN
from vua.storage.names import PIN

SECOND_NS = 10**9


def keys_of_prompt(*blocks: int) -> KeyChain:
    """The chunks of a prompt, one token each."""
    return KeyChain(token_ids(blocks), 1)


class RacesTest(DirectoryTest):
    """Chunks of single prompts, all used long ago."""

    def setUp(self) -> None:
        """Store ten, and say that they were used an hour ago, a second after each other."""
        super().setUp()
        self.cache = Cache(self.root, 10)
        self.fd = self.cache.capacity.storage.fileno()
        self.names = [keys_of_prompt(number)[0].name for number in range(10)]
        for number in range(10):
            self.cache.saver.save([keys_of_prompt(number)[0]])
        self.cache.capacity.close()
        self.now_ns = server_now_ns(self.fd)
        for at, name in enumerate(self.names):
            set_mtime(self.fd, name, self.now_ns - (3600 - at) * SECOND_NS)
        self.now_ns = next_tick_ns(self.fd)

    def stored(self) -> list[int]:
        """The numbers of the chunks that are there."""
        return [at for at, name in enumerate(self.names) if mtime_ns_of(self.fd, name) is not None]

    def test_own_prompt(self) -> None:
        """Ahead of need nothing goes that a prompt, of those being written now, may begin with."""
        for oldest, stays in ((3600, 10), (3594, 9)):  # seconds ago
            limits = Limits(max_bytes=9 * NBYTES, min_free_bytes=0)
            reclaim = Capacity(self.root, self.cache.capacity.storage, limits, LRU())
            for ago_s in (oldest, 5):  # the prompt that began last is not the one to look at
                reclaim.note_request(NBYTES, self.now_ns - ago_s * SECOND_NS, 1)
            reclaim.work_ahead()
            self.assertEqual(stays, len(self.stored()))

    def test_written_while_measured(self) -> None:
        """What is written while the directory is looked at counts, seen or not."""
        lock = threading.Condition(threading.RLock())
        limits = Limits(max_bytes=100 * NBYTES, min_free_bytes=0)
        estimate = UsageEstimate(self.root, limits, lock)

        def slow(*args: Any, **options: Any) -> Any:
            found = measure(*args, **options)
            estimate.reserve(7 * NBYTES)
            estimate.settle(7 * NBYTES, 7 * NBYTES)
            return found

        with mock.patch("vua.capacity.usage.measure", slow):
            estimate.measure(lambda *_: None)
        self.assertEqual((10 + 7 - 100) * NBYTES, estimate.missing(0))

    def test_used_after_the_search(self) -> None:
        """A victim that is used between the search and its turn stays."""
        evictor = Evictor(self.root)
        evictor.search(self.now_ns)
        self.assertEqual(10, evictor.left)
        set_mtime(self.fd, self.names[0], self.now_ns)
        evictor.evict(2 * NBYTES, self.now_ns)
        self.assertEqual([0, *range(3, 10)], self.stored())

    def test_child_stored_during_a_pass(self) -> None:
        """A chunk that gets a child which a pass did not see stays, and so does its prefix."""
        cache, real, seen = Cache(self.root, 100), Sweep.drain, Sweep.victims
        self.addCleanup(cache.capacity.close)

        def blind(sweep: Sweep, *args: Any) -> None:
            if is_late:
                real(sweep, *args)
            cache.saver.save([keys[3]])
            real(sweep, *args)

        def but_the_child(sweep: Sweep) -> Candidates:
            """All but the new child, as if its folder came before it was stored."""
            return seen(sweep)[seen(sweep)["chunk"] != names[3].encode()]

        for is_late in (False, True):  # stored after all was looked at
            keys = keys_of_prompt(20 + is_late, 21, 22, 23)
            names = [keys[at].name for at in range(4)]
            for at, name in enumerate(names[:3]):
                cache.saver.save([keys[at]])
                set_mtime(self.fd, name, self.now_ns - 7200 * SECOND_NS - 1000 * at)
            before, victims = self.stored(), Evictor(self.root)
            with mock.patch.multiple(Sweep, drain=blind, victims=but_the_child):
                victims.evict(2 * NBYTES, next_tick_ns(self.fd))
            self.assertEqual(before[2:], self.stored())
            self.assertNotIn(None, [mtime_ns_of(self.fd, name) for name in names])
            Evictor(self.root).evict(4 * NBYTES, next_tick_ns(self.fd))
            self.assertEqual([None] * 4, [mtime_ns_of(self.fd, name) for name in names])

    def test_pinned_while_renamed(self) -> None:
        """A pin that comes after the look at a chunk brings it back from its eviction."""
        name, real = self.names[0], os.rename
        folder = self.root / self.cache.store.namespace / name[:2] / name

        def rename(*args: Any, **options: Any) -> None:
            if folder.exists():
                (folder / f"{PIN}{name}").touch()
            real(*args, **options)

        with mock.patch("os.rename", rename):
            self.assertIsNone(evict_chunk(self.cache.capacity.space, name))
        self.assertTrue((folder / f"{LAYOUT.full.name}.safetensors").exists())
        self.assertEqual([*range(10)], self.stored())

    def test_child_while_renamed(self) -> None:
        """A child that is stored after the last look at a chunk brings that back."""
        cache, real, keys = Cache(self.root, 100), os.rename, keys_of_prompt(20, 21, 22)
        self.addCleanup(cache.capacity.close)
        names = [keys[at].name for at in range(3)]
        for at, name in enumerate(names[:2]):
            cache.saver.save([keys[at]])
            set_mtime(self.fd, name, self.now_ns - 7200 * SECOND_NS - 1000 * at)

        def rename(source: str, *args: Any, **options: Any) -> None:
            if names[1] in source and mtime_ns_of(self.fd, names[2]) is None:
                cache.saver.save([keys[2]])
            real(source, *args, **options)

        with mock.patch("os.rename", rename), without_native_deletion():
            Evictor(self.root).evict(NBYTES, next_tick_ns(self.fd))
        self.assertNotIn(None, [mtime_ns_of(self.fd, name) for name in names])
        self.assertEqual([*range(1, 10)], self.stored())

    def test_orphan(self) -> None:
        """A chunk without its parent goes before all else: it counts as unused for years."""
        cache = Cache(self.root, 20)
        key = keys_of_prompt(77, 78)[1]
        self.assertEqual([WRITTEN], cache.saver.save([key]))
        mtime_ns = mtime_ns_of(self.fd, key.name)
        assert mtime_ns is not None
        self.assertLess(mtime_ns, self.now_ns - 10**4 * 86_400 * SECOND_NS // 2)
        Evictor(self.root).evict(1, next_tick_ns(self.fd))
        self.assertEqual([*range(10)], self.stored())
        self.assertIsNone(mtime_ns_of(self.fd, key.name))
