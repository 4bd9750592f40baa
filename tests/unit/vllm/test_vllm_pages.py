"""Any combination of caches in one model is stored: what is known in its form, else as pages.

A generated model has cache groups as vLLM describes them, over memory full of noise. A prompt is
stored by one worker and loaded by another one into other blocks. Compared is what vLLM's own rules
need of each cache; those are written here anew.
"""

from __future__ import annotations

import gc
import os
import random
import sys
import unittest
from collections import Counter
from importlib.util import find_spec
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch

from e2e.engine import ENVIRONMENT
from e2e.harness import llama
from helpers import DirectoryTest, noise, save_step
from vua.connector.config import ConnectorConfig
from vua.format.keys import KeyChain, token_ids

pytestmark = pytest.mark.vllm

FIRST_SEED = int(os.environ.get("VUA_TEST_SEED", "0"))
MODELS = 24
BLOCKS = 40
ORDERS = ((0, 1, 2, 3), (0, 2, 1, 3), (1, 0, 2, 3))
"""Of blocks, heads and slots in memory."""


def with_platform(*, gpu: bool) -> Any:
    """What vLLM says of its device."""
    platform = SimpleNamespace(
        is_cpu=lambda: not gpu,
        is_cuda=lambda: gpu,
        is_rocm=lambda: False,
        device_type="cuda" if gpu else "cpu",
        get_device_name=lambda: "simulated",
    )
    return mock.patch("vllm.platforms.current_platform", platform)


def engine_config(**more: Any) -> Any:
    """Return vLLM's configuration of an engine."""
    from vllm.engine.arg_utils import EngineArgs

    given = {"dtype": "bfloat16", "max_model_len": 2048, "skip_tokenizer_init": True} | more
    return EngineArgs(model=str(llama()), **given).create_engine_config()


def spec_of(kind: str, block: int, chance: random.Random) -> Any:
    """One of vLLM's descriptions of a cache, with sizes that are drawn."""
    from vllm.v1 import kv_cache_interface as found
    from vllm.v1.attention.backends.registry import MambaAttentionBackendEnum

    heads, size = chance.choice(((2, 32), (2, 32), (1, 64), (4, 16)))
    dtype = chance.choice((torch.bfloat16, torch.bfloat16, torch.uint8, torch.float32))
    same: dict[str, Any] = {"block_size": block, "num_kv_heads": heads, "head_size": size}
    same["dtype"] = dtype
    packed = {"state_content_bytes": chance.choice((33, 132, 584))}
    known = set(found.AttentionSpec.__dataclass_fields__)
    if kind == "full":
        return found.FullAttentionSpec(**same | chance.choice(({}, {}, packed)))
    if kind == "window":
        return found.SlidingWindowSpec(sliding_window=chance.choice((20, 48, 100)), **same)
    if kind == "state":
        shapes = ((chance.choice((3, 6)), 16), (chance.choice((2, 5)), 8))
        return found.MambaSpec(
            block_size=block,
            shapes=shapes,
            dtypes=(torch.float16, torch.float32),
            mamba_type=MambaAttentionBackendEnum.GDN_ATTN,
            mamba_cache_mode=chance.choice(("align", "all")),
        )
    same |= {"num_kv_heads": 1}
    if kind == "latent":
        return found.MLAAttentionSpec(**same)
    more: dict[str, Any] = dict(packed)
    if "tokens_per_state" in known:
        more["tokens_per_state"] = chance.choice((1, 4, block))
    if kind == "compressed window":
        return found.SlidingWindowMLASpec(sliding_window=chance.choice((24, 64)), **same, **packed)
    return found.MLAAttentionSpec(**same, **more)  # of an indexer, or compressed


class Cell:
    """One cache: its description, its name, and its memory."""

    def __init__(self, name: str, spec: Any, order: tuple[int, ...], chance: random.Random) -> None:
        """Lay it out in this order, like all caches of the engine."""
        self.name, self.spec, self.order = name, spec, order
        self.nbytes = int(spec.real_page_size_bytes)
        self.pieces = chance.choice((1, 2))
        self.seed = chance.randrange(1 << 20)

    def memory(self, seed: int, *, plain: bool) -> torch.Tensor:
        """The tensor that vLLM registers, full of noise."""
        spec = self.spec
        if type(spec).__name__ == "MambaSpec":
            padded = noise(BLOCKS, self.nbytes + 40, dtype=torch.uint8, seed=seed)
            return padded.view(torch.int8)[:, None, None]
        heads, states = spec.num_heads, int(getattr(spec, "num_states", spec.block_size))
        sizes = [BLOCKS, heads, states, self.nbytes // heads // states]
        if plain:
            return noise(*sizes[:-1], sizes[-1] // spec.dtype.itemsize, dtype=spec.dtype, seed=seed)
        if self.pieces == 2 and states % 2 == 0 and self.order == ORDERS[0]:
            sizes = [2 * BLOCKS, heads, states // 2, sizes[-1]]
        order = self.order
        raw = noise(*(sizes[axis] for axis in order), dtype=torch.uint8, seed=seed)
        return raw.permute(*(order.index(axis) for axis in range(4)))

    def page(self, memory: torch.Tensor, block: int) -> bytes:
        """The bytes of a page that count, in one order for all that are laid out alike."""
        if type(self.spec).__name__ == "MambaSpec":
            return memory[block].flatten().view(torch.uint8)[: self.nbytes].numpy().tobytes()
        step = len(memory) // BLOCKS
        part = memory[block * step : (block + 1) * step].contiguous().view(torch.uint8)
        return part.numpy().tobytes()


@unittest.skipUnless(find_spec("vllm"), "vLLM is not installed")
class GeneratedModelsTest(DirectoryTest):
    """Models of random groups, stored, restarted, loaded and compared; none is refused."""

    def setUp(self) -> None:
        """Let vLLM read no environment but ours."""
        super().setUp()
        self.enterContext(mock.patch.dict(os.environ, ENVIRONMENT))

    def draw(self, chance: random.Random, *, single: bool) -> tuple[list[Any], list[Cell]]:
        """Draw the cache groups of a model."""
        block, order = chance.choice((16, 32, 48)), chance.choice(ORDERS)
        kinds = ["full", "window", "latent", "indexer", "compressed window", "state"]
        first = chance.choice(("full", "latent", "indexer"))
        chosen = [first] if single else [first, *chance.choices(kinds, k=chance.randrange(1, 4))]
        tables, cells, layer = [], [], 0
        for kind in chosen:
            spec = spec_of(kind, block * chance.choice((1, 1, 2)), chance)
            names = []
            for _ in range(chance.randrange(1, 4)):
                name = f"model.layers.{layer}.attn_{len(cells)}"
                layer += chance.choice((0, 1, 1)) if kind == "indexer" else 1
                cells.append(Cell(name, spec, order, chance))
                names.append(name)
            tables.append(SimpleNamespace(layer_names=names, kv_cache_spec=spec))
        return tables, cells

    def worker(
        self, model: Any, config: Any, memories: dict[str, torch.Tensor], tables: Any
    ) -> Any:
        """A worker over this memory."""
        from vua.connector.group_transfer import Rank
        from vua.connector.worker import WorkerSide
        from vua.vllm import page_layout
        from vua.vllm.cache_spec import layer_number

        side = WorkerSide(model, config, Rank(0, 0))
        number = {name: at for at, one in enumerate(tables) for name in one.layer_names}
        layer_of = {name: layer_number(name) for name in memories}
        side.register(memories, layer_of, number, page_layout)
        return side

    def play(self, seed: int) -> str:
        """Store and load one model's prompt; return its groups' names."""
        from vua.connector.opening import Opening
        from vua.connector.prefix_match import find
        from vua.vllm.cache_spec import describe

        chance = random.Random(f"pages {seed}")
        single = not windows_are_cached() or chance.random() < 0.2
        tables, cells = self.draw(chance, single=single)
        config = ConnectorConfig(shared_storage_path=str(self.root / f"{seed}"), chunk_tokens=16)
        caches = SimpleNamespace(kv_cache_groups=tables, num_blocks=BLOCKS)
        model = describe(self.config(), caches, config).with_weights("0" * 64)
        of = {name: group for group in model.groups for name in group.names}
        self.assertEqual({one.name for one in cells}, {*of})
        known = {
            name for name, one in of.items() if not (one.page_nbytes or one.layout.keeps_state)
        }
        tokens = max(3 * model.chunk_tokens, 2 * model.align) + 5
        keys = KeyChain(token_ids(list(range(7, 7 + tokens))), model.chunk_tokens)
        ours, theirs = (
            {one.name: one.memory(seed + one.seed, plain=one.name in known) for one in cells}
            for seed in (1, 2)
        )
        ids = [
            [random.Random(n).sample(range(1, BLOCKS), BLOCKS - 1) for _ in tables] for n in (3, 4)
        ]
        self.save(model, config, ours, tables, ids[0], keys)
        opened: Any = Opening(model, config).take()
        stores = opened.namespace.stores
        found = find(model, stores, keys, tokens, window_every_tokens=None)
        end = len(keys) * model.chunk_tokens // model.align * model.align
        self.assertEqual([end, True], [found.tokens, end > 0])
        before = {name: memory.clone() for name, memory in theirs.items()}
        self.load(model, config, theirs, tables, ids[1], found)
        for number, table in enumerate(tables):
            for one in cells:
                if one.name in table.layer_names:
                    memories = [each[one.name] for each in (ours, theirs, before)]
                    self.compare(one, table, memories, [each[number] for each in ids], end)
        return " ".join(group.layout.group or "-" for group in model.groups)

    def save(self, model: Any, config: Any, memory: Any, tables: Any, ids: Any, keys: Any) -> None:
        """Store every chunk, of states those behind which a prefix may end."""
        from vua.connector.metadata import ConnectorMetadata, SaveOrder

        parts: list[tuple[int, Any]] = []
        for number, group in enumerate(model.groups):
            size = model.chunk_tokens
            ends = [at for at in range(len(keys)) if (at + 1) * size % model.align == 0]
            held = ends if group.layout.keeps_state else range(len(keys))
            parts.append((number, [keys[at] for at in held]))
        side = self.worker(model, config, memory, tables)
        orders = ConnectorMetadata(identity=model.identity, saves=[SaveOrder(ids, parts)])
        save_step(side, orders)
        side.shutdown()

    def load(self, model: Any, config: Any, memory: Any, tables: Any, ids: Any, found: Any) -> None:
        """Load what was found, by another worker into other blocks."""
        from vua.connector.metadata import ConnectorMetadata, LoadOrder
        from vua.connector.save_scheduler import to_load

        side = self.worker(model, config, memory, tables)
        parts = [to_load(model, at, found, 0, found.tokens) for at in range(len(model.groups))]
        orders = ConnectorMetadata(identity=model.identity, loads=[LoadOrder("r", ids, parts)])
        side.start_loads(orders)
        side.shutdown()
        ended = side.take_received(idle=False), side.take_failed(), side.take_failed_blocks()
        self.assertEqual(({"r"}, set(), set()), ended)

    def compare(self, one: Cell, table: Any, memories: Any, ids: Any, end: int) -> None:
        """What a hit of so many tokens needs is there; blocks behind it are as before."""
        from vua.vllm.cache_spec import rule_of

        (ours, theirs, before), (out_ids, in_ids) = memories, ids
        rule, block = rule_of(table.kv_cache_spec, table) or "", table.kv_cache_spec.block_size
        last = end // block
        start = {"": 0, "s": last - 1}.get(rule)
        if start is None:
            start = max(0, end - int(rule[1:]) + 1) // block
        for column in range(start, last):
            came = one.page(theirs, in_ids[column])
            self.assertEqual(one.page(ours, out_ids[column]), came, (one.name, rule, column))
            self.assertNotEqual(one.page(before, in_ids[column]), came)
        for block_id in in_ids[-(-end // block) :]:
            self.assertEqual(one.page(before, block_id), one.page(theirs, block_id))

    def config(self) -> Any:
        """The engine's configuration, made once."""
        cls = type(self)
        if cls.made is None:
            cls.made = engine_config()
        return cls.made

    made: Any = None

    @pytest.mark.thorough
    def test_host(self) -> None:
        """Pages, windows, states and known forms are all among them."""
        seen = []
        for seed in range(FIRST_SEED, FIRST_SEED + MODELS):
            with self.subTest(seed=seed):
                seen.append(self.play(seed))
            if seed % 4 == 0:
                gc.collect()  # some 150 MB of buffers and caches per model refer to each other
        kinds = Counter(name[0] for names in seen for name in names.split())
        said = f"{len(seen)} models, {kinds.total()} groups: {dict(kinds)}\n"
        sys.stdout.write(said)  # shown by `pytest -rP`
        self.assertEqual(MODELS, len(seen))
        self.assertEqual({*("-pws" if windows_are_cached() else "-p")}, {*kinds})


@unittest.skipUnless(find_spec("vllm"), "vLLM is not installed")
class ClassesTest(unittest.TestCase):
    """Classes that people serve on GPUs: the connector leaves them to the tier, and says so.

    Each with its own class of configuration, as vLLM resolves it, and with caches of small sizes.
    """

    def setUp(self) -> None:
        """Let vLLM read no environment but ours; models with several groups need vLLM 0.30."""
        super().setUp()
        self.enterContext(mock.patch.dict(os.environ, ENVIRONMENT))
        if not windows_are_cached():
            self.skipTest("models with several groups are cached with vLLM 0.30 and newer")

    def groups(
        self, *tables: dict[str, Any], gpu: bool = True, like: str = "llama", **config: Any
    ) -> list[str]:
        """The groups' names of a model of the type ``like``, with such caches."""
        from transformers import CONFIG_MAPPING

        from vua.vllm.cache_spec import describe
        from vua.vllm.setup import setup_of

        made = engine_config(**config)
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
        caches = SimpleNamespace(kv_cache_groups=named, num_blocks=BLOCKS)
        settings = ConnectorConfig(shared_storage_path="/kv", chunk_tokens=256)
        with with_platform(gpu=gpu):
            self.model = describe(made, caches, settings)
        return [group.layout.group for group in self.model.groups]

    def left_to_the_tier(self, what: str, *tables: dict[str, Any], **given: Any) -> None:
        """On a GPU this is refused, with what to do."""
        from vua.connector.cache_spec import UncachedError

        words = f"does not serve {what}: set VUA_DOOR=tier, which needs vLLM 0.32 or newer"
        with self.assertRaisesRegex(UncachedError, words):
            self.groups(*tables, **given)

    def test_indexers(self) -> None:
        """DeepSeek V3.2 and GLM-5; latents alone are the connector's."""
        from vllm.v1.kv_cache_interface import MLAAttentionSpec

        latent = {"block_size": 64, "num_kv_heads": 1, "head_size": 576, "dtype": torch.bfloat16}
        keys = latent | {"head_size": 132, "dtype": torch.uint8}
        latents = {f"model.layers.{n}.attn": MLAAttentionSpec(**latent) for n in range(3)}
        indexers = {f"model.layers.{n}.indexer": MLAAttentionSpec(**keys) for n in range(3)}
        for like in ("deepseek_v32", "glm_moe_dsa"):
            self.left_to_the_tier("an indexer", latents | indexers, like=like)
        self.left_to_the_tier("such a MLAAttentionSpec", latents | indexers)
        self.assertEqual([""], self.groups(latents))

    def test_hybrids(self) -> None:
        """Qwen3-Next, Qwen 3.5 and Nemotron-H, also where the configuration does not tell."""
        from vllm.v1.kv_cache_interface import FullAttentionSpec, MambaSpec

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
        from vllm.v1.kv_cache_interface import FullAttentionSpec

        same = {"block_size": 16, "num_kv_heads": 2, "head_size": 32, "dtype": torch.uint8}
        for more in ({"state_content_bytes": 72}, {"num_head_slots": 1, "state_content_bytes": 52}):
            specs = {f"layers.{n}.attn": FullAttentionSpec(**same, **more) for n in range(2)}
            self.left_to_the_tier("such a FullAttentionSpec", specs, kv_cache_dtype="fp8")
        plain = {"layers.0.attn": FullAttentionSpec(**same)}
        self.assertEqual([""], self.groups(plain, kv_cache_dtype="fp8"))
        self.assertEqual("F8_E4M3", self.model.identity.kv_dtype)

    def test_heads_that_differ(self) -> None:
        """Gemma 4: on a CPU such layers are pages beside the others."""
        from vllm.v1.kv_cache_interface import FullAttentionSpec, SlidingWindowSpec

        same = {"block_size": 16, "num_kv_heads": 2, "head_size": 32, "dtype": torch.bfloat16}
        window = SlidingWindowSpec(sliding_window=128, **same)
        full = FullAttentionSpec(**same | {"num_kv_heads": 1, "head_size": 64})
        windows = {f"layers.{n}.attn": window for n in range(2)}
        for like in ("gemma4", "gemma4_text"):
            tables = windows, {"layers.2.attn": full}
            self.assertEqual(["p256", "w128"], self.groups(*tables, like=like, gpu=False))
            self.assertEqual("BF16", self.model.identity.kv_dtype)
            self.left_to_the_tier("such a FullAttentionSpec", *tables, like=like)
        self.assertEqual(["w128"], self.groups(windows))

    def test_compressed(self) -> None:
        """DeepSeek V4: latents of 4 and of 128 tokens each, windows, a ring that no hit needs."""
        from vllm.v1 import kv_cache_interface as found

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
        self.left_to_the_tier("a CircularBufferSpec", *tables, **given)
        self.left_to_the_tier("such a SlidingWindowMLASpec", *tables[1:2], **given)
        self.left_to_the_tier("such a MLAAttentionSpec", latents, **given)


def windows_are_cached() -> bool:
    """Whether this vLLM has what several groups need."""
    from vua.vllm.support import has_load_interface

    return has_load_interface()


if __name__ == "__main__":
    unittest.main()
