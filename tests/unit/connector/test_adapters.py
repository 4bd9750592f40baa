"""What the scheduler's half knows of the adapters that workers hold."""

from __future__ import annotations

import unittest
from types import SimpleNamespace

from vua.connector.extras import Adapter, AdapterBook, AdapterNote, together


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
