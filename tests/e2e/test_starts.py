"""An engine starts and serves with VUA whenever it does without."""

from __future__ import annotations

import shutil
import unittest
from importlib.metadata import PackageNotFoundError, distribution
from typing import Any

import pytest

from e2e.damage import stored
from e2e.harness import PROMPT, SETTLE, Batch, EngineTest, Phase, run, tokens
from vua.vllm import BESIDE_OFFLOADING

try:
    distribution("vua")
    INSTALLED = True
except PackageNotFoundError:
    INSTALLED = False

pytestmark = [pytest.mark.vllm, pytest.mark.thorough]

CONNECTOR = "vua.vllm.kv_connector_v1."
UNCACHED = "this engine is served without a stored KV cache: "
ONE_WORKER = "this worker loads and stores nothing: "


class StartsTest(EngineTest):
    def test_whatever_raises(self) -> None:
        """One line gives the reason, and all prompts are computed, also those that are stored."""
        batches = Batch([PROMPT]), Batch([tokens(300, seed=2)])
        self.fill(batches[0])
        expected = self.baseline(*batches)
        names = {
            f"{CONNECTOR}describe": UNCACHED,
            f"{CONNECTOR}announce": UNCACHED,
            f"{CONNECTOR}SchedulerSide": UNCACHED,
            f"{CONNECTOR}memory_of": UNCACHED,
            f"{CONNECTOR}WorkerSide": UNCACHED,
            f"{CONNECTOR}layer_number": ONE_WORKER,
            "vua.connector.worker.WorkerSide.register": ONE_WORKER,
            "vua.connector.worker.WorkerSide.start_loads": "",
        }
        for name, what in names.items():
            with self.subTest(name):
                trouble = {"raises": [name]}
                served = self.serve(*batches, trouble=trouble, extra={"strict": None})

                self.assertEqual(expected, served.tokens)
                self.assertEqual(0, served.counts.get("tokens_loaded", 0))
                if what:
                    said = f"VUA: {what}RuntimeError: {name} raises this"
                    self.assertIn(1, [served.log.count(said), served.log.count(said) - 1])
                    self.assertNotRegex(served.log, 'File ".*kv_connector_v1.py"')
                    self.assertEqual(10, len(stored(self.root)))

    def test_before_the_weights_are_known(self) -> None:
        """A prompt that comes before is stored then, without another step; a restart loads it."""
        (cold,) = self.baseline(Batch([PROMPT]))
        early = self.serve(Batch([PROMPT]), trouble={"late": True})
        again = self.serve(Batch([PROMPT]))

        self.assertEqual([[cold], [cold]], [early.tokens, again.tokens])
        self.assertEqual([[0], [640]], [early.cached, again.cached])

    def child(self) -> dict[str, Any]:
        """A VUA connector below a MultiConnector."""
        extra = {"shared_storage_path": str(self.root), "witness_every": 0}
        return {
            "kv_connector": "VUAStorageConnector_V1",
            "kv_role": "kv_both",
            "kv_connector_extra_config": extra,
        }

    def test_beside_offloading(self) -> None:
        """The setting with which vLLM exchanges connectors is refused before the engine starts."""
        for name, transfer in {
            "by module": {},
            "by name": {"kv_connector_module_path": None},
            "by MultiConnector": {
                "kv_connector": "MultiConnector",
                "kv_connector_module_path": None,
                "kv_connector_extra_config": {"connectors": [self.child()]},
            },
        }.items():
            if INSTALLED or name == "by module":
                with self.subTest(name):
                    beside = self.phase(
                        Batch([PROMPT]), transfer=transfer, engine={"kv_offloading_size": 1.0}
                    )
                    (served,) = run(beside)
                    self.assertIn(BESIDE_OFFLOADING, str(served.problem))

    @unittest.skipUnless(INSTALLED, "vua is not installed, only on the path: there is no plug-in")
    def test_path_alone(self) -> None:
        """VUA_PATH alone stores, and loads after a restart; empty, or without plug-in, nothing."""
        batch = Batch([PROMPT])
        expected = self.baseline(batch)
        for at, (more, loaded) in enumerate(
            (({}, 0), ({}, 640), ({"VUA_PATH": ""}, 0), ({"VLLM_PLUGINS": "none"}, 0))
        ):
            with self.subTest(at):
                variables = {"VUA_PATH": str(self.root), **more}
                (served,) = run(Phase([batch], environment=variables))
                self.assertEqual([None, expected], [served.problem, served.tokens])
                self.assertEqual([loaded], served.cached)
                self.assertEqual(not more, "namespace" in served.log)
                self.assertEqual(10, len(stored(self.root)))

    @unittest.skipUnless(INSTALLED, "vua is not installed, only on the path: there is no plug-in")
    def test_path_that_cannot_be_used(self) -> None:
        """It costs one line, not the start."""
        self.root.write_text("a file")
        batch = Batch([PROMPT])
        (served,) = run(Phase([batch], environment={"VUA_PATH": str(self.root)}))
        self.assertEqual([None, self.baseline(batch)], [served.problem, served.tokens])
        self.assertEqual(1, served.log.count("this engine is served without VUA: "), served.log)
        self.assertIn("found a file", served.log)

    @unittest.skipUnless(INSTALLED, "vua is not installed, only on the path: there is no plug-in")
    def test_path_beside_a_connector(self) -> None:
        """The user's own stays alone, and one line says so; or both store."""
        batch, other = Batch([PROMPT]), self.root.parent / "other"
        expected = self.baseline(batch)
        own = self.child() | {
            "kv_connector": "ExampleConnector",
            "kv_connector_module_path": None,
            "kv_load_failure_policy": None,
            "kv_connector_extra_config": {"shared_storage_path": str(other)},
        }
        for more, lines, chunks in (({}, 1, 0), ({"VUA_DOOR": "beside"}, 0, 10)):
            with self.subTest(more):
                variables = {"VUA_PATH": str(self.root), **more}
                served = self.serve(batch, transfer=own, environment=variables)
                self.assertEqual(expected, served.tokens)
                words = "--kv-transfer-config names ExampleConnector: VUA_DOOR=beside joins both"
                self.assertEqual([lines, chunks], [served.log.count(words), len(stored(self.root))])
        self.assertTrue([*other.iterdir()])
        shutil.rmtree(other)
        served = self.serve(batch, transfer=own, environment=variables)
        self.assertEqual([expected, [640]], [served.tokens, served.cached])

    def test_newer_vllm(self) -> None:
        """It starts, compares what it has stored with what it computes, and then loads.

        Uncached where a trial fails. Control: one that was run loads what it has stored at once.
        """
        batch, new = Batch([PROMPT]), {"newer": True}
        blocks = {"does_nothing": ["vua.connector.group_transfer.GroupTransfer._scatter"]}
        files = {"does_nothing": ["vua.connector.opening.reads_back"]}
        for at, (trouble, loaded, said) in enumerate(
            (
                (new, [0, 0, 640], "equals what this engine computes"),
                (new | blocks, [0, 0, 0], "put into unused blocks to try them is not there"),
                (new | files, [0, 0, 0], "stored to try it is not what is read"),
                ({}, [0, 640, 640], ""),
            )
        ):
            with self.subTest(trouble):
                root, steps = self.root.with_name(f"kv{at}"), (batch, SETTLE, batch, SETTLE, batch)
                served = self.serve(*steps, root=root, trouble=trouble)
                self.assertEqual([None, loaded], [served.problem, served.cached])
                self.assertEqual(self.baseline(batch) * 3, served.tokens)
                self.assertEqual(bool(trouble), served.log.count("never run with vLLM") == 1)
                self.assertIn(said, served.log)
                self.assertEqual(10 if loaded[2] else 0, len(stored(root)))
