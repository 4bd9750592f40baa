"""Lets tests run a real SGLang server on the CPU, and ask it.

SGLang has an environment of its own, which `dev.py sglang` makes; it names that environment's
Python in ``VUA_SGLANG_PYTHON``. Without it these tests are skipped.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import time
import unittest
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import vua
from e2e.damage import CHUNK
from e2e.sglang_schedulers import answers
from forks import Forker, Program
from vua.connector.config import sglang_arguments as engine_arguments

PYTHON = os.environ.get("VUA_SGLANG_PYTHON")
TESTS = Path(__file__).resolve().parent.parent
SOURCE = Path(vua.__file__).resolve().parent.parent
DEADLINE_S = 900.0
LOOK_EVERY_S = 0.2

needs_sglang = unittest.skipUnless(
    PYTHON, "SGLang has an environment of its own: `dev.py sglang` makes it and runs this"
)

_FORKING = (
    "import multiprocessing, runpy; multiprocessing.set_start_method = lambda *_, **__: None;"
    "runpy.run_module('sglang.launch_server', run_name='__main__', alter_sys=True)"
)
"""Starts the server's processes as forks: each would import SGLang anew, 20 s of CPU."""

_ON_CPU: dict[str, Any] = {
    "device": "cpu",
    "page_size": CHUNK,
    "attention_backend": "torch_native",
    "sampling_backend": "pytorch",
    "grammar_backend": "none",
    "mem_fraction_static": 0.3,
    "max_total_tokens": 20000,
    "context_length": 4096,
    "disable_cuda_graph": True,
    "disable_overlap_schedule": True,
    "enable_hierarchical_cache": True,
    "hicache_io_backend": "direct",
    "hicache_size": 1,
    "hicache_write_policy": "write_through",
    "hicache_storage_prefetch_policy": "wait_complete",
    "skip_server_warmup": True,
}
"""Fields of ``ServerArgs``."""

_ASKED = ("--host", "127.0.0.1", "--enable-cache-report", "--admin-api-key", "test")
_TICKS_S = 0.05
"""Files are not believed that are younger than the process: its start is known by the tick."""

_HEADERS = {"Content-Type": "application/json", "Authorization": "Bearer test"}


def extra_config(root: Path | str, **settings: Any) -> str:
    """The extra configuration with which SGLang uses VUA in a directory or a bucket."""
    more: dict[str, Any] = {"prefetch_threshold": CHUNK}
    more |= {"load_policy": "always", "timeouts": {"lookup_s": 60.0}}  # on a busy machine
    more |= settings
    arguments = engine_arguments(str(root), **more)
    return str(arguments["hicache_storage_backend_extra_config"])


def environment() -> dict[str, str]:
    """The environment variables with which SGLang runs on a CPU, from this source tree."""
    paths = (TESTS / "e2e" / "sglang_on_cpu", TESTS, SOURCE)
    found = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(map(str, paths)),
        "SGLANG_USE_CPU_ENGINE": "1",
        "SGLANG_CPU_OMP_THREADS_BIND": "",
        "HF_HUB_OFFLINE": "1",
        "TRANSFORMERS_OFFLINE": "1",
    }
    found.pop("VUA_PATH", None)
    return found


def wait_until(what: str, seen: Callable[[], bool]) -> None:
    """Wait for something that happens sooner or later."""
    deadline = time.monotonic() + DEADLINE_S
    while not seen():
        if time.monotonic() > deadline:
            raise AssertionError(f"not seen in {DEADLINE_S:.0f} s: {what}")
        time.sleep(LOOK_EVERY_S)


def scheduler_arguments(model: Path, root: Path | str, **more: Any) -> dict[str, Any]:
    """What ``ServerArgs`` takes for a server on the CPU with VUA in a directory."""
    return {
        **_ON_CPU,
        "model_path": str(model),
        "dtype": "float32",
        "skip_tokenizer_init": True,
        "hicache_storage_backend": "dynamic",
        "hicache_storage_backend_extra_config": extra_config(root),
        **more,
    }


def words(fields: dict[str, Any]) -> Iterator[str]:
    """The same as arguments of a command line."""
    for name, value in fields.items():
        yield f"--{name.replace('_', '-')}"
        yield from () if value is True else (str(value),)


class Schedulers(Forker):
    """SGLang's schedulers, one after the other in forks of one process, see `sglang_schedulers`."""

    def __init__(self) -> None:
        """Start the process that all of them are forks of."""
        super().__init__("e2e.sglang_schedulers", environment(), str(PYTHON))

    def run(
        self,
        arguments: dict[str, Any],
        *steps: Any,
        change: str = "",
        **variables: str,
    ) -> list[dict[str, Any]]:
        """What a server with these arguments and variables answers to each step.

        A step is ``{"ask": ids, "new": 8, ...}``, ``{"update": folder}`` or a function to call.
        ``change``: a function of `sglang_hooks`, which changes the engine.

        Raises AssertionError: it does not start, or a step fails.
        """
        time.sleep(_TICKS_S)
        ended = self.do(partial(answers, arguments, steps, change, variables), DEADLINE_S)
        if ended.how != "well":
            raise AssertionError(ended.log[-6000:])
        return list(ended.value)


@dataclass(frozen=True)
class Answer:
    """What the server says to one prompt."""

    tokens: list[int]
    cached: int
    """Tokens that were not computed."""
    stored: int
    """Of these, tokens that came from the storage."""
    backend: str
    """The class that they came from."""
    first_s: float
    """Seconds until the first token."""


class Server(Program):
    """One SGLang server, from its start to its end."""

    def __init__(
        self,
        model: Path,
        *arguments: str,
        backend: str = "",
        extra: str | None = None,
        texts: bool = False,
    ) -> None:
        """Start it and wait until it answers.

        Args:
            model: a Hugging Face directory.
            arguments: further ones of SGLang's.
            backend: ``dynamic`` (VUA), ``file``, or none.
            extra: the backend's extra configuration.
            texts: whether it takes them; else token ids alone, and needs no tokenizer.
        """
        with socket.socket() as found:
            found.bind(("127.0.0.1", 0))
            self._port = found.getsockname()[1]
        chosen = ["--hicache-storage-backend", backend] if backend else []
        chosen += [] if texts else ["--skip-tokenizer-init"]
        if extra is not None:
            chosen += ["--hicache-storage-backend-extra-config", extra]
        command = [str(PYTHON), "-c", _FORKING, "--model-path", str(model)]
        command += ["--port", str(self._port), *words(_ON_CPU), *_ASKED, *chosen, *arguments]
        super().__init__(command, environment())
        self.until(self._answers)

    def _answers(self) -> bool:
        try:
            return bool(self.call("GET", "/health") is not None)
        except (AssertionError, urllib.error.URLError, ConnectionError):
            return False

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._port}"

    def call(self, method: str, path: str, body: object = None) -> str:
        """Call one of the server's ways; raises URLError, and AssertionError with what it says."""
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(
            f"{self.url}{path}",
            data,
            _HEADERS,
            method=method,
        )
        try:
            with urllib.request.urlopen(request, timeout=DEADLINE_S) as answer:
                return str(answer.read().decode())
        except urllib.error.HTTPError as problem:
            raise AssertionError(f"{method} {path}: {problem.read().decode()}") from problem

    def ask(self, prompt: list[int], *, new: int = 8, **more: Any) -> Answer:
        """Generate greedily; ``more`` are fields of the request, such as ``cache_salt``."""
        sampling = {"temperature": 0, "max_new_tokens": new, "ignore_eos": True}
        body = {"input_ids": prompt, "sampling_params": sampling, "stream": True, **more}
        request = urllib.request.Request(
            f"{self.url}/generate",
            json.dumps(body).encode(),
            _HEADERS,
        )
        began, first_s, last = time.monotonic(), 0.0, {}
        with urllib.request.urlopen(request, timeout=DEADLINE_S) as stream:
            for line in stream:
                if line.startswith(b"data: {"):
                    first_s = first_s or time.monotonic() - began
                    last = json.loads(line[len(b"data: ") :])
        meta = last["meta_info"]
        details = meta.get("cached_tokens_details") or {}
        return Answer(
            last["output_ids"],
            meta["cached_tokens"],
            details.get("storage") or 0,
            details.get("storage_backend") or "",
            first_s,
        )

    def forget(self) -> None:
        """Let it drop what it holds in its own memory, once that is stored."""
        self.call("POST", f"/flush_cache?timeout={DEADLINE_S:.0f}")

    def attach(self, backend: str, extra: str) -> None:
        """Have it use another storage from now on, once it has nothing to do any more."""
        wait_until("the storage to be let go", self._detaches)
        chosen = {
            "hicache_storage_backend": backend,
            "hicache_storage_backend_extra_config_json": extra,
            "hicache_storage_prefetch_policy": "wait_complete",
        }
        self.call("PUT", "/hicache/storage-backend", chosen)

    def _detaches(self) -> bool:
        try:
            self.call("DELETE", "/hicache/storage-backend")
        except AssertionError as problem:
            if "not idle" not in str(problem):
                raise
            return False
        return True

    def close(self) -> str:
        """End it and all that it has started."""
        with suppress(ProcessLookupError, subprocess.TimeoutExpired):
            os.killpg(self._process.pid, signal.SIGTERM)
            self._process.wait(30)
        return super().close()
