"""Does the connector work in a vLLM on this GPU? One engine per case: what it loads must be right.

    python benchmarks/gpu/vllm_cases.py [CASE ...] [--dir DIRECTORY] [--json FILE] [--tiny]

A few layers of Llama 3.1 8B's shape with random weights; nothing is downloaded. Per case: the
form of a layer's cache, how much of a prompt was stored, and whether the tokens that come out of a
loaded cache are those of the engine's own. Tokens computed anew may differ in bfloat16: only shown.
``VLLM_KV_CACHE_LAYOUT=HND`` tries the other layout. A case that fails is reported, and the next one
begins; the exit status says whether all went well. ``--tiny``: a small model, on the CPU.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import random
import sys
import tempfile
import time
import traceback
from pathlib import Path
from typing import Any

from first_token import CHUNK, TINY, set_environment, use_lively_weights, write_config

CASES: dict[str, dict[str, Any]] = {
    "eager": {"enforce_eager": True},
    "graphs": {},
    "triton": {"enforce_eager": True, "attention_backend": "TRITON_ATTN"},
    "fp8": {"enforce_eager": True, "kv_cache_dtype": "fp8"},
}


class Case:
    """One engine with a connector, and a prompt that it stores and loads."""

    def __init__(self, name: str, root: Path, *, tiny: bool) -> None:
        """Start the engine."""
        from vllm import LLM

        use_lively_weights()
        self.store, self.tokens = root / "kv", 4 * CHUNK if tiny else 62 * CHUNK
        transfer = {
            "kv_connector": "VUAStorageConnector_V1", "kv_role": "kv_both",
            "kv_connector_module_path": "vua.vllm.kv_connector_v1",
            "kv_load_failure_policy": "recompute",
            "kv_connector_extra_config": {
                "shared_storage_path": str(self.store), "load_policy": "always", "strict": True,
                "witness_every": 0, "timeouts": {"lookup_s": 60.0, "io_s": 60.0},
            },
        }  # fmt: skip
        settings = {
            "load_format": "dummy", "skip_tokenizer_init": True, "enable_prefix_caching": True,
            "seed": 0,
            "kv_transfer_config": transfer, "max_model_len": self.tokens + 2 * CHUNK,
            **CASES[name],
        }  # fmt: skip
        if tiny:
            settings |= {"dtype": "float32", "block_size": 32, "kv_cache_memory_bytes": 64 << 20}
        else:
            settings |= {"dtype": "bfloat16", "gpu_memory_utilization": 0.2}
        changes = TINY if tiny else {"num_hidden_layers": 4}
        settings["model"] = str(write_config(root / "model", **changes))
        self.llm = LLM(**settings)

    def forms(self) -> list[str]:
        """Shape, strides, type and place of the caches' layers, each form once."""

        def look(worker: Any) -> list[str]:
            caches = worker.model_runner.kv_caches
            shown = [(tuple(c.shape), c.stride(), str(c.dtype), str(c.device)) for c in caches]
            return sorted({str(one) for one in shown})

        return [form for forms in self.llm.collective_rpc(look) for form in forms]

    def ask(self, prompt: list[int]) -> tuple[list[int], int, float]:
        """The tokens that follow, how many of the prompt's were cached, and the seconds."""
        from vllm import SamplingParams

        sampling = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
        start = time.perf_counter()
        output = self.llm.generate([{"prompt_token_ids": prompt}], sampling, use_tqdm=False)[0]
        took = time.perf_counter() - start
        return list(output.outputs[0].token_ids), output.num_cached_tokens or 0, took

    def stored(self) -> int:
        """Wait until the prompt is stored; return how many chunks are."""
        until = time.monotonic() + 60
        while (count := len(list(self.store.glob("*/??/*/*.safetensors")))) < self.tokens // CHUNK:
            if time.monotonic() > until:
                break
            time.sleep(0.05)
        return count

    def run(self) -> dict[str, Any]:
        """Compute and store a prompt, find it in vLLM's cache, load it."""
        prompt = random.Random(1).choices(range(10, 1000), k=self.tokens + 32)
        computed, stored, own = self.ask(prompt), self.stored(), self.ask(prompt)
        if not self.llm.reset_prefix_cache():
            raise RuntimeError("the prefix cache could not be reset")
        loaded = self.ask(prompt)
        complete = stored == self.tokens // CHUNK and loaded[1] == self.tokens
        return {
            "forms": self.forms(),
            "chunks stored": f"{stored} of {self.tokens // CHUNK}",
            "cached tokens: computed, own, loaded": [one[1] for one in (computed, own, loaded)],
            "loaded = own": loaded[0] == own[0],
            "loaded = computed": loaded[0] == computed[0],
            "ms: computed, own, loaded": [round(1e3 * x[2], 1) for x in (computed, own, loaded)],
            "good": complete and loaded[0] == own[0],
        }

    def close(self) -> None:
        """End the engine, so that its memory is free for the next one."""
        self.llm.llm_engine.engine_core.shutdown()
        del self.llm
        gc.collect()


def tried(name: str, *, directory: str | None, tiny: bool) -> dict[str, Any]:
    """What came of a case; its error is a finding, whatever it is."""
    with tempfile.TemporaryDirectory(prefix="vua-case-", dir=directory) as root:
        case = None
        try:
            case = Case(name, Path(root), tiny=tiny)
            return case.run()
        except Exception as problem:  # noqa: BLE001 - of a vLLM that nobody has tried so far
            return {"good": False, "error": repr(problem), "trace": traceback.format_exc()[-4000:]}
        finally:
            if case is not None:
                case.close()


def main() -> None:
    """Try each case, print, and write JSON if asked for."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("cases", nargs="*", help=f"of {', '.join(CASES)}; by default all")
    parser.add_argument("--dir", help="where the stores lie for a while")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--tiny", action="store_true", help="only see whether it works")
    arguments = parser.parse_args()
    set_environment()
    os.environ["VLLM_ALLOW_INSECURE_SERIALIZATION"] = "1"  # for the look at the caches
    found: dict[str, Any] = {}
    for name in arguments.cases or CASES:
        found[name] = tried(name, directory=arguments.dir, tiny=arguments.tiny)
        print(name, json.dumps(found[name], indent=1), flush=True)
        if arguments.json:
            arguments.json.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    sys.exit(0 if all(one["good"] for one in found.values()) else 1)


if __name__ == "__main__":
    main()
