"""What the scheduler's side tells the workers each step."""

from __future__ import annotations

from dataclasses import dataclass, field

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorMetadata

from vua.keys import ChunkKey

__all__ = ["LoadOrder", "Orders", "SaveOrder"]


@dataclass(slots=True)
class LoadOrder:
    """Load tokens [start, stop) of a request into its blocks."""

    request_id: str
    block_ids: list[int]
    """The request's block table from its first token on."""
    start: int
    stop: int
    keys: list[ChunkKey]
    """The chunks that cover [start, stop), in order."""


@dataclass(slots=True)
class SaveOrder:
    """Store whole chunks of a request whose K/V are complete after this step's forward pass."""

    block_ids: list[int]
    """The request's block table from its first token on."""
    keys: list[ChunkKey]


@dataclass(slots=True)
class Orders(KVConnectorMetadata):
    """One step's loads and saves."""

    loads: list[LoadOrder] = field(default_factory=list)
    saves: list[SaveOrder] = field(default_factory=list)
