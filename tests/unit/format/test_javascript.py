"""The implementation in JavaScript, written from docs/format.md alone, agrees with VUA."""

from __future__ import annotations

import contextlib
import io
import json
import random
import shutil
import unittest
from collections.abc import Sequence
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

import conformity
import make_golden
from conformity import (
    Entry,
    Judge,
    description_kind,
    digest,
    golden_entries,
    kind_of,
    mutated,
    needs_node,
    node,
    random_entry,
    run_command,
)
from helpers import SOON_S, DirectoryTest
from vua import cli
from vua.core import VUA, VUAConfig
from vua.format.identity import config_digest
from vua.format.parse import parse_entry
from vua.security.settings import Security

SEED = 43
TOKENS = [3, 1, 4, 1, 5, 9, 2, 6]
LAYOUT = {"layers": 3, "kv_heads": 2, "k_dim": 8, "v_dim": 8, "dtype": "F32", "chunk_tokens": 4}
PROMPT = {"layout": LAYOUT, "tokens": TOKENS, "model": "mine"}


def differing(names: Sequence[str], ours: Sequence[str], theirs: Sequence[str]) -> list[str]:
    """The first cases of which both implementations say something else."""
    rows = zip(names, ours, theirs, strict=True)
    return [f"{name}: VUA {one}, JavaScript {other}" for name, one, other in rows if one != other][
        :5
    ]


@needs_node
class JavaScriptTest(DirectoryTest):
    """Both are asked about the same bytes."""

    def ask(
        self, entries: Sequence[Entry], cases: Sequence[tuple[int, bytes]], **more: Any
    ) -> list[str]:
        """Let `judge.js` answer about bytes, each under the name of an entry."""
        described = [entry.described() for entry in entries]
        return run_command("judge", entries=described, **self.blob(cases), **more)

    def blob(self, cases: Sequence[tuple[int, bytes]]) -> dict[str, Any]:
        """Write bytes one after the other to a file; return how `judge.js` finds them."""
        places, at = [], 0
        with (self.root / "blob").open("wb") as blob:
            for which, data in cases:
                places.append([which, at, len(data)])
                at += blob.write(data)
        return {"blob": str(self.root / "blob"), "cases": places}

    def compare(self, entries: Sequence[Entry], cases: Sequence[tuple[int, bytes]]) -> list[str]:
        """See that both say the same of every case; return what VUA says."""
        judge, expected = Judge(self.root), []
        for which, data in cases:
            said = digest(judge.loaded(entries[which], data))
            expected.append(f"{said} {kind_of(data)}")
        found = self.ask(entries, cases)
        names = [f"{at}: {entries[which].name}" for at, (which, _) in enumerate(cases)]
        self.assertEqual([], differing(names, expected, found))
        return expected

    def test_own_tests(self) -> None:
        """Its own tests pass: golden files, the page's examples, the conformance table."""
        self.assertIn("# fail 0", node("--test"))

    def test_sound(self) -> None:
        """It reads golden files and what VUA writes of random shapes."""
        rng = random.Random(SEED)
        entries = [*golden_entries(), *(random_entry(rng, number) for number in range(60))]
        said = self.compare(entries, list(enumerate(entry.data for entry in entries)))
        self.assertEqual([], [one for one in said if "miss" in one or "damaged" in one])

    def test_same_bytes(self) -> None:
        """It writes the bytes that VUA writes, plain and sealed."""
        rng, entries, cases, writes = random.Random(SEED + 1), [], [], []
        while len(entries) < 60:
            entry = random_entry(rng, len(entries))
            payload = rng.randbytes(entry.shard.payload_nbytes(entry.layout))
            created, nonce = rng.randrange(10**10), rng.randrange(1 << 128)
            data = conformity.encoded(entry, payload, created=created, nonce=nonce)
            entries.append(replace(entry, data=data))
            cases.append((len(cases), payload))
            writes.append(
                {"created": created, "writer": conformity.WRITER, "nonce": f"{nonce:032x}"}
            )
        out = self.root / "out"
        self.ask(entries, cases, writes=writes, out=str(out))
        expected = b"".join(entry.data for entry in entries)
        self.assertEqual(expected, out.read_bytes())

    def test_config_digests(self) -> None:
        """It digests a config as VUA does, also where the longest prompt does not count."""
        plain = {"rope_type": "default", "rope_theta": 1e6}
        own = {**plain, "factor": 8.0, "original_max_position_embeddings": 64}
        configs = [
            {"model_type": kind, "max_position_embeddings": 4096, "rope_parameters": rope, **more}
            for kind in ("llama", "cohere", "opt", "bloom")
            for more in ({}, {"vua.code": ["x"]}, {"attention_dropout": 0.5, "x": [1e-5, None]})
            for rope in (
                *(None, plain, own, {**own, "rope_type": "yarn"}, {"a": plain, "b": own}),
                *({**plain, "rope_type": one} for one in ("linear", "llama3", "dynamic")),
                *({"a": plain, "rope_type": "x"}, {**plain, "odd": 1}),
            )
        ]
        code = (
            "import { configDigest } from './keys.js';"
            f"for (const config of {json.dumps(configs)}) console.log(configDigest(config))"
        )
        found = node("--input-type=module", "-e", code).split()
        self.assertEqual([config_digest(config) for config in configs], found)

    @pytest.mark.thorough
    def test_writes(self) -> None:
        """`vua verify` takes what it writes for sound, and VUA loads it; plain and sealed."""
        for name, security in self.securities().items():
            with self.subTest(name):
                root, payload = self.root / name, random.Random(name).randbytes(2 * 2 * 3 * 2 * 128)
                (self.root / "payload").write_bytes(payload)
                options = {}
                if security.key_file:
                    kind = "aes-256-gcm" if security.encrypt else "gmac"
                    options = {"key": conformity.KEY.hex(), "kind": kind}
                said = run_command(
                    "put", root=str(root), payload=str(self.root / "payload"), **options, **PROMPT
                )
                self.assertEqual(["2"], said)
                keys = ["--key-file", security.key_file] if security.key_file else []
                keys += ["--encrypt"] if security.encrypt else []
                self.assertEqual(0, self.quietly("verify", str(root), *keys))
                config = VUAConfig(split_factor=4, model="mine", security=security)
                with VUA(config, root) as vua:
                    found = vua.get_closest(torch.tensor(TOKENS))
                self.assertEqual(8, found.num_tokens)
                self.assertEqual(payload, self.payload_of(found.data))
                mtimes = [path.stat().st_mtime_ns for path in self.chunks(root)]
                self.assertEqual(mtimes, sorted(mtimes, reverse=True))
                file = next(self.chunks(root)[1].iterdir())
                data = bytearray(file.read_bytes())
                data[-1] ^= 1
                file.write_bytes(data)
                self.assertEqual(1, self.quietly("verify", str(root), *keys))

    def test_reads(self) -> None:
        """It loads what the library has put."""
        rng = torch.Generator().manual_seed(SEED)
        kv = [[torch.randn(1, 2, 8, 8, generator=rng) for _ in "kv"] for _ in range(3)]
        with VUA(VUAConfig(split_factor=4, model="mine"), self.root / "kv") as vua:
            self.assertEqual(2, vua.put(torch.tensor(TOKENS), kv))
        said = run_command("get", root=str(self.root / "kv"), **PROMPT)
        self.assertEqual(self.payload_of(kv).hex(), "".join(said))

    def securities(self) -> dict[str, Security]:
        file = self.root / "key"
        file.write_text(conformity.KEY.hex())
        file.chmod(0o600)
        signed = Security(key_file=str(file))
        return {"plain": Security(), "signed": signed, "encrypted": replace(signed, encrypt=True)}

    def chunks(self, root: Path) -> list[Path]:
        """The directories of the prompt's chunks, in order."""
        (found,) = (one for one in root.iterdir() if one.is_dir() and len(one.name) == 64)
        entries = found.glob("*/*/*.safetensors")
        return [
            path.parent
            for path in sorted(entries, key=lambda one: parse_entry(one.read_bytes()).start)
        ]

    def quietly(self, *words: str) -> int:
        """Run a command of `vua` and drop what it prints; return its exit status."""
        with contextlib.redirect_stdout(io.StringIO()):
            return cli.main(list(words))

    def payload_of(self, kv: Any) -> bytes:
        """K and V as they lie in files, chunk by chunk, each [heads, layers, tokens, dim]."""
        arrays = [torch.stack([layer[at][0] for layer in kv], dim=1).numpy() for at in (0, 1)]
        chunks = [array[:, :, first : first + 4] for first in (0, 4) for array in arrays]
        return b"".join(chunk.tobytes() for chunk in chunks)

    @pytest.mark.thorough
    @unittest.skipUnless(find_spec("transformers"), "transformers is not installed")
    def test_joins(self) -> None:
        """It finds and fills an engine's namespace, from the page's recipes and rules.

        transformers stores a prompt. JavaScript copies the chunks that the page says are needed to
        another directory, and transformers loads the prompt from there. Without one of them it
        does not.
        """
        import transformers

        from vua.transformers import PrefixCache, identity_of

        sizes = {
            "hidden_size": 64,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "intermediate_size": 128,
            "num_hidden_layers": 3,
            "vocab_size": 64,
        }
        kinds = ["sliding_attention", "full_attention", "sliding_attention"]
        gemma = {"head_dim": 16, "sliding_window": 40, "layer_types": kinds}
        every, ids = [f"{n} " for n in range(6)], 3 + torch.arange(97)[None] % 61
        for made, config, needed in (
            (transformers.LlamaForCausalLM, transformers.LlamaConfig(**sizes), every),
            (transformers.Qwen3ForCausalLM, transformers.Qwen3Config(**sizes, head_dim=16), every),
            (
                transformers.Gemma3ForCausalLM,
                transformers.Gemma3TextConfig(**sizes, **gemma),
                sorted([*every, "3 w40", "4 w40", "5 w40"]),
            ),
        ):
            with self.subTest(made.__name__):
                folder = self.root / made.__name__
                made(config).save_pretrained(folder / "model", max_shard_size="100KB")
                model = made.from_pretrained(folder / "model", dtype=torch.float32).eval()
                weights = [str(one) for one in sorted((folder / "model").glob("*.safetensors"))]
                self.assertLess(1, len(weights))
                with PrefixCache(model, folder / "theirs", chunk_tokens=16, share=True) as prefixes:
                    self.assertTrue(prefixes.ready(SOON_S))
                    cache = prefixes.load([0]).cache
                    with torch.no_grad():
                        model(ids, past_key_values=cache)
                    self.assertEqual(6, prefixes.save(ids, cache))
                for without, tokens in ((False, 96), (True, 0)):
                    said = run_command(
                        "copy",
                        root=str(folder / "theirs"),
                        to=str(folder / f"ours {without}"),
                        tokens=ids[0, :96].tolist(),
                        config=model.config.get_text_config().to_dict(),
                        weights=weights,
                        identity={"kv_dtype": "F32", "rope": "neox", "chunk_tokens": 16},
                        without=without,
                    )
                    self.assertEqual(identity_of(model, chunk_tokens=16).namespace, said[0])
                    if not without:
                        self.assertEqual(needed, sorted(said[1:]))
                        # transformers computes the last chunk to compare it: from further windows
                        self.copy_beside(folder / "theirs", folder / f"ours {without}")
                    with PrefixCache(
                        model, folder / f"ours {without}", chunk_tokens=16, share=True
                    ) as ours:
                        self.assertTrue(ours.ready(SOON_S))
                        found = ours.load(ids)
                    self.assertEqual(tokens, found.num_tokens)
                    pairs = zip(found.cache.layers, cache.layers, strict=not without)
                    for mine, layer in pairs:
                        for kv in ("keys", "values"):
                            one, other = (getattr(each, kv)[:, :, 57:96] for each in (mine, layer))
                            self.assertTrue(torch.equal(one, other))

    def copy_beside(self, place: Path, to: Path) -> None:
        """Copy a cache's other files of the chunks that are there."""
        for path in place.rglob("*.safetensors"):
            there = to / path.relative_to(place)
            if there.parent.is_dir() and not there.exists():
                shutil.copy2(path, there)

    @pytest.mark.thorough
    def test_mutated(self) -> None:
        """Right or a miss: both say the same of 1,300 files that were changed at random."""
        rng, count = random.Random(SEED), 1300
        entries = [*golden_entries(), *(random_entry(rng, number) for number in range(24))]
        cases = []
        for number in range(count):
            which = number % len(entries)
            cases.append((which, mutated(rng, entries[which], entries)))
        said = self.compare(entries, cases)
        for text, least in (("miss", 0.5), ("sound", 0.02)):
            share = sum(text in one for one in said) / count
            self.assertGreaterEqual(share, least, text)
            self.assertLess(share, 1.0, text)

    @pytest.mark.thorough
    def test_mutated_descriptions(self) -> None:
        """Both say the same of 1,000 changed namespace.json: right, foreign or damaged."""
        golden = sorted(make_golden.GOLDEN.glob("*/namespace.json"))
        texts = [path.read_bytes() for path in golden]
        layout = b'\n  "group": "w8",\n  "layers"'
        texts.append(
            texts[0].rstrip(b"}\n")
            + b'\n },\n "further_groups": [\n  {'
            + texts[0].partition(b'"layout": {')[2].rstrip(b"}\n").replace(b'\n  "layers"', layout)
            + b"\n  }\n ]\n}\n"
        )
        rng, name = random.Random(SEED), golden[0].parent.name
        cases = [conformity.text_mutated(rng, rng.choice(texts), texts) for _ in range(1000)]
        said = run_command("describe", directory=name, **self.blob([(0, one) for one in cases]))
        expected = [description_kind(one, name) for one in cases]
        names = [repr(one) for one in cases]
        self.assertEqual([], differing(names, expected, said))
        self.assertEqual({"right", "foreign", "damaged"}, set(expected))
