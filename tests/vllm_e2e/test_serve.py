"""`vua-vllm serve`, as a user starts it: vLLM's own server, restarted on the same directory."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from importlib.metadata import PackageNotFoundError, version
from urllib.error import URLError

import pytest

from helpers import soak
from vllm_e2e.damage import stored
from vllm_e2e.engine import ENVIRONMENT
from vllm_e2e.harness import MAX_TOKENS, PROMPT, SOURCE, Batch, EngineTest, llama

pytestmark = pytest.mark.vllm

START_TIMEOUT_S = 120.0
HITS = "vllm:external_prefix_cache_hits_total"


class ServeTest(EngineTest):
    def setUp(self) -> None:
        """Skip where vLLM's server cannot start at all."""
        super().setUp()
        try:
            version("vllm")
        except PackageNotFoundError:
            self.skipTest("no distribution is called vllm, and its server asks for its version")

    def test_server(self) -> None:
        """A server loads what another engine stored, and gives the tokens of one without VUA."""
        batch = Batch([PROMPT])
        (expected,) = self.fill(batch)
        with self.server() as address:
            self.assertEqual(expected, complete(address))
            self.assertEqual(640, metric(address, HITS))

    @soak
    def test_restarted_server(self) -> None:
        """A server loads what the one before it stored, and answers the same."""
        answers, hits = [], []
        for _ in range(2):
            with self.server() as address:
                answers.append(complete(address))
                hits.append(metric(address, HITS))

        self.assertEqual(answers[0], answers[1])
        self.assertEqual([0, 640], hits)
        self.assertEqual(10, len(stored(self.root)))

    def test_unknown_setting(self) -> None:
        """A misspelt setting ends the command at once, with the nearest name."""
        config = json.dumps({"kv_connector_extra_config": {"epochs": "1"}})
        done = subprocess.run(
            [*command(), str(llama()), f"--vua-path={self.root}", f"--kv-transfer-config={config}"],
            check=False,
            env=environment(),
            capture_output=True,
            text=True,
            timeout=60,
        )

        self.assertEqual(2, done.returncode)
        self.assertIn("no key 'epochs'; the nearest is 'epoch'", done.stderr)

    @contextmanager
    def server(self) -> Iterator[str]:
        """A running server; yields its address."""
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        arguments = [
            *(str(llama()), "--vua-path", str(self.root)),
            *("--host", "127.0.0.1", "--port", str(port), "--served-model-name", "tiny"),
            *("--dtype", "float32", "--block-size", "32", "--max-model-len", "2048"),
            *("--kv-cache-memory-bytes", str(64 << 20), "--enforce-eager"),
            *("--no-enable-prefix-caching", "--max-num-batched-tokens", "2048"),
        ]
        with tempfile.TemporaryFile() as log:
            process = subprocess.Popen(
                [*command(), *arguments],
                env=environment(),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            try:
                address = f"http://127.0.0.1:{port}"
                if not wait_until_healthy(process, address):
                    log.seek(0)
                    self.fail(f"no server:\n{log.read().decode(errors='replace')[-6000:]}")
                yield address
                process.send_signal(signal.SIGINT)
                process.wait(60)
            finally:
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()


def command() -> list[str]:
    """The command as a checkout has it, or the same module."""
    script = SOURCE.parent / "bin" / "vua-vllm"
    start = [str(script)] if script.exists() else [sys.executable, "-m", "vua.vllm.serve"]
    return [*start, "serve"]


def environment() -> dict[str, str]:
    """The tests' environment, with vLLM's engine in a process of its own, as is usual."""
    path = os.pathsep.join(filter(None, [str(SOURCE), os.environ.get("PYTHONPATH", "")]))
    kept = {name: value for name, value in ENVIRONMENT.items() if "MULTIPROCESSING" not in name}
    return {**os.environ, **kept, "PYTHON": sys.executable, "PYTHONPATH": path}


def wait_until_healthy(process: subprocess.Popen[bytes], address: str) -> bool:
    """Wait until the server answers; False if it ends or takes too long."""
    until = time.monotonic() + START_TIMEOUT_S
    while process.poll() is None and time.monotonic() < until:
        try:
            with urllib.request.urlopen(f"{address}/health", timeout=5) as answer:
                return bool(answer.status == 200)
        except (URLError, OSError):
            time.sleep(0.2)
    return False


def complete(address: str) -> list[int]:
    """The tokens that complete the usual prompt."""
    body = {
        "model": "tiny",
        "prompt": PROMPT,
        "max_tokens": MAX_TOKENS,
        "temperature": 0,
        "ignore_eos": True,
        "return_token_ids": True,
    }
    request = urllib.request.Request(
        f"{address}/v1/completions",
        data=json.dumps(body).encode(),
        headers={"Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=60) as answer:
        tokens: list[int] = json.load(answer)["choices"][0]["token_ids"]
    return tokens


def metric(address: str, name: str) -> float:
    """One of the server's counters, over all its labels."""
    with urllib.request.urlopen(f"{address}/metrics", timeout=30) as answer:
        lines = answer.read().decode().splitlines()
    return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith(name + "{"))
