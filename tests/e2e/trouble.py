"""What can go wrong with the directory while an engine runs. Entered in the engine's process."""

from __future__ import annotations

import hashlib
import pkgutil
import secrets
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

from packaging.version import Version


@contextmanager
def trouble(described: dict[str, Any]) -> Iterator[None]:
    """Bring the trouble that a phase describes until this ends.

    Args:
        described: "raises": names of functions and classes that raise an error of two lines
            whenever they are called; "does_nothing": names of functions that return None;
            "halves": names of functions that are replaced by ones with half their results;
            "preempt_every": steps after which all running requests are thrown out; "one_identity":
            whatever the model, the adapter and the image, all is stored under the same names;
            "another_setup": this engine runs other code than those that stored before;
            "newer": this vLLM came after those that were run; "late": the weights are known once a
            prompt waits; "sample_nbytes": so much is read to check a note beside the weights.
    """
    with ExitStack() as stack:
        for one in _patches(described):
            stack.enter_context(one)
        if "preempt_every" in described:
            stack.enter_context(_preemptions(described["preempt_every"]))
        begins = {"late": _late_weights, "one_identity": _one_identity}
        for name in begins.keys() & described.keys():
            stack.enter_context(begins[name]())
        yield


@contextmanager
def _late_weights() -> Iterator[None]:
    """Keep every search for the weights from ending before chunks wait to be written."""
    from vua.connector.write_queue import WriteQueue
    from vua.weights import Weights

    waits, hand_over = threading.Event(), WriteQueue.hand_over
    original = pkgutil.resolve_name("vua.vllm.kv_connector_v1.find_weights")

    def find(*given: Any) -> Weights:
        waits.wait(300)
        found: Weights = original(*given)
        return found

    def handed_over(queue: WriteQueue, *held: Any) -> None:
        hand_over(queue, *held)
        if queue.pending:
            waits.set()

    with (
        mock.patch("vua.connector.opening._START_WAIT_S", 0.1),  # the engine's start goes on
        mock.patch("vua.vllm.kv_connector_v1.find_weights", find),
        mock.patch.object(WriteQueue, "hand_over", handed_over),
    ):
        yield


def _patches(described: dict[str, Any]) -> Iterator[Any]:
    """Yield what replaces single functions and values."""
    for name in described.get("raises", ()):
        yield mock.patch(name, side_effect=RuntimeError(f"{name}\nraises this"))
    for name in described.get("does_nothing", ()):
        yield mock.patch(name, return_value=None)
    for name in described.get("halves", ()):
        yield _halved(name)
    if described.get("another_setup"):
        from vua.connector.setup import Code

        other = Code(secrets.token_hex(32), set())
        yield mock.patch("vua.vllm.offloading.code_of", return_value=other)
    if "sample_nbytes" in described:
        yield mock.patch("vua.weights.content._SAMPLE_NBYTES", described["sample_nbytes"])
    if described.get("newer"):
        yield mock.patch("vua.vllm.support.NEWEST", Version("0.27"))


def _halved(name: str) -> Any:
    """Replace a function by one that halves its result."""
    place, _, last = name.rpartition(".")
    original = getattr(pkgutil.resolve_name(place), last)

    def halved(*given: Any, **named: Any) -> Any:
        return original(*given, **named) * 0.5

    return mock.patch(name, halved)


@contextmanager
def _one_identity() -> Iterator[None]:
    """Give all engines one namespace (per epoch), and prompts names by their tokens alone.

    Each engine has a setup of its own.
    """
    from vua.connector.setup import Code
    from vua.format.identity import Identity
    from vua.format.keys import KeyChain
    from vua.store import namespace as naming_module

    def namespace(self: Identity) -> str:
        return hashlib.sha256(f"one identity {self.epoch}".encode()).hexdigest()

    def plain_chain(ids: bytes, size: int, extras: Any, naming: Any) -> KeyChain:
        return KeyChain(ids, size, {}, naming)

    with (
        mock.patch.object(Identity, "namespace", property(namespace)),
        mock.patch(
            "vua.vllm.kv_connector_v1.code_of", return_value=Code(secrets.token_hex(32), set())
        ),
        mock.patch.object(naming_module, "KeyChain", plain_chain),
    ):
        yield


@contextmanager
def _preemptions(every: int) -> Iterator[None]:
    """Throw all running requests out, and what vLLM has in its prefix cache, every so often.

    As vLLM does it for new weights; it cannot while a load is running, or while what an ended
    request holds is stored, so then in a later step.
    """
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.request import RequestStatus

    schedule, steps = Scheduler.schedule, 0

    def interrupted(self: Any, *arguments: Any, **named: Any) -> Any:
        nonlocal steps
        steps += 1
        transferring = any(
            request.status == RequestStatus.WAITING_FOR_REMOTE_KVS or request.is_finished()
            for request in self.requests.values()
        )
        if steps >= every and self.running and not transferring:
            steps = 0
            self.reset_prefix_cache(reset_running_requests=True)
        return schedule(self, *arguments, **named)

    with mock.patch.object(Scheduler, "schedule", interrupted):
        yield
