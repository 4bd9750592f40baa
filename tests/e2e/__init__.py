"""The vLLM connector inside real vLLM engines, on tiny models and a CPU.

Not called `vllm`: this package's parent is on the import path while tests run, and would hide the
engine itself.
"""
