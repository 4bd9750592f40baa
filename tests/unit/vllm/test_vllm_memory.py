"""Weights and adapters as they are in the memory of vLLM's worker: what notices a change."""

from __future__ import annotations

import hashlib
import threading
import unittest
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn
from vllm.lora.lora_model import LoRAModel
from vllm.lora.lora_weights import LoRALayerWeights
from vllm.v1.worker.worker_base import WorkerWrapperBase

from helpers import until
from vua.connector.cache_spec import UncachedError
from vua.connector.extras import AdapterNote
from vua.connector.weights_watch import EngineState
from vua.vllm.engine_worker import Adapters, adapter_content, find_worker, memory_of, worker_of

pytestmark = pytest.mark.vllm


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


class WorkerCallsTest(unittest.TestCase):
    def test_calls(self) -> None:
        """Steps and questions count for nothing; everything else counts, also what nobody knows."""
        wrapper = wrapped()
        engine, _ = worker_of(wrapper)
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
        watch = EngineState(worker_of(wrapper)[0])
        self.assertTrue(watch.proof()())
        wrapper.execute_model(None)
        self.assertIsNone(watch.weights_changed())
        wrapper.anything()
        self.assertIn("anything", str(watch.weights_changed()))

    def test_found_among_the_callers(self) -> None:
        """By whoever is called by a wrapper; nobody else finds one, and may store nothing."""

        class Wrapper(WorkerWrapperBase):
            def make(self) -> Any:
                return find_worker()[0].model

        wrapper = Wrapper()
        wrapper.worker = Worker()  # type: ignore[assignment]
        first = wrapper.make()
        self.assertIs(wrapper.make(), first)  # two connectors of one worker
        with self.assertRaises(UncachedError):
            find_worker()
        memory = memory_of(SimpleNamespace(lora_config=None))
        self.assertIsNotNone(memory.unknown)

    def test_a_worker_that_shows_no_model(self) -> None:
        """It is refused, to a second connector, too; the first one keeps what it watches."""
        wrapper = wrapped()
        memory, _ = worker_of(wrapper)
        model = memory.model
        hidden = mock.patch.object(Worker, "get_model", side_effect=NotImplementedError)
        with hidden, self.assertRaises(UncachedError):
            worker_of(wrapper)
        wrapper.worker.model = None
        with self.assertRaises(UncachedError):
            worker_of(wrapper)
        self.assertIs(model, memory.model)


def lora(scaling: float = 2.0, **tensors: torch.Tensor) -> Any:
    parts = {"lora_a": torch.ones(4, 8), "lora_b": torch.ones(8, 4), **tensors}
    weights = LoRALayerWeights("m.q_proj", 4, 8, parts["lora_a"], parts["lora_b"], scaling)
    return LoRAModel(1, 4, {"m.q_proj": weights})


def digest_of(adapter: Any) -> str:
    """What stands for its content."""
    return adapter_content(adapter).digest()


class AdaptersTest(unittest.TestCase):
    def test_digest(self) -> None:
        """Equal where all is equal but the number; another one for anything else."""
        same, renumbered = lora(), lora()
        renumbered.id = 7
        self.assertEqual(digest_of(same), digest_of(renumbered))
        flagged = lora()
        flagged.a_flag_of_a_later_release = True
        others = {
            "scaling": lora(scaling=1.0),
            "one value": lora(lora_b=torch.ones(8, 4).index_fill(0, torch.tensor([7]), 2)),
            "shape": lora(lora_a=torch.ones(8, 4)),
            "dtype": lora(lora_a=torch.ones(4, 8, dtype=torch.bfloat16)),
            "attribute": flagged,
        }
        digests = {name: digest_of(given) for name, given in others.items()}
        self.assertEqual(len(others) + 1, len({digest_of(same), *digests.values()}))
        flagged.a_flag_of_a_later_release = object()
        with self.assertRaises(UncachedError):
            digest_of(flagged)

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

    def told(self, adapters: Any, *wanted: Any) -> Any:
        """What is told of number 3, in this step or a later one."""
        found = adapters.news(wanted)

        def known() -> Any:
            adapters.record()
            found.update(adapters.news([]))
            return 3 in found and found[3].adapter

        return until(known)

    def test_loads(self) -> None:
        """Told once, loaded when wanted, refused once replaced, known again with old content."""
        runner = self.manager()
        adapters = Adapters(runner)
        request = SimpleNamespace(lora_int_id=3, lora_name="l")
        self.assertEqual({}, adapters.news([]))
        first = self.told(adapters, request)
        assert first is not None
        self.assertEqual({}, adapters.news([]))
        self.assertTrue(adapters.holds(first))
        runner.files["scaling"] = 1.0  # by now nothing has read them
        self.assertEqual(first, adapters.news([request])[3].adapter)
        seen = []
        for scaling in (1.0, 2.0):
            runner.files["scaling"] = scaling
            runner.add_lora(request)
            adapters.record()
            self.assertFalse(adapters.holds(first))
            seen.append(self.told(adapters, request))
        self.assertEqual([1, 2], [each.generation for each in seen if each])
        self.assertEqual(first.digest, seen[1].digest)
        runner.kept.clear()
        adapters.record()
        self.assertEqual({3: AdapterNote(None, 1)}, adapters.news([]))
        runner.add_lora(request)  # from the same files: it is what it was
        self.assertEqual(seen[1], self.told(adapters, request))

    def test_digests_are_taken_beside_the_engine(self) -> None:
        """An adapter is of nobody until its digest is known; the engine packs it meanwhile."""
        go, engine, sha256 = threading.Event(), threading.get_ident(), hashlib.sha256
        self.addCleanup(go.set)

        def slow(*given: Any) -> Any:
            self.assertNotEqual(engine, threading.get_ident())
            go.wait()
            return sha256(*given)

        runner = self.manager()
        adapters, request = Adapters(runner), SimpleNamespace(lora_int_id=3, lora_name="l")
        with mock.patch("hashlib.sha256", slow):
            for _ in range(2):
                self.assertEqual({}, adapters.news([request]))
                runner.kept[3].loras["m.q_proj"].optimize()
            go.set()
            found = self.told(adapters)
        self.assertEqual(digest_of(lora()), found.digest)
        self.assertTrue(adapters.holds(found))

    def test_replaced_before_it_is_known(self) -> None:
        """What a number held for a step counts, also if nobody knows it: it is another since."""
        runner = self.manager()
        adapters, request = Adapters(runner), SimpleNamespace(lora_int_id=3, lora_name="l")
        first = self.told(adapters, request)
        go, sha256 = threading.Event(), hashlib.sha256
        self.addCleanup(go.set)
        with mock.patch("hashlib.sha256", lambda *given: go.wait() and sha256(*given)):
            for scaling in (1.0, 2.0):
                runner.files["scaling"] = scaling
                runner.add_lora(request)
                adapters.record()
                self.assertFalse(adapters.holds(first))
            go.set()
            again = self.told(adapters, request)
        self.assertEqual((first.digest, 1), (again.digest, again.generation))
        runner.kept[3] = lora()  # not from files
        adapters.record()
        self.assertFalse(adapters.holds(again))
        runner.add_lora(request)
        self.assertEqual(2, self.told(adapters, request).generation)

    def test_not_from_files(self) -> None:
        """What somebody put there is not known; a manager of another kind is refused."""
        runner = self.manager()
        adapters = Adapters(runner)
        runner.kept[1] = lora()
        adapters.record()
        self.assertEqual({}, adapters.news([]))
        with self.assertRaises(UncachedError):
            Adapters(SimpleNamespace(lora_manager=object()))
