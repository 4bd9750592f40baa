"""Every face of VUA on a bucket: what one process stored in it another one loads from there."""

from __future__ import annotations

import unittest

import pytest
import torch

from buckets import seaweedfs, speaking_to
from helpers import DirectoryTest
from llama import BYTES_FROM, WHERE, completed, has_llama_cpp, load_gguf, make_gguf
from small_models import make_model
from vua.errors import StorageError
from vua.storage.bucket import Bucket

pytestmark = pytest.mark.thorough
pytest.importorskip("obstore")

CHUNK = 16


class FacesTest(DirectoryTest):
    """A real server; the engines' own models."""

    def setUp(self) -> None:
        """Begin with an empty place in its bucket."""
        super().setUp()
        self.enterContext(speaking_to(seaweedfs().endpoint))
        self.url = seaweedfs().place()

    def stored(self, url: str) -> int:
        return sum(one.key.endswith(".safetensors") for one in Bucket.at(url).walk())

    def test_transformers(self) -> None:
        """The same tokens with the prefix that another cache object stored, alone and in tiers."""
        from transformers import AutoModelForCausalLM

        from vua.transformers import PrefixCache

        make_model(self.root / "model")
        model = AutoModelForCausalLM.from_pretrained(
            self.root / "model", attn_implementation="eager"
        )
        ids = torch.randint(4, 512, (1, 150), generator=torch.Generator().manual_seed(1))
        places = [self.url, [str(self.root / "near"), self.url], self.url]
        lengths, outputs = [], []
        for place in places:
            with PrefixCache(model, place, chunk_tokens=CHUNK, load_policy="always") as prefixes:
                prefixes.ready()
                prefix = prefixes.load(ids)
                lengths.append(prefix.num_tokens)
                output = model.generate(
                    *(ids,),
                    past_key_values=prefix.cache,
                    max_new_tokens=8,
                    min_new_tokens=8,
                    do_sample=False,
                )
                prefixes.save(ids, prefix.cache)
                outputs.append(output.tolist())
        self.assertEqual([0, 144, 144], lengths)
        self.assertEqual([outputs[0]] * 3, outputs)
        self.assertEqual(10, self.stored(self.url))  # 9 chunks, and the probe of the model

    @unittest.skipUnless(has_llama_cpp(), WHERE)
    def test_llama_cpp(self) -> None:
        """A new engine takes the prefix of a prompt from the bucket."""
        from vua.llama_cpp import VUALlamaCache

        path = make_gguf(self.root / "model.gguf")
        prompt = [1, *(BYTES_FROM + byte for byte in range(40, 140))]
        tokens = []
        for _ in range(2):
            llm = load_gguf(path)
            cache = VUALlamaCache(llm, self.url, chunk_tokens=CHUNK)
            self.assertTrue(cache.ready())
            llm.set_cache(cache)
            if tokens:
                self.assertEqual(96, cache[prompt].n_tokens)
            tokens.append(completed(llm, prompt))
            with self.assertRaisesRegex(StorageError, "vua du"):
                _ = cache.cache_size
            cache.close()
            llm.close()
        self.assertEqual(tokens[0], tokens[1])
        self.assertGreaterEqual(self.stored(self.url), 6)
