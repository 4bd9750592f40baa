"""Moves KV caches between an engine's paged blocks and chunks: the one package that knows CUDA.

`paged.PagedCache` describes where the engine's rows are, `paged.slots_of` which of them are a
request's tokens, `paged.gather` and `paged.scatter` copy them out of and into the cache, and
`staging.Staging` moves them to and from pinned host memory beside the engine's own work. On a GPU
the copies are one Triton kernel; without Triton, or on the CPU, they are PyTorch indexing, and both
give the same bytes. Everything works on CPU tensors; CUDA is used only if a cache is there.
"""
