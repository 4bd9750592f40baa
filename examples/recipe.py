"""Store, reset, load: is a model's KV cache kept, and is its answer the same?

    python examples/recipe.py Qwen/Qwen3-8B --path /mnt/kv [--engine '{"tensor_parallel_size": 2}']

What vllm-project/recipes asks of a model's entry for KV offloading, with any model that vLLM runs:

1. a greedy prompt of 2,700 tokens is answered, and its chunks are stored;
2. vLLM forgets its own prefix cache;
3. the same prompt is answered again, by what is loaded;
4. both answers are identical.

Exit status 1 unless all of that holds. `--json FILE` writes what was found.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import sys
import time
from pathlib import Path
from typing import Any

TOKENS, ANSWER = 2700, 32
PATIENCE_S = 120


def main() -> int:
    """Run it once; return the exit status."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("model", help="as vLLM takes it")
    parser.add_argument("--path", default=os.environ.get("VUA_PATH"), help="the cache's directory")
    parser.add_argument("--engine", type=json.loads, default={}, help="further settings of vLLM")
    parser.add_argument("--extra", type=json.loads, default={}, help="further settings of VUA")
    parser.add_argument("--json", type=Path, help="write the result there")
    options = parser.parse_args()
    if options.path is None:
        parser.error("give --path DIRECTORY, or set VUA_PATH")
    found = recipe(options.model, Path(options.path), options.engine, options.extra)
    for name, value in found.items():
        print(f"{name:16} {value}")
    if options.json:
        options.json.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    return 0 if found["passed"] else 1


def recipe(model: str, path: Path, engine: dict[str, Any], extra: dict[str, Any]) -> dict[str, Any]:
    """Return what was found."""
    import vllm
    from vllm import LLM, SamplingParams

    transfer = {
        "kv_connector": "VUAStorageConnector_V1",
        "kv_connector_module_path": "vua.vllm.kv_connector_v1",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {"shared_storage_path": str(path), "load_policy": "always"}
        | extra,
    }
    settings: dict[str, Any] = {"enable_prefix_caching": True, "disable_log_stats": False}
    llm = LLM(model=model, kv_transfer_config=transfer, **settings | engine)
    vocabulary = int(llm.llm_engine.model_config.get_vocab_size())
    ids = random.Random(0).choices(range(5, min(vocabulary, 30_000)), k=TOKENS)
    greedy = SamplingParams(max_tokens=ANSWER, temperature=0, ignore_eos=True)

    def ask() -> tuple[list[int], int]:
        (done,) = llm.generate([{"prompt_token_ids": ids}], greedy, use_tqdm=False)
        return list(done.outputs[0].token_ids), int(done.num_cached_tokens or 0)

    def settle() -> None:
        """Let vLLM take the metrics of what ended since its last step."""
        some = SamplingParams(max_tokens=2, ignore_eos=True)
        llm.generate([{"prompt_token_ids": [1, 2, 3]}], some, use_tqdm=False)

    first, before = ask()
    stored, until = 0.0, time.monotonic() + PATIENCE_S
    while time.monotonic() < until:
        settle()
        now = metric("vua_stored_bytes_total")
        if now and now == stored:
            break
        stored = now
        time.sleep(0.5)
    llm.reset_prefix_cache()
    second, cached = ask()
    settle()
    loaded = metric("vua_loaded_bytes_total")
    llm.llm_engine.engine_core.shutdown()
    passed = stored > 0 and loaded > 0 and cached > 0 and first == second and before == 0
    return {
        "model": model,
        "engine": f"vLLM {vllm.__version__}",
        "device": device(),
        "prompt_tokens": TOKENS,
        "stored_bytes": int(stored),
        "loaded_bytes": int(loaded),
        "loaded_tokens": cached,
        "identical": first == second,
        "different_tokens": len({*first}),
        "groups": groups(path),
        "passed": passed,
    }


def metric(name: str) -> float:
    """Return a counter's sum over its labels."""
    from prometheus_client import REGISTRY

    return sum(
        sample.value
        for family in REGISTRY.collect()
        for sample in family.samples
        if sample.name == name
    )


def device() -> str:
    """Return what the engine runs on."""
    from vllm.platforms import current_platform

    return "CPU" if current_platform.is_cpu() else str(current_platform.get_device_name())


def groups(path: Path) -> list[str]:
    """Return the kinds of layers that are stored, as the format calls them."""
    from vua.storage.description import descriptions

    return sorted({layout.group for found in descriptions(path) for layout in found.layouts})


if __name__ == "__main__":
    sys.exit(main())
