"""Whatever happens to files, storage or start, requests end with the tokens of an engine alone."""

from __future__ import annotations

import inspect
import os
import shutil
import sys
import tempfile
import threading
import traceback
import unittest
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial, wraps
from importlib.metadata import PackageNotFoundError, distribution
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

import vua
from e2e.damage import chunk_files, flip, stored, truncate
from e2e.harness import PROMPT, RESET, SETTLE, Batch, EngineTest, Exchange, Phase, run, tokens
from e2e.trouble import late_weights, newer, raises
from helpers import until
from vua.vllm import BESIDE_OFFLOADING

pytestmark = pytest.mark.vllm


OTHER = PROMPT[:192] + tokens(300, seed=3)
BATCH = Batch([PROMPT, OTHER])


@pytest.mark.thorough
class DamagedTest(EngineTest):
    def setUp(self) -> None:
        super().setUp()
        self.expected = self.fill(BATCH)
        self.assertEqual(14, len(stored(self.root)))

    def file(self, index: int) -> Path:
        """The file of one of the first prompt's chunks."""
        (path,) = chunk_files(self.root, PROMPT, index)
        return path

    def test_files(self) -> None:
        """What lies before the first damaged chunk loads; the rest is computed and stored anew."""
        steps: list[Batch | Exchange] = []
        for number, paths in enumerate(
            ([self.file(5)], [self.file(8)], [self.file(0)], stored(self.root))
        ):
            sound = [path.read_bytes() for path in paths]
            for path in paths:
                (truncate if number == 1 else flip)(path)
            hurt = Path(shutil.copytree(self.root, self.root.with_name(f"hurt{number}")))
            steps += [RESET, Exchange(hurt, self.root), RESET, Batch([PROMPT]), RESET, BATCH]
            for path, data in zip(paths, sound, strict=True):
                path.write_bytes(data)

        served = self.serve(*steps)

        self.assertEqual((self.expected[:1] + self.expected) * 4, served.tokens)
        ordered = [640, 640, 448] * 2 + [0, 640, 448] * 2  # by vLLM, also what does not come then
        self.assertEqual(ordered, served.cached)
        loaded = [320, 512, 0, 0, *[640 + 448] * 3, 640 + 192]
        self.assertEqual(sum(loaded), served.counts["tokens_loaded"])
        self.assertIn("out of sight", served.log)

    def test_load_failures_that_fail(self) -> None:
        """With the policy "fail", which is warned of, a damaged file costs its own request only."""
        flip(self.file(8))

        served = self.serve(BATCH, transfer={"kv_load_failure_policy": None})  # vLLM's default

        self.assertEqual(["error", "length"], served.finish)
        self.assertEqual([[], self.expected[1]], served.tokens)
        self.assertEqual(1, served.log.count('kv_load_failure_policy is "fail"'))


try:
    distribution("vua")
    INSTALLED = True
except PackageNotFoundError:
    INSTALLED = False


CONNECTOR = "vua.vllm.kv_connector_v1."
UNCACHED = "this engine is served without a stored KV cache: "
ONE_WORKER = "this worker loads and stores nothing: "


@pytest.mark.thorough
class StartsTest(EngineTest):
    def test_whatever_raises(self) -> None:
        """One line gives the reason, and all prompts are computed, also those that are stored."""
        batches = Batch([PROMPT]), Batch([tokens(300, seed=2)])
        self.fill(batches[0])
        expected = self.baseline(*batches)
        names = {
            f"{CONNECTOR}describe": UNCACHED,
            f"{CONNECTOR}SchedulerSide": UNCACHED,
            f"{CONNECTOR}WorkerSide": UNCACHED,
            f"{CONNECTOR}layer_number": ONE_WORKER,
            "vua.connector.worker.WorkerSide.start_loads": "",
        }
        for name, what in names.items():
            with self.subTest(name):
                trouble = [partial(raises, name)]
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
        early = self.serve(Batch([PROMPT]), trouble=[late_weights])
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
        batch, new = Batch([PROMPT]), [newer]
        blocks = partial(
            mock.patch, "vua.connector.group_transfer.GroupTransfer._scatter", return_value=None
        )
        files = partial(mock.patch, "vua.connector.opening.reads_back", return_value=None)
        for at, (trouble, loaded, said) in enumerate(
            (
                (new, [0, 0, 640], "equals what this engine computes"),
                ([*new, blocks], [0, 0, 0], "put into unused blocks to try them is not there"),
                ([*new, files], [0, 0, 0], "stored to try it is not what is read"),
                ([], [0, 640, 640], ""),
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


if find_spec("vllm"):
    from sim.engine import Engine, Settings
    from sim.truth import VOCABULARY, Chain, make_shape
    from vua.vllm.kv_connector_v1 import VUAStorageConnector_V1

CALLS = (
    *("access", "chmod", "link", "listdir", "lstat", "mkdir", "open", "remove", "rename"),
    *("replace", "rmdir", "scandir", "stat", "statvfs", "symlink", "truncate", "unlink", "utime"),
)
"""Functions of `os` that ask a file system."""
CODE = (sys.prefix, sys.base_prefix, str(Path(vua.__file__).parents[2]), "/proc/", "/sys/", "/dev/")
"""Modules are imported when they are needed, and packages' versions are read."""
NOT_DRIVEN = {"after_fork", "shutdown"}
"""The one is not vLLM's; the other may wait for the storage, within `timeouts.drain_s`."""


class Dead:
    """A storage in which no call returns before :attr:`go` is set."""

    def __init__(self, root: Path) -> None:
        self.root, self.go = str(root), threading.Event()
        self.engine, self.hook = threading.get_ident(), ""
        self.waiting = 0
        self.called: Counter[str] = Counter()
        self.faults: list[str] = []

    def call(self, name: str, where: object) -> None:
        path = where if isinstance(where, str) else getattr(where, "__fspath__", str)()
        if threading.get_ident() == self.engine:
            if self.hook and not path.startswith(CODE) and path not in sys.path:
                hook, self.hook = self.hook, ""
                stack = "".join(traceback.format_stack(limit=12)[:-2])
                self.hook = hook
                self.faults.append(f"{hook}: {name} {path!r}\n{stack}")
        elif path.startswith(self.root) or not path:
            self.waiting += 1
            self.go.wait()

    def wrapped(self, name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        """A function of `os` that notes its calls."""

        @wraps(real)
        def call(*args: Any, **kwargs: Any) -> Any:
            self.call(name, args[0] if args and kwargs.get("dir_fd") is None else "")
            return real(*args, **kwargs)

        return call

    def watched(self, name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        """A hook during which nothing is to be asked of a file system."""

        @wraps(real)
        def hook(*args: Any, **kwargs: Any) -> Any:
            before, self.hook = self.hook, name
            self.called[name] += 1
            try:
                return real(*args, **kwargs)
            finally:
                self.hook = before

        return hook


def hooks() -> dict[str, Callable[..., Any]]:
    """All that vLLM calls of a connector once there is an engine, and that is VUA's own."""
    found = {
        name: value
        for base in reversed(VUAStorageConnector_V1.__mro__)
        if base.__module__.startswith("vua.")
        for name, value in vars(base).items()
        if not name.startswith("_") and inspect.isfunction(value)
    }
    return {name: value for name, value in found.items() if name not in NOT_DRIVEN}


@contextmanager
def dead(root: Path) -> Iterator[Dead]:
    """From now on no call in a directory returns; every hook is watched."""
    storage = Dead(root)
    with ExitStack() as patches:
        for name in CALLS:
            patched = storage.wrapped(name, getattr(os, name))
            patches.enter_context(mock.patch.object(os, name, patched))
        for name, real in hooks().items():
            watched = storage.watched(name, real)
            patches.enter_context(mock.patch.object(VUAStorageConnector_V1, name, watched))
        try:
            yield storage
        finally:
            storage.go.set()


@pytest.mark.thorough
@unittest.skipUnless(find_spec("vllm"), "vLLM is not installed")
class StallTest(unittest.TestCase):
    def setUp(self) -> None:
        folder = self.enterContext(tempfile.TemporaryDirectory(ignore_cleanup_errors=True))
        home = {"XDG_CACHE_HOME": f"{folder}/kv/cache"}  # as slow as the rest
        self.enterContext(mock.patch.dict(os.environ, home))
        self.root = Path(folder) / "kv"

    def settings(self, model: str, **extra: Any) -> Settings:
        extra = {"chunk_tokens": 64, "timeouts": {"lookup_s": 0.2, "io_s": 0.5}} | extra
        shape = make_shape(model, 80)
        return Settings(self.root, shape, blocks=80, extra=extra)

    def answered(self, engine: Engine, name: str, seed: int = 1) -> int:
        """Let an engine answer a request; return how many tokens it loaded."""
        ids = [seed * 7 % VOCABULARY + 5 + at % 50 for at in range(400)]
        engine.add(name, Chain(ids, None), 4)
        while engine.busy:
            engine.step()
        engine.check_answers()
        return engine.loaded.get(name, 0)

    def loaded(self, engine: Engine) -> bool:
        """Ask once more, without vLLM's own prefix cache; whether something was loaded."""
        engine.scheduler.reset_prefix_cache()
        return self.answered(engine, f"{len(engine.wanted)}") > 0

    def test_no_hook_waits(self) -> None:
        """Requests are computed; no hook asks the storage; then all is loaded and stored.

        The storage dies before the namespace is open, or when the scheduler's half has opened it.
        """
        driven = set[str]()
        for number, model in enumerate(("full", "hybrid")):
            for opened in (False, True):
                with self.subTest(model, opened=opened):
                    self.root = self.root.with_name(f"kv-{model}-{opened}")
                    self.root.mkdir()
                    every = 2 if opened else 0
                    settings = self.settings(
                        model, witness_every=every, save_generated=bool(number)
                    )
                    driven |= self.driven(settings, opened=opened)
        self.assertEqual(set(), hooks().keys() - driven)

    def driven(self, settings: Settings, *, opened: bool) -> set[str]:
        """Let a storage die under an engine and live again; return the hooks that were called."""
        writer = Engine(settings)
        try:
            self.answered(writer, "stored")
        finally:
            writer.close()
        with dead(self.root) as storage:
            if opened:
                storage.go.set()
            with mock.patch("vua.connector.opening._START_WAIT_S", 60.0 if opened else 0.0):
                engine = Engine(settings)
            storage.go.clear()
            try:
                for at in range(3):
                    self.assertEqual(0, self.answered(engine, f"dead {at}"))
                    self.answered(engine, f"new {at}", seed=2 + at)
                    engine.scheduler.reset_prefix_cache(reset_connector=at == 1)
                self.assertGreater(storage.waiting, 0)
                storage.go.set()
                until(lambda: self.loaded(engine))
            finally:
                engine.close()
        self.assertEqual([], storage.faults[:3])
        return set(storage.called)
