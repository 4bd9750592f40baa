"""Images and adapters are named by their content; what lies or is unknown costs hits alone."""

from __future__ import annotations

import hashlib
import threading
import unittest
import weakref
from importlib.util import find_spec
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch

from helpers import until
from vua.connector.cache_spec import UncachedError
from vua.connector.extras import Adapter, AdapterBook, AdapterNote, Media, together

pytestmark = pytest.mark.vllm


def feature(data: Any, name: str = "u", offset: int = 3, **place: Any) -> Any:
    """A multimodal input of a request; ``data``: what the model gets, by name."""
    item = None if data is None else Item({k: SimpleNamespace(data=v) for k, v in data.items()})
    where = SimpleNamespace(offset=offset, length=4, **place)
    return SimpleNamespace(data=item, modality="image", identifier=name, mm_position=where)


class Item(dict[str, Any]):
    """As vLLM's `MultiModalKwargsItem`: a mapping that can be referred to weakly."""


def pixels(value: float) -> dict[str, Any]:
    """What the model gets of an image of one colour."""
    return {"pixel_values": torch.full((3, 2, 2), value)}


@unittest.skipUnless(find_spec("vllm"), "vLLM is not installed")
class MediaTest(unittest.TestCase):
    def setUp(self) -> None:
        self.media = self.begin()

    def begin(self, settings: str = "s", refused: str = "", blocks: int = 8) -> Any:
        return Media(settings, refused, blocks)

    def refused(self, found: Any, text: str) -> None:
        self.assertIsInstance(found, UncachedError)
        self.assertRegex(str(found), text)

    def test_content_counts_and_identifiers_do_not(self) -> None:
        """The same image has one name whatever vLLM calls it; another image has another."""
        one, same, other = (
            self.media.look_at([feature(pixels(value), name)])
            for value, name in ((1, "renderer0-mm-1-image-0"), (1, "a hash"), (2, "another"))
        )
        self.assertEqual(one, same)
        self.assertNotEqual(one, other)
        again = self.begin().look_at([feature(pixels(2), "renderer0-mm-1-image-0")])
        self.assertEqual(other, again)

    def test_large_ones_by_a_thread(self) -> None:
        """What takes long to digest, another thread digests, once; until then it is not ready."""
        large = [feature({"a": torch.full((1 << 20,), float(at))}) for at in range(3)]
        threads, begun = set[int](), threading.Event()
        real, go = hashlib.sha256, threading.Event()

        def sha256(*data: bytes) -> Any:
            threads.add(threading.get_ident())
            begun.set()
            go.wait()
            return real(*data)

        with mock.patch.object(hashlib, "sha256", sha256):
            self.assertFalse(self.media.ready("a", large))
            self.assertTrue(begun.wait(60))
            self.assertFalse(self.media.ready("a", large))
            self.assertTrue(self.media.ready("b", [feature(pixels(1))]))
            go.set()
            until(lambda: self.media.ready("a", large))
        self.assertNotIn(threading.get_ident(), threads)
        with mock.patch.object(hashlib, "sha256", side_effect=AssertionError):
            found = self.media.look_at(large[:1])
        self.assertEqual(self.begin().look_at(large[:1]), found)
        self.assertTrue(self.media.ready("c", large))

    def test_large_ones_without_a_digest(self) -> None:
        """They are refused as small ones are."""
        strange = [feature({"a": torch.zeros(1 << 20), "b": object()})]
        until(lambda: self.media.ready("a", strange))
        self.refused(self.media.look_at(strange), "holds a object")

    def test_everything_of_the_content_counts(self) -> None:
        """Type, shape, names, order and nesting of what the model gets, and where it stands."""
        flat = torch.arange(4.0)
        contents: list[dict[str, Any]] = [
            {"a": flat},
            {"b": flat},
            {"a": flat.view(2, 2)},
            {"a": flat.double()},
            {"a": flat.bfloat16()},
            {"a": flat.flip(0)},
            {"a": flat, "b": flat},
            {"a": [flat, flat]},
            {"a": [[flat], flat]},
            {"a": flat.numpy()},
            {"a": 1},
            {"a": True},
            {"a": 1.0},
            {"a": "1"},
            {"a": {"x": 1}},
            {"a": torch.tensor(1.0)},
            {"a": torch.zeros(0)},
        ]
        chosen = torch.tensor([True, False, True, True])
        features = [feature(content, str(at)) for at, content in enumerate(contents)]
        features.append(feature({"a": flat}, "0", offset=4))
        features.append(feature({"a": flat}, "0", is_embed=chosen))
        features.append(feature({"a": flat}, "0", is_embed=~chosen))
        names = [self.media.look_at([each])[0] for each in features]
        names.append(self.begin("other settings").look_at(features[:1])[0])
        self.assertEqual(len(names), len(set(names)))

    def test_one_identifier_for_two_contents(self) -> None:
        """From then on it is not believed, by requests that are running already neither."""
        first = [feature(pixels(1))]
        self.assertIsInstance(self.media.look_at(first), list)
        self.assertFalse(self.media.doubtful(first))
        self.refused(self.media.look_at([feature(pixels(2))]), "identifier")
        self.assertTrue(self.media.doubtful(first))
        self.refused(self.media.look_at(first), "identifier")
        self.assertIsInstance(self.media.look_at([feature(pixels(2), "v")]), list)

    def test_no_content(self) -> None:
        """Content that vLLM left out is that of the same identifier before, if that is known."""
        known = self.media.look_at([feature(pixels(1))])
        self.assertEqual(known, self.media.look_at([feature(None)]))
        self.refused(self.media.look_at([feature(None, "unseen")]), "content")
        self.refused(self.media.look_at([feature(pixels(1), "unseen")]), "identifier")

    def test_unknown_content(self) -> None:
        """What cannot be digested is refused, and nothing of that identifier is believed."""
        on_device = torch.empty(2, device="meta")
        for value in (object(), np.array([object()]), on_device):
            with self.subTest(value):
                media = self.begin()
                self.refused(media.look_at([feature({"a": value})]), "content")
                self.refused(media.look_at([feature(pixels(1))]), "identifier")

    def test_bound(self) -> None:
        """More identifiers are remembered than vLLM's caches have room for, and no more."""
        with mock.patch("vua.connector.extras._MORE_REMEMBERED", 2):
            media = self.begin(blocks=2)
        kept = [feature(pixels(0), "kept")]
        for at in range(10):
            media.look_at(kept)
            media.look_at([feature(pixels(at), f"n{at}")])
        known = [at for at in range(10) if not media.doubtful([feature(None, f"n{at}")])]
        self.assertEqual([7, 8, 9], known)
        self.assertFalse(media.doubtful(kept))

    def test_nothing_is_kept_of_objects_that_are_gone(self) -> None:
        """Neither they nor their digests, which another object at their address would get."""
        images = [feature(pixels(at), f"n{at}") for at in range(2)]
        gone = [weakref.ref(image.data) for image in images]
        names = {str(self.media.look_at([images.pop()])) for _ in range(2)}
        self.assertEqual([None, None], [kept() for kept in gone])
        names |= {str(self.media.look_at([feature(pixels(at), f"n{at}")])) for at in range(2, 20)}
        self.assertEqual(20, len(names))


class AdapterBookTest(unittest.TestCase):
    def test_book(self) -> None:
        """Only what all workers say counts; who does not agree, or answer, is not waited for."""
        now_s = 0.0
        book = AdapterBook(workers=2, patience_s=1.0, clock=lambda: now_s)
        one, other = Adapter(5, "d", 0), Adapter(5, "e", 0)
        request = SimpleNamespace(lora_int_id=5)
        for notes, found in (
            (together({5: AdapterNote(one, 1)}, {5: AdapterNote(one, 1)}), one),
            (together({5: AdapterNote(one, 1)}, {5: AdapterNote(other, 1)}), None),
        ):
            book.learn({5: AdapterNote(None, 2)})
            if book.find(request)[1]:
                book.find(request)
            self.assertEqual([request], book.take_wanted())
            book.learn(notes)
            self.assertEqual((found, True), book.find(request))
        self.assertEqual((None, False), book.find(request))
        book.take_wanted()
        now_s = 1.5
        self.assertEqual((None, True), book.find(request))

    def test_some_still_read_it(self) -> None:
        """All are asked again while some say nothing, until the request has waited long enough."""
        now_s = 0.0
        book = AdapterBook(workers=2, patience_s=1.0, clock=lambda: now_s)
        one, request = Adapter(5, "d", 0), SimpleNamespace(lora_int_id=5)
        self.assertEqual((None, False), book.find(request))
        for _ in range(3):
            self.assertEqual([request], book.take_wanted())
            book.learn({5: AdapterNote(one, 1)})
            self.assertEqual((None, False), book.find(request))
            now_s += 0.3
        book.take_wanted()
        book.learn({5: AdapterNote(one, 2)})
        self.assertEqual((one, True), book.find(request))
        book.learn({5: AdapterNote(None, 2)})  # dropped, and read again
        self.assertEqual((None, False), book.find(request))
        book.take_wanted()
        now_s += 1.5
        self.assertEqual((None, True), book.find(request))
        self.assertEqual({5}, book.learn({5: AdapterNote(one._replace(generation=1), 2)}))
        self.assertEqual(set(), book.learn({5: AdapterNote(one._replace(generation=1), 2)}))
