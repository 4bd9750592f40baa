"""Mirrors `vua.catalog.prefix: order_documents` and `vua explain --order`."""

from __future__ import annotations

import itertools
import json
import random
from collections.abc import Sequence

import torch

from commands import run, run_json
from helpers import DirectoryTest, caches_of
from vua.catalog.prefix import order_documents
from vua.core import VUA, VUAConfig

PREFIX = [*range(10)]
SIZE = 4


class OrderTest(DirectoryTest):
    """Documents of other lengths than chunks."""

    documents: Sequence[list[int]] = [[*range(100 * n, 100 * n + 5 + n)] for n in range(1, 5)]

    def prompt(self, places: Sequence[int]) -> list[int]:
        return [*PREFIX, *itertools.chain(*(self.documents[one] for one in places))]

    def put(self, *places: int, model: str = "m") -> None:
        """Store a prompt of these documents in this order, with a question at its end."""
        ids = torch.tensor([*self.prompt(places), 7, 8, 9])
        tokens = len(ids) // SIZE * SIZE
        with VUA(VUAConfig(split_factor=SIZE, model=model), self.root) as vua:
            vua.put(ids[:tokens], caches_of(layers=1, heads=1, tokens=tokens, dim=8))

    def order(self, **more: str) -> tuple[list[int], int, str]:
        return order_documents(str(self.root), len(self.documents), self.prompt, **more)

    def stored(self, places: Sequence[int]) -> int:
        with VUA(VUAConfig(split_factor=SIZE, model="m"), self.root) as vua:
            (tokens,) = vua.lookup(self.prompt(places))
        return tokens

    def test_not_the_longest_first(self) -> None:
        """A long document first hits more at once, and less in all."""
        self.documents = [[*range(100, 140)], [*range(200, 212)], [*range(300, 360)]]
        self.put(0)
        self.put(1, 2)
        self.assertEqual([1, 2, 0], self.order()[0])

    def test_all_orders(self) -> None:
        """Nothing is stored further than what it finds, by trying each order."""
        chance = random.Random(5)
        for _ in range(4):
            self.put(*chance.sample(range(4), k=chance.randrange(1, 5)))
            best = max(map(self.stored, itertools.permutations(range(4))))
            places, tokens, _ = self.order()
            self.assertEqual((best, best), (tokens, self.stored(places)))

    def test_namespace(self) -> None:
        """The best of all namespaces, or a named one."""
        self.put(3, 2, 1, model="other")
        self.put(1)
        places, _, name = self.order()
        self.assertEqual([3, 2, 1, 0], places)
        (mine,) = (one.name for one in self.root.iterdir() if len(one.name) == 64
                   and one.name != name)  # fmt: skip
        self.assertEqual([1, 0, 2, 3], self.order(namespace=mine[:12])[0])
        self.assertEqual(([0, 1, 2, 3], 0, ""), self.order(salt="tenant"))

    def test_command(self) -> None:
        """`vua explain --order` reads token ids, and prints places."""
        self.put(2, 0)
        file = self.root / "documents.json"
        file.write_text(json.dumps({"prefix": PREFIX, "documents": self.documents}))
        places, tokens, name = self.order()
        asked = ("explain", self.root, "--order", file)
        code, out, err = run(*asked)
        self.assertEqual((0, ""), (code, err))
        self.assertEqual(f"2 0 1 3: {tokens} tokens stored in namespace {name[:12]}\n", out)
        told = {"directory": str(self.root), "order": places, "tokens": tokens, "namespace": name}
        self.assertEqual((0, told), run_json(*asked))

    def test_unusable(self) -> None:
        """What is no prefix with documents, and what needs a tokenizer, is said in one line."""
        file = self.root / "documents.json"
        for given, expected in (
            ({"prefix": "a", "documents": "bc"}, "all texts, or all token ids"),
            ({"prefix": [1], "documents": ["a"]}, "all texts, or all token ids"),
            ({"prefix": [1], "documents": []}, "all texts, or all token ids"),
            ({"documents": [[1]]}, "all texts, or all token ids"),
            ([1], "all texts, or all token ids"),
            ({"prefix": "a", "documents": ["b"]}, "give --model MODELDIR"),
        ):
            file.write_text(json.dumps(given))
            with self.subTest(given):
                code, out, err = run("explain", self.root, "--order", file)
                self.assertEqual((2, "", 1), (code, out, len(err.splitlines())), err)
                self.assertIn(expected, err)
        code, _, err = run("explain", self.root, "--order", file, "--tokens", file)
        self.assertEqual(2, code)
        self.assertIn("give one of --tokens --prompt --order --recent", err)
