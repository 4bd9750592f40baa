"""Each refusal of `vua.connector.cache_spec` holds, and what it advises helps.

A refusal without a row here fails the test, so no advice comes untested.
"""

from __future__ import annotations

import multiprocessing
import os
import threading
import unittest
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing
from functools import partial
from itertools import chain, product
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
from vua.connector.config import ConnectorConfig, RequestOptions
from vua.connector.extras import Media
from vua.connector.lookup import Lookup, Lookups
from vua.errors import ConfigError
from vua.store.namespace import Namespace
from vua.store.place import locate
from vua.vllm.cache_spec import check_place, describe
from vua.vllm.engine_identity import find_weights, setup_of
from vua.vllm.support import check_drafts, check_engine, check_starts, door_of

pytestmark = pytest.mark.vllm

WITHOUT = "start it without --kv-transfer-config"
TIER = "set VUA_DOOR=tier"

Ask = Callable[[], object]
Row = tuple[Any, ...]
"""The arguments of `RefusalsTest.check`."""


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
    def described(self, *specs: Any, allow: str = "") -> Any:
        """How the connector describes an engine whose layers have such caches."""
        tables = [
            SimpleNamespace(layer_names=[f"model.layers.{at}.attn"], kv_cache_spec=spec)
            for at, spec in enumerate(specs)
        ]
        settings = ConnectorConfig(shared_storage_path="/kv", allow=(allow,) if allow else ())
        return describe(self.made, SimpleNamespace(kv_cache_groups=tables), settings)

    def spec(self, kind: str = "FullAttentionSpec", **more: Any) -> Any:
        """One of vLLM's descriptions of a cache."""
        sizes = {"block_size": 32, "num_kv_heads": 2, "head_size": 32, "dtype": torch.float32}
        return getattr(kv_cache_interface, kind)(**sizes | more)

    def window(self, heads: int = 2) -> Any:
        return self.spec("SlidingWindowSpec", sliding_window=64, num_kv_heads=heads)

    def engine(self) -> None:
        """Check an engine as it is."""
        self.described(self.spec())

    @staticmethod
    def why_not(ask: Ask) -> str:
        """Why it is refused; "" if it is not."""
        try:
            found = ask()
        except (UncachedError, ConfigError) as problem:
            return str(problem)
        return str(found) if isinstance(found, UncachedError | str) else ""

    def test_rows(self) -> None:
        """Every refusal that there is, and once its advice is heeded it is none."""
        seen = set[str]()
        for name, *row in chain(self.of_engines(), self.of_caches(), self.of_requests()):
            seen.add(name)
            with self.subTest(name):
                self.check(name, *row)
        self.assertEqual({*REFUSALS}, seen, "advice that is not tried")

    def check(
        self,
        name: str,
        ask: Ask,
        refused: Sequence[Given] = (),
        advised: Sequence[Given] = (),
        then: Ask | None = None,
    ) -> None:
        """It is refused by this name, and where the advice is heeded it is not.

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

    def of_engines(self) -> Iterator[Row]:
        sleeps = self.given("model_config", enable_sleep_mode=True)
        for device in ("cuda", "cpu"):  # also what `DoorsTest` and `ClassesTest` have
            yield "tier_alone", partial(check_engine, self.made), (on(device), sleeps)
        mixed = self.given("cache_config", cache_dtype="bfloat16")
        yield "mixed_blocks", self.engine, (mixed,)
        encoder = self.given("model_config", is_encoder_decoder=True)
        yield "encoder_decoder", partial(check_starts, self.made), (encoder,)
        kind, own = type(self.made.model_config), self.made.model_config.hf_config
        uncached = mock.patch.object(kind, "is_prefix_caching_supported", new=False)
        pooling = self.given("model_config", runner_type="pooling")
        yield "pooling", self.engine, (pooling, uncached)
        yield "no_cache", self.described
        # code with a name on a hub that is not here, then in the model's own directory
        (self.root / "model" / "modeling.py").write_text("")
        trusted = self.given("model_config", trust_remote_code=True)
        elsewhere, here = (
            mock.patch.object(own, "auto_map", {"AutoModel": name}, create=True)
            for name in ("nobody/none--modeling.Model", "modeling.Model")
        )
        yield "unidentified", self.engine, (trusted, elsewhere), (trusted, here)
        find = partial(find_weights, self.made, threading.Event())
        for part, values in (
            ("load_config", {"load_format": "npcache"}),
            ("model_config", {"model": "nobody/none"}),
            ("model_config", {"model": str(self.root)}),
            ("model_config", {"model_weights": "s3://bucket/model"}),
        ):
            yield "weights", find, (self.given(part, **values),)
        more = mock.patch.object(LlamaForCausalLM, "secondary_weights", (), create=True)
        yield "more_weights", find, (more,)
        find()  # what is known of the content, processes share by a file
        changed = (self.root / "model" / "model.safetensors").stat().st_ctime_ns
        changed += 2 * 10**9  # clocks of processes step by 0.01 s
        restart = partial(self.started, find, 0)
        yield "weights_changed", partial(self.started, find, changed), (), (), restart
        odd = self.given("compilation_config", inductor_passes={"mine": object()})
        yield "setting", self.engine, (odd,)
        for method, better in product(("draft_model", "dflash"), ("ngram", "eagle", "mtp")):
            self.assertIn(better, REFUSALS["draft_method"].do)
            guesses = [
                [self.given("", speculative_config=SimpleNamespace(method=one))]
                for one in (method, better)
            ]
            yield "draft_method", partial(check_drafts, self.made), *guesses

    def started(self, find: Ask, touched: int) -> str:
        """Why an engine is refused, in a process of its own, if its weights change meanwhile."""
        here, there = multiprocessing.Pipe(duplex=False)
        file = self.root / "model" / "model.safetensors"

        def run() -> None:
            while touched and file.stat().st_ctime_ns <= touched:
                file.touch()
            there.send(self.why_not(find))

        process = multiprocessing.get_context("fork").Process(target=run, name="EngineCore_DP0")
        process.start()
        try:
            return str(here.recv())
        finally:
            process.join()

    def of_caches(self) -> Iterator[Row]:
        latent = self.spec("MLAAttentionSpec", num_kv_heads=1)
        unchunked = (self.given("scheduler_config", enable_chunked_prefill=False),)
        allowed = partial(self.described, latent, allow="inexact_continuation")
        yield "latent", partial(self.described, latent), unchunked, unchunked, allowed
        for table in ({"host_resident": True}, {"enable_kv_transfer": False}):
            yield "on_host", partial(check_place, SimpleNamespace(**table))
        yield "no_prefix", partial(self.described, self.spec(non_causal=True))
        # two ranks of a pipeline are refused, two that divide the heads are not
        self.assertIn("leave out --pipeline-parallel-size", REFUSALS["pipeline"].do)
        text = self.made.model_config.hf_text_config
        shares = mock.patch.object(text, "num_kv_shared_layers", 1, create=True)
        pipeline, tensors = (
            self.given("parallel_config", pipeline_parallel_size=pp, tensor_parallel_size=tp)
            for pp, tp in ((2, 1), (1, 2))
        )
        for beside, given in (([self.window], ()), ([], (shares,))):
            ask, then = (
                partial(self.described, self.spec(num_kv_heads=n), *(one(n) for one in beside))
                for n in (2, 1)
            )
            yield "pipeline", ask, (pipeline, *given), (tensors, *given), then

    def images(self) -> str:
        """Why prompts with images are not cached."""
        return str(self.described(self.spec()).engine.media_refused)

    def of_requests(self) -> Iterator[Row]:
        def sees(**values: Any) -> Given:
            """The model takes images, with such settings."""
            return self.given("model_config", multimodal_config=MultiModalConfig(**values))

        def look(*features: Any, media: Any = None) -> Ask:
            """Ask whether a request with these images is cached."""
            return partial((media or Media("s", "", 8)).look_at, features)

        without = Media("s", self.images(), 8)
        yield "no_images", look(pixels(1, "a"), media=without), (), (), look(media=without)
        other = ECTransferConfig(ec_connector="ECExampleConnector", ec_role="ec_consumer")
        apart = (sees(), self.given("", ec_transfer_config=other))
        yield "other_encoder", self.images, apart, (sees(),)
        for better in ({}, {"mm_processor_cache_type": "lru"}):
            shared = sees(mm_processor_cache_type="shm")
            yield "shared_memory", self.images, (shared,), (sees(**better),)
        gone = self.given("model_config", model="nobody/none")
        yield "processor", self.images, (sees(), gone), (sees(),)
        media = Media("s", "", 8)
        nothing = look(feature(None, "a"), media=media)
        for name in ("b", "its hash"):
            yield "no_content", nothing, (), (), look(pixels(1, name), media=media)
        self.assertIn("identifier", self.why_not(look(pixels(1, "a"), media=media)))
        for odd in (object(), torch.zeros(2, device="meta")):
            yield "content", look(pixels(1, "a", more=odd)), (), (), look()
        media = Media("s", "", 8)
        self.assertEqual("", self.why_not(look(pixels(1, "a"), media=media)))
        two, better = (look(pixels(2, name), media=media) for name in ("a", "b"))
        yield "identifiers", two, (), (), better
        with self.assertLogs("vllm.vua", "WARNING") as told:
            ask, then = (partial(self.asked, one, told) for one in ("/adapter", None))
            yield "adapter", ask, (), (), then

    def asked(self, adapter: str | None, told: Any) -> str:
        """Why a request with an adapter is not looked up: the workers do not hold it."""
        model, place = self.described(self.spec()), locate(self.root / "kv")
        namespace = Namespace.create(place, model.identity, [one.layout for one in model.groups])
        config, media = ConnectorConfig(shared_storage_path="/kv"), Media("s", "", 8)
        with closing(namespace), closing(Lookups(model, namespace, config)) as lookups:
            held = None if adapter is None else SimpleNamespace(lora_path=adapter)
            request = request_of("a", lora_request=held, num_output_tokens=0)
            found = Lookup(request, RequestOptions(), 0.0, None, media)
            lookups.ask(found)
            return "" if found.answer.result(60) else "".join(told.output)


class ClassesTest(unittest.TestCase):
    """Each with its own class of configuration, as vLLM resolves it, with caches of small sizes."""

    def setUp(self) -> None:
        self.enterContext(mock.patch.dict(os.environ, ENVIRONMENT))

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
        words = f"does not serve {what}: set VUA_DOOR=tier, which needs"
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
        same = {"block_size": 256, "num_kv_heads": 1, "head_size": 584, "dtype": torch.uint8}
        latents = {"layers.0.attn": MLAAttentionSpec(**same, tokens_per_state=4)}
        window = kv_cache_interface.SlidingWindowMLASpec(
            **same | {"block_size": 64}, sliding_window=128
        )
        ring = kv_cache_interface.CircularBufferSpec(**same | {"block_size": 7})
        given = {"like": "deepseek_v4", "kv_cache_dtype": "fp8"}
        tables = latents, {"layers.0.swa": window}, {"layers.1.ring": ring}
        self.left_to_the_tier("an indexer", *tables, **given)
        del given["like"]
        self.left_to_the_tier("a CircularBufferSpec", tables[2], **given)
        self.left_to_the_tier("a SlidingWindowMLASpec", *tables[1:2], **given)
        self.left_to_the_tier("a MLAAttentionSpec", latents, **given)
