"""Forms of pages that an engine on a CPU may have."""

from __future__ import annotations

import torch

from vua.device.cpu_pages import PageForm


def column_form(block_size: int, dim: int) -> PageForm:
    """The form vLLM calls `vec`: K transposed as one block, then V by rows."""
    k = torch.arange(dim) * block_size + torch.arange(block_size)[:, None]
    v = torch.arange(block_size * dim).view(block_size, dim) + block_size * dim
    return PageForm(k, v, 2 * dim)


def shuffled_form(block_size: int, dim: int) -> PageForm:
    generator = torch.Generator().manual_seed(block_size * dim)
    places = torch.randperm(2 * block_size * dim, generator=generator)
    k, v = places.view(2, block_size, dim)
    return PageForm(k, v, 2 * dim)
