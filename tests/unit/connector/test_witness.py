"""The scheduler's half of the witness, and what is remembered of it, without an engine."""

from __future__ import annotations

import os
import tempfile
import unittest
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest

from helpers import save_chunk
from vua.device.buffers import StagingBuffer
from vua.format.identity import Identity
from vua.format.keys import KeyChain, token_ids
from vua.format.layout import KVLayout
from vua.store.namespace import Namespace

pytestmark = pytest.mark.vllm

if find_spec("vllm"):
    from vua.connector.cache_spec import Group, Model
    from vua.connector.config import ConnectorConfig, Timeouts
    from vua.connector.metadata import Verdict
    from vua.connector.metrics import Recorder
    from vua.connector.prefix_match import PrefixMatch
    from vua.connector.proved import Remembered
    from vua.connector.witness import Witness

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
    adapter = SimpleNamespace(lora_path=lora) if lora else None
    return SimpleNamespace(request_id=name, lora_request=adapter, mm_features=features)


def found_of(stored: int, chunks: int = 0, seed: int = 0) -> PrefixMatch:
    """The answer to a lookup of a prompt of which the first chunks are stored."""
    ids = token_ids(range(seed, seed + SIZE * max(stored, chunks)))
    keys = KeyChain(ids, SIZE)
    return PrefixMatch(keys, stored * SIZE, stored, (frozenset(),), len(keys))


@unittest.skipUnless(find_spec("vllm"), "vLLM is not installed")
class WitnessTest(unittest.TestCase):
    def setUp(self) -> None:
        """A directory in which others have stored something."""
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.root, self.now_s = Path(folder.name) / "kv", 0.0
        home = {"XDG_CACHE_HOME": str(Path(folder.name) / "cache")}
        patched = mock.patch.dict(os.environ, home)
        patched.start()
        self.addCleanup(patched.stop)
        self.store()

    def store(self) -> None:
        """Store one chunk."""
        store = Namespace.create(self.root, IDENTITY, [LAYOUT]).stores[0]
        memory = StagingBuffer(LAYOUT, LAYOUT.full, 1).memory
        save_chunk(store, KeyChain(token_ids(range(SIZE)), SIZE)[0], memory)
        store.close()

    def witness(
        self, *, workers: int = 1, setup: str = "this", model_epoch: str = "", **settings: Any
    ) -> Witness:
        """A new engine's."""
        group = Group(LAYOUT, (0,), ((LAYOUT.full,) * workers,), (0,))
        model = Model(IDENTITY, (group,), (SIZE,)).in_epoch(model_epoch)
        config = ConnectorConfig(shared_storage_path=str(self.root), **settings)
        self.stats = Recorder()
        return Witness(model, config, self.stats, setup, clock=lambda: self.now_s)

    def compare(
        self, witness: Witness, name: str, found: PrefixMatch, *outcomes: str
    ) -> str | None:
        """Let the request's chunks be computed, and the workers say this."""
        tables = [list(range(1, 100))]
        order = witness.order(name, found, len(found.keys) * SIZE, tables)
        assert order is not None
        return witness.learn(
            [Verdict(order.number, each, 2.0 if each == "different" else 0.1) for each in outcomes]
        )

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
        self.assertEqual([(0, [found.keys[3]])], order.parts)
        for at in (0, 1):
            self.assertIsNone(witness.limit(request_of("b"), found, 0))
            self.assertIsNone(witness.learn([Verdict(order.number, "same", 0.5 * at)]))

        self.assertEqual(64, witness.limit(request_of("b"), found, 0))
        data = self.stats.take()
        assert data is not None
        self.assertEqual({"same": 1}, data["vua_witnesses_total"])
        self.assertEqual({"": 0.5}, data["vua_witness_distance"])

    def test_patience(self) -> None:
        """Requests do not wait long for another one's comparison: they are computed then."""
        witness, found = self.witness(timeouts=Timeouts(lookup_s=1.0)), found_of(4)
        witness.limit(request_of("a"), found, 0)
        self.now_s = 0.9
        self.assertIsNone(witness.limit(request_of("b"), found, 0))
        self.now_s = 1.1
        self.assertEqual(0, witness.limit(request_of("b"), found, 0))

    def test_one_worker_disagrees(self) -> None:
        """One verdict is enough, and it is never taken for proved later."""
        witness, found = self.witness(workers=2), found_of(4)
        witness.limit(request_of("a"), found, 0)
        text = self.compare(witness, "a", found, "same", "different")
        assert text is not None
        self.assertIn(IDENTITY.namespace, text)
        own = self.witness(model_epoch="of its own")
        self.assertEqual(64, own.limit(request_of("b"), found, 0))  # nobody else writes there
        self.assertEqual(0, self.witness().limit(request_of("c"), found, 0))

    def test_no_answer(self) -> None:
        """Whatever keeps a comparison from an answer, the next request is tried; one log line."""
        witness, found = self.witness(timeouts=Timeouts(io_s=1.0)), found_of(4)
        for at, ending in enumerate(("gone", "none", "timeout", "none")):
            name = f"{ending}{at}"
            self.assertEqual(0, witness.limit(request_of(name), found, 0))
            if ending == "gone":
                witness.gone(name)
            elif ending == "none" and at == 3:
                with self.assertLogs("vllm.vua.scheduler", "WARNING"):
                    self.compare(witness, name, found, "none")
            elif ending == "none":
                self.compare(witness, name, found, "none")
            else:
                order = witness.order(name, found, 64, [[1, 2, 3, 4]])
                self.now_s += 3.0
        assert order is not None
        self.assertEqual(0, witness.limit(request_of("e"), found, 0))
        witness.learn([Verdict(order.number, "same")])  # too late to count
        self.assertEqual(None, witness.limit(request_of("f"), found, 0))

    def test_freed_blocks(self) -> None:
        """A chunk whose blocks vLLM has freed is not compared with what lies there now."""
        witness, found = self.witness(), found_of(4)
        witness.limit(request_of("a"), found, 0)
        order = witness.order("a", found, 64, [[1, 2, 3, 0]])
        assert order is not None
        self.assertEqual([], order.parts)

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
            self.assertIsNone(self.compare(witness, request.request_id, found, "same"))
            self.assertEqual(64, witness.limit(request, found, 0), request.request_id)
        behind = request_of("image behind what is stored", images=[(64, 30)])
        self.assertEqual(64, witness.limit(behind, found, 0))

    def test_the_chunk_with_the_image(self) -> None:
        """Beside the last chunk, that with most of an image's tokens is compared."""
        witness, found = self.witness(), found_of(4)
        witness.limit(request_of("a", images=[(12, 20), (40, 3)]), found, 0)
        order = witness.order("a", found, 64, [[1, 2, 3, 4]])
        assert order is not None
        self.assertEqual([(0, [found.keys[1], found.keys[3]])], order.parts)

    def test_own_chunks(self) -> None:
        """What this engine has stored itself it loads at once, but not what others have added."""
        witness, request = self.witness(), request_of("a")
        witness.stored(request, found_of(0, 4), range(3))
        self.assertEqual(48, witness.limit(request, found_of(3, 4), 0))
        self.assertEqual(0, witness.limit(request, found_of(4), 0))

    def test_restart(self) -> None:
        """An engine of the same setup is not asked again; one of another setup is."""
        found = found_of(4)
        witness = self.witness()
        witness.limit(request_of("a"), found, 0)
        self.compare(witness, "a", found, "same")
        self.assertEqual(64, self.witness().limit(request_of("b"), found, 0))
        self.assertEqual(0, self.witness().limit(request_of("b", lora="/a"), found, 0))
        self.assertEqual(0, self.witness(setup="other").limit(request_of("b"), found, 0))
        self.assertEqual(0, self.witness(setup="").limit(request_of("b"), found, 0))

    def test_restart_after_the_beginning(self) -> None:
        """Who began a namespace is not asked after a restart, but is about what others add."""
        self.root = self.root.with_name("empty")
        found = found_of(4)
        first = self.witness()
        Namespace.create(self.root, IDENTITY, [LAYOUT]).stores[0].close()
        first = self.witness()
        self.assertEqual(0, first.limit(request_of("a"), found, 0))  # somebody was quicker
        self.assertEqual(0, self.witness().limit(request_of("b"), found, 0))  # it stored nothing
        first.stored(request_of("a"), found_of(0, 4), range(4))
        self.store()
        self.assertEqual(64, self.witness().limit(request_of("b"), found, 0))
        self.assertEqual(0, self.witness(setup="other").limit(request_of("b"), found, 0))

    def test_another_directory(self) -> None:
        """What was proved in a directory says nothing about one in its place."""
        Remembered(self.root / IDENTITY.namespace, "this").add(PLAIN)
        self.assertTrue(Remembered(self.root / IDENTITY.namespace, "this").holds(PLAIN))
        self.root.rename(self.root.with_name("old"))
        self.store()
        self.assertFalse(Remembered(self.root / IDENTITY.namespace, "this").holds(PLAIN))

    def test_who_may_remember(self) -> None:
        """A note that others could have written is none; and it is forgotten in the end."""
        remembered = Remembered(self.root / IDENTITY.namespace, "this")
        remembered.add(PLAIN)
        folder = Path(os.environ["XDG_CACHE_HOME"]) / "vua" / "proved"
        (note,) = folder.iterdir()
        folder.chmod(0o777)
        self.assertFalse(remembered.holds(PLAIN))
        folder.chmod(0o700)
        self.assertTrue(remembered.holds(PLAIN))
        os.utime(note, (0, 0))
        remembered.add(("", "image"))
        self.assertFalse(remembered.holds(PLAIN))

    def test_differs_later(self) -> None:
        """What was proved and then differs is asked about anew after the next start."""
        remembered = Remembered(self.root / IDENTITY.namespace, "this")
        remembered.add(PLAIN)
        witness, found = self.witness(witness_every=3), found_of(4)
        for at in range(3):
            request = request_of(f"a{at}")
            self.assertEqual(64, witness.limit(request, found, 0))
            witness.loaded(request, found)
        self.assertEqual(48, witness.limit(request_of("b"), found, 0))
        self.compare(witness, "b", found, "different")
        self.assertFalse(remembered.holds(PLAIN))
        self.assertEqual(0, self.witness().limit(request_of("c"), found, 0))

    def test_an_adapter_whose_files_changed(self) -> None:
        """What was proved of an adapter says nothing about other files at its path."""
        adapter = self.root.with_name("adapter")
        adapter.mkdir()
        file = adapter / "adapter_model.safetensors"
        file.write_bytes(b"one")
        remembered, kind = Remembered(self.root / IDENTITY.namespace, "this"), (str(adapter),)
        remembered.add(kind)
        self.assertTrue(remembered.holds(kind))
        os.utime(file, (1, 1))
        self.assertFalse(remembered.holds(kind))
        remembered.add(kind)
        (adapter.with_name("new")).write_bytes(b"two")
        os.utime(adapter.with_name("new"), (1, 1))
        adapter.with_name("new").replace(file)  # as large, and as old
        self.assertFalse(remembered.holds(kind))
        remembered.add(("nowhere",))
        self.assertFalse(remembered.holds(("nowhere",)))

    def test_again_now_and_then(self) -> None:
        """One of so many loads, and one much longer than all before, computes its last chunk."""
        witness, found = self.witness(witness_every=3), found_of(4)
        witness.limit(request_of("a"), found, 0)
        self.compare(witness, "a", found, "same")
        for at in range(3):
            request = request_of(f"b{at}")
            self.assertEqual(64, witness.limit(request, found, 0))
            witness.loaded(request, found)
        self.assertEqual(48, witness.limit(request_of("c"), found, 0))
        self.assertEqual(64, witness.limit(request_of("d"), found, 0))  # nobody waits for it
        self.compare(witness, "c", found, "same")
        self.assertEqual(64, witness.limit(request_of("e"), found, 0))
        self.assertEqual(9 * 16, witness.limit(request_of("f"), found_of(9), 8 * 16))  # all local
        limited = found_of(9)
        limited.tokens = 32  # the client's max_load_tokens
        self.assertEqual(32, witness.limit(request_of("limited"), limited, 0))
        witness.gone("limited")
        self.assertEqual(8 * 16, witness.limit(request_of("g"), found_of(9), 0))
        self.assertIsNotNone(self.compare(witness, "g", found_of(9), "different"))

    def test_off(self) -> None:
        """Without a rate nothing is ever compared."""
        witness = self.witness(witness_every=0)
        self.assertEqual(64, witness.limit(request_of("a"), found_of(4), 0))
        self.assertFalse(witness.watching)
