"""What moves pages between a pool of SGLang's and a namespace, as tests want it."""

from __future__ import annotations

from pathlib import Path

from vua.connector.cache_spec import Group, Model
from vua.connector.config import ConnectorConfig, Timeouts
from vua.connector.metrics import Recorder
from vua.format.identity import Identity
from vua.format.layout import Shard
from vua.sglang.transfers import Comparisons, HostPages, Transfers
from vua.store.namespace import Namespace


def transfers_of(
    root: Path,
    namespace: Namespace,
    shard: Shard,
    pages: HostPages,
    stats: Recorder | None = None,
    *,
    io_s: float = 60.0,
    proven: bool = True,
) -> Transfers:
    """Nothing is compared; ``proven``: whether the weights stay as they are."""
    (store,), stats = namespace.stores, stats or Recorder()
    layout = store.layout
    identity = Identity(model="test", chunk_tokens=layout.chunk_tokens)
    group = Group(layout, tuple(range(layout.layers)), ((shard,),), (0,))
    config = ConnectorConfig(
        shared_storage_path=str(root),
        timeouts=Timeouts(io_s=io_s),
        witness_every=0,
    )
    model = Model(identity, (group,), (layout.chunk_tokens,))
    believed = Comparisons(*(model, [store], config, stats), setup="", writer="", seed=0)
    return Transfers(
        *(store, shard, pages, config, stats),
        proof=lambda: lambda: proven,
        writer="",
        believed=believed,
    )
