"""The scheduler's half of the vLLM connector, without an engine around it."""

from __future__ import annotations

import gc
import sys
import tempfile
import threading
import unittest
from collections import Counter
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from types import FrameType, SimpleNamespace
from typing import Any
from unittest import mock

import pytest

from commands import told
from helpers import keys_of, save_chunk, until
from scheduling import LAYOUT, answer, bare_connector, model_of, request_of, scheduler_of, step
from vua.capacity.hit_density import UseLog
from vua.capacity.upkeep import parted_at
from vua.connector.config import Timeouts
from vua.connector.metadata import ConnectorMetadata, ScheduledRequest, ScheduledStep, WorkerOutput
from vua.device.buffers import StagingBuffer
from vua.format.keys import KeyChain, token_ids
from vua.format.layout import KVLayout
from vua.security.keyring import tenant_of, write_key
from vua.security.settings import Security

pytestmark = pytest.mark.vllm


def asking(name: str, **options: Any) -> Any:
    """A request whose client says something about its cache."""
    return request_of(name, kv_transfer_params={"vua": options})


def store(side: Any, first: int, stop: int, ids: Sequence[int] = range(64)) -> None:
    layout = side.namespace.stores[0].layout
    memory = StagingBuffer(layout, layout.full, 1).memory
    for key in keys_of(ids, 16)[first:stop]:
        save_chunk(side.namespace.stores[0], key, memory)


@unittest.skipUnless(find_spec("vllm"), "vLLM is not installed")
class SchedulerTest(unittest.TestCase):
    now_s = 100.0
    """A clock that stands still until a test moves it."""

    def side(
        self,
        *,
        layout: KVLayout = LAYOUT,
        block: int = 16,
        workers: int = 1,
        **settings: Any,
    ) -> Any:
        model = model_of(layout, workers=workers, block=block)
        self.root = Path(self.enterContext(tempfile.TemporaryDirectory(ignore_cleanup_errors=True)))
        given = {"clock": lambda: self.now_s} | settings
        return scheduler_of(self, self.root, model, **given)

    def test_a_request_that_cannot_be_named_costs_no_other_one(self) -> None:
        """Whatever breaks while one prompt is named, it is a miss and other prompts are stored."""
        side = self.side()
        broken, good = request_of("broken", cache_salt="\ud800"), request_of("good")
        with self.assertLogs("vllm.vua.scheduler", "ERROR"):
            for one in (broken, good):
                self.assertEqual((0, False), answer(side, one))

        orders = ConnectorMetadata(loads=side.take_loads())
        side.add_saves(orders, step({"broken": 0, "good": 0}))

        self.assertEqual([4], [len(keys) for save in orders.saves for _, keys in save.parts])

    def test_prompts_that_are_to_be_computed(self) -> None:
        """Nothing is offered to a request that asks for log probabilities of its prompt."""
        side = self.side()
        store(side, 0, 3)
        asked = request_of("asked", skip_reading_prefix_cache=True)
        self.assertEqual((0, False), answer(side, asked))
        other = request_of("other", skip_reading_prefix_cache=False)
        self.assertEqual((48, True), answer(side, other))

    def test_where_prompts_part(self) -> None:
        """Each prompt that was looked up is noted once; what is stored of it may be nothing."""
        side = self.side()
        side.be_of("ab" * 32)
        store(side, 0, 3)
        other = {"prompt_token_ids": [7] * 64}
        short = {"prompt_token_ids": [7] * 9, "num_tokens": 9}
        for name, given in (("a", {}), ("b", {}), ("a", {}), ("other", other), ("short", short)):
            answer(side, request_of(name, **given))
        name = side.namespace.name
        side.shutdown()
        ((_, noted),) = parted_at(self.root).items()
        self.assertEqual({name: {"64": 2, "16": 1, "short": 1}}, noted)

    def test_what_loads_count(self) -> None:
        """Tokens that came to all ranks count as loaded, and what they saved; a computed hit."""
        side = self.side()
        side.be_of("ab" * 32)
        store(side, 0, 3)
        for at in range(3):  # 0.2 s a token
            first = ScheduledRequest(f"{at}", 0, 64, [[1, 2, 3, 4]], begins=True)
            side.add_saves(ConnectorMetadata(), ScheduledStep([first], lambda _: []))
            self.now_s += 12.8
            side.take_stats()
        blocks, saved_s = SimpleNamespace(get_block_ids=lambda: ([1, 2, 3, 4],)), 0.0
        for name, failed, outcome, tokens in (
            ("a", set[int](), "complete", 48),
            ("b", {3}, "partial", 32),
            ("c", {1, 2, 3}, "failed", 0),
        ):
            asked = request_of(name)
            answer(side, asked)
            side.stats.take()
            side.allocated(asked, blocks, 48)
            self.now_s += 0.5
            side.policy.measured({name: 60.0})
            for _ in range(2):  # the second time nothing runs
                side.received({name}, set(), failed)
            found, saved_s = side.stats.take(), saved_s + 0.2 * tokens - 0.5
            self.assertAlmostEqual(saved_s, found.pop("vua_seconds_saved")[""])
            self.assertEqual(
                {"": tokens} if tokens else {}, found.pop("vua_loaded_tokens_total", {})
            )
            self.assertEqual({outcome: 1}, found.pop("vua_loads_total"))
            self.assertEqual({"": [0.5]}, found.pop("vua_load_seconds"))
            self.assertEqual(["vua_load_decisions_total"], [*found])
        computed = request_of("d", num_computed_tokens=0)
        self.assertEqual((0, False), answer(side, computed))
        side.stats.take()
        side.allocated(computed, blocks, 0)
        self.assertEqual({"vua_load_decisions_total": {"compute": 1}}, side.stats.take())
        side.shutdown()
        said = f"{saved_s:.1f} s saved, 80 tokens loaded, 12 of 16 chunks found"
        self.assertEqual(said, told(self.root))

    def until_counted(self, side: Any, words: dict[str, int]) -> None:
        """Wait until these hints, and no others, are counted."""
        counted = dict[str, int]()

        def told() -> bool:
            for word, many in (side.take_stats() or {}).get("vua_hints_total", {}).items():
                counted[word] = counted.get(word, 0) + many
            return counted == words

        until(told)

    def test_hints(self) -> None:
        """What is said about a prompt is in the directory's log when its request ends, counted."""
        side = self.side()
        store(side, 0, 3)
        log = UseLog(side.namespace.storage.directory.parent)
        for name, options, words, retain_s in (
            ("a", {"retain_s": 60}, {"retained": 1}, [60.0, 60.0]),  # at its beginning, too
            ("b", {"drop": True}, {"dropped": 1}, [0.0]),
            ("c", {"prefetch": True}, {"not_kept": 1}, []),
            ("d", {"pin": True}, {"not_allowed": 1}, []),
            ("e", {}, {}, []),
            ("f", {"retain_s": 1e9, "drop": True}, {"dropped": 1}, [0.0]),
            ("g", {"retain_s": 1e9}, {"retained": 1}, [3600.0, 3600.0]),
        ):
            with self.subTest(name=name):
                asked = asking(name, **options)
                self.assertEqual((48, True), answer(side, asked))
                side.finished(asked)
                self.until_counted(side, words)
                noted = list[float]()

                def all_noted(noted: list[float] = noted, many: int = len(retain_s)) -> bool:
                    hints = (one.retain_s for one in log.records())
                    noted.extend(retain_s for retain_s in hints if retain_s is not None)
                    return len(noted) >= many

                until(all_noted)  # the lookup's thread may note its own after the count
                self.assertEqual(retain_s, noted)

    def ordered(self, side: Any, computed: dict[str, int]) -> list[tuple[str, int]]:
        """What a step orders to be stored: (request, number of chunks)."""
        orders = ConnectorMetadata()
        side.add_saves(orders, step(computed))
        return [(order.request_id, len(order.parts[0][1])) for order in orders.saves]

    def test_a_shared_prefix_is_ordered_once(self) -> None:
        """Of requests that share a prefix one orders it, while its copy is under way.

        One that is looked up later orders what it does not find: somebody may have deleted it.
        """
        side = self.side(allow=("pins",))
        own = [*range(48), *range(900, 916)]
        for name in ("a", "b", "late"):
            answer(side, request_of(name))
        answer(side, request_of("c", prompt_token_ids=own))
        answer(side, asking("d", pin=True))
        self.assertEqual([("a", 4)], self.ordered(side, {"a": 0, "b": 0}))
        self.assertEqual([("c", 1), ("d", 4)], self.ordered(side, {"c": 0, "d": 0}))
        self.now_s += 9
        answer(side, request_of("soon"))
        self.assertEqual([], self.ordered(side, {"late": 0, "soon": 0}))
        self.now_s += 1  # io_s
        answer(side, request_of("e"))
        self.assertEqual([("e", 4)], self.ordered(side, {"e": 0}))

    def test_a_copy_that_fails_is_ordered_again(self) -> None:
        """All of an order of which a worker could not store a part is ordered by later requests."""
        for ends in (False, True):
            with self.subTest(ends=ends):
                side = self.side()
                for name in ("a", "b"):
                    answer(side, request_of(name))
                self.assertEqual([("a", 4)], self.ordered(side, {"a": 0}))
                if ends:
                    side.finished(side.states["a"].request)
                self.now_s += 1
                side.learn(WorkerOutput(unsaved={"a": 16}))
                stats = side.take_stats().get("vua_prompt_chunk_tokens_total")
                self.assertEqual({"yes": 16, "no": 48} if ends else None, stats)
                self.assertEqual([("b", 4)], self.ordered(side, {"b": 0}))
                if ends:
                    continue
                more = ScheduledRequest("a", 64, 1, [[]], begins=False)
                orders = ConnectorMetadata()
                for retry in (set[str](), {"a"}):  # not before there are buffers
                    self.assertEqual([], orders.saves)
                    side.learn(WorkerOutput(unsaved={"b": 16}, retry=retry))
                    side.add_saves(orders, ScheduledStep([more], lambda _: [[1, 2, 3, 4]]))
                (order,) = orders.saves
                self.assertEqual(("a", 16), (order.request_id, order.start))
                self.assertEqual(3, len(order.parts[0][1]))

    def test_tenants(self) -> None:
        """A salt with a key finds and stores what is its own; one without a key is not cached."""
        keys = Path(self.enterContext(tempfile.TemporaryDirectory(ignore_cleanup_errors=True)))
        write_key(keys / f"{tenant_of(b'alice')}.key")
        side = self.side(security=Security(tenant_keys=str(keys)))
        store = side.namespace.stores[0]
        chain = KeyChain(
            token_ids(range(64)), 16, {0: [("salt", b"alice")]}, store.keyring.naming(b"alice")
        )
        for key in chain.first(2):
            save_chunk(store, key, StagingBuffer(LAYOUT, LAYOUT.full, 1).memory)
        found = {
            name: answer(side, request_of(name, cache_salt=name or None))
            for name in ("alice", "carol", "")
        }
        self.assertEqual({"alice": (32, True), "carol": (0, False), "": (0, False)}, found)

        orders = ConnectorMetadata()
        side.add_saves(orders, step({"alice": 0, "carol": 0, "": 0}))
        saved = [key for save in orders.saves for _, keys in save.parts for key in keys]
        self.assertEqual({tenant_of(b"alice"), ""}, {key.tenant for key in saved})
        (keys / f"{tenant_of(b'alice')}.key").unlink()
        gone = request_of("gone", cache_salt="alice")
        self.assertEqual((0, False), answer(side, gone))

    def test_blocks_at_the_edge_of_a_window_are_loaded_whole(self) -> None:
        """The prefix cache of vLLM offers them to requests whose windows begin earlier in them."""
        windowed = KVLayout(1, 1, 8, 8, "U8", 16, "w10")
        side = self.side(layout=windowed, block=32)
        store(side, 0, 4)
        request = request_of("long", prompt_token_ids=list(range(65)), num_tokens=65)
        self.assertEqual((64, True), answer(side, request))

        side.allocated(request, SimpleNamespace(get_block_ids=lambda: ([0, 7],)), 64)

        ((part,),) = (order.parts for order in side.take_loads())
        self.assertEqual((32, 64), (part.start, part.stop))
        self.assertEqual([32, 48], [key.start for key in part.keys])

    def test_a_failure_may_be_reported_before_the_end_of_its_load(self) -> None:
        """The scheduler's half learns of it in that step; otherwise it would promise it again."""
        from vllm.v1.outputs import KVConnectorOutput

        side = self.side(layout=KVLayout(1, 1, 8, 8, "U8", 16, "w10"))
        store(side, 0, 3)
        request = request_of("r")
        self.assertEqual((48, True), answer(side, request))
        connector = bare_connector("/nowhere", strict=True)
        connector.scheduler = side

        for output in ({"failed_recving": {"r"}}, {"finished_recving": {"r"}}):
            connector.update_connector_output(KVConnectorOutput(**output))

        self.assertEqual((0, False), answer(side, request))

    def test_hanging_storage(self) -> None:
        """Each lookup is a miss in time; after a few there are none, until storage answers."""
        side, asked, go = self.side(timeouts=Timeouts(lookup_s=1.0)), [], threading.Event()
        self.addCleanup(go.set)
        look_up = side.namespace.stores[0].lookup

        def hanging(*args: Any) -> int:
            asked.append(1)
            go.wait()
            return look_up(*args)

        side.namespace.stores[0].lookup = hanging  # type: ignore[method-assign]
        with self.assertLogs("vllm.vua.storage", "WARNING"):
            for at in range(3):
                late = request_of(f"late {at}")
                self.assertEqual((None, False), side.matched_tokens(late, 0))
                until(lambda at=at: len(asked) == min(at + 1, 2))
                self.now_s += 1.0
                self.assertEqual((0, False), side.matched_tokens(late, 0))
        self.assertEqual((0, False), side.matched_tokens(request_of("paused"), 0))
        orders = ConnectorMetadata()
        side.add_saves(orders, step({"late 0": 0, "paused": 0}))
        self.assertEqual([], orders.saves)
        self.assertEqual(2, len(asked), "one for each thread")
        stats = side.stats.take()
        assert stats is not None
        self.assertEqual({"timeout": 3, "paused": 1}, stats["vua_lookups_total"])

        go.set()
        with self.assertLogs("vllm.vua.storage", "INFO"):
            until(lambda: len(asked) == 3)  # whoever asked third is answered, too late to count
            self.now_s += 60.0  # the longest pause
            answer(side, request_of("again"))
        answer(side, request_of("good"))
        side.add_saves(orders, step({"good": 0}))
        self.assertEqual([4], [len(keys) for save in orders.saves for _, keys in save.parts])

    def test_engine_that_only_stores(self) -> None:
        """It computes a prompt in one step, so what to store is known before that."""
        side = self.side(loads=False)
        store(side, 0, 1)
        self.assertEqual((0, False), answer(side, request_of("a")))
        orders = ConnectorMetadata()
        side.add_saves(orders, step({"a": 0}))

        self.assertEqual([3], [len(keys) for save in orders.saves for _, keys in save.parts])

    def saved(self, side: Any, request: Any, computed: int = 0, tokens: int = 64) -> list[int]:
        """The first tokens of the chunks that a step orders to be stored."""
        begins = not computed
        blocks = [[*range(1, 2000)]] if begins else [[]]
        one = ScheduledRequest(request.request_id, computed, tokens, blocks, begins=begins)
        orders = ConnectorMetadata()
        side.add_saves(orders, ScheduledStep([one], lambda _: blocks))
        return [key.start for save in orders.saves for _, keys in save.parts for key in keys]

    def test_prompts_too_short_to_be_loaded(self) -> None:
        """They count as short, others as a miss: a chunk, a whole block, and a last token."""
        for block, tokens, expected in (
            *((16, 10, "short"), (16, 16, "short"), (16, 17, "miss")),
            *((64, 64, "short"), (64, 65, "miss"), (128, 124, "short")),
        ):
            with self.subTest(block=block, tokens=tokens):
                side = self.side(block=block)
                ids = list(range(tokens))
                answer(side, request_of("a", prompt_token_ids=ids, num_tokens=tokens))

                self.assertEqual({expected: 1}, side.stats.take()["vua_lookups_total"])

    def test_chunks_that_this_engine_cannot_load_are_not_stored(self) -> None:
        """A hit ends with a block. A repeated prompt is a hit, and is not waited for."""
        for block, loads, chunks in (
            *((16, True, 4), (24, True, 3), (32, True, 4), (40, True, 3), (48, True, 3)),
            *((64, True, 4), (128, True, 0), (48, False, 4), (128, False, 4)),
        ):
            with self.subTest(block=block, loads=loads):
                side, request = self.side(block=block, loads=loads), request_of("a")
                answer(side, request)
                self.assertEqual([*range(0, 16 * chunks, 16)], self.saved(side, request))
                store(side, 0, chunks)
                side.finished(request)
                side.take_stats()
                again = asking("b", wait_s=600.0)
                again.prompt_token_ids, again.num_tokens = [*range(65)], 65
                answer(side, again)
                stats = side.take_stats()

                outcome = "short" if block > 64 else "hit"
                self.assertEqual({outcome: 1}, stats["vua_lookups_total"])
                self.assertEqual([], self.saved(side, again))

    def test_generated_chunks_that_this_engine_cannot_load(self) -> None:
        """They are stored as soon as a block ends, with the prompt's chunks before them."""
        side = self.side(block=48, save_generated=True)
        ids = [*range(160)]
        request = request_of("a", num_prompt_tokens=64, num_output_tokens=0, all_token_ids=ids)
        answer(side, request)
        found = [self.saved(side, request)]
        for tokens in range(64, 160):
            request.num_tokens = tokens + 1
            if new := self.saved(side, request, tokens, 1):
                found.append([tokens + 1, *new])

        self.assertEqual([[0, 16, 32], [96, 48, 64, 80], [144, 96, 112, 128]], found)

    def test_generated_chunks_without_a_hit(self) -> None:
        """Generated chunks are stored until 256 brought no hit, and again after a hit."""

        def told(name: str, first: int, *, prompt: int = 16) -> int:
            """How many generated chunks of a request are stored."""
            ids = [first, *range(336)][:336]
            request = request_of(name, num_prompt_tokens=prompt, num_output_tokens=0)
            request.prompt_token_ids, request.num_tokens = ids[:prompt], prompt
            request.all_token_ids = ids
            answer(side, request)
            self.saved(side, request, 0, prompt)
            request.num_tokens, stored = 336, 0
            for tokens in range(prompt, 336, 16):
                stored += len(self.saved(side, request, tokens, 16))
            side.finished(request)
            return stored

        side = self.side(save_generated=True)
        with self.assertLogs("vllm.vua.scheduler", "WARNING") as lines:
            found = [told(str(number), number) for number in range(30)]
        self.assertEqual([20] * 16 + [1] + [0] * 13, found)
        self.assertEqual(1, len(lines.output))
        self.assertIn("save_generated", lines.output[0])

        told("29 goes on", 29, prompt=100)  # a reply that was not stored
        self.assertEqual([20] * 10, [told(str(number), number) for number in range(30, 40)])

    def test_client_limits_loads(self) -> None:
        """A client may have less loaded than is stored, or nothing."""
        side = self.side()
        store(side, 0, 3)

        for options, expected in (
            ({}, (48, True)),
            ({"load": False}, (0, False)),
            ({"store": False}, (48, True)),
            ({"load": False, "store": False}, (0, False)),
        ):
            with self.subTest(options=options):
                self.assertEqual(expected, answer(side, asking(str(options), **options)))

    def test_client_limits_saves(self) -> None:
        """A client may have nothing stored, or pinned."""
        side = self.side(allow=("pins",))
        asked = {
            "usual": asking("usual"),
            "not": asking("not", store=False),
            "nothing": asking("nothing", store=False, load=False),
            "hinted": asking("hinted", load=False, pin=True),
        }
        for request in asked.values():
            self.assertEqual((0, False), answer(side, request))
        orders = ConnectorMetadata()
        side.add_saves(orders, step(dict.fromkeys(asked, 0)))

        self.assertEqual([False, True], [one.pin for one in orders.saves])

    def test_pin_of_what_is_stored_already(self) -> None:
        """A client's word counts for a prompt that others stored, unless it wants none stored."""
        side = self.side(allow=("pins",))
        store(side, 0, 3)
        names = [key.name for key in keys_of(range(64), 16)[:3]]
        root = side.namespace.stores[0].storage.directory

        answer(side, asking("not", store=False, pin=True))
        self.assertEqual([], [*root.rglob("pin-*")])
        answer(side, asking("hinted", pin=True))

        self.assertEqual(
            names, sorted((p.parent.name for p in root.rglob("pin-*")), key=names.index)
        )

    def test_waiting_for_a_writer(self) -> None:
        """A client may let its request wait until all of its prompt is stored by another engine."""
        side = self.side()
        store(side, 0, 1)
        self.assertEqual((16, True), answer(side, asking("impatient")))
        waiting = asking("waiting", wait_s=60)
        for _ in range(100):
            self.now_s += 0.02
            self.assertIsNone(side.matched_tokens(waiting, 0)[0])
            side.take_loads()
        store(side, 1, 4)
        while (given := side.matched_tokens(waiting, 0))[0] is None:
            self.now_s += 0.02
            side.take_loads()

        self.assertEqual((48, True), given)

    def test_prompts_that_come_together(self) -> None:
        """An idle engine waits for the lookups of both; one that computes does not wait so long."""
        side, go, pause_s = self.side(), threading.Event(), 0.02
        look_up = side.namespace.stores[0].lookup

        def slowly(*args: Any) -> int:
            go.wait(pause_s)
            return look_up(*args)

        side.namespace.stores[0].lookup = slowly
        both = [request_of(name, num_computed_tokens=0) for name in ("one", "other")]
        with mock.patch("vua.connector.lookup._IDLE_STEP_WAIT_S", 30):
            for request in both:
                self.assertEqual((0, False), side.matched_tokens(request, 0))
                side.allocated(request, None, 0)
            side.take_loads()
            pause_s = 30
            third = request_of("third")
            self.assertEqual((None, False), side.matched_tokens(third, 0))
            side.take_loads()
            for request in both:
                side.finished(request)
            go.set()
            self.assertEqual((0, False), side.matched_tokens(third, 0))

    def test_waiting_in_vain(self) -> None:
        """A request that waits for what never comes takes what there is."""
        side, waiting = self.side(timeouts=Timeouts(lookup_s=60.0)), asking("waiting", wait_s=2)
        store(side, 0, 1)
        for later_s in (0.0, 1.9):
            self.now_s += later_s
            self.assertIsNone(side.matched_tokens(waiting, 0)[0])
        self.now_s += 0.2
        self.assertEqual((16, True), answer(side, waiting))

    @pytest.mark.thorough
    def test_long_prompts(self) -> None:
        """The scheduler's thread does no Python work per chunk: loads and saves cost the same.

        A few calls may differ: a pool starts another thread where its threads are still busy.
        """
        few, many = (self.calls(chunks) for chunks in (40, 800))
        self.assertLess(sum(many.values()) - sum(few.values()), 760 // 4, (few, many))
        self.assertGreater(few["matched_tokens"], 0)
        self.assertGreater(few["allocated"] + few["add_saves"], 1)

    def calls(self, chunks: int) -> dict[str, int]:
        """Count the calls of each Python function for a prompt that is stored to its half."""
        side, half, ids = self.side(), chunks // 2, list(range(16 * chunks))
        given = {"prompt_token_ids": ids, "all_token_ids": ids, "num_tokens": len(ids)}
        store(side, 0, half, ids)
        request = request_of("r", **given)
        until(lambda: side.matched_tokens(request, 0)[0] is not None or side.take_loads())
        table, called = list(range(1, 1 + chunks)), Counter[str]()
        new = ScheduledRequest("r", 8 * chunks, 8 * chunks, [table], begins=True)

        def count(frame: FrameType, event: str, _: object) -> None:
            if event == "call":
                called[frame.f_code.co_name] += 1

        orders = ConnectorMetadata()
        blocks = SimpleNamespace(get_block_ids=lambda: (table,))
        gc.collect()
        gc.disable()  # a collection in between would be counted: others have callbacks on it
        sys.setprofile(count)
        try:
            found = side.matched_tokens(request, 0)
            side.allocated(request, blocks, 8 * chunks)
            side.add_saves(orders, ScheduledStep([new], lambda _: [table]))
        finally:
            sys.setprofile(None)
            gc.enable()
        self.assertFalse(orders.idle)
        side.add_saves(idle := ConnectorMetadata(), ScheduledStep([], lambda _: []))
        self.assertTrue(idle.idle)
        self.assertEqual((8 * chunks, True), found)
        self.assertEqual([half], [len(k) for save in orders.saves for _, k in save.parts])
        return called
