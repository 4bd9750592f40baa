"""What a hit means: a field of a request that K and V depend on is part of its chunks' keys.

One case per field; those of the engine decide about the namespace, see test_vllm_identity.
"""

from __future__ import annotations

import dataclasses
import hashlib
import unittest
from importlib.util import find_spec
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from helpers import DirectoryTest, save_chunk
from scheduling import LAYOUT, request_of, scheduler_of
from vua.connector.cache_spec import EngineIdentity
from vua.connector.extras import Adapter, AdapterNote
from vua.connector.metadata import WorkerOutput
from vua.device.buffers import StagingBuffer

pytestmark = pytest.mark.vllm


@unittest.skipUnless(find_spec("vllm"), "vLLM is not installed")
class RequestFieldsTest(DirectoryTest):
    """Through the scheduler's half, with a real directory."""

    def setUp(self) -> None:
        super().setUp()
        self.side = scheduler_of(self, self.root / "kv")
        self.serial = 0
        self.loaded: dict[int, str] = {}

    def adapter(self, number: int, digest: str) -> Any:
        """A request's adapter; the workers hold it under this number."""
        self.loaded[number] = digest
        return SimpleNamespace(lora_int_id=number, lora_name="l", lora_path="/anywhere")

    def answer(self) -> None:
        """Let the workers say what they hold of what they are asked about."""
        notes = WorkerOutput()
        for wanted in self.side.adapters.take_wanted():
            number = wanted.lora_int_id
            digest = self.loaded.get(number)
            held = None if digest is None else Adapter(number, digest, 0)
            notes.adapters[number] = AdapterNote(held, 1)
        self.side.learn(notes)

    def hits(self, *, save: bool = False, **fields: Any) -> int:
        """Tokens found for a request with these fields; ``save``: store its chunks afterwards."""
        self.serial += 1
        request = request_of(f"r{self.serial}", **{"num_tokens": 65, **fields})
        while (answer := self.side.matched_tokens(request, 0))[0] is None:
            self.side.take_loads()
            self.answer()
        if save:
            found = self.side.states[request.request_id].lookup.answer.result()
            memory = StagingBuffer(LAYOUT, LAYOUT.full, 1).memory
            for key in () if found is None else found.keys.first(4):
                save_chunk(self.side.namespace.stores[0], key, memory)
        self.side.finished(request)
        return answer[0] or 0

    def test_fields(self) -> None:
        """Each kind of request finds its own chunks and no other kind's."""
        lora = [self.adapter(1, "one"), self.adapter(2, "two")]
        kinds: dict[str, dict[str, Any]] = {
            "plain": {},
            "salt a": {"cache_salt": "a"},
            "salt b": {"cache_salt": "b"},
            "adapter one": {"lora_request": lora[0]},
            "adapter two, of the same name": {"lora_request": lora[1]},
            "adapter one, salt a": {"lora_request": lora[0], "cache_salt": "a"},
            "image": {"mm_features": [image("x", 0)]},
            "other image": {"mm_features": [image("y", 0)]},
            "image elsewhere": {"mm_features": [image("x", 1)]},
            "longer image": {"mm_features": [image("x", 0, 8)]},
            "sound": {"mm_features": [image("x", 0, modality="audio")]},
            "two images": {"mm_features": [image("x", 0), image("x", 9)]},
        }
        for name, fields in kinds.items():
            with self.subTest(name):
                self.assertEqual(0, self.hits(**fields, save=True))
                self.assertEqual(64, self.hits(**fields))
        for name, fields in kinds.items():
            with self.subTest(name, after="all"):
                self.assertEqual(64, self.hits(**fields))

    def test_image_further_on(self) -> None:
        """The chunks before an image are shared by requests with other images, or none."""
        self.hits(save=True)
        late = {"mm_features": [image("x", 40)]}
        self.assertEqual(32, self.hits(**late, save=True))
        self.assertEqual(64, self.hits(**late))
        self.assertEqual(32, self.hits(mm_features=[image("y", 40)]))

    def test_settings_of_adapters_and_images(self) -> None:
        """What an engine says about them is in the keys of those requests, and of no others."""
        kinds: dict[str, dict[str, Any]] = {
            "adapter": {"lora_request": self.adapter(1, "one")},
            "image": {"mm_features": [image("x", 0)]},
            "plain": {},
        }
        for fields in kinds.values():
            self.hits(**fields, save=True)
        model = self.side.model
        other = dataclasses.replace(model, engine=EngineIdentity({}, "a", "m", ""))
        refusing = dataclasses.replace(model, engine=EngineIdentity({}, "", "", "no images"))
        for changed, expected in ((other, [0, 0, 64]), (refusing, [64, 0, 64]), (model, [64] * 3)):
            self.side = scheduler_of(self, self.root / "kv", changed)
            self.assertEqual(expected, [self.hits(**fields) for fields in kinds.values()])

    def test_adapter_replaced(self) -> None:
        """Under the same number, nothing of before is found; loaded again, all of it."""
        lora = self.adapter(1, "one")
        self.hits(lora_request=lora, save=True)
        for generation, digest, found in ((1, "two", 0), (2, "one", 64)):
            note = AdapterNote(Adapter(1, digest, generation), 1)
            self.side.learn(WorkerOutput(adapters={1: note}))
            self.assertEqual(found, self.hits(lora_request=lora))

    def test_no_name(self) -> None:
        """With an adapter that is not loaded nothing is found or stored."""
        self.hits(save=True)
        nowhere = SimpleNamespace(lora_int_id=9, lora_name="l", lora_path="/nowhere")
        with self.assertLogs("vllm.vua.scheduler", "WARNING") as said:
            self.assertEqual(0, self.hits(lora_request=nowhere, save=True))
        self.assertEqual(1, len(said.output))
        self.assertEqual(4, len(self.files()))


def image(
    content: str, offset: int, length: int = 4, modality: str = "image", name: str | None = None
) -> Any:
    """A multimodal input as vLLM describes it; ``name``: an identifier not made from content."""
    from vllm.multimodal.inputs import (
        MultiModalFeatureSpec,
        MultiModalFieldConfig,
        MultiModalKwargsItems,
        PlaceholderRange,
    )

    pixels = torch.full((1, 3, 4, 4), float(sum(content.encode())))
    items = MultiModalKwargsItems.from_hf_inputs(
        {"pixel_values": pixels},
        {"pixel_values": MultiModalFieldConfig.batched(modality)},
    )
    return MultiModalFeatureSpec(
        data=items[modality][0],
        modality=modality,
        identifier=name or hashlib.sha256(content.encode()).hexdigest(),
        mm_position=PlaceholderRange(offset=offset, length=length),
    )
