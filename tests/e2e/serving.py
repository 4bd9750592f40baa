"""Runs `vua-vllm serve` for tests, and asks the servers."""

from __future__ import annotations

import json
import os
import socket
import sys
import tempfile
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any
from urllib.error import URLError

from e2e import engine
from e2e.engine import ENVIRONMENT
from e2e.harness import MAX_TOKENS, PROMPT, SOURCE, EngineTest, driver, llama
from forks import START_S, Program, wait_for


class ServerTest(EngineTest):
    """A test that starts vLLM's own server."""

    def setUp(self) -> None:
        super().setUp()
        try:
            version("vllm")
        except PackageNotFoundError:
            self.skipTest("no distribution is called vllm, and its server asks for its version")


class Fork:
    """A server that the engines' driver forks: in a third of the time that a new process takes."""

    def __init__(self, arguments: Sequence[str], log: str) -> None:
        """Start it; its words go to the file ``log``."""
        start = partial(engine.start_server, list(arguments), Path(log))
        self.pid: int = driver().do_itself(start, START_S)

    def poll(self) -> int | None:
        """Not None when it has ended; the driver's child it is until somebody waits for it."""
        with suppress(FileNotFoundError):
            state = Path(f"/proc/{self.pid}/stat").read_text().rpartition(") ")[2][0]
            return 0 if state == "Z" else None
        return 0

    def send_signal(self, number: int) -> None:
        os.kill(self.pid, number)

    def wait(self, timeout_s: float = 10.0) -> None:
        if Path(f"/proc/{self.pid}").exists():
            driver().do_itself(partial(wait_for, self.pid, timeout_s))


class Forked(Program):
    """Likewise, as a program."""

    def __init__(self, arguments: Sequence[str]) -> None:
        self._log = tempfile.NamedTemporaryFile()  # noqa: SIM115 - lives as long as the program
        self._process = Fork(arguments, self._log.name)


@contextmanager
def starting(
    root: Path, *extra: Sequence[str], plain: bool = False, model: Path | None = None
) -> Iterator[Callable[[], list[str]]]:
    """Starting servers, each with further arguments, on one directory.

    Yields what waits until all of them are there and returns their addresses. ``plain``: as a user
    starts them, by `vllm serve` and `VUA_PATH` alone.
    """
    with ExitStack() as stack:
        started: list[tuple[Program, str]] = []
        for more in extra:
            port = free_port()
            arguments = [*settings(port, model or llama()), *more]
            if plain:
                vllm = [sys.executable, "-m", "vllm.entrypoints.cli.main", "serve"]
                server = Program([*vllm, *arguments], environment() | {"VUA_PATH": str(root)})
            else:
                server = Forked([*arguments, "--vua-path", str(root)])
            started.append((stack.enter_context(server), f"http://127.0.0.1:{port}"))

        def ready() -> list[str]:
            for server, address in started:
                server.until(partial(healthy, address))
            return [address for _, address in started]

        try:
            yield ready
        except BaseException:
            for server, _ in started:  # pytest shows it with the failure
                sys.stderr.write(server.log[-6000:])
            raise
        for server, _ in started:
            server.end()


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port: int = free.getsockname()[1]
    return port


def settings(port: int, model: Path) -> list[str]:
    return [
        str(model),
        *("--host", "127.0.0.1", "--port", str(port), "--served-model-name", "tiny"),
        *("--dtype", "float32", "--block-size", "32", "--max-model-len", "2048"),
        *("--kv-cache-memory-bytes", str(64 << 20), "--enforce-eager"),
        *("--no-enable-prefix-caching", "--max-num-batched-tokens", "2048"),
    ]


def transfer(**settings: str) -> list[str]:
    """Arguments of servers that load whatever a busy machine makes of it; with other settings."""
    extra = {"kv_connector_extra_config": {"load_policy": "always", "witness_every": 0}}
    return ["--kv-transfer-config", json.dumps(extra | settings)]


def environment() -> dict[str, str]:
    """The tests' environment, with vLLM's engine in a process of its own, as is usual."""
    path = os.pathsep.join(filter(None, [str(SOURCE), os.environ.get("PYTHONPATH", "")]))
    kept = {name: value for name, value in ENVIRONMENT.items() if "MULTIPROCESSING" not in name}
    return {**os.environ, **kept, "PYTHON": sys.executable, "PYTHONPATH": path}


def healthy(address: str) -> bool:
    """Whether a server answers by now."""
    with suppress(URLError, OSError), urllib.request.urlopen(f"{address}/health", timeout=5) as one:
        return bool(one.status == 200)
    return False


def complete(
    address: str, prompt: Sequence[int] = PROMPT, *, replica: int = 0, **asked: Any
) -> list[int]:
    """The tokens that complete a prompt.

    Args:
        address: of the server.
        prompt: token ids.
        replica: which one of the server's data parallel engines is to do it.
        asked: further words of the request.
    """
    body = {
        **asked,
        "model": "tiny",
        "prompt": prompt,
        "max_tokens": MAX_TOKENS,
        "temperature": 0,
        "ignore_eos": True,
        "return_token_ids": True,
    }
    request = urllib.request.Request(
        f"{address}/v1/completions",
        data=json.dumps(body).encode(),
        headers={"Content-Type": "application/json", "X-data-parallel-rank": str(replica)},
    )
    with urllib.request.urlopen(request, timeout=300) as answer:
        tokens: list[int] = json.load(answer)["choices"][0]["token_ids"]
    return tokens


def metric(address: str, name: str) -> float:
    """One of the server's counters, over all its labels."""
    found = scraped(address)
    return sum(value for series, value in found.items() if series.startswith(name + "{"))


def scraped(address: str) -> dict[str, float]:
    """All of the server's metrics, by name and labels."""
    with urllib.request.urlopen(f"{address}/metrics", timeout=300) as answer:
        lines = answer.read().decode().splitlines()
    pairs = (line.rsplit(" ", 1) for line in lines if line and not line.startswith("#"))
    return {series: float(value) for series, value in pairs}
