"""Sequences of different lengths in one tensor, padded on the left, as `generate` wants them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from vua.errors import InputError

__all__ = ["Row", "rows_of"]


class Row(NamedTuple):
    """One row of a batch."""

    ids: torch.Tensor
    """(T,), without padding."""
    padding: int
    """Columns of padding before them."""


def rows_of(
    input_ids: torch.Tensor | Sequence[int], attention_mask: torch.Tensor | None
) -> list[Row]:
    """Return the sequences of a batch without their padding.

    Args:
        input_ids: (T,) or (B, T).
        attention_mask: 0 where there is padding, of the shape of ``input_ids`` or shorter, as what
            is generated is no padding. None: no padding.

    Raises:
        InputError: other shapes, or padding that is not on the left.
    """
    ids = torch.as_tensor(input_ids)
    if ids.ndim == 1:
        ids = ids[None]
    if ids.ndim != 2 or not len(ids):
        raise InputError(
            f"input_ids of shape {tuple(ids.shape)}; expected one sequence, (T,), or a batch of "
            "them, (B, T)"
        )
    if attention_mask is None:
        return [Row(row, 0) for row in ids]
    mask = torch.as_tensor(attention_mask).bool()
    mask = mask[None] if mask.ndim == 1 else mask
    if mask.ndim != 2 or len(mask) != len(ids) or mask.shape[1] > ids.shape[1]:
        raise InputError(
            f"an attention_mask of shape {tuple(mask.shape)} for input_ids of shape "
            f"{tuple(ids.shape)}; expected the same shape"
        )
    paddings = [int(count) for count in (~mask).sum(dim=1)]
    if any(bool(row[:count].any()) for row, count in zip(mask, paddings, strict=True)):
        raise InputError(
            "the attention_mask hides tokens that are not at the left end; pad on the left "
            "(tokenizer.padding_side = 'left')"
        )
    return [Row(row[count:], count) for row, count in zip(ids, paddings, strict=True)]
