"""Layers that keep one state instead of K and V of each token (Mamba, gated delta nets...).

A state sums up all tokens before it, so it is valid behind exactly one of them. A chunk's file in a
group ``s<n>`` holds, for each layer, the state of n bytes as it is behind the chunk's last token;
few chunks have such a file. Its array ``k`` has the form of any other group's, so that whatever
reads, checks or deletes files needs to know nothing of states. It holds the state's bytes, filled
up with zeros and cut into one row for each of the chunk's tokens.
"""

from __future__ import annotations

from vua.errors import LayoutError
from vua.format.layout import KVLayout

__all__ = ["state_layout", "state_nbytes"]


def state_layout(*, layers: int, parts: int, nbytes: int, chunk_tokens: int) -> KVLayout:
    """Return the layout of layers that keep a state.

    >>> state_layout(layers=3, parts=2, nbytes=100, chunk_tokens=64).k_dim
    2

    Args:
        layers: how many there are.
        parts: into how many parts a model's state is cut (one for each tensor-parallel rank); they
            take the place of KV heads.
        nbytes: bytes of one layer's state, of one part of it.
        chunk_tokens: tokens per chunk.

    Raises LayoutError: no state has so many bytes.
    """
    return KVLayout(
        layers=layers,
        kv_heads=parts,
        k_dim=-(-nbytes // chunk_tokens),
        v_dim=0,
        dtype="U8",
        chunk_tokens=chunk_tokens,
        group=f"s{nbytes}",
    )


def state_nbytes(layout: KVLayout) -> int | None:
    """Return the bytes of one layer's state, of one part; None for a group that keeps K and V.

    Raises LayoutError: the layout says that it is one of states, and cannot be.
    """
    if not layout.keeps_state:
        return None
    nbytes = int(layout.group[1:])
    expected = state_layout(
        layers=layout.layers,
        parts=layout.kv_heads,
        nbytes=nbytes,
        chunk_tokens=layout.chunk_tokens,
    )
    if layout != expected:
        msg = f"a state of {nbytes} bytes has the layout {expected}, found {layout}"
        raise LayoutError(msg)
    return nbytes
