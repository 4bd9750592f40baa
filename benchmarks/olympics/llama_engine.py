"""llama.cpp's own server (as the package xllamacpp holds it), with states of its slot in files.

The client says which file: here it restores the one of the prompt before it asks, and saves it
afterwards, as the documentation of `--slot-save-path` shows.
"""

from __future__ import annotations

import json
import urllib.error
import urllib.request
import zlib
from array import array
from importlib import metadata
from pathlib import Path
from typing import Any


def prepare() -> None:
    """Nothing takes long."""


def version() -> str:
    """Return the package's version; its last part is llama.cpp's build."""
    return metadata.version("xllamacpp")


def make(job: dict[str, Any]) -> Engine:
    """Make an engine."""
    return Engine(job)


class Engine:
    """One server with one slot."""

    def __init__(self, job: dict[str, Any]) -> None:
        import xllamacpp

        given = xllamacpp.CommonParams()
        given.model.path = job["model"]
        given.n_ctx, given.n_parallel, given.cache_ram_mib = 1024, 1, 0
        given.cpuparams.n_threads = given.cpuparams_batch.n_threads = 1
        given.endpoint_slots, given.warmup = True, False
        given.cache_type_k = given.cache_type_v = getattr(
            xllamacpp.ggml_type, f"GGML_TYPE_{job['dtype']}"
        )
        given.flash_attn_type = xllamacpp.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_ENABLED
        adapters = [xllamacpp.CommonAdapterLoraInfo(path, 1.0) for path in job["adapters"]]
        given.lora_adapters = adapters
        self.root = Path(job["transfer"]["root"]) if job.get("transfer") else None
        if self.root is not None:
            self.root.mkdir(exist_ok=True)
            given.slot_save_path = f"{self.root}/"
        self.server = xllamacpp.Server(given)

    def _post(self, path: str, body: dict[str, Any]) -> Any:
        request = urllib.request.Request(
            f"{self.server.listening_address}{path}",
            json.dumps(body).encode(),
            {"Content-Type": "application/json"},
        )
        with urllib.request.urlopen(request) as answer:
            return json.load(answer)

    def ask(
        self,
        prompt: list[int],
        new: int,
        adapter: str | None,  # noqa: ARG002 - the server's, for all requests
    ) -> tuple[list[int], int]:
        """Restore the slot, where its file is there and llama.cpp takes it; generate; save it."""
        name = {"filename": f"{zlib.crc32(array('q', prompt).tobytes()):08x}.bin"}
        if self.root is not None:
            self._post("/slots/0?action=erase", {})
            if (self.root / name["filename"]).exists():
                self._try("/slots/0?action=restore", name)
        asked = {"prompt": prompt, "n_predict": new, "temperature": 0, "top_k": 1}
        asked |= {"cache_prompt": True, "return_tokens": True, "id_slot": 0, "ignore_eos": True}
        found = self._post("/completion", asked)
        if self.root is not None:
            self._try("/slots/0?action=save", name)
        return found["tokens"], int(found["timings"].get("cache_n", 0))

    def _try(self, path: str, body: dict[str, Any]) -> None:
        try:
            self._post(path, body)
        except urllib.error.HTTPError as problem:
            print(path, problem.code, problem.read(), flush=True)  # the client goes on without

    def step(self) -> None:
        """It has written all before it answered."""

    def close(self) -> None:
        """Let the process end."""
