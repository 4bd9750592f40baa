"""Who takes part, each by its own code: how an engine with it is made, where its packages lie."""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
CACHE = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "vua"
START_S = 300.0
QUIET = {
    "DO_NOT_TRACK": "1",
    "GGML_NO_BACKTRACE": "1",  # of an abort: it calls gdb
    "HF_HUB_OFFLINE": "1",
    "LMCACHE_DISABLE_BANNER": "1",
    "LMCACHE_MP_TRANSFER_MODE": "engine_driven",
    "LMCACHE_TRACK_USAGE": "false",
    "OMP_NUM_THREADS": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "TRANSFORMERS_OFFLINE": "1",
    "VLLM_CPU_CI_ENV": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_NO_USAGE_STATS": "1",
}


@dataclass(frozen=True)
class Subject:
    """A store, and the engine in which it is tried."""

    name: str
    engine: str
    """The module `olympics.ENGINE_engine` that makes it."""
    transfer: Callable[[Path], dict[str, Any]]
    """Returns how the engine is told to use the store in a directory."""
    package: str
    """Whose version is the subject's; empty: the engine's."""
    level: str
    """At what level it is tried."""
    settings: str
    """What is not its default, in words."""
    python: Path = Path(sys.executable)
    paths: tuple[Path, ...] = ()
    """Before what its Python has."""
    environment: dict[str, str] = field(default_factory=dict)
    server: Callable[[Path], contextlib.AbstractContextManager[tuple[int, int]]] | None = None
    """Starts what it needs beside the engine; gives a port and a process group."""
    dtypes: tuple[str, str, str] = ("float32", "bfloat16", "float16")
    """The usual one, and two of one size."""
    restarts: bool = True
    """Whether files are damaged between two processes; else within one, which alone finds them."""
    lacks: dict[str, str] = field(default_factory=dict)
    """Accidents that cannot be run, with the reason."""

    def missing(self) -> str | None:
        """Return why it is not here."""
        lost = [path for path in (self.python, *self.paths) if not path.exists()]
        return f"{lost[0]} is not there: `dev.py olympics --install` makes it" if lost else None


def _vua(root: Path) -> dict[str, Any]:
    return {
        "kv_connector": "VUAStorageConnector_V1",
        "kv_connector_module_path": "vua.vllm.kv_connector_v1",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {
            "shared_storage_path": str(root),
            "chunk_tokens": 64,
            "load_policy": "always",
        },
    }


def _tier(tier: dict[str, Any]) -> dict[str, Any]:
    return {
        "kv_connector": "OffloadingConnector",
        "kv_connector_module_path": "olympics.offloading_on_cpu",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {
            "spec_name": "TieringOffloadingSpec",
            "cpu_bytes_to_use": 64 << 20,
            "secondary_tiers": [tier],
        },
    }


def _fs_tier(root: Path) -> dict[str, Any]:
    return _tier({"type": "fs", "root_dir": str(root)})


def _lifeboat(root: Path) -> dict[str, Any]:
    given = {
        "storage": {"fallback_local": {"path": str(root), "min_free_gb": 0}},
        "dashboard": {"enabled": False},
    }
    module = "lifeboat_cache.integrations.vllm_tier"
    return _tier({"type": "LifeboatTier", "module_path": module, "lifeboat_config": given})


def _lmcache(root: Path) -> dict[str, Any]:  # noqa: ARG001 - its server has it
    return {
        "kv_connector": "LMCacheMPConnector",
        "kv_connector_module_path": "e2e.lmcache_connector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {
            "lmcache.mp.host": "tcp://localhost",
            "lmcache.mp.port": 0,  # the server's
            "lmcache.mp.heartbeat_interval": 30.0,  # also the patience with its answer
        },
    }


def _hicache_file(root: Path) -> dict[str, Any]:
    extra = {"file_storage_path": str(root), "prefetch_threshold": 64}
    return {
        "hicache_storage_backend": "file",
        "hicache_storage_backend_extra_config": json.dumps(extra),
    }


def _folder(root: Path) -> dict[str, Any]:
    return {"root": str(root)}


def _free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


LMCACHE = CACHE / "engines" / "lmcache-0.5.6"
LIFEBOAT = CACHE / "engines" / "lifeboatcache-0.1.11"
LLAMA = CACHE / "engines" / "xllamacpp-2026.10.11549"
FUSE = CACHE / "engines" / "mfusepy-3.1.1"
SGLANG = CACHE / "sglang-0.5.23" / "bin" / "python"


@contextlib.contextmanager
def lmcache_server(root: Path) -> Iterator[tuple[int, int]]:
    """Run an LMCache server with its own L2 adapter `fs`."""
    port, name = _free_port(), f"olympics-{uuid.uuid4().hex}"
    adapter = {"type": "fs", "base_path": str(root)}
    command = [
        *(sys.executable, "-m", "lmcache.cli.main", "server", "--host", "localhost"),
        *("--port", str(port), "--http-port", str(_free_port()), "--l1-size-gb", "0.25"),
        *("--chunk-size", "64", "--eviction-policy", "LRU", "--disable-observability"),
        *("--supported-transfer-mode", "engine_driven", "--shm-name", name),
        *("--l2-adapter", json.dumps(adapter)),
    ]
    with tempfile.TemporaryFile() as log:
        process = subprocess.Popen(
            command, env={**os.environ, **QUIET, "PYTHONPATH": str(LMCACHE)},
            stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True,
        )  # fmt: skip
        try:
            until = time.monotonic() + START_S
            while True:
                with socket.socket() as asked:
                    if asked.connect_ex(("127.0.0.1", port)) == 0:
                        break
                if process.poll() is not None or time.monotonic() > until:
                    log.seek(0)
                    raise RuntimeError(f"LMCache's server: {log.read()[-2000:].decode()}")
                time.sleep(0.1)
            yield port, process.pid
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            for left in Path("/dev/shm").glob(f"*{name}*"):
                left.unlink(missing_ok=True)


_LAYOUT = "the files hold K and V in the order of the memory, which on a CPU is not a GPU's"
_TOKENS_OF_VLLM = "tokens of vLLM"
_ON_CPU = "tokens of vLLM; the copies between engine and host memory, CUDA's, are lent by memmove"

SUBJECTS = (
    Subject(
        "VUA", "vllm", _vua, "vua", _TOKENS_OF_VLLM,
        "chunks of 64 tokens, load_policy always, kv_load_failure_policy recompute",
    ),
    Subject(
        "vLLM fs tier", "vllm", _fs_tier, "", _ON_CPU, "64 MiB of host memory",
        lacks={"other TP": _LAYOUT},
    ),
    Subject(
        "lifeboatcache", "vllm", _lifeboat, "lifeboatcache", _ON_CPU,
        "64 MiB of host memory, local disk alone, no reserve of free room, no dashboard",
        paths=(LIFEBOAT,),
    ),
    Subject(
        "LMCache multi-process", "vllm", _lmcache, "lmcache", _TOKENS_OF_VLLM,
        "L2 adapter fs, chunks of 64 tokens, engine_driven",
        paths=(LMCACHE,), server=lmcache_server,
    ),
    Subject(
        "LMCache disk", "lmcache", _folder, "lmcache",
        "its storage class, with K and V made from the tokens: it has no engine on a CPU",
        "LocalDiskBackend without the memory tier, chunks of 64 tokens. Its index is in memory: "
        "a new process finds nothing, so files are damaged under a running one",
        paths=(LMCACHE,), environment={"PYTHONHASHSEED": "0"}, restarts=False,
    ),
    Subject(
        "SGLang file backend", "sglang", _hicache_file, "",
        "tokens of SGLang's scheduler; the copies between pools, CUDA's, are lent by torch",
        "pages of 64 tokens, write_through, wait_complete", python=SGLANG,
        lacks={"other TP": "a scheduler of one rank was run: two need sockets between processes"},
    ),
    Subject(
        "llama.cpp slot files", "llama", _folder, "", "tokens of llama.cpp's server",
        "the client restores and saves the slot under a name made of the prompt", paths=(LLAMA,),
        dtypes=("F16", "F16", "BF16"),
        lacks={"other TP": "it has none on a CPU"},
    ),
)  # fmt: skip


class Driver:
    """The process in whose forks a subject's engines live."""

    def __init__(self, subject: Subject) -> None:
        """Start it, and wait until it has imported the engine. Raises RuntimeError."""
        paths = [*subject.paths, ROOT / "src", ROOT / "tests", ROOT / "benchmarks"]
        if subject.engine == "sglang":
            paths.insert(0, ROOT / "tests" / "e2e" / "sglang_on_cpu")
        given = [path for path in [os.environ.get("PYTHONPATH")] if path]
        environment = {
            **os.environ, **QUIET, **subject.environment,
            "PYTHONPATH": os.pathsep.join([*map(str, paths), *given]),
            "SGLANG_USE_CPU_ENGINE": "1", "SGLANG_CPU_OMP_THREADS_BIND": "",
        }  # fmt: skip
        environment.pop("VUA_PATH", None)
        self._log = tempfile.TemporaryFile()  # noqa: SIM115 - lives as long as the process
        self._process = subprocess.Popen(
            [str(subject.python), "-m", "olympics.driver", subject.engine],
            env=environment, cwd=ROOT / "tests", start_new_session=True,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._log,
        )  # fmt: skip
        self.version = self._answer(START_S)["version"]

    def live(self, job: dict[str, Any], limit_s: float) -> dict[str, Any]:
        """Have an engine live; return what it told. Raises RuntimeError."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({**job, "limit_s": limit_s}).encode() + b"\n")
        self._process.stdin.flush()
        return self._answer(limit_s + 60)

    def _answer(self, limit_s: float) -> dict[str, Any]:
        assert self._process.stdout is not None
        text, until = b"", time.monotonic() + limit_s
        with selectors.DefaultSelector() as selector:
            selector.register(self._process.stdout, selectors.EVENT_READ)
            while not text.endswith(b"\n"):
                ready = selector.select(max(0.0, until - time.monotonic()))
                part = os.read(self._process.stdout.fileno(), 1 << 20) if ready else b""
                if not part:
                    self.close()
                    raise RuntimeError(f"the driver has ended: {self.said}")
                text += part
        answer: dict[str, Any] = json.loads(text)
        return answer

    said = ""

    def close(self) -> None:
        """End it."""
        if self._log.closed:
            return
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        for stream in (self._process.stdin, self._process.stdout):
            assert stream is not None
            stream.close()
        self._log.seek(0)
        self.said = self._log.read().decode(errors="replace")[-3000:]
        self._log.close()


@contextlib.contextmanager
def troubled(below: Path, at: Path, control: Path) -> Iterator[None]:
    """Show a directory through a file system that has trouble on demand. Raises RuntimeError."""
    if os.geteuid() or not Path("/dev/fuse").exists() or not shutil.which("fusermount3"):
        raise RuntimeError("a FUSE mount needs root, /dev/fuse and fusermount3")
    below.mkdir()
    at.mkdir()
    control.write_text("{}", encoding="utf-8")
    process = subprocess.Popen(
        [sys.executable, str(Path(__file__).with_name("troubled.py")), below, at, control],
        env={**os.environ, "PYTHONPATH": str(FUSE)}, start_new_session=True,
    )  # fmt: skip
    try:
        until = time.monotonic() + 30
        while not os.path.ismount(at):
            if process.poll() is not None or time.monotonic() > until:
                raise RuntimeError("the FUSE mount did not come")
            time.sleep(0.05)
        yield
    finally:
        control.write_text("{}", encoding="utf-8")
        process.kill()
        process.wait()
        subprocess.run(["fusermount3", "-u", "-z", str(at)], check=False)
