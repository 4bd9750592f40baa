"""InferenceX AgentX by aiperf, on `vllm serve` without VUA, with it, and once more after a restart.

    git clone https://github.com/callanjfox/kv-cache-tester
    python -m venv AIPERF && AIPERF/bin/pip install aiperf==0.13.0
    python benchmarks/agentx.py kv-cache-tester/traces/trace_{0012,0021}.json \
        --aiperf AIPERF/bin/aiperf --json docs/measurements/evaluation.json

The clone holds traces by WEKA (Apache-2.0) in the form that the scenario `inferencex-agentx-mvp`
takes: sessions of an agent that writes code, with sub-agents, hashes of blocks, and real times.
aiperf makes texts by the hashes. For a CPU `--divide` makes tokens, blocks and seconds that many
times smaller; texts of such small blocks have still fewer tokens than the traces say. With less
`--cache-tokens` (of `--length` at least) sessions evict each other from vLLM's own cache.

The results cannot be submitted: the scenario needs a data set of Hugging Face, and aiperf takes
other traces with `--unsafe-override` alone. The scenario asks for half an hour, from a random point
of each session; here each session is asked once, from its start. The scenario also changes the
first message of each session in every run, so a restarted engine could load nothing; `--cache-bust
none` turns that off. All runs ask the same.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime, timezone
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).resolve().parents[1] / "tests"))

from e2e.damage import stored
from e2e.serving import free_port, healthy, scraped
from engines import expect
from forks import Program
from real_model import NAME, real_model
from small_models import ENGINE_ENVIRONMENT

TOKENS = ("in", "out", "block_size", "tool_tokens", "system_tokens")
SECONDS = ("t", "api_time", "think_time", "ttft")
SOURCES = {"computed": "local_compute", "own": "local_cache_hit", "vua": "external_kv_transfer"}
"""Where the tokens of prompts came from, in vLLM's words."""
BLOCK = 32
"""Tokens of a block of vLLM, which keeps one for itself."""
STARTED = ("without VUA", "VUA, empty", "VUA, restarted")
ENVIRONMENT = {name: value for name, value in ENGINE_ENVIRONMENT.items() if "MULTI" not in name}
END_S, ASK_S = 60.0, 1500.0


def divided(one: dict[str, Any], by: int) -> dict[str, Any]:
    """A trace, or a request of it, with that many times fewer tokens and seconds."""
    made = dict(one)
    for name in TOKENS:
        if one.get(name):
            made[name] = max(1, one[name] // by)  # whole blocks stay as many as they are
    for name in SECONDS:
        if one.get(name):
            made[name] = one[name] / by
    if one.get("duration_ms"):
        made["duration_ms"] = one["duration_ms"] // by
    if "requests" in one:
        made["requests"] = [divided(request, by) for request in one["requests"]]
    return made


def token_nbytes(model: Path) -> int:
    """What K and V of a token take, in 32 bits: many CPUs have no arithmetic of 16."""
    config = json.loads((model / "config.json").read_text("utf-8"))
    heads = config["num_attention_heads"]
    width = config.get("head_dim") or config["hidden_size"] // heads
    kept = config.get("num_key_value_heads", heads)
    return int(2 * config["num_hidden_layers"] * kept * width * 4)


@contextmanager
def serving(model: Path, given: argparse.Namespace, root: Path | None) -> Iterator[str]:
    """`vllm serve`, as a user starts it: `VUA_PATH` alone says whether it uses VUA."""
    port = free_port()
    command = [
        *(sys.executable, "-m", "vllm.entrypoints.cli.main", "serve", str(model)),
        *("--host", "127.0.0.1", "--port", str(port), "--served-model-name", NAME),
        *("--dtype", "float32", "--enforce-eager", "--block-size", str(BLOCK)),
        *("--max-model-len", str(given.length)),
        *("--kv-cache-memory-bytes", str((given.cache_tokens + BLOCK) * token_nbytes(model))),
    ]
    environment = os.environ | ENVIRONMENT
    environment.pop("VUA_PATH", None)
    environment |= {"VUA_PATH": str(root)} if root else {}
    address = f"http://127.0.0.1:{port}"
    with Program(command, environment) as server:
        server.until(partial(healthy, address))
        yield address
        server.end(END_S)  # VUA writes what it still has


def replayed(place: Path, address: str, model: Path, given: argparse.Namespace) -> dict[str, Any]:
    """What aiperf says of a replay of the traces below ``place``."""
    count, out = str(len(given.traces)), Path(tempfile.mkdtemp(dir=place))
    command = [
        *(given.aiperf, "profile", "--scenario", "inferencex-agentx-mvp", "--unsafe-override"),
        *("--custom-dataset-type", "weka_trace", "--input-file", str(place / "traces")),
        *("--cache-bust", "none", "--dataset-sampling-strategy", "sequential"),
        *("--concurrency", count, "--num-conversations", count, "--random-seed", "11"),
        *("--trajectory-start-min-ratio", "0", "--trajectory-start-max-ratio", "0"),
        *("--model", NAME, "--tokenizer", str(model), "--url", address),
        *("--endpoint-type", "chat", "--artifact-dir", str(out), "--ui", "none"),
        *("--use-server-token-count", "--no-gpu-telemetry", "--no-server-metrics"),
        *("--workers-max", "1", "--record-processors", "1"),
    ]
    other = {"PYTHONPATH", "HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE"}  # the last two: no local path
    environment = {name: value for name, value in os.environ.items() if name not in other}
    done = subprocess.run(
        command,
        env=environment,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=ASK_S,
        check=False,
    )
    found = sorted(out.rglob("profile_export_aiperf.json"))
    if done.returncode or not found:
        sys.exit(f"aiperf ended with {done.returncode}:\n{(done.stdout + done.stderr)[-6000:]}")
    said: dict[str, Any] = json.loads(found[0].read_text("utf-8"))
    return said


def row(run: str, address: str, said: dict[str, Any], written: int) -> dict[str, Any]:
    """A row of the table: what aiperf and the server's metrics say of a run."""
    found = scraped(address)

    def total(name: str, label: str = "") -> float | None:
        values = [value for series, value in found.items()
                  if series.startswith(name + "{") and label in series]  # fmt: skip
        return sum(values) if values else None

    sources = {name: int(total("vllm:prompt_tokens_by_source_total", f'"{source}"') or 0)
               for name, source in SOURCES.items()}  # fmt: skip
    return {
        "run": run,
        "requests": int(said["request_count"]["avg"]),
        "failed": int((said.get("error_request_count") or {"avg": 0})["avg"]),
        "prompt_tokens": int(total("vllm:prompt_tokens_total") or 0),
        **sources,
        "saved_s": total("vua_seconds_saved"),
        "written_nbytes": written,
        "ttft_ms": said["time_to_first_token"]["p50"],
        "seconds": said["benchmark_duration"]["avg"],
    }


def main() -> int:
    """Replay in all ways, print a row for each, and keep them in a file."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("traces", nargs="+", type=Path, help="WEKA's, a session in each file")
    parser.add_argument("--aiperf", default="aiperf", help="the command, in a venv of its own")
    parser.add_argument("--divide", type=int, default=32, help="tokens and seconds, for a CPU")
    parser.add_argument("--length", type=int, default=2560, help="of prompt and answer, at most")
    parser.add_argument("--cache-tokens", type=int, default=2560, help="that vLLM itself keeps")
    parser.add_argument("--model", type=Path, help=f"with a chat template; by default {NAME}")
    parser.add_argument("--dir", type=Path, help="work there: on the file system to measure")
    parser.add_argument("--json", type=Path, help="a file of figures, whose `agentx` this writes")
    given = parser.parse_args()
    model, load, rows = given.model or real_model(), round(os.getloadavg()[0], 1), []
    with tempfile.TemporaryDirectory(prefix="vua-agentx-", dir=given.dir) as folder:
        place = Path(folder)
        (place / "traces").mkdir()
        for path in given.traces:
            trace = json.loads(path.read_text("utf-8"))
            expect(f"{path}: what is over of a block", 0, trace["block_size"] % given.divide)
            (place / "traces" / path.name).write_text(json.dumps(divided(trace, given.divide)))
        root = place / "kv"
        root.mkdir(mode=0o700)
        for run in STARTED:
            before = sum(path.stat().st_size for path in stored(root))
            with serving(model, given, None if run == STARTED[0] else root) as address:
                said = replayed(place, address, model, given)
                rows.append(row(run, address, said, 0))
            rows[-1]["written_nbytes"] = sum(path.stat().st_size for path in stored(root)) - before
            print(json.dumps(rows[-1]), flush=True)
    expect("tokens of prompts in all runs", 1, len({one["prompt_tokens"] for one in rows}))
    if given.json:
        found = json.loads(given.json.read_text("utf-8")) if given.json.exists() else {}
        found["agentx"] = {
            "date": datetime.now(timezone.utc).date().isoformat(), "load": load,
            "cpus": os.cpu_count(), "machine": platform.machine(), "model": model.name,
            "vllm": version("vllm"), "vua": version("vua"), "aiperf": said["aiperf_version"],
            "traces": [path.stem for path in given.traces], "divide": given.divide,
            "length": given.length, "cache_tokens": given.cache_tokens, "rows": rows,
        }  # fmt: skip
        given.json.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
