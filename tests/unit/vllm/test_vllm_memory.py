"""Weights and adapters as they are in the memory of vLLM's worker: what notices a change."""

from __future__ import annotations

import time
import unittest
from collections.abc import Callable
from importlib.util import find_spec
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

pytestmark = pytest.mark.vllm

if find_spec("vllm"):
    from vllm.lora.lora_model import LoRAModel
    from vllm.lora.lora_weights import LoRALayerWeights
    from vllm.v1.worker.worker_base import WorkerWrapperBase

    from vua.connector.adapters import AdapterNote
    from vua.connector.cache_spec import UncachedError
    from vua.connector.weights_watch import WeightsWatch
    from vua.vllm.engine_worker import Adapters, EngineWorker, adapter_digest, memory_of


class Worker:
    """What a wrapper has of vLLM's workers."""

    device = "cpu"

    def __init__(self) -> None:
        self.model_runner = self.model = nn.Sequential(nn.Linear(64, 64), nn.BatchNorm1d(8))
        for parameter in self.model.parameters():
            parameter.requires_grad_(False)  # noqa: FBT003 - torch's

    def get_model(self) -> nn.Module:
        """As vLLM's."""
        return self.model

    def execute_model(self, _: object) -> str:
        """As vLLM's."""
        return "a step"

    def anything(self) -> str:
        """What a worker extension adds."""
        return "a method that nobody has heard of"


def wrapped() -> Any:
    """A worker within vLLM's wrapper."""
    wrapper = WorkerWrapperBase()
    wrapper.worker = Worker()  # type: ignore[assignment]
    wrapper.mm_receiver_cache = None
    return wrapper


@unittest.skipUnless(find_spec("vllm"), "vLLM is not installed")
class EngineWorkerTest(unittest.TestCase):
    def test_calls(self) -> None:
        """Steps and questions count for nothing; everything else counts, also what nobody knows."""
        wrapper = wrapped()
        engine = EngineWorker(wrapper)
        self.assertEqual("a step", wrapper.execute_model(None))
        self.assertEqual("cpu", wrapper.device)
        self.assertIsInstance(wrapper.worker, Worker)
        self.assertEqual(0, engine.calls)
        ways: list[Callable[[], Any]] = [
            lambda: wrapper.anything(),  # noqa: PLW0108 - read when it is called
            lambda: getattr(wrapper, "model_runner"),  # noqa: B009 - as `collective_rpc` does
            lambda: wrapper.worker.get_model(),  # noqa: PLW0108
            lambda: setattr(wrapper.worker, "model", None),
        ]
        for number, way in enumerate(ways):
            before = engine.calls
            way()
            self.assertLess(before, engine.calls, number)
        self.assertEqual("model", engine.last_call)

    def test_watched(self) -> None:
        """A look at the weights is no call; a call is noticed without a look."""
        wrapper = wrapped()
        watch = WeightsWatch(EngineWorker(wrapper))
        self.assertTrue(watch.expected.still_at(time.monotonic()))
        wrapper.execute_model(None)
        self.assertIsNone(watch.changed())
        wrapper.anything()
        self.assertIn("anything", str(watch.changed()))

    def test_found_among_the_callers(self) -> None:
        """By whoever is called by a wrapper; nobody else finds one, and may store nothing."""

        class Wrapper(WorkerWrapperBase):
            def make(self) -> EngineWorker:
                return EngineWorker.find()

        wrapper = Wrapper()
        wrapper.worker = Worker()  # type: ignore[assignment]
        first = wrapper.make()
        self.assertIs(wrapper.make().model, first.model)  # two connectors of one worker
        with self.assertRaises(UncachedError):
            EngineWorker.find()
        memory = memory_of(SimpleNamespace(lora_config=None))
        self.assertIsNotNone(memory.unknown)
        self.assertIsNotNone(memory.weights_changed())

    def test_a_worker_that_shows_no_model(self) -> None:
        """Is refused."""
        wrapper = wrapped()
        wrapper.worker.model = None
        with self.assertRaises(UncachedError):
            EngineWorker(wrapper)


def lora(scaling: float = 2.0, **tensors: torch.Tensor) -> Any:
    """A loaded adapter of one module."""
    parts = {"lora_a": torch.ones(4, 8), "lora_b": torch.ones(8, 4), **tensors}
    weights = LoRALayerWeights("m.q_proj", 4, 8, parts["lora_a"], parts["lora_b"], scaling)
    return LoRAModel(1, 4, {"m.q_proj": weights})


@unittest.skipUnless(find_spec("vllm"), "vLLM is not installed")
class AdaptersTest(unittest.TestCase):
    def test_digest(self) -> None:
        """Equal where all is equal but the number; another one for anything else."""
        same, renumbered = lora(), lora()
        renumbered.id = 7
        self.assertEqual(adapter_digest(same), adapter_digest(renumbered))
        flagged = lora()
        flagged.a_flag_of_a_later_release = True
        others = {
            "scaling": lora(scaling=1.0),
            "one value": lora(lora_b=torch.ones(8, 4).index_fill(0, torch.tensor([7]), 2)),
            "shape": lora(lora_a=torch.ones(8, 4)),
            "dtype": lora(lora_a=torch.ones(4, 8, dtype=torch.bfloat16)),
            "attribute": flagged,
        }
        digests = {name: adapter_digest(given) for name, given in others.items()}
        self.assertEqual(len(others) + 1, len({adapter_digest(same), *digests.values()}))
        flagged.a_flag_of_a_later_release = object()
        with self.assertRaises(UncachedError):
            adapter_digest(flagged)

    def manager(self) -> Any:
        """What a runner has, holding what is loaded last under its number."""
        kept: dict[int, Any] = {}
        files = {"scaling": 2.0}

        def add(request: Any) -> None:
            kept[request.lora_int_id] = manager._load_adapter(request)

        adapters = SimpleNamespace(list_adapters=lambda: dict(kept))
        manager = SimpleNamespace(
            _load_adapter=lambda _: lora(files["scaling"]), _adapter_manager=adapters
        )
        return SimpleNamespace(lora_manager=manager, add_lora=add, files=files, kept=kept)

    def test_loads(self) -> None:
        """Told once, loaded when wanted, refused once replaced, known again with old content."""
        runner = self.manager()
        adapters = Adapters(runner)
        request = SimpleNamespace(lora_int_id=3, lora_name="l")
        self.assertEqual({}, adapters.news([]))
        first = adapters.news([request])[3].adapter
        assert first is not None
        self.assertEqual({}, adapters.news([]))
        self.assertTrue(adapters.holds(first))
        runner.files["scaling"] = 1.0  # by now nothing has read them
        self.assertEqual(first, adapters.news([request])[3].adapter)
        seen = []
        for scaling in (1.0, 2.0):
            runner.files["scaling"] = scaling
            runner.add_lora(request)
            adapters.look()
            self.assertFalse(adapters.holds(first))
            seen.append(adapters.news([])[3].adapter)
        self.assertEqual([1, 2], [each.generation for each in seen if each])
        self.assertEqual(first.digest, seen[1].digest)  # type: ignore[union-attr]
        runner.kept.clear()
        adapters.look()
        self.assertEqual({3: AdapterNote(None, 1)}, adapters.news([]))

    def test_not_from_files(self) -> None:
        """What somebody put there is not known; a manager of another kind is refused."""
        runner = self.manager()
        adapters = Adapters(runner)
        runner.kept[1] = lora()
        adapters.look()
        self.assertEqual({}, adapters.news([]))
        with self.assertRaises(UncachedError):
            Adapters(SimpleNamespace(lora_manager=object()))


if __name__ == "__main__":
    unittest.main()
