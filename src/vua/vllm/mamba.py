"""States of Mamba-like layers in vLLM: how they are cut into parts, and what tells kinds apart.

Where they lie is in `vua.device.state_pages`.
"""

from __future__ import annotations

from typing import Any

__all__ = ["signature", "state_parts"]


def state_parts(spec: Any, tp_size: int) -> int:  # noqa: ANN401
    """Return into how many parts tensor parallelism cuts a state of this kind."""
    return 1 if getattr(spec, "tp_replicated", False) else tp_size


def signature(spec: Any, tp_size: int) -> list[object]:  # noqa: ANN401
    """Return what tells states of this kind from others of as many bytes, for the identity.

    The size of tensor parallelism belongs to it: a rank's part holds pieces of several projections
    (queries, keys and values of a convolution, each cut by itself), so parts are not heads.
    """
    from vllm.model_executor.layers.mamba.mamba_utils import get_conv_state_layout

    return [
        str(spec.mamba_type),
        [list(shape) for shape in spec.shapes],
        [str(dtype) for dtype in spec.dtypes],
        str(get_conv_state_layout()),
        tp_size,
    ]
