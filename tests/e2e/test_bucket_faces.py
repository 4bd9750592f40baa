"""Every face of VUA on a bucket: what one process stored in it another one loads from there."""

from __future__ import annotations

import unittest

import pytest
import torch

from buckets import seaweedfs, speaking_to
from helpers import DirectoryTest, caches_of
from llama import BYTES_FROM, WHERE, completed, has_llama_cpp, load_gguf, make_gguf
from small_models import make_model
from vua.core import VUA, VUAConfig
from vua.errors import ConfigError, StorageError
from vua.security.keyring import write_key
from vua.security.settings import Security
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

    def test_keys_of_the_library(self) -> None:
        """Names are secret, no byte of K and V leaves in clear, and a deleted key is a miss."""
        tokens, kv = torch.arange(64), caches_of(layers=2, heads=2, tokens=64, dim=64, seed=1)
        plain, names = VUAConfig(split_factor=CHUNK, model="tiny"), []
        sealed = {}
        for who in ("alice", "bob"):
            key = self.root / f"{who}.key"
            write_key(key)
            security = Security(key_file=str(key), encrypt=True)
            sealed[who] = VUAConfig(split_factor=CHUNK, model="tiny", security=security)
        elsewhere = seaweedfs().place()
        for config, url in ((plain, elsewhere), *((one, self.url) for one in sealed.values())):
            with VUA(config, url) as vua:
                self.assertEqual(4, vua.put(tokens, kv))
            found = [one for one in Bucket.at(url).walk() if one.key.endswith(".safetensors")]
            names.append({one.key.split("/")[2] for one in found})
        self.assertEqual([4, 4, 8], [len(one) for one in names])
        self.assertTrue(names[0].isdisjoint(names[2]))
        clear = kv[0][0][0, 0, :CHUNK].contiguous().view(torch.uint8).numpy().tobytes()[:64]
        for url, there in ((elsewhere, True), (self.url, False)):
            bucket = Bucket.at(url)
            whole = b"".join(bytes(bucket.get(one.key)[1]) for one in bucket.walk())
            self.assertEqual(there, clear in whole)
        (self.root / "alice.key").unlink()
        write_key(self.root / "alice.key")  # the old one is gone for good
        for config, tokens_found in ((sealed["alice"], 0), (sealed["bob"], 64), (plain, 0)):
            with VUA(config, self.url) as vua:
                self.assertEqual(tokens_found, vua.get_closest(tokens).num_tokens)

    def test_http_has_to_be_allowed(self) -> None:
        """Without the switch nothing is sent in clear; the error names the place alone."""
        self.enterContext(speaking_to(seaweedfs().endpoint, AWS_ALLOW_HTTP="false"))
        with self.assertRaises((ConfigError, StorageError)) as refused:
            VUA(VUAConfig(), seaweedfs().place())
        self.assertNotIn("vuatestsecret", str(refused.exception))
