"""Models by each door, each the whole way; architectures; those that are served without a cache.

`tests/model_classes.py` lists where the other classes are tested. Of an architecture that vLLM
cannot run on a CPU, or that VUA does not store there, the reason is asked; VUA describes the real
configuration of all.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest import mock

import pytest

from e2e.checkpoints import with_biases
from e2e.damage import CHUNK, exchange_for_noise, flip, stored
from e2e.engine import ENVIRONMENT
from e2e.harness import (
    PROMPT,
    RESET,
    RESET_ALL,
    Batch,
    EngineTest,
    Exchange,
    Phase,
    llama,
    needs_vllm,
    run,
    tier_at,
    tokens,
)
from e2e.kinds import (
    DELTA_ENGINE,
    KINDS,
    SHORT_ENGINE,
    Kind,
    eagle,
    ernie,
    gemma3,
    gemma3n,
    gpt_oss,
    small,
)
from e2e.trouble import preempted

pytestmark = pytest.mark.vllm


WHOLE = Batch([PROMPT[:642]])
"""Two tokens are left to compute: states fade, and here they cannot."""
OTHERS = (Batch([PROMPT[:642] + tokens(300, seed=4)]), Batch([PROMPT[:400] + tokens(150, seed=2)]))
"""A longer prompt, and one that shares a part."""
LEAST = 512
"""Tokens of `WHOLE` that are loaded at least: whole blocks of any size; of windows the last one."""


def _cold(phase: Phase) -> list[list[int]]:
    """The tokens of an engine that finds nothing; those of each prompt are others."""
    (cold,) = run(phase)
    assert cold.problem is None, cold.problem
    assert len({*map(tuple, cold.tokens)}) == len(cold.tokens), cold.tokens
    assert not any(cold.cached)
    return cold.tokens


def _apart(count: int) -> Sequence[Batch]:
    """The other prompts, each under a salt of its own."""
    return [replace(one, salt=f"other {at}") for at, one in enumerate(OTHERS[:count])]


def check_loads(
    engine: dict[str, Any], root: Path, loaded: tuple[int, ...] = (640, 384), damaged: str = ""
) -> None:
    """By the connector: cold, restarted, other prompts, damaged, healed; noise gives other tokens.

    Args:
        engine: its settings.
        root: an empty directory.
        loaded: tokens that each of `OTHERS` loads; shorter: the rest of them is not asked.
        damaged: how the names of files begin in which a bit is flipped: their kind of layers.
    """
    flipped, noise = (root.with_name(name) for name in ("flipped", "noise"))

    def phase(*batches: Batch | Exchange) -> Phase:
        return Phase([step for batch in batches for step in (RESET, batch)], engine, root)

    cold = _cold(phase(WHOLE, *_apart(len(loaded))))
    for copy in (flipped, noise):
        shutil.copytree(root, copy)
    hurt = [path for path in stored(flipped) if path.name.startswith(damaged)]
    for path in hurt:
        flip(path)
    exchange_for_noise(noise, WHOLE.prompts[0])

    again = (Exchange(flipped, root), WHOLE, WHOLE, Exchange(noise, root), WHOLE)
    (warm,) = run(phase(WHOLE, *OTHERS[: len(loaded)], *again))

    assert warm.problem is None, warm.problem
    *right, wrong = warm.tokens
    assert right == [*cold, cold[0], cold[0]]
    assert warm.cached == [640, *loaded, 0, 640, 640]
    assert hurt
    assert warm.counts["corrupt"] > 0
    assert warm.counts["tokens_loaded"] >= LEAST
    assert wrong != cold[0]


def check_by_tier(engine: dict[str, Any], root: Path, others: int = 2) -> None:
    """By the tier: cold, restarted, so many other prompts, damaged."""
    flipped, engine = root.with_name("flipped"), {"enable_prefix_caching": True} | engine

    def phase(at: Path, *batches: Batch) -> Phase:
        steps = [step for batch in batches for step in (RESET_ALL, batch)]
        return Phase(steps, engine, at, transfer=tier_at(at))

    cold = _cold(phase(root, WHOLE, *_apart(others)))
    shutil.copytree(root, flipped)
    for path in stored(flipped):
        flip(path)

    warm, damaged = run(phase(root, WHOLE, *OTHERS[:others]), phase(flipped, WHOLE))

    assert (warm.problem, damaged.problem) == (None, None)
    assert (cold, cold[:1]) == (warm.tokens, damaged.tokens)
    assert damaged.cached == [0]
    assert warm.cached[0] >= LEAST


def check_preempted(engine: dict[str, Any], root: Path) -> None:
    """Prompts that share a beginning and are thrown out again and again, in small steps."""
    sharing = [PROMPT[:400] + tokens(150, seed=10 + at) for at in range(4)]
    batch = Batch(sharing, max_tokens=40)
    engine = engine | {"max_num_batched_tokens": 192, "enable_chunked_prefill": True}
    trouble = [partial(preempted, 25)]

    plain, served = run(
        Phase([batch], engine), Phase([batch, RESET, batch], engine, root, trouble=trouble)
    )

    assert served.problem is None, served.problem
    assert served.tokens == 2 * plain.tokens
    assert served.counts.get("preemptions", 0) > 0
    assert min(served.cached[4:]) > 0


CPU = Path("/proc/cpuinfo").read_text(encoding="utf-8")
TP2: dict[str, Any] = {"tensor_parallel_size": 2}
BY_TURNS = ("sliding_attention", "full_attention") * 2
AVX512 = pytest.mark.skipif("avx512f" not in CPU, reason="vLLM needs AVX-512")
AMX = pytest.mark.skipif("amx_tile" not in CPU, reason="without AMX it continues no prefix")


def drafted(method: str, count: int, **more: Any) -> dict[str, Any]:
    return {"speculative_config": {"method": method, "num_speculative_tokens": count} | more}


class Case(NamedTuple):
    model: Callable[[], Path] = llama
    engine: Callable[[], dict[str, Any]] = dict
    damaged: str = "l"
    """How the names of its files begin that are damaged."""
    others: int = 2
    """How many other prompts are asked: tokens of some depend on how vLLM cuts a prompt."""
    mark: Any = ()

    @property
    def settings(self) -> dict[str, Any]:
        return {"model": str(self.model()), **self.engine()}


CASES = {
    "llama": Case(),
    # each engine compiles the search for n-grams anew
    "n-grams": Case(engine=lambda: drafted("ngram", 2, prompt_lookup_max=3), mark=pytest.mark.soak),
    "gpt-oss": Case(gpt_oss, damaged="w128"),
    "gemma3": Case(gemma3, damaged="w128"),
    "gemma3n": Case(lambda: gemma3n(*BY_TURNS), damaged="w128"),
    "gemma3n of one kind": Case(lambda: gemma3n(*["full_attention"] * 4)),
    "mistral": Case(lambda: small("Mistral", sliding_window=128), damaged="w128"),
}
BY_TIER = {
    "llama": Case(),
    "gpt-oss": Case(gpt_oss),
    "gemma3n": Case(lambda: gemma3n(*BY_TURNS)),
    "gemma4": Case(lambda: small("Gemma4")),
    "llama4": Case(lambda: small("Llama4")),
    "qwen3-next": Case(lambda: small("Qwen3Next"), lambda: DELTA_ENGINE),
    "lfm2": Case(lambda: small("Lfm2"), lambda: SHORT_ENGINE, others=0),
    "eagle": Case(engine=lambda: drafted("eagle", 2, model=str(eagle()))),
    "mtp": Case(ernie, lambda: drafted("mtp", 1)),
    "fp8": Case(engine=lambda: {"kv_cache_dtype": "fp8"}, mark=AVX512),
    "deepseek": Case(lambda: small("DeepseekV2"), lambda: {"block_size": 16}, mark=AMX),
}


def each(cases: dict[str, Case]) -> Any:
    chosen = [pytest.param(case, id=name, marks=case.mark) for name, case in cases.items()]
    return pytest.mark.parametrize("case", chosen)


@pytest.mark.thorough
@needs_vllm
class TestClasses:
    @each(CASES)
    def test_row(self, case: Case, tmp_path: Path) -> None:
        check_loads(case.settings, tmp_path / "kv", damaged=case.damaged)

    @each(CASES)
    def test_preempted(self, case: Case, tmp_path: Path) -> None:
        check_preempted(case.settings, tmp_path / "kv")

    @each(BY_TIER)
    def test_by_tier(self, case: Case, tmp_path: Path) -> None:
        check_by_tier(case.settings, tmp_path / "kv", case.others)

    def test_workers(self, tmp_path: Path) -> None:
        """What two workers have stored of each group of layers one loads, and two load again."""
        engine, root = {"model": str(gpt_oss())}, tmp_path / "kv"
        plain, *served = run(
            Phase([WHOLE], engine | TP2),
            Phase([WHOLE], engine | TP2, root),
            Phase([WHOLE], engine, root),
            Phase([WHOLE], engine | TP2, root),
        )

        assert [one.problem for one in served] == [None] * 3
        assert [one.tokens for one in served] == [plain.tokens] * 3
        assert [cached for one in served for cached in one.cached] == [0, 640, 640]


@pytest.mark.soak
class TestArchitectures:
    @needs_vllm
    @pytest.mark.parametrize("name", KINDS)
    def test_one(self, name: str, tmp_path: Path) -> None:
        """Its real configuration is described; a small model of it runs in real engines."""
        kind = KINDS[name]
        check_door(name, kind, tmp_path)
        config = {"architectures": [name], **kind.config}
        model = with_biases(tmp_path / "model", kind.model_type, **config)
        engine, root = {"model": str(model), **kind.engine}, tmp_path / "kv"
        if kind.cannot:
            check_refused(kind, engine, root)
        elif kind.why_tier:
            check_by_tier(engine, root, len(kind.loaded))
        else:
            check_loads(engine, root, kind.loaded)


def check_door(name: str, kind: Kind, at: Path) -> None:
    """On a GPU it takes the door that the table says; the connector has an identity for it."""
    import torch
    from transformers import AutoConfig
    from vllm.engine.arg_utils import EngineArgs
    from vllm.model_executor.models import registry
    from vllm.v1.kv_cache_interface import FullAttentionSpec

    from vua.connector.config import ConnectorConfig
    from vua.vllm.cache_spec import describe
    from vua.vllm.support import door_of

    real = AutoConfig.for_model(kind.model_type).to_dict() | {"architectures": [name]}
    (at / "config.json").write_text(json.dumps(real), encoding="utf-8")
    given = {"max_model_len": 1024, "skip_tokenizer_init": True, "dtype": "bfloat16"}
    in_this_process = mock.patch.object(registry, "_run_in_subprocess", lambda look: look())
    with mock.patch.dict(os.environ, ENVIRONMENT), in_this_process:
        config = EngineArgs(model=str(at), **given).create_engine_config()
    heads = config.model_config.get_total_num_kv_heads()
    spec = FullAttentionSpec(32, num_kv_heads=heads, head_size=32, dtype=torch.bfloat16)
    table = SimpleNamespace(layer_names=["model.layers.0.attn"], kv_cache_spec=spec)
    caches = SimpleNamespace(kv_cache_groups=[table])
    asked = {f"is_{one}": lambda one=one: one == "cuda" for one in ("cpu", "cuda", "rocm", "xpu")}
    gpu = SimpleNamespace(**asked, device_type="cuda")
    memory = mock.patch("vua.vllm.support.machine_memory_nbytes", return_value=64 << 30)
    with mock.patch("vllm.platforms.current_platform", gpu), memory:
        door, why = door_of(config)
        assert door == ("tier" if kind.why_tier else "connector"), why
        assert kind.why_tier in why
        if not kind.why_tier:
            found = describe(config, caches, ConnectorConfig(shared_storage_path=str(at)))
            assert len(found.identity.model) == 64


def check_refused(kind: Kind, engine: dict[str, Any], root: Path) -> None:
    """On a CPU vLLM does not run it, or VUA stores nothing: either says why."""
    by_name = {"kv_connector": "VUA", "kv_connector_module_path": None}
    transfer = by_name if kind.why_tier else {}
    bare, served = run(Phase([WHOLE], engine), Phase([WHOLE], engine, root, transfer=transfer))

    assert kind.cannot in (served.problem or served.log)
    assert bare.tokens == served.tokens
    assert (bare.problem is None) == (served.problem is None)
    assert stored(root) == []


HAS_AMX = "amx_tile" in CPU
BLOCK, LOADED = 32 if HAS_AMX else 16, 640
DTYPE = "bfloat16" if HAS_AMX else "float32"
"""With HAS_AMX vLLM's MLA takes no weights in float32, and no shorter blocks."""
BATCH = Batch([PROMPT])


class LatentBytesTest(EngineTest):
    """MLA on a CPU, where vLLM's prefill and decode disagree: by bytes, not by tokens."""

    def blocks(self, *, loaded: int) -> dict[str, list[str]]:
        """Serve the prompt in a process of its own; the digests of its whole blocks."""
        engine: dict[str, Any] = {
            "model": str(small("DeepseekV2")),
            "block_size": BLOCK,
            "dtype": DTYPE,
        }
        extra = {"allow": ["inexact_continuation"]}
        served = self.serve(BATCH, engine=engine, extra=extra, snapshots=True)
        self.assertEqual([loaded], served.cached)
        self.assertEqual(loaded, served.counts.get("tokens_loaded", 0))
        (blocks,) = served.blocks
        self.assertEqual(2, len(blocks))
        return {name: digests[: LOADED // BLOCK] for name, digests in blocks.items()}

    @pytest.mark.thorough
    def test_latents(self) -> None:
        """A warm process has the bytes of the cold one in every block it loaded.

        Negative control: after one stored chunk was replaced, just its blocks differ.
        """
        cold = self.blocks(loaded=0)
        for digests in cold.values():  # no two blocks are alike, none is empty
            self.assertEqual(LOADED // BLOCK, len(set(digests)))

        warm = self.blocks(loaded=LOADED)

        self.assertEqual(cold, warm)

        exchange_for_noise(self.root, PROMPT, [4])
        other = self.blocks(loaded=LOADED)

        changed = set(range(4 * CHUNK // BLOCK, 5 * CHUNK // BLOCK))
        for name, digests in cold.items():
            found = {n for n, one in enumerate(digests) if one != other[name][n]}
            self.assertEqual(changed, found)
