"""What the scheduler's half of the connector is asked, and answers."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

from vua.connector.cache_spec import Group, Model
from vua.connector.metadata import (
    ConnectorMetadata,
    GroupLoad,
    LoadOrder,
    SaveOrder,
    ScheduledRequest,
    ScheduledStep,
)
from vua.format.identity import Identity
from vua.format.layout import KVLayout

LAYOUT = KVLayout(1, 1, 8, 8, "U8", 16)


def model_of(
    layout: KVLayout = LAYOUT, *, workers: int = 1, block: int = 0, name: str = "m", **more: Any
) -> Model:
    """An engine's KV cache of one group, each of whose workers has all of it.

    ``block``: tokens of the engine's blocks; 0: as a chunk.
    """
    size, shards = layout.chunk_tokens, ((layout.full,) * workers,)
    group = Group(layout, tuple(range(layout.layers)), shards, (0,))
    return Model(Identity(model=name, chunk_tokens=size), (group,), (block or size,), **more)


def request_of(name: str, **settings: Any) -> Any:
    """A request of 64 tokens, as far as the scheduler's half looks at one."""
    plain: dict[str, Any] = {"prompt_embeds": None, "lora_request": None, "cache_salt": None}
    plain |= {"mm_features": [], "kv_transfer_params": None, "kv_hints": None}
    plain |= {"skip_reading_prefix_cache": False}
    ids = list(range(64))
    given = {"request_id": name, "prompt_token_ids": ids, "num_tokens": 64} | plain | settings
    return SimpleNamespace(**given)


def bare_connector(path: str, *, encoder_decoder: bool = False, **extra: Any) -> Any:
    """VLLM's connector of an engine that cannot be cached, so without a half; tests give it one."""
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole

    from vua.vllm.kv_connector_v1 import VUAStorageConnector_V1

    transfer = SimpleNamespace(
        kv_connector_extra_config={"shared_storage_path": path, **extra},
        is_kv_consumer=True,
        is_kv_producer=True,
    )
    engine: Any = SimpleNamespace(
        kv_transfer_config=transfer,
        model_config=SimpleNamespace(
            dtype="float32", runner_type="pooling", is_encoder_decoder=encoder_decoder
        ),
        cache_config=SimpleNamespace(cache_dtype="auto"),
        parallel_config=SimpleNamespace(),
    )
    cache: Any = SimpleNamespace(kv_cache_groups=[])
    made = VUAStorageConnector_V1(engine, KVConnectorRole.WORKER, cache)
    assert made.worker is None
    made.build_connector_worker_meta()  # it says once that it is unable
    return made


def scheduler_of(test: Any, root: Any, model: Model | None = None, **given: Any) -> Any:
    """A `SchedulerSide` of an engine that stores at ``root``, until the test ends.

    ``given``: of it, or of the settings; without it comparisons are off.
    """
    from vua.connector.config import ConnectorConfig
    from vua.connector.scheduler import SchedulerSide

    model = model or model_of()
    roles = {name: given.pop(name, True) for name in ("loads", "saves")}
    of_side = {name: given.pop(name) for name in ("clock",) if name in given}
    settings = {"chunk_tokens": model.chunk_tokens, "witness_every": 0} | given
    config = ConnectorConfig(shared_storage_path=str(root), **settings)
    side = SchedulerSide(model, config, **roles, **of_side)
    test.addCleanup(side.shutdown)
    return side


def step(computed: dict[str, int]) -> ScheduledStep:
    """A step that computes these new requests, all 64 tokens of each."""
    blocks = [[1, 2, 3, 4]]
    requests = [
        ScheduledRequest(name, tokens, 64, blocks, begins=True) for name, tokens in computed.items()
    ]
    return ScheduledStep(requests, lambda _: blocks)


def answer(side: Any, request: Any) -> tuple[int, bool]:
    """Ask about a request, step after step, until there is an answer."""
    while (given := side.matched_tokens(request, 0))[0] is None:
        side.take_loads()
    return given


def worker_of(root: Any, caches: Sequence[Any], layout: KVLayout, **given: Any) -> Any:
    """A `WorkerSide` that has taken over an engine's caches, one per layer, and stores at ``root``.

    ``given``: of the model, of the worker or of the settings.
    """
    from vua.connector.config import ConnectorConfig
    from vua.connector.group_transfer import Rank
    from vua.connector.worker import WorkerSide
    from vua.vllm import cache_spec

    of_model = {name: given.pop(name) for name in _OF_MODEL if name in given}
    of_worker = {name: given.pop(name) for name in _OF_WORKER if name in given}
    model = given.pop("model", None) or model_of(layout, **of_model)
    size = layout.chunk_tokens
    config = ConnectorConfig(shared_storage_path=str(root), chunk_tokens=size, **given)
    side = WorkerSide(model, config, Rank(0, 0), **of_worker)
    names = [f"model.layers.{at}" for at in range(len(caches))]
    numbers = {name: at for at, name in enumerate(names)}
    tables = dict.fromkeys(names, 0)
    side.register(dict(zip(names, caches, strict=True)), numbers, tables, cache_spec)
    return side


_OF_MODEL = ("block", "name", "trusts_itself", "blocks", "workers")
_OF_WORKER = ("memory", "identification", "clock")


def loading(keys: Sequence[Any], blocks: Sequence[int], name: str = "r") -> ConnectorMetadata:
    """The order to load these chunks into these blocks."""
    part = GroupLoad(0, 0, keys[-1].stop, keys)
    return ConnectorMetadata(loads=[LoadOrder(name, [list(blocks)], [part])])


def saving(keys: Sequence[Any], blocks: Sequence[int], **more: Any) -> ConnectorMetadata:
    """The order to store these chunks from these blocks."""
    return ConnectorMetadata(saves=[SaveOrder([list(blocks)], [(0, keys)], **more)])
