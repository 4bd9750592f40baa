"""The vLLM worker that owns this connector: its model, its LoRA adapters, and calls into it.

vLLM gives a connector the configuration and the KV cache, but no reference to the model. The
connector is created by its worker, so the worker is found on the call stack, as the
``WorkerWrapperBase`` through which every executor of vLLM calls it. If it is not found
nothing is cached, since the weights in memory would be unknown.

Adapters are identified by what the engine has loaded, not by what is at their path now. vLLM loads
an adapter when a worker first needs it or on request (``add_lora``), keeps it under a number,
replaces it (``load_inplace``), and may drop it and read its files again. A worker copies an adapter
when vLLM has read it: every tensor as loaded, with rank and scaling. A separate thread digests that
while the engine continues. The scheduler's half learns the digest from the workers; until all of
them agree, a request with that adapter is neither loaded nor stored. Later orders name the
adapter's content, and a worker that holds another one refuses.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from types import FrameType
from typing import Any, Final

from vllm.v1.worker.worker_base import WorkerWrapperBase

from vua.connector.cache_spec import UncachedError
from vua.connector.extras import Adapter, AdapterNote, Content
from vua.connector.log import logger
from vua.connector.weights_watch import EngineMemory, EngineState, NoAdapters

_VERSION: Final = b"vua.lora.v1"
_NAMES: Final = frozenset({"id"})
"""Attributes of a loaded adapter that do not affect its results."""


class Adapters(NoAdapters):
    """What one worker's LoRA manager holds."""

    def __init__(self, runner: Any) -> None:
        """Watch vLLM's runner, which has loaded no adapter yet. Raises UncachedError: unknown."""
        manager = getattr(runner, "lora_manager", None)
        load = getattr(manager, "_load_adapter", None)
        kept: Any = getattr(manager, "_adapter_manager", None)
        if not (callable(load) and callable(getattr(kept, "list_adapters", None))):
            raise UncachedError("this vLLM's structure of LoRA adapters is unknown")
        self._runner, self._kept = runner, kept
        self._load: Callable[[Any], Any] = load
        manager._load_adapter = self._load_and_copy  # type: ignore[union-attr]  # noqa: SLF001
        self._digests: weakref.WeakKeyDictionary[Any, Future[str]] = weakref.WeakKeyDictionary()
        """Digests of adapters loaded from files; no other has one."""
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="vua-adapters")
        self._latest: dict[int, Adapter] = {}
        """The latest known content of each number."""
        self._since: dict[int, list[Future[str] | None]] = {}
        """Digests of other adapters that a number has held since then; None: that one has no
        digest."""
        self._held: dict[int, Adapter] = {}
        self._reported: dict[int, Adapter] = {}
        self._being_read: set[int] = set()
        """Adapters present at the latest look that have no digest yet."""
        self._asked: set[int] = set()
        """What the scheduler's half has asked for, still without an answer."""

    def _load_and_copy(self, lora_request: Any) -> Any:
        """Begin to digest an adapter; vLLM packs it next, which scales its tensors in place."""
        adapter = self._load(lora_request)
        try:
            self._digests[adapter] = self._thread.submit(adapter_content(adapter).digest)
        except (UncachedError, TypeError, RuntimeError) as problem:
            name = getattr(lora_request, "lora_name", "")
            log.warning("VUA: requests with the adapter %.80r are not cached: %s", name, problem)
        return adapter

    def record(self) -> None:
        held, being_read = {}, set()
        for number, adapter in self._kept.list_adapters().items():
            digest = self._digests.get(adapter)
            if digest is not None and digest.done():
                held[number] = self._named(number, digest.result())
                continue
            since = self._since.setdefault(number, [])
            since += [] if digest in since else [digest]
            being_read |= set() if digest is None else {number}
        self._held, self._being_read = held, being_read

    def _named(self, number: int, digest: str) -> Adapter:
        """Return what a number holds: as before if it has held nothing else meanwhile."""
        latest, since = self._latest.get(number), self._since.pop(number, [])
        others = [one is None or not one.done() or one.result() != digest for one in since]
        if latest is None or latest.digest != digest or any(others):
            generation = 0 if latest is None else latest.generation + 1
            latest = self._latest[number] = Adapter(number, digest, generation)
        return latest

    def holds(self, adapter: Adapter | None) -> bool:
        return adapter is None or self._held.get(adapter.number) == adapter

    def news(self, wanted: Iterable[Any]) -> dict[int, AdapterNote]:
        """See :meth:`NoAdapters.news`; what is wanted and missing is loaded.

        As vLLM would in the next step. The answer comes when the digest is known.
        """
        self.record()
        for request in wanted:
            number = request.lora_int_id
            self._asked.add(number)
            if number not in self._kept.list_adapters():
                try:
                    self._runner.add_lora(request)
                except Exception as problem:  # noqa: BLE001 - the request will say it, too
                    log.debug("adapter %r is not loaded: %s", request.lora_name, problem)
                self.record()
        asked = self._asked - self._being_read
        self._asked &= self._being_read
        changed = [n for n, adapter in self._held.items() if self._reported.get(n) != adapter]
        gone = self._reported.keys() - self._held.keys()
        self._reported = dict(self._held)
        return {n: AdapterNote(self._held.get(n), 1) for n in {*changed, *gone, *asked}}


def adapter_content(adapter: Any) -> Content:
    """Return a copy of the content of a loaded adapter (vLLM's ``LoRAModel``), to be digested.

    Covers every attribute except its number, and all bytes of all tensors, so nothing that a
    release adds is missed. The engine's settings for adapters count separately, see
    `engine_identity`. Must be called before vLLM packs the adapter, which scales tensors in place.

    Raises:
        UncachedError: it has an attribute of a kind that has no canonical bytes.
    """
    return Content(adapter, _VERSION, _attributes)


def _attributes(value: Any) -> Mapping[str, Any] | None:
    if not type(value).__module__.startswith("vllm.lora."):
        return None
    return {name: item for name, item in vars(value).items() if name not in _NAMES}


log = logger("worker")

_LEAVES_WEIGHTS: Final = frozenset(
    # One word each. Steps of the engine.
    "execute_model sample_tokens execute_dummy_batch take_draft_token_ids "  # noqa: SIM905
    # Start and end; a model is loaded before its connector is made.
    "init_device initialize_from_config compile_or_warm_up_model determine_available_memory "
    "update_max_model_len set_kv_cache_layout wait_for_comm shutdown "
    # Questions.
    "check_health get_kv_cache_spec get_supported_kv_cache_layouts get_supported_tasks "
    "get_kv_connector_handshake_metadata get_compilation_match_table get_encoder_timing_stats "
    "get_simple_cpu_offload_num_cpu_blocks get_cache_block_size_bytes get_model_inspection "
    "compute_weight_checksums supports_draft_weight_updates vocab_size list_loras "
    "device rank local_rank is_driver_worker vllm_config "
    # Adapters: their content is in the keys, see `adapters`.
    "add_lora remove_lora pin_lora "
    # Other caches, profiles, files that are written.
    "reset_mm_cache reset_encoder_cache release_late_interaction_query_cache synchronize_device "
    "profile annotate_profile save_sharded_state save_tensorized_model".split()
)
"""What may be called or read from outside without affecting the weights: reviewed in the workers
(GPU, CPU) of vLLM 0.32 and 0.33. Anything else counts as a change."""

_MOVES_WEIGHTS: Final = ("sleep", "wake_up")
"""Calls that take the weights from the device, and put the same back."""
_READERS: Final = frozenset({"execute_model_ray", "_get_driver_model_for_cleanup"})
"""Functions of vLLM that use the worker's model runner without changing its weights: the steps of
the Ray executor, and what an engine in the caller's process keeps for its end."""


class Calls:
    """Replaces the worker in its wrapper, forwards everything, and counts calls that may write.

    So no list of ways to change weights is needed: ``reload_weights``, ``update_weights``,
    ``apply_model``, ``wake_up``, a worker extension's method, and a function passed to
    ``collective_rpc`` that uses ``model_runner`` all come through here. For the worker's thread.
    """

    __slots__ = ("_vua_memory", "_vua_worker")

    def __init__(self, worker: Any) -> None:
        object.__setattr__(self, "_vua_worker", worker)
        object.__setattr__(self, "_vua_memory", EngineMemory(None))

    @property  # type: ignore[misc] # by mypy, no class has another one than its own
    def __class__(self) -> type:
        return type(self._vua_worker)

    def __getattr__(self, name: str) -> Any:
        if name in _MOVES_WEIGHTS:
            self._vua_memory.moves += 1
            for call in self._vua_memory.before_moves:
                call()
        elif name not in _LEAVES_WEIGHTS and not (name == "model_runner" and _by_a_reader()):
            self._vua_note(name)
        return getattr(self._vua_worker, name)

    def __setattr__(self, name: str, value: Any) -> None:
        self._vua_note(name)
        setattr(self._vua_worker, name, value)

    def _vua_note(self, name: str) -> None:
        self._vua_memory.calls += 1
        self._vua_memory.last_call = name


def _by_a_reader() -> bool:
    """Whether the attribute is read by one of `_READERS`, through the wrapper or not."""
    frame = sys._getframe(2)  # noqa: SLF001
    while frame.f_code.co_name == "__getattr__" and frame.f_back is not None:
        frame = frame.f_back
    ours = str(frame.f_globals.get("__name__")).startswith("vllm.")
    return ours and frame.f_code.co_name in _READERS


def worker_of(wrapper: Any) -> tuple[EngineMemory, Any]:
    """Return the memory of a wrapper's worker, and its model runner.

    Inserts :class:`Calls` between ``wrapper`` (a ``WorkerWrapperBase``) and its worker. Raises
    UncachedError if their structure is unknown.
    """
    calls = wrapper.__dict__.get("worker")
    if type(calls) is not Calls:  # another connector of this worker may have done so already
        calls = Calls(calls)
        wrapper.worker = calls
    if wrapper.__dict__.get("worker") is not calls:
        raise UncachedError("the structure of this worker's wrapper is unknown")
    worker, memory = calls._vua_worker, calls._vua_memory  # noqa: SLF001
    runner, model = getattr(worker, "model_runner", None), None
    with suppress(AttributeError, NotImplementedError):  # of workers without a model
        model = worker.get_model()
    if runner is None or not callable(getattr(model, "modules", None)):
        msg = "this worker does not expose its model, so its weights cannot be checked"
        raise UncachedError(msg)
    memory.model = model
    return memory, runner


def find_worker() -> tuple[EngineMemory, Any]:
    """Return :func:`worker_of` the wrapper that is creating a connector right now."""
    frame: FrameType | None = sys._getframe(1)  # noqa: SLF001
    while frame is not None:
        owner = frame.f_locals.get("self")
        if isinstance(owner, WorkerWrapperBase):
            return worker_of(owner)
        frame = frame.f_back
    msg = "vLLM did not create this connector inside a worker: its model cannot be found"
    raise UncachedError(msg)


def memory_of(vllm_config: Any) -> EngineState:
    """Find the worker that is creating a connector right now, and its model and adapters."""
    try:
        memory, runner = find_worker()
    except UncachedError as problem:
        return EngineState(unknown=str(problem))
    try:
        adapters = None if vllm_config.lora_config is None else Adapters(runner)
    except UncachedError as problem:
        log.warning("VUA: requests with LoRA adapters are not cached: %s", problem)
        adapters = None
    return EngineState(memory, adapters)
