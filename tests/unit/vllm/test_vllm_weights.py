"""Which weights a vLLM engine has: its own loader's files, and nothing before they are known."""

from __future__ import annotations

import copy
import json
import os
import shutil
import tempfile
import threading
import unittest
from collections.abc import Callable
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest

from helpers import keys_of, noise, save_step
from scheduling import LAYOUT, answer, request_of, step
from vua.connector.config import ConnectorConfig
from vua.errors import ConfigError, StorageError
from vua.format.identity import Identity
from vua.format.layout import KVLayout
from vua.testing.models import make_model
from vua.weights import Identification, Weights

pytestmark = pytest.mark.vllm

NO_FILES = Weights("f" * 64, (), 2_000_000, 1_000_000, 0.5, 0.0)


@cache
def engine_config() -> Any:
    """What vLLM makes of a tiny Llama, once: it takes seconds."""
    from vllm.engine.arg_utils import EngineArgs

    with tempfile.TemporaryDirectory() as folder, mock.patch.dict(os.environ, HF_HUB_OFFLINE="1"):
        model = make_model(Path(folder, "model"), layers=2)
        return EngineArgs(model=str(model), skip_tokenizer_init=True).create_engine_config()


@unittest.skipUnless(find_spec("vllm"), "vLLM is not installed")
class FilesTest(unittest.TestCase):
    """Which files count."""

    def setUp(self) -> None:
        """Make a model of two files with an index."""
        self.root = Path(self.enterContext(tempfile.TemporaryDirectory()))
        environment = {"HF_HUB_OFFLINE": "1", "XDG_CACHE_HOME": str(self.root / "cache")}
        self.enterContext(mock.patch.dict(os.environ, environment))
        self.model = make_model(self.root / "model", layers=2)
        self.whole = self.model / "model.safetensors"

    def find(self, load_format: str = "auto", **fields: Any) -> Weights:
        """What the connector finds for an engine with this load format."""
        from vua.vllm.weights import find_weights

        made = engine_config()
        model_config, load_config = copy.copy(made.model_config), copy.copy(made.load_config)
        for name, value in {"model": str(self.model), **fields}.items():
            setattr(model_config, name, value)
        load_config.load_format = load_format
        given = SimpleNamespace(
            model_config=model_config, load_config=load_config, speculative_config=None
        )
        return find_weights(given, threading.Event())

    def names(self, *given: Any, **fields: Any) -> list[str]:
        """The files that count."""
        return sorted(file.name for file in self.find(*given, **fields).files)

    def test_the_loaders_rule(self) -> None:
        """Each load format has the files that vLLM's loader takes, of all that lie there."""
        index = {"weight_map": {"a": "model.safetensors"}}
        (self.model / "model.safetensors.index.json").write_text(json.dumps(index))
        for name in ("extra.safetensors", "pytorch_model.bin", "training_args.bin", "a.pt"):
            shutil.copy(self.whole, self.model / name)
        self.assertEqual(["model.safetensors"], self.names())
        self.assertEqual(["model.safetensors"], self.names("safetensors"))
        self.assertEqual(["a.pt"], self.names("pt"))
        every = ["a.pt", "extra.safetensors", "model.safetensors", "pytorch_model.bin"]
        self.assertEqual([*every, "training_args.bin"], self.names("sharded_state"))
        shutil.copy(self.whole, self.model / "consolidated.safetensors")
        self.assertEqual(["consolidated.safetensors"], self.names("mistral"))
        self.assertEqual(0, len(self.find("dummy").files))

    def test_what_cannot_be_told(self) -> None:
        """Loaders of which nobody knows what they load, second places, nothing at all."""
        from vllm.model_executor.model_loader import register_model_loader
        from vllm.model_executor.model_loader.default_loader import DefaultModelLoader
        from vllm.model_executor.models.llama import LlamaForCausalLM

        from vua.connector.cache_spec import UncachedError

        @register_model_loader("somebodys")
        class Loader(DefaultModelLoader):
            """A plugin's."""

        def refused(reason: str, *given: Any, **fields: Any) -> None:
            with self.subTest(reason), self.assertRaisesRegex(UncachedError, reason):
                self.find(*given, **fields)

        refused("somebodys", "somebodys")
        refused("npcache", "npcache")
        refused("object storage", model_weights="s3://bucket/model")
        with mock.patch.object(LlamaForCausalLM, "secondary_weights", (), create=True):
            refused("second place")
        prepare = "_prepare_weights"
        with mock.patch.object(DefaultModelLoader, prepare, side_effect=TypeError("another API")):
            refused("another API")
        self.whole.unlink()
        refused("any model weights")

    def test_models_with_a_second_place(self) -> None:
        """VLLM's own models that name further sources are found by their code."""
        from vllm.model_executor.models.llama import LlamaForCausalLM
        from vllm.model_executor.models.ultravox import UltravoxModel

        from vua.vllm.weights import has_secondary

        self.assertEqual(
            [True, False], [has_secondary(one) for one in (UltravoxModel, LlamaForCausalLM)]
        )

    def test_a_description_of_quantisation_counts(self) -> None:
        """Bits and groups that a checkpoint has beside its config belong to its weights."""
        plain = self.find().fingerprint
        file = self.model / "quantize_config.json"
        found = {plain}
        for bits in (4, 8):
            file.write_text(json.dumps({"bits": bits}))
            found.add(self.find(quantization="gptq").fingerprint)
            self.assertEqual(plain, self.find().fingerprint)
        self.assertEqual(3, len(found))

    def test_files_changed_after_the_start(self) -> None:
        """In a process that vLLM started for the engine, newer files may not be what it loaded."""
        from vua.connector.cache_spec import UncachedError

        name = "multiprocessing.current_process"
        with mock.patch(name, return_value=SimpleNamespace(name="EngineCore")):
            with self.assertRaisesRegex(UncachedError, "after the engine's start"):
                self.find()
            with mock.patch("vua.vllm.weights.process_began_s", return_value=2**33):
                expected = self.find()
        self.assertEqual(expected.fingerprint, self.find().fingerprint)

    def test_when_a_process_began(self) -> None:
        """It is in the past, by less than this test run took."""
        import psutil

        from vua.weights import process_began_s

        self.assertAlmostEqual(psutil.Process().create_time(), process_began_s(), delta=2)


@unittest.skipUnless(find_spec("vllm"), "vLLM is not installed")
class UntilKnownTest(unittest.TestCase):
    """Both halves while the weights are not identified."""

    def setUp(self) -> None:
        """A search that ends when it is told to."""
        self.root = Path(self.enterContext(tempfile.TemporaryDirectory()))
        self.go = threading.Event()
        self.addCleanup(self.go.set)
        self.enterContext(mock.patch("vua.connector.opening._START_WAIT_S", 0.01))
        self.config = ConnectorConfig(shared_storage_path=str(self.root), chunk_tokens=16)

    def model(self, *, identified: bool = False, layout: KVLayout = LAYOUT) -> Any:
        """A model of one layer."""
        from vua.connector.cache_spec import Group, Model

        group = Group(layout, (0,), ((layout.full,),), (0,))
        identity = Identity(model="m", chunk_tokens=16)
        return Model(identity, (group,), (16,), latent=False, identified=identified)

    def side(self, end: Callable[[], Weights] = lambda: NO_FILES) -> Any:
        """The scheduler's half, whose search waits for `go`."""
        from vua.connector.scheduler import SchedulerSide

        def find(stop: threading.Event) -> Weights:
            self.stop = stop
            self.go.wait(60)
            return end()

        self.search = Identification(find)
        side = SchedulerSide(
            self.model(), self.config, loads=True, saves=True, identification=self.search
        )
        self.addCleanup(side.shutdown)
        return side

    def known(self) -> None:
        """Let the search end, and wait until its answer was acted upon."""
        self.go.set()
        self.assertTrue(self.search.wait(60))
        for thread in threading.enumerate():
            if thread.name == "vua-identify":
                thread.join(60)

    def orders(self, side: Any, name: str) -> Any:
        """What is ordered for a new request that is computed as a whole."""
        from vua.connector.metadata import ConnectorMetadata

        self.assertEqual((0, False), answer(side, request_of(name)))
        orders = ConnectorMetadata(loads=side.take_loads(), identity=side.identity)
        side.add_saves(orders, step({name: 0}))
        return orders

    def test_nothing_is_ordered_before(self) -> None:
        """A request that comes before is a miss and is not stored; one after it is; one line."""
        from vua.connector.metadata import ConnectorMetadata

        with self.assertLogs("vllm.vua.scheduler", "INFO") as logs:
            side = self.side()
            before = self.orders(side, "before")
            self.assertEqual(([], [], None), (before.loads, before.saves, before.identity))
            self.assertEqual([], [*self.root.iterdir()])
            self.known()
            late = ConnectorMetadata()
            side.add_saves(late, step({"before": 0}))
            after = self.orders(side, "after")
        stats = side.take_stats()

        self.assertEqual([], late.saves)
        self.assertEqual([4], [len(keys) for save in after.saves for _, keys in save.parts])
        expected = self.model().with_weights(NO_FILES.fingerprint).identity
        self.assertEqual(expected, after.identity)
        self.assertEqual({"unidentified": 1, "miss": 1}, stats["vua_lookups_total"])
        self.assertEqual(1, sum("weights identified in 0.5 s" in line for line in logs.output))

    def test_a_search_that_fails(self) -> None:
        """One warning, and everything is served without the cache; nothing is made."""

        def fail() -> Weights:
            raise ConfigError("cannot be told")

        side = self.side(fail)
        with self.assertLogs("vllm.vua.scheduler", "WARNING") as logs:
            self.known()
        for name in ("one", "two"):
            orders = self.orders(side, name)
            self.assertEqual(([], [], None), (orders.loads, orders.saves, orders.identity))
        self.assertEqual(1, len(logs.output))
        self.assertIn("cannot be told", logs.output[0])
        self.assertEqual([], [*self.root.iterdir()])

    def test_a_reset_before(self) -> None:
        """Weights exchanged meanwhile are not those of the files: an epoch of their own."""
        side = self.side()
        side.reset()
        self.known()
        orders = self.orders(side, "after")

        self.assertTrue(orders.identity.epoch)
        self.assertEqual(NO_FILES.fingerprint, orders.identity.weights)

    def test_what_is_known_soon_is_known_at_once(self) -> None:
        """The start waits a little: remembered weights are there before the first request."""
        self.go.set()
        with mock.patch("vua.connector.opening._START_WAIT_S", 60.0):
            side = self.side()
        self.assertIsNotNone(self.orders(side, "first").identity)

    def test_a_shutdown_before(self) -> None:
        """Ends at once, and the search is told to stop."""
        side = self.side()
        side.shutdown()
        self.assertTrue(self.stop.is_set())
        self.known()
        self.assertEqual([], [*self.root.iterdir()])

    def test_a_worker_opens_what_is_ordered(self) -> None:
        """Nothing before, then the ordered identity's stores, then another one's."""
        from vua.connector.group_transfer import Rank
        from vua.connector.metadata import ConnectorMetadata, SaveOrder
        from vua.connector.worker import WorkerSide
        from vua.vllm import page_layout

        model = self.model(layout=KVLayout(1, 1, 8, 4, "F32", 16))
        worker = WorkerSide(model, self.config, Rank(0, 0))
        layers = {"model.layers.0": noise(4, 1, 16, 12)}
        keys = keys_of(range(48), 16)
        worker.register(layers, {"model.layers.0": 0}, {"model.layers.0": 0}, page_layout)
        saves = [SaveOrder([[1, 2, 3]], [(0, keys)])]
        with self.assertRaisesRegex(StorageError, "before the model is identified"):
            save_step(worker, ConnectorMetadata(saves=saves))
        self.assertEqual(({}, []), (dict(worker.counts), [*self.root.iterdir()]))
        found = []
        for weights in ("one", "two"):
            identity = model.with_weights(weights).identity
            save_step(worker, ConnectorMetadata(saves=saves, identity=identity))
            found.append(worker.groups[0].store.namespace)
            self.assertEqual(identity.namespace, found[-1])
        worker.shutdown()
        self.assertEqual(2, len(set(found)))


if __name__ == "__main__":
    unittest.main()
