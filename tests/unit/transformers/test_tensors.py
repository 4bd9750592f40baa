"""What is noticed of bytes that change, and what looking for it may cost."""

from __future__ import annotations

import unittest
from collections.abc import Callable
from importlib import util
from typing import Any

import pytest
import torch

MIB = 1 << 20
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
PIECES = {"cpu": 6, "cuda": 3}
"""In which tensors of 24 MiB are read."""


class Clock:
    """Time as it is given: a second passes with each call."""

    now = 0.0

    def __call__(self) -> float:
        """The time now."""
        self.now += 1.0
        return self.now


def made(device: str) -> list[torch.Tensor]:
    """Three tensors of 8 MiB."""
    noise = torch.Generator().manual_seed(1)
    return [torch.randn(1024, 2048, generator=noise).to(device) for _ in range(3)]


def looks(contents: Any, tensors: list[torch.Tensor], before: Callable[[], object]) -> int:
    """How many looks it takes until the tensors differ; each after ``before``."""
    for number in range(1, 100):
        before()
        if contents.differ(tensors, whole=False):
            return number
    raise AssertionError("never found")


@pytest.mark.parametrize("device", DEVICES)
def test_one_element(device: str) -> None:
    """One element is found within a round, and at once where a round is paid for."""
    from vua.transformers.tensors import SHARE, Contents

    found = []
    for at in (123_457, 1_700_003):
        for paid_s in (0.0, 2 / SHARE):  # two rounds: one that is owed, and one
            tensors = made(device)
            contents = Contents(tensors, Clock())  # reads all in a second
            assert not contents.differ(tensors, whole=False)
            before = tensors[1].clone()
            tensors[1].data.view(-1)[at] += 1.0
            found.append((paid_s, looks(contents, tensors, lambda: contents.earn(paid_s))))  # noqa: B023
            assert contents.differ(tensors, whole=True)
            tensors[1].data.copy_(before)
            assert not contents.differ(tensors, whole=True)
    assert all(number <= PIECES[device] for _, number in found)
    assert {number for paid_s, number in found if paid_s} == {1}


@pytest.mark.parametrize("device", DEVICES)
def test_a_tensor(device: str) -> None:
    """What changes a good part of a tensor is found at once, although nothing is paid."""
    from vua.transformers.tensors import Contents

    for part in (slice(None), slice(100, 200), (slice(None), slice(0, 1024))):
        tensors = made(device)
        contents = Contents(tensors, Clock())
        contents.spend(100.0)
        assert not contents.differ(tensors, whole=False)
        tensors[2].data[part] *= 1.01
        assert contents.differ(tensors, whole=False)


@pytest.mark.thorough
def test_paid_in_part() -> None:
    """A look reads as much as was paid for: first half of the bytes, then all."""
    from vua.transformers.tensors import SHARE, Contents

    found = set()
    for _ in range(20):
        tensors = made("cpu")
        contents = Contents(tensors, Clock())
        contents.spend(100.0)  # of which one round remains owed
        tensors[0].data.view(-1)[123_457] += 1.0
        found.add(looks(contents, tensors, lambda: contents.earn(1.5 / SHARE)))  # noqa: B023
    assert found == {1, 2}


@pytest.mark.thorough
def test_small_ones() -> None:
    """Little is read whole each time, whatever it costs; shared and odd tensors, too."""
    from vua.transformers.tensors import Contents

    base = torch.randn(256, 512, dtype=torch.bfloat16)
    tensors = [base, base, base.t(), base[1:7, 3], torch.tensor(3.0), torch.empty(0), base[::3]]
    contents = Contents(tensors, Clock())
    for at in range(0, base.numel(), 997):
        contents.spend(100.0)
        assert not contents.differ(tensors, whole=False)
        before = base.view(-1)[at].clone()
        base.data.view(-1)[at] = before + 1
        assert contents.differ(tensors, whole=False)
        base.data.view(-1)[at] = before
    tensors[4].data += 1
    assert contents.differ(tensors, whole=False)


@unittest.skipUnless(util.find_spec("transformers"), "transformers is not installed")
class WatchTest(unittest.TestCase):
    """A model that is too large to be read at each look."""

    def setUp(self) -> None:
        """20 MiB, watched."""
        from transformers import LlamaConfig, LlamaForCausalLM

        from vua.transformers.watch import ModelWatch

        config = LlamaConfig(
            vocab_size=8192, hidden_size=256, intermediate_size=512, num_hidden_layers=2,
            num_attention_heads=4, num_key_value_heads=2,
        )  # fmt: skip
        self.model: Any = LlamaForCausalLM(config).eval()
        self.watch = ModelWatch(self.model, Clock())
        self.rows = self.model.get_input_embeddings().weight

    def keep(self) -> None:
        """Take the model as it is; nothing is paid for."""
        contents = self.watch.read()
        self.assertEqual("", self.watch.keep(contents))
        contents.spend(1000.0)

    def test_versions(self) -> None:
        """A write that leaves a sign is found at once, and that it was undone."""
        self.keep()
        before = self.rows[77].clone()
        with torch.no_grad():
            self.rows[77] += 1
        self.assertIn("other values", self.watch.change_of_bytes())
        self.assertIn("other values", self.watch.change_of_bytes())
        with torch.no_grad():
            self.rows[77] = before
        self.assertEqual("", self.watch.change_of_bytes())
        self.assertEqual("", self.watch.change_of_bytes())

    def test_without_versions(self) -> None:
        """Tensors of `torch.inference_mode` have no versions: all of them is read each time."""
        with torch.inference_mode():
            for module in self.model.modules():
                for name, parameter in [*module.named_parameters(recurse=False)]:
                    setattr(
                        module, name, torch.nn.Parameter(parameter.clone(), requires_grad=False)
                    )
            rows = self.model.get_input_embeddings().weight
            self.keep()
            for row in range(0, 8192, 1023):
                self.assertEqual("", self.watch.change_of_bytes())
                rows[row] += 1
                self.assertIn("other values", self.watch.change_of_bytes())
                rows[row] -= 1
                self.keep()

    def test_data(self) -> None:
        """A row that is written through `.data` is found within a round, or when time has paid."""
        self.keep()
        self.assertEqual("", self.watch.change_of_bytes())
        self.rows.data[77] += 1
        self.watch.earn(1e9)
        found = [self.watch.change_of_bytes() for _ in range(2)]
        self.assertIn("other values", found[-1])
        self.keep()
        self.rows.data[4000] += 1
        found = [self.watch.change_of_bytes() for _ in range(30)]
        self.assertTrue(any(found))
