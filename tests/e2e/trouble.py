"""What happens within an engine's process: trouble, changes of weights, digests of blocks."""

from __future__ import annotations

import hashlib
import pkgutil
import secrets
import threading
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from packaging.version import Version


@contextmanager
def late_weights() -> Iterator[None]:
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


def raises(name: str) -> Any:
    """A function or class raises an error of two lines whenever it is called."""
    return mock.patch(name, side_effect=RuntimeError(f"{name}\nraises this"))


def another_setup() -> Any:
    """This engine runs other code than those that stored before."""
    from vua.connector.setup import Code

    other = Code(secrets.token_hex(32), set())
    return mock.patch("vua.vllm.offloading.code_of", return_value=other)


def newer() -> Any:
    """This vLLM came after those that were run."""
    return mock.patch("vua.vllm.support.NEWEST", Version("0.27"))


def halves(name: str) -> Any:
    """A function gives half its result."""
    place, _, last = name.rpartition(".")
    original = getattr(pkgutil.resolve_name(place), last)

    def halved(*given: Any, **named: Any) -> Any:
        return original(*given, **named) * 0.5

    return mock.patch(name, halved)


@contextmanager
def one_identity() -> Iterator[None]:
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
def preempted(every: int) -> Iterator[None]:
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


def adapter(path: str | None) -> Any:
    """What vLLM asks for the LoRA adapter in a directory by."""
    from vllm.lora.request import LoRARequest

    return path and LoRARequest(Path(path).name, 1 + zlib.crc32(path.encode()), path)


def apply(llm: Any, source: Path) -> None:
    """A function for the model."""
    llm.apply_model(lambda model: write(model, source))


def by_function(llm: Any, source: Path) -> None:
    """A function for the worker, which writes past PyTorch's counters."""
    llm.collective_rpc(lambda worker: write(worker.model_runner.model, source))


def update(llm: Any, source: Path) -> None:
    """A session of vLLM's weight updates, as trainers of reinforcement learning begin them."""
    llm.init_weight_transfer_engine({"init_info": {}})
    llm.start_weight_update()
    llm.update_weights({"update_info": {"source": str(source)}})
    llm.finish_weight_update()


def sleep(llm: Any, source: Path) -> None:
    """A sleep, during which a trainer may bring other weights. vLLM keeps them in place on CPUs."""
    llm.sleep(level=1)
    if source.name:
        _, _, (model,), _ = llm.llm_engine._finalizer.peek()
        write(model(), source)
    llm.wake_up()


def behind(llm: Any, source: Path) -> None:
    """Somebody who has had a reference to the model all the time: the engine itself has one."""
    _, _, (model,), _ = llm.llm_engine._finalizer.peek()
    write(model(), source)


def write(model: Any, source: Path) -> None:
    """Write another embedding over a model's, past PyTorch's counters.

    On CPUs vLLM keeps the weights of linear layers packed, outside of all parameters.
    """
    from safetensors.torch import load_file

    name = "model.embed_tokens.weight"
    model.get_parameter(name).data.copy_(load_file(source / "model.safetensors")[name])


def add(llm: Any, source: Path) -> None:
    """Load an adapter under the number and name that its directory has, anew if it is there."""
    request = adapter(str(source))
    request.load_inplace = True
    llm.llm_engine.add_lora(request)


@contextmanager
def snapshots(taken: list[dict[str, list[str]]] | None) -> Iterator[None]:
    """When a request ends, add the digests of its blocks' bytes: per layer, block after block.

    Straight from vLLM's own tensors, by its own block table; nothing of VUA is in between.
    """
    if taken is None:
        yield
        return
    from vua.vllm.kv_connector_v1 import VUAStorageConnector_V1 as Connector

    register, finished = Connector.register_kv_caches, Connector.request_finished_all_groups
    caches: dict[str, torch.Tensor] = {}

    def registered(self: Any, kv_caches: dict[str, torch.Tensor]) -> None:
        caches.update(kv_caches)
        register(self, kv_caches)

    def ended(self: Any, request: Any, block_ids: tuple[list[int], ...]) -> Any:
        digests = {}
        for group, table in zip(self._kv_cache_config.kv_cache_groups, block_ids, strict=True):
            for name in group.layer_names:
                digests[name] = [digest(caches[name][block]) for block in table]
        assert taken is not None
        taken.append(digests)
        return finished(self, request, block_ids)

    with (
        mock.patch.object(Connector, "register_kv_caches", registered),
        mock.patch.object(Connector, "request_finished_all_groups", ended),
    ):
        yield


def digest(block: torch.Tensor) -> str:
    return hashlib.sha256(block.contiguous().view(torch.uint8).numpy().tobytes()).hexdigest()


def weight_transfer(backend: str) -> Any:
    """Make a transport of weights known to vLLM as ``backend``; return the setting for it.

    What a trainer computed comes from files: vLLM's own transports (NCCL, CUDA IPC) need GPUs. Its
    sessions and calls are the same with this one.
    """
    from vllm.config.weight_transfer import WeightTransferConfig
    from vllm.distributed.weight_transfer import WeightTransferEngine, WeightTransferEngineFactory
    from vllm.distributed.weight_transfer.base import (
        WeightTransferInitInfo,
        WeightTransferUpdateInfo,
    )

    @dataclass
    class Update(WeightTransferUpdateInfo):
        source: str

    class FileTransfer(WeightTransferEngine[WeightTransferInitInfo, Update]):
        init_info_cls, update_info_cls = WeightTransferInitInfo, Update

        def nothing(self, *_: Any) -> None:
            """Files need no connection, and weights are written in place."""

        init_transfer_engine = start_weight_update = finish_weight_update = shutdown = nothing

        def update_weights(self, update_info: dict[str, Any]) -> None:
            """Load at once; the base class waits for an accelerator, and there is none."""
            self.receive_weights(self.parse_update_info(update_info))

        def receive_weights(self, update_info: Update) -> None:
            write(self.model, Path(update_info.source))

    WeightTransferEngineFactory.register_engine(backend, FileTransfer)
    return WeightTransferConfig(backend=backend)
