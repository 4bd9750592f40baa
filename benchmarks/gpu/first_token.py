"""Time to the first token in a real vLLM: computed, in its own cache, loaded after a restart.

    python benchmarks/gpu/first_token.py [--dir DIRECTORY] [--json FILE]      # all phases
    python benchmarks/gpu/first_token.py PHASE --dir DIRECTORY [--json FILE]  # one; files are kept

plain   without a connector
cold    with an empty store: prompts are computed and stored, then found in vLLM's own prefix cache,
        just after and at rest
warm    a restart on the files of `cold`; then again, after vLLM's prefix cache was reset

Each phase is an engine in a process of its own. The model has the shape of Llama 3.1 8B and random
weights, so that no network is needed. Its tokens depend on the whole prompt; `cold` checks that.
``--connector fs`` measures vLLM's own fs tier instead of VUA; after a reset that tier still has its
host memory. ``--hooks`` shows how long each hook of the connector took. ``--tiny``: a small model
on the CPU, whose times mean nothing. The exit status is 1 where a stored prompt was not loaded, or
where a loaded one has other tokens than `cold` got from the engine's own cache.
"""

from __future__ import annotations

import argparse
import functools
import importlib
import inspect
import json
import multiprocessing
import os
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).resolve().parents[2] / "tests"))

from small_models import ENGINE_ENVIRONMENT

PHASES = ("plain", "cold", "warm")
CHUNK = 64
ASKED_AFTER = 8
"""Tokens of a prompt after the part that can be loaded."""
SIZES = {1024: 8, 8192: 3, 32768: 2}
"""Tokens that can be loaded, and prompts of that size."""
TINY_SIZES = {64: 2, 256: 1}
LLAMA_8B = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "torch_dtype": "bfloat16",
    "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
    "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 128256,
    "max_position_embeddings": 131072, "rms_norm_eps": 1e-5, "rope_theta": 500000.0,
    "tie_word_embeddings": False, "hidden_act": "silu", "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
TINY = {
    "torch_dtype": "float32", "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32, "vocab_size": 1024,
}  # fmt: skip
CONNECTORS = {
    "vua": ("vua.vllm.kv_connector_v1", "VUAStorageConnector_V1"),
    "fs": (
        "vllm.distributed.kv_transfer.kv_connector.v1.offloading_connector", "OffloadingConnector",
    ),
}  # fmt: skip


def set_environment() -> None:
    """One process, offline, quiet. To be called before vLLM is imported."""
    os.environ.update(ENGINE_ENVIRONMENT)
    os.environ.setdefault("VLLM_USE_FLASHINFER_SAMPLER", "0")  # compiles at its first use


def write_config(directory: Path, **changes: Any) -> Path:
    """Make a checkpoint without weights, for `load_format="dummy"`."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(LLAMA_8B | changes), encoding="utf-8")
    return directory


def use_lively_weights() -> None:
    """Have `load_format="dummy"` make weights whose tokens depend on the prompt.

    vLLM's own lie within a thousandth of 0, norms too: attention changes nothing then, and a cache
    of wrong bytes yields the right tokens.
    """
    import torch
    from vllm.model_executor.model_loader import register_model_loader
    from vllm.model_executor.model_loader.dummy_loader import DummyModelLoader

    @register_model_loader("dummy")
    class LivelyLoader(DummyModelLoader):
        """Norms of 1; matrices that double what goes through them."""

        @torch.no_grad()
        def load_weights(self, model: torch.nn.Module, model_config: Any) -> None:
            super().load_weights(model, model_config)
            for number, weights in enumerate(model.parameters()):
                if weights.dim() == 1:
                    weights.fill_(1.0)
                    continue
                generator = torch.Generator(weights.device).manual_seed(number)
                weights.normal_(0.0, 2.0 / weights.shape[-1] ** 0.5, generator=generator)


def transfer_config(connector: str, store: Path) -> dict[str, Any]:
    """The `kv_transfer_config` of a connector over a directory."""
    module, name = CONNECTORS[connector]
    config: dict[str, Any] = {"kv_connector": name, "kv_role": "kv_both"}
    if connector == "fs":
        store.mkdir(parents=True, exist_ok=True)
        tier = {"type": "fs", "root_dir": str(store)}
        tiers = {"spec_name": "TieringOffloadingSpec", "cpu_bytes_to_use": 20 << 30}
        return config | {"kv_connector_extra_config": tiers | {"secondary_tiers": [tier]}}
    extra: dict[str, Any] = {"shared_storage_path": str(store), "load_policy": "always"}
    extra["witness_every"] = 0  # what is measured are loads
    extra["timeouts"] = {"lookup_s": 60.0, "io_s": 60.0}  # a busy machine loads, too
    return config | {
        "kv_connector_module_path": module,
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": extra,
    }


class Hooks:
    """How long the hooks of a connector's class take."""

    def __init__(self, connector: str) -> None:
        """Wrap each hook that the class defines itself. To be called before the engine starts."""
        from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1 as Base

        self.seconds: dict[str, float] = {}
        module, name = CONNECTORS[connector]
        kind = getattr(importlib.import_module(module), name)
        for hook in dir(Base):
            found = inspect.getattr_static(kind, hook)
            if hook.startswith("_") or found is inspect.getattr_static(Base, hook):
                continue
            if inspect.isfunction(found):
                setattr(kind, hook, self.timed(hook, found))

    def timed(self, name: str, hook: Callable[..., Any]) -> Callable[..., Any]:
        """The same hook; its time is added to what it took before."""

        @functools.wraps(hook)
        def around(*given: Any, **named: Any) -> Any:
            began = time.perf_counter()
            try:
                return hook(*given, **named)
            finally:
                took = time.perf_counter() - began
                self.seconds[name] = self.seconds.get(name, 0.0) + took

        return around

    def since(self) -> dict[str, float]:
        """Milliseconds per hook since the last call, the longest first."""
        slowest_first = sorted(self.seconds.items(), key=lambda item: -item[1])
        self.seconds = {}
        return {name: round(1e3 * took, 2) for name, took in slowest_first}


class Phase:
    """One engine, what it is asked, and what came of it."""

    def __init__(self, name: str, arguments: argparse.Namespace, root: Path) -> None:
        """Start the engine."""
        began = time.monotonic()
        set_environment()
        import torch
        from vllm import LLM

        use_lively_weights()
        self.name, self.root, self.tiny = name, root, arguments.tiny
        self.sizes = TINY_SIZES if arguments.tiny else SIZES
        self.store = root / arguments.connector
        self.rows: list[dict[str, Any]] = []
        self.wrong: list[str] = []
        self.answers: dict[str, list[int]] = {}
        with_one = name != "plain"
        self.hooks = Hooks(arguments.connector) if with_one and arguments.hooks else None
        settings: dict[str, Any] = {
            "load_format": "dummy", "skip_tokenizer_init": True, "disable_log_stats": False,
            "enable_prefix_caching": True, "seed": 0, "enforce_eager": True,
            "max_model_len": max(self.sizes) + 4 * CHUNK,
            "model": str(write_config(root / "model", **(TINY if self.tiny else {}))),
        }  # fmt: skip
        if self.tiny:  # bfloat16 tokens depend on how the prompt is cut
            settings |= {"dtype": "float32", "block_size": 32, "kv_cache_memory_bytes": 64 << 20}
        else:
            settings |= {"dtype": "bfloat16", "gpu_memory_utilization": 0.6}
        if with_one:
            settings["kv_transfer_config"] = transfer_config(arguments.connector, self.store)
        self.llm = LLM(**settings)
        gpu = torch.cuda.is_available()
        self.found: dict[str, Any] = {
            "phase": name, "connector": arguments.connector if with_one else None,
            "device": torch.cuda.get_device_name() if gpu else "CPU, tiny sizes",
            "start_s": round(time.monotonic() - began, 1), "rows": self.rows,
            "wrong": self.wrong, "answers": self.answers,
        }  # fmt: skip
        print(f"{name}: started in {self.found['start_s']} s", flush=True)

    # -- asking -------------------------------------------------------------------------------

    def ask(self, prompt: Sequence[int], *, forget: bool = False) -> dict[str, Any]:
        """Serve a prompt; ``forget``: without what is in vLLM's own prefix cache."""
        from vllm import SamplingParams

        if forget and not self.llm.reset_prefix_cache():
            raise RuntimeError("the prefix cache could not be reset")
        if self.hooks is not None:
            self.hooks.since()
        sampling = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
        asked = [{"prompt_token_ids": list(prompt)}]
        output = self.llm.generate(asked, sampling, use_tqdm=False)[0]
        return {
            "ms": round(1e3 * output.metrics.first_token_latency, 1),
            "cached": output.num_cached_tokens or 0,
            "tokens": list(output.outputs[0].token_ids),
            "hooks": self.hooks.since() if self.hooks is not None else {},
        }

    def row(
        self, size: int, what: str, prompts: dict[str, list[int]], *, cached: int | None,
        forget: bool = False,
    ) -> None:  # fmt: skip
        """Ask for prompts one after the other, note the times, and check cached and tokens."""
        found = {name: self.ask(prompt, forget=forget) for name, prompt in prompts.items()}
        same = None
        for name, one in found.items():
            if cached is not None and one["cached"] != cached:
                self.fail(f"{what}, prompt {name}: {one['cached']} tokens cached, not {cached}")
            if cached:  # computed from the same place on: the numerics are the same, too
                before = self.answers.setdefault(name, one["tokens"])
                same = same is not False and before == one["tokens"]
                if before != one["tokens"]:
                    self.fail(f"{what}, prompt {name}: tokens {one['tokens']}, not {before}")
        times = [one["ms"] for one in found.values()]
        row = {
            "size": size, "what": what, "ms": times, "median ms": statistics.median(times),
            "cached": [one["cached"] for one in found.values()], "tokens equal": same,
        }  # fmt: skip
        span = f"{row['median ms']:8.1f} ms ({min(times)} to {max(times)})"
        print(f"{self.name}, {size} tokens, {what:22} {span}, cached {row['cached']}, "
              f"tokens equal: {same}", flush=True)  # fmt: skip
        if self.hooks is not None:
            row["hooks ms"] = [one["hooks"] for one in found.values()]
            shown = [f"{name} {took}" for name, took in row["hooks ms"][-1].items() if took >= 0.1]
            print(f"    hooks of the last one, ms: {', '.join(shown)}", flush=True)
        self.rows.append(row)

    def fail(self, why: str) -> None:
        """Note what is not as it must be."""
        self.wrong.append(why)
        print(f"{self.name}: WRONG: {why}", flush=True)

    def settle(self) -> None:
        """Wait until the store has not grown for a second."""
        until, last, since = time.monotonic() + 60, -1, time.monotonic()
        while time.monotonic() - since < 1 and time.monotonic() < until:
            files = [path for path in self.store.rglob("*") if path.is_file()]
            if (size := len(files)) != last:
                last, since = size, time.monotonic()
            time.sleep(0.05)

    # -- phases -------------------------------------------------------------------------------

    def run(self) -> bool:
        """Ask all that the phase asks, write what was found, and say whether all was right."""
        chance = random.Random(7)
        vocabulary = range(10, 1000 if self.tiny else 100_000)

        def prompt(size: int) -> list[int]:
            return chance.choices(vocabulary, k=size + ASKED_AFTER)

        prompts = {
            size: {f"{size}/{number}": prompt(size) for number in range(count)}
            for size, count in self.sizes.items()
        }
        self.ask(chance.choices(vocabulary, k=max(self.sizes) // 8))  # compiles, allocates
        if self.name == "warm":
            self.warm(prompts)
        else:
            self.cold(prompts, prompt)
        self.llm.llm_engine.engine_core.shutdown()  # what waits to be stored is stored
        results = json.dumps(self.found, indent=1) + "\n"
        (self.root / f"{self.name}.json").write_text(results, encoding="utf-8")
        return not self.wrong

    def cold(
        self, prompts: dict[int, dict[str, list[int]]], prompt: Callable[[int], list[int]]
    ) -> None:
        """Compute all; find it in vLLM's own cache; compute some more."""
        for size, some in prompts.items():
            self.row(size, "computed", some, cached=0)
            last = dict(list(some.items())[-1:])
            self.row(size, "own, just after", last, cached=size)
            self.settle()
            self.row(size, "own, at rest", some, cached=size)
        size = min(prompts)
        late = {f"late/{number}": prompt(size) for number in range(self.sizes[size])}
        self.row(size, "computed, at the end", late, cached=0)
        name, one = next(iter(prompts[size].items()))
        other = self.ask([*prompt(size)[:size], *one[size:]])
        if other["tokens"] == self.answers[name]:
            self.fail("equal tokens say nothing: they do not depend on what is cached")
        self.settle()

    def warm(self, prompts: dict[int, dict[str, list[int]]]) -> None:
        """Load all; forget it, and load it again."""
        before = json.loads((self.root / "cold.json").read_text(encoding="utf-8"))
        self.answers.update(before["answers"])
        for size, some in prompts.items():
            self.row(size, "restart", some, cached=size)
            self.row(size, "after a reset", some, cached=size, forget=True)
        for name in ("plain", "cold"):
            self.beside(self.root / f"{name}.json", name)

    def beside(self, path: Path, name: str) -> None:
        """Print loaded over computed, where that phase was run."""
        if not path.exists():
            return
        rows = json.loads(path.read_text(encoding="utf-8"))["rows"]
        computed = {row["size"]: row["median ms"] for row in rows if row["what"] == "computed"}
        for row in self.rows:
            if row["what"] == "restart":
                row[f"of computed, {name}"] = round(row["median ms"] / computed[row["size"]], 3)
                print(f"{row['size']} tokens: loaded after a restart / computed in `{name}`: "
                      f"{row[f'of computed, {name}']}", flush=True)  # fmt: skip


def run_phase(name: str, arguments: argparse.Namespace, root: Path) -> None:
    """Run one phase, and end the process with its status."""
    sys.exit(0 if Phase(name, arguments, root).run() else 1)


def all_phases(arguments: argparse.Namespace, root: Path) -> int:
    """Run each phase in a process of its own; return the first exit status that is not 0."""
    if arguments.tiny:  # once, for all phases; with CUDA processes cannot be forked
        set_environment()
        import vllm.entrypoints.llm
        import vllm.v1.engine.core
        import vllm.v1.worker.cpu_worker  # noqa: F401
    context = multiprocessing.get_context("fork" if arguments.tiny else "spawn")
    for name in PHASES:
        process = context.Process(target=run_phase, args=(name, arguments, root))
        process.start()
        process.join()
        if process.exitcode:
            return process.exitcode
    return 0


def main() -> None:
    """Measure, print, and write JSON if asked for."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("phase", nargs="?", choices=PHASES, help="by default all, each in turn")
    parser.add_argument("--dir", type=Path, help="a directory on the file system to measure")
    parser.add_argument("--connector", choices=CONNECTORS, default="vua")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--hooks", action="store_true", help="how long each of them took")
    parser.add_argument("--tiny", action="store_true", help="only see whether it works")
    arguments = parser.parse_args()
    if arguments.phase is None:
        with tempfile.TemporaryDirectory(prefix="vua-bench-", dir=arguments.dir) as name:
            status = all_phases(arguments, Path(name))
            paths = [Path(name, f"{phase}.json") for phase in PHASES]
            found = [json.loads(path.read_text()) for path in paths if path.exists()]
    else:
        if arguments.dir is None:
            parser.error("a single phase needs --dir: `warm` loads what `cold` has stored there")
        if arguments.phase == "warm" and not (arguments.dir / "cold.json").exists():
            parser.error(f"{arguments.dir} holds nothing of `cold`: run that first")
        phase = Phase(arguments.phase, arguments, arguments.dir)
        status, found = 0 if phase.run() else 1, [phase.found]
    if arguments.json:
        arguments.json.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    sys.exit(status)


if __name__ == "__main__":
    main()
