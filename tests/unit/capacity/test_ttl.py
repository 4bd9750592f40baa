"""Chunks worth keeping for less long than others: marks, who honours them, in what order."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

from commands import collect
from helpers import DirectoryTest, noise
from vua.capacity import marks
from vua.capacity.evictor import Evictor, expired
from vua.capacity.limits import Limits, ResolvedLimits
from vua.capacity.lru import set_mtime, touch
from vua.capacity.marks import pin
from vua.capacity.reclaim import Capacity
from vua.capacity.spaces import Space
from vua.capacity.upkeep import next_tick_ns, server_now_ns
from vua.device.buffers import StagingBuffer
from vua.format.identity import Identity
from vua.format.keys import KeyChain, token_ids
from vua.format.layout import KVLayout
from vua.store.namespace import Namespace
from vua.store.writer import EntryWriter

LAYOUT = KVLayout(1, 1, 4, 4, "F32", 1)
IDENTITY = Identity(model="m", chunk_tokens=1)
SECOND_NS = 10**9


class HintsTest(DirectoryTest):
    def setUp(self) -> None:
        """Open a store with a capacity, for chunks of one token."""
        super().setUp()
        self.store = Namespace.create(self.root, IDENTITY, [LAYOUT], bounds=Limits()).stores[0]
        self.addCleanup(self.store.close)
        assert self.store.capacity is not None
        self.capacity: Capacity = self.store.capacity
        self.space: Space = self.capacity.space
        buffer = StagingBuffer(LAYOUT, LAYOUT.full, 1)
        buffer.bytes[:] = noise(buffer.bytes.size // 4).numpy().view("u1")
        self.memory = buffer.memory
        self.saver = EntryWriter(self.store, buffer.memory)

    def put(self, prompt: list[int], ttl_s: float | None = None) -> list[str]:
        """Store a prompt with a hint; return its chunks' names."""
        self.saver.ttl_s = ttl_s
        keys = KeyChain(token_ids(prompt), 1)
        for at in range(len(keys)):
            self.saver.save([keys[at]])
        return [key.name for key in keys.first(len(keys))]

    def age(self, names: list[str], seconds: float) -> None:
        """Let a prefix be used last so long ago."""
        now = server_now_ns(self.space.fd) - int(seconds * SECOND_NS)
        for at, name in enumerate(names):
            set_mtime(self.space.fd, name, now - at * 1000)

    def marks(self, names: list[str]) -> list[int | None]:
        return [marks.ttl_s_of(self.space, name) for name in names]

    def stored(self, prompt: list[int]) -> int:
        return self.store.lookup(KeyChain(token_ids(prompt), 1))

    def limits(self, **said: float) -> ResolvedLimits:
        return ResolvedLimits.of(self.root, Limits(min_free_bytes=0, **said))  # type: ignore[arg-type]

    def test_expiry(self) -> None:
        """A full pass, quick or not, and a writer delete what is over, and nothing else."""
        for how in ("gc", "quick", "writer"):
            with self.subTest(how):
                short, long = self.put([1, 2, 3], 100), self.put([4, 5], 1000)
                self.put([6, 7])
                for names, prompt in ((short, 3), (long, 2)):
                    self.assertEqual(prompt, len(names))
                    self.age(names, 500)
                if how == "writer":
                    with closing(
                        Namespace.create(self.root, IDENTITY, [LAYOUT], bounds=Limits()).stores[0]
                    ) as other:
                        EntryWriter(other, self.memory).save([KeyChain(token_ids([8]), 1)[0]])
                else:
                    report = collect(self.root, self.limits(), quick=how == "quick")
                    self.assertEqual(3, report.expired.chunks)

                found = [self.stored(prompt) for prompt in ([1, 2, 3], [4, 5], [6, 7])]
                self.assertEqual([0, 2, 2], found)
                self.assertEqual([None] * 3 + [1000] * 2, self.marks(short + long))

    def test_use_begins_anew(self) -> None:
        """Seconds count from the last use."""
        names = self.put([1, 2], 100)
        self.age(names, 500)
        touch(self.space.fd, names)
        self.assertEqual(0, collect(self.root, self.limits()).expired.chunks)
        self.assertEqual(2, self.stored([1, 2]))

    def test_the_longest_holds(self) -> None:
        """A longer hint of another request lifts a whole prefix; a shorter one changes nothing."""
        names = self.put([1, 2, 3], 100)
        more = self.put([1, 2, 9], 1000)
        self.assertEqual([1000, 1000, 100, 1000], self.marks([*names, more[2]]))
        self.put([1, 2, 8], 50)
        self.assertEqual([1000, 1000, 100], self.marks(names))
        self.assertEqual([9_999_999_999], self.marks(self.put([7], float("inf"))))
        marks.raise_ttls(self.space, names[2], 200.5)
        self.assertEqual([1000, 1000, 201], self.marks(names))

    def test_none_is_the_longest(self) -> None:
        """What was stored without a hint, or is needed by such a chunk, never gets a mark."""
        plain = self.put([1, 2])
        self.assertEqual([None, None], self.marks(plain))
        self.put([1, 2, 3], 100)
        self.assertEqual([None, None], self.marks(plain))
        self.put([1, 2, 3, 4])
        self.assertEqual([None] * 3, self.marks(self.put([1, 2, 3], 100)))
        self.assertEqual([None], self.marks(["0" * 64]))

    def test_prefixes_go_last(self) -> None:
        """However hints and uses mix, no chunk outlives what it depends on."""
        one = self.put([1, 2, 3, 4], 100)
        two = self.put([1, 2, 5, 6], 300)
        self.put([1, 2, 5, 6, 7], 200)
        self.age(one, 250)
        self.age(two[2:], 251)
        now = server_now_ns(self.space.fd)
        order = [one.chunk for one in expired([self.space], now)[0]]
        self.assertEqual([one[3], one[2]], order)
        later = [each.chunk for each in expired([self.space], now + 100 * SECOND_NS)[0]]
        self.assertEqual(sorted(later, key=later.index), later)
        for first, then in ((two[3], two[2]), (two[2], two[1]), (two[1], two[0])):
            self.assertLess(later.index(first), later.index(then))

    def test_not_above_the_directory(self) -> None:
        """A hint cannot lengthen the directory's own time to live; a pin keeps from both."""
        held, names = self.put([8, 9], 10), self.put([1, 2], 10_000)
        pin(self.space, held[1])
        self.age(names, 500)
        self.age(held, 500)
        report = collect(self.root, self.limits(ttl_s=400))
        self.assertEqual([2, 0, 2], [report.expired.chunks, self.stored([1, 2]), 2])
        self.assertEqual(2, self.stored([8, 9]))

    def test_marks_go_with_their_chunks(self) -> None:
        """Evicted, a chunk leaves no mark for one of the same name; others are swept."""
        names = self.put([1, 2], 1000)
        Evictor(self.root).evict(1, next_tick_ns(self.space.fd))
        self.assertEqual([1000, None], self.marks(names))
        path = Path(self.root, self.space.name, "ttl", "f" * 64)
        path.write_text("0000000001")
        path.with_name("strange").touch()
        self.assertEqual(2, marks.count_ttls([self.space]))
        collect(self.root, self.limits())
        self.assertEqual(1, marks.count_ttls([self.space]))

    def test_unusable_marks(self) -> None:
        """Half a mark, a link or a folder in its place says nothing and breaks nothing."""
        names = self.put([1, 2, 3, 4], 1)
        self.age(names, 500)
        folder = Path(self.root, self.space.name, "ttl")
        (folder / names[3]).write_text("1")
        (folder / names[2]).unlink()
        (folder / names[2]).symlink_to(folder / names[0])
        (folder / names[1]).unlink()
        (folder / names[1]).mkdir()
        marks.settle_ttl(self.space, names[1], "", 5)
        self.assertEqual([1, None, None, None], self.marks(names))
