"""The scheduler's half of the witness, and what is remembered of it, without an engine."""

from __future__ import annotations

import contextlib
import os
import random
import shutil
import tempfile
import unittest
from collections import Counter
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from helpers import save_chunk
from scheduling import model_of
from vua.device.buffers import StagingBuffer
from vua.format.entry import written_name
from vua.format.identity import Identity
from vua.format.keys import KeyChain, token_ids
from vua.format.layout import KVLayout
from vua.security.keyring import write_key
from vua.security.settings import Security
from vua.store.namespace import Namespace
from vua.store.writer import new_writer

pytestmark = pytest.mark.vllm

if find_spec("vllm"):
    from vua.connector.config import ConnectorConfig, Timeouts
    from vua.connector.lookup import PrefixMatch
    from vua.connector.metadata import ComparisonResult, Verdict
    from vua.connector.metrics import Recorder
    from vua.connector.proved import KnownWriters, Tally, kind_of, upper_bound, written
    from vua.connector.witness import Witness

    class TraceRequest(Witness):
        """One that is asked when a lookup has found who wrote what."""

        def limit(self, request: Any, found: PrefixMatch, local_tokens: int) -> int | None:
            """Answer."""
            written()
            found.kind = kind_of(request, found.stored * SIZE, request.lora_request)
            beside = frozenset[bytes]().union(*(writers for _, writers in found.writers))
            self.known.learn(found.kind, beside | found.beside)
            return super().limit(request, found, local_tokens)


SIZE = 16
LAYOUT = KVLayout(1, 1, 8, 8, "F32", SIZE)
IDENTITY = Identity(model="m", chunk_tokens=SIZE)
PLAIN: tuple[str, ...] = ("",)


def request_of(name: str, *, lora: str | None = None, images: Any = ()) -> Any:
    """A request as far as the witness looks at one; images: (first token, tokens) of each."""
    features = [
        SimpleNamespace(modality="image", mm_position=SimpleNamespace(offset=at, length=length))
        for at, length in images
    ]
    adapter = SimpleNamespace(digest=lora) if lora else None
    return SimpleNamespace(request_id=name, lora_request=adapter, mm_features=features)


def name_of(writer: str) -> bytes:
    """A writer's name as it stands in a header."""
    return written_name(writer).encode()


def found_of(stored: int, chunks: int = 0, seed: int = 0, **runs: int) -> PrefixMatch:
    """The answer to a lookup of a prompt of which the first chunks are stored.

    ``runs``: per writer the first chunk that it has written; by default all are of "other".
    """
    ids = token_ids(range(seed, seed + SIZE * max(stored, chunks)))
    keys = KeyChain(ids, SIZE)
    written = sorted((first, writer) for writer, first in (runs or {"other": 0}).items())
    writers = tuple((first, frozenset((name_of(writer),))) for first, writer in written)
    return PrefixMatch(keys, stored * SIZE, stored, (frozenset(),), len(keys), writers)


def found_by(writer: str) -> PrefixMatch:
    """The answer to a lookup of a prompt of four chunks of one writer."""
    return found_of(4, **{writer: 0})


def writers_of(found: PrefixMatch, chunk: int) -> frozenset[bytes]:
    """Who wrote a chunk."""
    return max((start, writers) for start, writers in found.writers if start <= chunk)[1]


class EngineTest(unittest.TestCase):
    left: str | None = None
    """Why the engine has to leave, if it has."""

    def setUp(self) -> None:
        """A directory in which others have stored something."""
        folder = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
        self.addCleanup(folder.cleanup)
        self.root, self.now_s = Path(folder.name) / "kv", 0.0
        self.addCleanup(written)
        self.store()

    def store(self) -> None:
        """Store one chunk."""
        store = Namespace.create(self.root, IDENTITY, [LAYOUT]).stores[0]
        memory = StagingBuffer(LAYOUT, LAYOUT.full, 1).memory
        save_chunk(store, KeyChain(token_ids(range(SIZE)), SIZE)[0], memory)
        store.close()

    def witness(
        self,
        *,
        workers: int = 1,
        setup: str = "this",
        model_epoch: str = "",
        writer: str = "own",
        trusts_itself: bool = True,
        seed: int = 0,
        **settings: Any,
    ) -> Witness:
        """A new engine's."""
        model = model_of(LAYOUT, workers=workers, trusts_itself=trusts_itself)
        model = model.in_epoch(model_epoch)
        config = ConnectorConfig(shared_storage_path=str(self.root), **settings)
        self.stats, chance = Recorder(), random.Random(seed)
        clock = lambda: self.now_s  # noqa: E731
        return TraceRequest(model, config, self.stats, setup, writer, clock=clock, chance=chance)

    def compare(
        self, witness: Witness, name: str, found: PrefixMatch, *bad: str, workers: int = 1
    ) -> str | None:
        """Let the request's chunks be computed; those of ``bad`` writers differ, for one worker."""
        order = witness.order(name, found, len(found.keys) * SIZE, [list(range(1, 999))])
        assert order is not None
        verdicts = []
        for worker in range(workers):
            chunks = [
                ComparisonResult(
                    key.start, of, 2.0 if differs and not worker else 0.1, f"K of {key.start}"
                )
                for _, keys in order.parts
                for key in keys
                for of in (writers_of(found, key.start // SIZE),)
                for differs in (bool(of & set(map(name_of, bad))),)
            ]
            verdicts.append(Verdict(order.number, tuple(chunks)))
        return witness.learn(verdicts)

    def ask(self, witness: Witness, name: str, found: PrefixMatch, *bad: str) -> int | None:
        """How much a request loads; what it is to compare is compared."""
        limit = witness.limit(request_of(name), found, 0)
        if limit == 0 and witness.watching:
            with contextlib.suppress(AssertionError):
                self.left = self.compare(witness, name, found, *bad)
        witness.gone(name)
        return limit


@unittest.skipUnless(find_spec("vllm"), "vLLM is not installed")
class WitnessTest(EngineTest):
    def test_nothing_is_loaded_before_all_workers_agree(self) -> None:
        """The first request is computed, others wait; then all is loaded."""
        witness, found = self.witness(workers=2), found_of(4)
        self.assertEqual(0, witness.limit(request_of("a"), found, 0))
        self.assertEqual(0, witness.limit(request_of("a"), found, 0))  # vLLM asks again
        self.assertIsNone(witness.limit(request_of("b"), found, 0))
        self.assertIsNone(witness.order("b", found, 64, [[1, 2, 3, 4]]))
        self.assertIsNone(witness.order("a", found, 63, [[1, 2, 3, 4]]))  # not yet complete

        order = witness.order("a", found, 64, [[1, 2, 3, 4]])
        assert order is not None
        self.assertEqual([(0, [found.keys[0], found.keys[3]])], order.parts)
        for at in (0, 1):
            self.assertIsNone(witness.limit(request_of("b"), found, 0))
            chunks = tuple(
                ComparisonResult(start, found.writers[0][1], 0.5 * at) for start in (0, 48)
            )
            self.assertIsNone(witness.learn([Verdict(order.number, chunks)]))

        self.assertEqual(64, witness.limit(request_of("b"), found, 0))
        data = self.stats.take()
        assert data is not None
        self.assertEqual({"same": 1}, data["vua_witnesses_total"])
        self.assertEqual({"": 0.5}, data["vua_witness_distance"])

    def test_one_worker_disagrees(self) -> None:
        """One worker is enough to put a writer aside, for good: also after a restart."""
        witness, found = self.witness(workers=2), found_of(4)
        witness.limit(request_of("a"), found, 0)
        with self.assertLogs("vllm.vua.scheduler", "ERROR") as lines:
            self.assertIsNone(self.compare(witness, "a", found, "other", workers=2))
        self.assertEqual(1, len(lines.output))
        self.assertRegex(lines.output[0], f"[[]other[]] .*{IDENTITY.namespace}.* K of 0")
        self.assertEqual(0, witness.limit(request_of("b"), found, 0))
        self.assertFalse(witness.watching)
        again = self.witness()
        self.assertEqual(0, again.limit(request_of("b"), found, 0))
        self.assertFalse(again.watching)
        own = self.witness(model_epoch="of its own")
        self.assertEqual(64, own.limit(request_of("b"), found, 0))  # nobody else writes there

    def test_one_bad_writer(self) -> None:
        """The engine stays, loads what others have written, and of the bad one nothing."""
        witness = self.witness()
        good, bad = found_of(4, good=0), found_of(4, seed=7, bad=0)
        with self.assertLogs("vllm.vua.scheduler", "ERROR"):
            self.ask(witness, "a", bad, "bad")
        self.assertIsNone(self.left)
        self.assertEqual([0, 64], [self.ask(witness, name, good) for name in "bc"])
        self.assertEqual(0, self.ask(witness, "d", bad, "bad"))
        mixed = found_of(4, good=0, bad=2)  # what lies before the bad one's chunks is loaded
        self.assertEqual(32, self.ask(witness, "e", mixed, "bad"))
        order = witness.believed(mixed)
        self.assertEqual(frozenset({name_of("good")}), order)
        data = self.stats.take()
        assert data is not None
        self.assertEqual({"": 1}, data["vua_writers_aside"])

    def test_who_is_to_blame(self) -> None:
        """Of chunks that differ the first one's writer: others may have computed on top of it."""
        witness = self.witness()
        found = found_of(6, first=0, bad=2, later=4)
        with self.assertLogs("vllm.vua.scheduler", "ERROR") as lines:
            self.ask(witness, "a", found, "bad", "later")
        self.assertEqual(1, len(lines.output))
        self.assertIn("[bad]", lines.output[0])
        self.assertEqual(32, self.ask(witness, "b", found_of(2, first=0)))
        self.assertEqual(0, self.ask(witness, "c", found_of(6, seed=9, later=0)))  # not proved

    def test_own_chunks_differ(self) -> None:
        """An engine that computes other things than it did leaves."""
        witness, found = self.witness(witness_every=1), found_of(4, own=0)
        for at in range(50):
            self.ask(witness, f"{at}", found, "own")
            if self.left:
                break
        self.assertRegex(self.left or "", "stored itself")

    def test_no_answer(self) -> None:
        """Whatever keeps a comparison from an answer, the next request is tried; one log line."""
        witness, found = self.witness(timeouts=Timeouts(io_s=1.0)), found_of(4)
        for at, ending in enumerate(("gone", "none", "timeout", "none")):
            name = f"{ending}{at}"
            self.assertEqual(0, witness.limit(request_of(name), found, 0))
            if ending == "gone":
                witness.gone(name)
                continue
            order = witness.order(name, found, 64, [[1, 2, 3, 4]])
            assert order is not None
            if ending == "timeout":
                self.now_s += 3.0
            elif at == 3:
                with self.assertLogs("vllm.vua.scheduler", "WARNING"):
                    witness.learn([Verdict(order.number, text="its file is missing")])
            else:
                witness.learn([Verdict(order.number, text="its file is missing")])
        self.assertEqual(0, witness.limit(request_of("e"), found, 0))
        late = (ComparisonResult(0, found.writers[0][1], 0.0),)
        witness.learn([Verdict(order.number, late)])  # too late to count
        self.assertEqual(None, witness.limit(request_of("f"), found, 0))

    def test_what_is_compared(self) -> None:
        """The ends, and the chunk with most of an image's tokens.

        Not a chunk whose blocks vLLM has freed: others lie there. Not what the engine's own prefix
        cache holds: that may be of the file itself.
        """
        found = found_of(4)
        for local, last_block, images, chunks in (
            (0, 4, [], [0, 3]),
            (0, 0, [], [0]),
            (20, 4, [], [2, 3]),
            (0, 4, [(12, 20), (40, 3)], [0, 1, 3]),
        ):
            witness = self.witness()
            self.assertEqual(0, witness.limit(request_of("a", images=images), found, local))
            order = witness.order("a", found, 64, [[1, 2, 3, last_block]])
            assert order is not None
            self.assertEqual([(0, [found.keys[at] for at in chunks])], order.parts)
        self.assertEqual(0, witness.limit(request_of("b"), found_of(4, else_=0), 50))
        self.assertFalse(witness.watching)

    def test_each_kind_by_itself(self) -> None:
        """Adapters, and prompts with images, are proved by themselves; salts make no difference."""
        witness, found = self.witness(), found_of(4)
        kinds = [
            request_of("plain"),
            request_of("lora", lora="/a"),
            request_of("other lora", lora="/b"),
            request_of("image", images=[(20, 30)]),
        ]
        for request in kinds:
            self.assertEqual(0, witness.limit(request, found, 0), request.request_id)
            self.assertIsNone(self.compare(witness, request.request_id, found))
            self.assertEqual(64, witness.limit(request, found, 0), request.request_id)
        behind = request_of("image behind what is stored", images=[(64, 30)])
        self.assertEqual(64, witness.limit(behind, found, 0))

    def test_own_chunks(self) -> None:
        """What this engine has stored itself it loads at once, but not what others have added."""
        witness, request = self.witness(), request_of("a")
        self.assertEqual(48, witness.limit(request, found_of(3, 4, own=0), 0))
        self.assertEqual(0, witness.limit(request_of("b"), found_of(4, own=0, other=3), 0))

    def test_own_chunks_of_an_untested_engine(self) -> None:
        """They are compared before the first load; if they differ nothing of it is loaded."""
        found = found_of(4, own=0)
        for every, epoch in ((1000, ""), (0, ""), (1000, "own")):
            new = {"trusts_itself": False, "witness_every": every, "model_epoch": epoch}
            for bad, tokens in (((), 64), (("own",), 0)):
                witness = self.witness(setup=f"{every} {epoch} {tokens}", **new)
                self.assertEqual(0, self.ask(witness, "a", found, *bad))
                self.assertEqual(tokens, witness.limit(request_of("b"), found, 0))

    def test_engines_of_one_setup(self) -> None:
        """What an engine of the same setup stored loads at once, on any host, until it differs."""
        same, other = "a" * 64, "b" * 64
        one, another = new_writer("vllm", same), new_writer("vllm", same)
        reader = self.witness(setup=same, writer=new_writer("vllm", same), witness_every=10)
        for request in (
            request_of("a"),
            request_of("b", lora="x"),
            request_of("c", images=[(0, 8)]),
        ):
            self.assertNotEqual(None, reader.limit(request, found_by(one), 0))
        alike = self.witness(setup=same, writer=another)
        self.assertEqual(64, alike.limit(request_of("a"), found_by(one), 0))
        for setup, writer in ((other, new_writer("vllm", other)), ("", new_writer("vllm"))):
            unlike = self.witness(setup=setup, writer=writer)
            self.assertEqual(0, unlike.limit(request_of("a"), found_by(one), 0))
            self.assertTrue(unlike.watching)
        for kind in ("transformers", "sglang"):
            of_another = found_by(new_writer(kind, same))
            self.assertEqual(0, self.witness(setup=same, writer=another).limit(
                request_of("a"), of_another, 0))  # fmt: skip
        self.assertEqual(0, alike.limit(request_of("b"), found_by(new_writer("vllm")), 0))

        with self.assertLogs("vllm.vua.scheduler", "ERROR"):
            loads = [self.ask(reader, f"d{at}", found_by(one), one) for at in range(60)]
        self.assertEqual({0, 64}, {*loads})
        fresh = self.witness(setup=same, writer=another)
        self.assertEqual(0, fresh.limit(request_of("e"), found_by(one), 0))
        self.assertEqual(64, fresh.limit(request_of("f"), found_by(another), 0))

    def test_its_reason_is_told(self) -> None:
        """A prompt that is computed although it is stored says so, why, and what comes next."""
        witness = self.witness(witness_every=1)
        with self.assertLogs("vllm.vua.scheduler", "INFO") as lines:
            self.assertEqual(0, witness.limit(request_of("a"), found_of(4), 0))
        self.assertRegex(
            lines.output[0],
            r"64 stored tokens of request a are computed .*\[other\] .* not compared",
        )
        self.compare(witness, "a", found_of(4))
        with self.assertLogs("vllm.vua.scheduler", "INFO") as lines:
            for at in range(20):
                self.ask(witness, f"b{at}", found_of(4))
        self.assertEqual(1, sum("drawn at random" in line for line in lines.output))
        with self.assertLogs("vllm.vua.scheduler", "INFO") as lines:
            for name, later_s, limit in (("c", 0, 0), ("d", 0, None), ("d", 2, 0), ("e", 0, 0)):
                self.now_s += later_s
                self.assertEqual(limit, witness.limit(request_of(name), found_by("late"), 0))
        self.assertEqual(2, len(lines.output))
        self.assertRegex(lines.output[1], "64 stored tokens of request d .* more than 1.0 s")

    def known(self, security: Security | None = None, root: Path | None = None) -> KnownWriters:
        """What another process of the setup "this" knows."""
        written()
        found = KnownWriters(root or self.root, IDENTITY.namespace, security)
        found.be_of("this", b"")
        return found

    def holds(self, kind: tuple[str, ...], writer: bytes, **place: Any) -> bool:
        """Whether another process knows that a writer's chunks of a kind are proved."""
        known = self.known(**place)
        self.assertFalse(known.holds(kind, writer))
        known.learn(kind, [writer])
        return known.holds(kind, writer)

    def test_where_the_directory_is(self) -> None:
        """Verdicts go with the directory, wherever it is mounted, and not to one in its place."""
        self.known().add(PLAIN, name_of("other"))
        self.assertTrue(self.holds(PLAIN, name_of("other")))
        self.assertFalse(self.holds(PLAIN, name_of("another")))
        self.assertFalse(self.holds(("", "image"), name_of("other")))
        copy = self.root.with_name("copy")
        shutil.copytree(self.root, copy)
        self.assertTrue(self.holds(PLAIN, name_of("other"), root=copy))
        self.root.rename(self.root.with_name("old"))
        self.store()
        self.assertFalse(self.holds(PLAIN, name_of("other")))

    def test_who_is_believed(self) -> None:
        """A verdict that others could have put there is none; and it is forgotten in the end."""
        writer = name_of("other")
        self.known().add(PLAIN, writer)
        written()
        folder = self.root / ".upkeep" / "verdicts"
        (note,) = folder.iterdir()
        folder.chmod(0o777)
        self.assertFalse(self.holds(PLAIN, writer))
        self.assertTrue(self.holds(PLAIN, writer, security=Security(trusted_uids="any")))
        folder.chmod(0o700)
        self.assertTrue(self.holds(PLAIN, writer))
        self.known().put_aside(writer)
        written()
        aside = next(path for path in folder.iterdir() if path != note)
        aside.replace(note)  # another verdict's file under this one's name
        self.assertFalse(self.holds(PLAIN, writer))
        self.known().add(PLAIN, writer)
        self.assertTrue(self.holds(PLAIN, writer))
        os.utime(note, (0, 0))
        self.known().add(("", "image"), writer)
        written()
        self.assertFalse(self.holds(PLAIN, writer))

    def test_with_a_key(self) -> None:
        """Where the directory has a key, a verdict made without it, or with another, is none."""
        writer = name_of("other")
        keys = [str(self.root.with_name(name)) for name in ("one", "two")]
        for key in keys:
            write_key(Path(key))
        one, two = (Security(key_file=key) for key in keys)
        self.known().add(PLAIN, writer)
        self.known(two).add(PLAIN, writer)
        self.assertFalse(self.holds(PLAIN, writer, security=one))
        self.known(one).add(PLAIN, writer)
        self.assertTrue(self.holds(PLAIN, writer, security=one))

    def test_again_for_ever(self) -> None:
        """Chunks are drawn at random from all that could be loaded, also much later ones."""
        witness, found = self.witness(witness_every=10), found_of(8)
        self.ask(witness, "first", found)
        drawn: Counter[int] = Counter()
        for at in range(4000):
            request = request_of(f"{at}")
            limit = witness.limit(request, found, 16)
            self.assertEqual(limit, witness.limit(request, found, 16))  # vLLM asks again
            if limit == 0:
                order = witness.order(f"{at}", found, 128, [list(range(1, 9))])
                assert order is not None
                ((_, keys),) = order.parts
                drawn.update({key.start // SIZE for key in keys} - {1, 7} or {0})
                chunks = tuple(
                    ComparisonResult(key.start, found.writers[0][1], 0.0) for key in keys
                )
                witness.learn([Verdict(order.number, chunks)])
            witness.gone(request.request_id)
        self.assertTrue(set(range(2, 7)) <= set(drawn), drawn)
        self.assertTrue(300 < sum(drawn.values()) < 500, drawn)  # one of ten loads
        for chunk in range(2, 7):
            self.assertTrue(30 < drawn[chunk] < 90, drawn)

    def test_off(self) -> None:
        """Without a rate nothing is ever compared."""
        witness = self.witness(witness_every=0)
        self.assertEqual(64, witness.limit(request_of("a"), found_of(4), 0))
        self.assertFalse(witness.watching)
        self.assertIsNone(witness.believed(found_of(4)))


@unittest.skipUnless(find_spec("vllm"), "vLLM is not installed")
class BoundTest(EngineTest):
    """What the draws say of all chunks that are loaded."""

    def test_by_hand(self) -> None:
        """Clopper and Pearson's bound, against values of their formula."""
        for different, compared, bound in (
            (0, 0, 1.0),
            (0, 1, 0.95),
            (0, 300, 1 - 0.05 ** (1 / 300)),
            (1, 10, 0.3941633),
            (5, 100, 0.1022534),
            (10, 10, 1.0),
        ):
            self.assertAlmostEqual(bound, upper_bound(different, compared), 6)

    def test_what_is_counted(self) -> None:
        """Processes count together, the latest, in a file that others cannot write."""
        one, other = (Tally(self.root, IDENTITY.namespace) for _ in range(2))
        for same in (True, True, False):
            one.add(same=same)
        other.add(same=True)
        self.assertEqual((4, 1), one.counted)
        (file,) = (self.root / ".upkeep" / "compared").iterdir()
        file.write_bytes(b"=" * (1 << 18))
        one.add(same=False)
        self.assertEqual((1 << 17, 1), other.counted)
        file.chmod(0o666)
        self.assertEqual((4, 2), one.counted)  # its own
        self.assertEqual((0, 0), Tally(self.root, IDENTITY.namespace).counted)

    def test_without_a_directory(self) -> None:
        """For a bucket nothing is kept for others, and nothing raises."""
        tally = Tally(None, IDENTITY.namespace)
        tally.add(same=False)
        found = [tally.counted, Tally(None, IDENTITY.namespace).counted]
        self.assertEqual([(1, 1), (0, 0)], found)
        own, restarted = (KnownWriters(None, IDENTITY.namespace) for _ in range(2))
        for known in (own, restarted):
            known.be_of("this", b"")
        own.add(PLAIN, name_of("other"))
        written()
        restarted.learn(PLAIN, [name_of("other")])
        found = [one.holds(PLAIN, name_of("other")) for one in (own, restarted)]
        self.assertEqual([True, False], found)
