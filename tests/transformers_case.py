"""What tests of the transformers face share: small models, and a store for each test."""

from __future__ import annotations

import logging
import tempfile
import unittest
import warnings
from importlib import util
from pathlib import Path
from typing import Any, ClassVar
from unittest import mock

import torch

from e2e.checkpoints import edit
from helpers import SOON_S, DirectoryTest
from small_models import make_model

CHUNK = 16
WINDOW = 40
"""Tokens of the sliding window of the family "mistral"."""
GREEDY: dict[str, Any] = {"max_new_tokens": 6, "min_new_tokens": 6, "do_sample": False}


def prompt_of(tokens: int, most: int = 512) -> torch.Tensor:
    """Random ids below ``most``, (1, T), the same each time."""
    return torch.randint(4, most, (1, tokens), generator=torch.Generator().manual_seed(1))


def computed(model: Any, ids: torch.Tensor, cache: Any) -> Any:
    """A cache after a model has computed ids, (B, T)."""
    with torch.no_grad():
        model(ids, past_key_values=cache)
    return cache


def empty(prefixes: Any) -> Any:
    """A cache of a `PrefixCache` in which nothing is."""
    return prefixes.load([0]).cache


@unittest.skipUnless(util.find_spec("transformers"), "transformers is not installed")
class TransformersTest(DirectoryTest):
    """Has a store of its own for each test, and models that the class made once."""

    models: ClassVar[Path]
    attention: ClassVar[str | None] = "eager"
    """None: transformers' choice."""

    @classmethod
    def setUpClass(cls) -> None:
        folder = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
        cls.addClassCleanup(folder.cleanup)
        cls.models = Path(folder.name)

    def setUp(self) -> None:
        super().setUp()
        self.store = self.root / "kv"
        self.enterContext(mock.patch("vua.transformers.cache._START_WAIT_S", SOON_S))
        self.enterContext(warnings.catch_warnings())
        warnings.simplefilter("ignore")  # transformers', torch's and PEFT's own

    @classmethod
    def path(cls, family: str = "llama", **sizes: Any) -> Path:
        path = cls.models / "-".join([family, *(f"{key}{value}" for key, value in sizes.items())])
        if not path.exists():
            make_model(path, family=family, **sizes)
            if family == "mistral":
                edit(path / "config.json", sliding_window=WINDOW)
        return path

    @classmethod
    def load(cls, path: Path | str | None = None, **settings: Any) -> Any:
        """A model, by default the Llama."""
        from transformers import AutoModelForCausalLM

        settings.setdefault("attn_implementation", cls.attention)
        return AutoModelForCausalLM.from_pretrained(path or cls.path(), **settings).eval()

    def prefixes(self, model: Any, **settings: Any) -> Any:
        """A `PrefixCache` in this test's store."""
        from vua.transformers import PrefixCache

        given = {"chunk_tokens": CHUNK, **settings}
        prefixes = PrefixCache(model, self.store, **given)
        self.addCleanup(prefixes.close)
        return prefixes

    def reusing(self, model: Any, **settings: Any) -> Any:
        """A block in which a model reuses prefixes of this test's store."""
        from vua.transformers import reuse_prefixes

        given = {"chunk_tokens": CHUNK, **settings}
        return reuse_prefixes(model, self.store, **given)

    def ask(
        self, model: Any, prompt: torch.Tensor, *, blocks: int = 1
    ) -> tuple[int, list[logging.LogRecord]]:
        """How many tokens a model finds stored in the last of some blocks, and what is said in all.

        What it generates inside has to be what it generates outside.
        """
        say = {"input_ids": prompt, "attention_mask": torch.ones_like(prompt), **GREEDY}
        say["pad_token_id"] = 3
        expected = model.generate(**say).tolist()
        with self.assertLogs("vua.transformers", logging.INFO) as logs:
            logging.getLogger("vua.transformers").info("so that there is a line")
            for _ in range(blocks):
                with self.reusing(model) as prefixes:
                    self.assertTrue(prefixes.ready())
                    loaded = prefixes.load(prompt).num_tokens
                    for _ in range(2):
                        self.assertEqual(expected, model.generate(**say).tolist())
        return loaded, logs.records[1:]
