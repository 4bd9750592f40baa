"""Each refusal of `vua.connector.cache_spec` holds, and what it advises helps.

A refusal without a row here fails the test, so no advice comes untested.
"""

from __future__ import annotations

import multiprocessing
import os
import threading
import unittest
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from engine_configs import ConfigTest, Given, engine_config, on
from vllm.config import ECTransferConfig, MultiModalConfig
from vllm.distributed.kv_transfer import kv_transfer_state as state
from vllm.model_executor.models.llama import LlamaForCausalLM
from vllm.v1 import kv_cache_interface
from vllm.v1 import kv_cache_interface as found
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    MambaSpec,
    MLAAttentionSpec,
    SlidingWindowSpec,
)

from e2e.engine import ENVIRONMENT
from e2e.harness import llama
from scheduling import request_of
from vua.connector.cache_spec import REFUSALS, UncachedError
from vua.connector.config import ConnectorConfig
from vua.connector.extras import Media
from vua.connector.lookup import Lookup, Lookups
from vua.connector.request import RequestOptions
from vua.errors import ConfigError
from vua.store.place import create_namespace, locate
from vua.vllm.cache_spec import check_place, describe
from vua.vllm.engine_identity import find_weights, setup_of
from vua.vllm.support import check_drafts, check_engine, check_starts, door_of, has_load_interface

pytestmark = pytest.mark.vllm

WITHOUT = "start it without --kv-transfer-config"
TIER = "set VUA_DOOR=tier"


def pixels(value: float, identifier: str, **more: Any) -> Any:
    """An image of one colour, as the connector gets it."""
    content = {"pixels": torch.full((2, 2), value), **more}
    return feature(Item({k: SimpleNamespace(data=v) for k, v in content.items()}), identifier)


def feature(data: Any, identifier: str) -> Any:
    """What vLLM's scheduler knows of an image."""
    place = SimpleNamespace(offset=3, length=4)
    return SimpleNamespace(data=data, modality="image", identifier=identifier, mm_position=place)


class Item(dict[str, Any]):
    """As vLLM's `MultiModalKwargsItem`: a mapping that can be referred to weakly."""


class RefusalsTest(ConfigTest):
    @classmethod
    def setUpClass(cls) -> None:
        super().setUpClass()
        cls.config = ConnectorConfig(shared_storage_path=str(cls.root / "kv"))

    def described(self, *specs: Any, made: Any = None, config: Any = None) -> Any:
        """How the connector describes an engine whose layers have such caches."""
        tables = [
            SimpleNamespace(layer_names=[f"model.layers.{at}.attn"], kv_cache_spec=spec)
            for at, spec in enumerate(specs)
        ]
        return describe(
            made or self.made, SimpleNamespace(kv_cache_groups=tables), config or self.config
        )

    def spec(self, kind: str = "FullAttentionSpec", **more: Any) -> Any:
        """One of vLLM's descriptions of a cache."""
        sizes = {"block_size": 32, "num_kv_heads": 2, "head_size": 32, "dtype": torch.float32}
        return getattr(kv_cache_interface, kind)(**sizes | more)

    @staticmethod
    def allowing(name: str) -> Any:
        """The connector's settings, with this in `allow`."""
        return ConnectorConfig(shared_storage_path="/kv", allow=(name,))

    def window(self, heads: int = 2) -> Any:
        return self.spec("SlidingWindowSpec", sliding_window=64, num_kv_heads=heads)

    def engine(self) -> None:
        """Check an engine as it is."""
        self.described(self.spec())

    @staticmethod
    def why_not(ask: Callable[[], object]) -> str:
        """Why it is refused; "" if it is not."""
        try:
            found = ask()
        except (UncachedError, ConfigError) as problem:
            return str(problem)
        return str(found) if isinstance(found, UncachedError | str) else ""

    def row(
        self,
        name: str,
        ask: Callable[[], object],
        *refused: Given,
        advised: tuple[Given, ...] = (),
        then: Callable[[], object] | None = None,
    ) -> None:
        """It is refused by this name, and once the advice is heeded it is not.

        ``refused`` holds for the refusal alone. ``then``: what is asked afterwards, if not the
        same; where the advice is to start without a connector, vLLM has to make none.
        """
        one = REFUSALS[name]
        *parts, end = one.why.split("{}")
        with ExitStack() as stack:
            for each in refused:
                stack.enter_context(each)
            text = self.why_not(ask)
            for part in (*parts, f"{end}: {one.do}"):
                self.assertIn(part, text)
            if WITHOUT in one.do:
                self.assert_no_connector()
                return
            if TIER in one.do:
                self.assert_tier()
        if one.do.startswith(TIER):
            return
        with ExitStack() as stack:
            for each in advised:
                stack.enter_context(each)
            self.assertEqual("", self.why_not(then or ask))

    def assert_no_connector(self) -> None:
        """An engine that is started without the option has none."""
        self.assertIsNone(self.made.kv_transfer_config)
        state.ensure_kv_transfer_initialized(self.made, SimpleNamespace())  # type: ignore[arg-type]
        self.assertFalse(state.has_kv_transfer_group())

    def assert_tier(self) -> None:
        """The user may name it for this engine."""
        offloads = self.given("cache_config", kv_offloading_size=1.0)
        with offloads, mock.patch.dict(os.environ, VUA_DOOR="tier"):
            for device in ("cuda", "cpu"):
                with on(device):
                    self.assertEqual("tier", door_of(self.made)[0])

    def test_rows(self) -> None:
        """Every refusal that there is."""
        for name in REFUSALS:
            with self.subTest(name):
                ask = getattr(self, f"row_{name}", None)
                self.assertIsNotNone(ask, f"{REFUSALS[name].do!r} is advised and not tried")
                ask()  # type: ignore[misc]

    # -- engines ----------------------------------------------------------------------------------

    def row_tier_alone(self) -> None:
        """Also caches of another form, see `ClassesTest`."""
        kind, text = type(self.made.model_config), self.made.model_config.hf_text_config
        draft = SimpleNamespace(method="eagle")
        for change in (
            self.given("parallel_config", decode_context_parallel_size=2),
            self.given("parallel_config", prefill_context_parallel_size=2),
            self.given("model_config", enable_sleep_mode=True),
            mock.patch.object(kind, "is_hybrid", new=True),
            mock.patch.object(kind, "has_inner_state", new=True),
            self.given("", speculative_config=draft),
            mock.patch.object(text, "index_topk", 8, create=True),
            mock.patch.object(text, "compress_ratios", [4], create=True),
        ):
            for device in ("cuda", "cpu"):
                self.row("tier_alone", lambda: check_engine(self.made), on(device), change)
        for device in ("rocm", "xpu"):
            self.row("tier_alone", lambda: check_engine(self.made), on(device))
        with on("cuda"):
            self.assertEqual("", self.why_not(lambda: check_engine(self.made)))

    def row_old_vllm(self) -> None:
        older = mock.patch("vua.vllm.cache_spec.has_load_interface", return_value=False)
        self.row("old_vllm", lambda: self.described(self.window()), older)

    def row_mixed_blocks(self) -> None:
        kept = self.given("cache_config", cache_dtype="bfloat16")
        self.row("mixed_blocks", self.engine, kept)

    def row_encoder_decoder(self) -> None:
        kind = self.given("model_config", is_encoder_decoder=True)
        self.row("encoder_decoder", lambda: check_starts(self.made), kind)

    def row_pooling(self) -> None:
        name = "is_prefix_caching_supported"
        kind = mock.patch.object(type(self.made.model_config), name, new=False)
        self.row("pooling", self.engine, self.given("model_config", runner_type="pooling"), kind)

    def row_no_cache(self) -> None:
        self.row("no_cache", self.described)

    def row_unidentified(self) -> None:
        """A model whose code is a name on a hub that is not here, then in its own directory."""
        (self.root / "model" / "modeling.py").write_text("")
        trusted = self.given("model_config", trust_remote_code=True)

        def code(name: str) -> Given:
            own = self.made.model_config.hf_config
            return mock.patch.object(own, "auto_map", {"AutoModel": name}, create=True)

        elsewhere = code("nobody/none--modeling.Model")
        here = (trusted, code("modeling.Model"))
        self.row("unidentified", self.engine, trusted, elsewhere, advised=here)

    def find(self) -> None:
        find_weights(self.made, threading.Event())

    def row_weights(self) -> None:
        for part, values in (
            ("load_config", {"load_format": "npcache"}),
            ("model_config", {"model": "nobody/none"}),
            ("model_config", {"model": str(self.root)}),
            ("model_config", {"model_weights": "s3://bucket/model"}),
        ):
            self.row("weights", self.find, self.given(part, **values))

    def row_more_weights(self) -> None:
        more = mock.patch.object(LlamaForCausalLM, "secondary_weights", (), create=True)
        self.row("more_weights", self.find, more)

    def row_weights_changed(self) -> None:
        """In processes of their own, as engines are: the second one is a restart."""
        file = self.root / "model" / "model.safetensors"
        self.find()  # what is known of the content, processes share by a file

        def started(touched: int) -> str:
            here, there = multiprocessing.Pipe(duplex=False)

            def run() -> None:
                while touched and file.stat().st_ctime_ns <= touched:
                    file.touch()
                there.send(self.why_not(self.find))

            fork = multiprocessing.get_context("fork")
            process = fork.Process(target=run, name="EngineCore_DP0")
            process.start()
            try:
                return str(here.recv())
            finally:
                process.join()

        changed = file.stat().st_ctime_ns + 2 * 10**9  # clocks of processes step by 0.01 s
        self.row("weights_changed", lambda: started(changed), then=lambda: started(0))

    def row_setting(self) -> None:
        odd = self.given("compilation_config", inductor_passes={"mine": object()})
        self.row("setting", self.engine, odd)

    # -- guesses ----------------------------------------------------------------------------------

    def row_draft_method(self) -> None:
        for method in ("draft_model", "dflash"):
            for better in ("ngram", "eagle", "mtp"):
                self.assertIn(better, REFUSALS["draft_method"].do)
                ask = partial(check_drafts, self.made)
                refused, advised = (
                    self.given("", speculative_config=SimpleNamespace(method=one))
                    for one in (method, better)
                )
                self.row("draft_method", ask, refused, advised=(advised,))

    # -- caches -----------------------------------------------------------------------------------

    def row_latent(self) -> None:
        spec = self.spec("MLAAttentionSpec", num_kv_heads=1)
        allowed = self.allowing("inexact_continuation")
        with self.given("scheduler_config", enable_chunked_prefill=False):
            self.row(
                "latent",
                lambda: self.described(spec),
                then=lambda: self.described(spec, config=allowed),
            )

    def row_on_host(self) -> None:
        for table in ({"host_resident": True}, {"enable_kv_transfer": False}):
            placed = SimpleNamespace(**table)
            self.row("on_host", lambda placed=placed: check_place(placed))

    def row_no_prefix(self) -> None:
        self.row("no_prefix", lambda: self.described(self.spec(non_causal=True)))

    def row_pipeline(self) -> None:
        self.pipeline(lambda one: self.described(one, self.window(one.num_kv_heads)))
        text = self.made.model_config.hf_text_config
        with mock.patch.object(text, "num_kv_shared_layers", 1, create=True):
            self.pipeline(self.described)

    def pipeline(self, ask: Callable[[Any], object]) -> None:
        """Two ranks of a pipeline are refused, two that divide the heads are not."""
        ranks = [
            self.given("parallel_config", pipeline_parallel_size=pp, tensor_parallel_size=tp)
            for pp, tp in ((2, 1), (1, 2))
        ]
        self.assertIn("leave out --pipeline-parallel-size", REFUSALS["pipeline"].do)
        self.row(
            "pipeline",
            *(lambda: ask(self.spec()), ranks[0]),
            advised=(ranks[1],),
            then=lambda: ask(self.spec(num_kv_heads=1)),
        )

    # -- images and adapters ----------------------------------------------------------------------

    def images(self) -> str:
        """Why prompts with images are not cached."""
        return str(self.described(self.spec()).engine.media_refused)

    def sees(self, **values: Any) -> Given:
        """The model takes images, with such settings."""
        return self.given("model_config", multimodal_config=MultiModalConfig(**values))

    def look(self, *features: Any, media: Any = None, refused: str = "") -> Callable[[], object]:
        """Ask whether a request with these images is cached."""
        found = media or Media("s", refused, 8)
        return lambda: found.look_at(features)

    def row_no_images(self) -> None:
        why = self.images()
        image = self.look(pixels(1, "a"), refused=why)
        self.row("no_images", image, then=self.look(refused=why))

    def row_other_encoder(self) -> None:
        other = ECTransferConfig(ec_connector="ECExampleConnector", ec_role="ec_consumer")
        apart = self.given("", ec_transfer_config=other)
        self.row("other_encoder", self.images, self.sees(), apart, advised=(self.sees(),))
        allowed = self.allowing("other_encoders")
        with self.sees(), apart:
            found = self.described(self.spec(), config=allowed)
        self.assertEqual("", found.engine.media_refused)

    def row_shared_memory(self) -> None:
        shared = self.sees(mm_processor_cache_type="shm")
        for better in ({}, {"mm_processor_cache_type": "lru"}):
            self.row("shared_memory", self.images, shared, advised=(self.sees(**better),))

    def row_processor(self) -> None:
        gone = self.given("model_config", model="nobody/none")
        self.row("processor", self.images, self.sees(), gone, advised=(self.sees(),))

    def row_no_content(self) -> None:
        media = Media("s", "", 8)
        nothing = self.look(feature(None, "a"), media=media)
        for better in (pixels(1, "b"), pixels(1, "its hash")):
            self.row("no_content", nothing, then=self.look(better, media=media))
        self.assertIn("identifier", self.why_not(self.look(pixels(1, "a"), media=media)))

    def row_content(self) -> None:
        device = pixels(1, "b", more=torch.zeros(2, device="meta"))
        for odd in (pixels(1, "a", more=object()), device):
            self.row("content", self.look(odd), then=self.look())

    def row_identifiers(self) -> None:
        media = Media("s", "", 8)
        self.assertEqual("", self.why_not(self.look(pixels(1, "a"), media=media)))
        other = self.look(pixels(2, "a"), media=media)
        self.row("identifiers", other, then=self.look(pixels(2, "b"), media=media))

    def row_adapter(self) -> None:
        """The workers have answered that they do not hold it; a request without it is looked up."""
        model = self.described(self.spec())
        place = locate(self.root / "kv")
        namespace = create_namespace(place, model.identity, [one.layout for one in model.groups])
        self.addCleanup(namespace.close)
        lookups, media = Lookups(model, namespace, self.config), Media("s", "", 8)
        self.addCleanup(lookups.close)

        def asked(adapter: Any) -> str:
            request = request_of("a", lora_request=adapter, num_output_tokens=0)
            found = Lookup(request, RequestOptions(), 0.0, None, media)
            lookups.ask(found)
            return "" if found.answer.result(60) else "".join(told.output)

        with self.assertLogs("vllm.vua", "WARNING") as told:
            held = SimpleNamespace(lora_path="/adapter")
            self.row("adapter", lambda: asked(held), then=lambda: asked(None))


class ClassesTest(unittest.TestCase):
    """Each with its own class of configuration, as vLLM resolves it, with caches of small sizes."""

    def setUp(self) -> None:
        self.enterContext(mock.patch.dict(os.environ, ENVIRONMENT))
        if not has_load_interface():
            self.skipTest("models with several groups are cached with vLLM 0.30 and newer")

    def groups(
        self, *tables: dict[str, Any], gpu: bool = True, like: str = "llama", **config: Any
    ) -> list[str]:
        """The groups' names of a model of the type ``like``, with such caches."""
        from transformers import CONFIG_MAPPING

        made = engine_config(llama(), **{"dtype": "bfloat16"} | config)
        if like != "llama":
            made.model_config.hf_config = CONFIG_MAPPING[like]()
            made.model_config.hf_text_config = made.model_config.hf_config.get_text_config()
        self.assertRegex(setup_of(made), "^[0-9a-f]{64}$")
        named = []
        for specs in tables:
            (first, *others) = dict.fromkeys(specs.values())
            wrapped = SimpleNamespace(kv_cache_specs=specs, block_size=first.block_size)
            spec = wrapped if others else first
            named.append(SimpleNamespace(layer_names=[*specs], kv_cache_spec=spec))
        caches = SimpleNamespace(kv_cache_groups=named, num_blocks=40)
        settings = ConnectorConfig(shared_storage_path="/kv", chunk_tokens=256)
        with on("cuda" if gpu else "cpu"):
            self.model = describe(made, caches, settings)
        return [group.layout.group for group in self.model.groups]

    def left_to_the_tier(self, what: str, *tables: dict[str, Any], **given: Any) -> None:
        """This is refused, with what to do."""
        words = f"does not serve {what}: set VUA_DOOR=tier, which needs vLLM 0.32"
        for gpu in (True, False):
            with self.assertRaisesRegex(UncachedError, words):
                self.groups(*tables, gpu=gpu, **given)

    def test_indexers(self) -> None:
        """DeepSeek V3.2 and GLM-5; latents alone are the connector's."""
        latent = {"block_size": 64, "num_kv_heads": 1, "head_size": 576, "dtype": torch.bfloat16}
        keys = latent | {"head_size": 132, "dtype": torch.uint8}
        latents = {f"model.layers.{n}.attn": MLAAttentionSpec(**latent) for n in range(3)}
        indexers = {f"model.layers.{n}.indexer": MLAAttentionSpec(**keys) for n in range(3)}
        for like in ("deepseek_v32", "glm_moe_dsa"):
            self.left_to_the_tier("an indexer", latents | indexers, like=like)
        self.left_to_the_tier("a MLAAttentionSpec", latents | indexers)
        self.assertEqual([""], self.groups(latents))

    def test_hybrids(self) -> None:
        """Qwen3-Next, Qwen 3.5 and Nemotron-H, also where the configuration does not tell."""
        state = MambaSpec(
            block_size=528,
            shapes=((3, 64), (4, 8, 8)),
            dtypes=(torch.bfloat16, torch.float32),
            mamba_cache_mode="align",
        )
        full = FullAttentionSpec(block_size=528, num_kv_heads=2, head_size=32, dtype=torch.bfloat16)
        for like in ("qwen3_next", "qwen3_5", "nemotron_h"):
            tables = {"layers.0.gdn": state}, {"layers.1.attn": full}
            self.left_to_the_tier("a MambaSpec", *tables, like=like)

    def test_quantised(self) -> None:
        """Scales beside elements, several elements in a byte; fp8 of one scale is known."""
        same = {"block_size": 16, "num_kv_heads": 2, "head_size": 32, "dtype": torch.uint8}
        for more in ({"state_content_bytes": 72}, {"num_head_slots": 1, "state_content_bytes": 52}):
            specs = {f"layers.{n}.attn": FullAttentionSpec(**same, **more) for n in range(2)}
            self.left_to_the_tier("a FullAttentionSpec", specs, kv_cache_dtype="fp8")
        plain = {"layers.0.attn": FullAttentionSpec(**same)}
        self.assertEqual([""], self.groups(plain, kv_cache_dtype="fp8"))
        self.assertEqual("F8_E4M3", self.model.identity.kv_dtype)

    def test_heads_that_differ(self) -> None:
        """Gemma 4."""
        same = {"block_size": 16, "num_kv_heads": 2, "head_size": 32, "dtype": torch.bfloat16}
        window = SlidingWindowSpec(sliding_window=128, **same)
        full = FullAttentionSpec(**same | {"num_kv_heads": 1, "head_size": 64})
        windows = {f"layers.{n}.attn": window for n in range(2)}
        for like in ("gemma4", "gemma4_text"):
            tables = windows, {"layers.2.attn": full}
            self.left_to_the_tier("such a FullAttentionSpec", *tables, like=like)
        self.assertEqual(["w128"], self.groups(windows))

    def test_compressed(self) -> None:
        """DeepSeek V4: latents of 4 and of 128 tokens each, windows, a ring that no hit needs."""
        if not hasattr(found, "CircularBufferSpec"):
            self.skipTest("this vLLM has no such caches")
        same = {"block_size": 256, "num_kv_heads": 1, "head_size": 584, "dtype": torch.uint8}
        latents = {"layers.0.attn": found.MLAAttentionSpec(**same, tokens_per_state=4)}
        window = found.SlidingWindowMLASpec(**same | {"block_size": 64}, sliding_window=128)
        ring = found.CircularBufferSpec(**same | {"block_size": 7})
        given = {"like": "deepseek_v4", "kv_cache_dtype": "fp8"}
        tables = latents, {"layers.0.swa": window}, {"layers.1.ring": ring}
        self.left_to_the_tier("an indexer", *tables, **given)
        del given["like"]
        self.left_to_the_tier("a CircularBufferSpec", tables[2], **given)
        self.left_to_the_tier("a SlidingWindowMLASpec", *tables[1:2], **given)
        self.left_to_the_tier("a MLAAttentionSpec", latents, **given)
