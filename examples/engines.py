"""One prompt, several engines: vLLM computes it, transformers compares a chunk and loads the rest.

    python examples/engines.py [--path DIR] [--new-tokens N] [--sglang URL]

vLLM and transformers run in processes of their own. SGLang has an environment of its own: start its
server as docs/sglang.md says, with the same directory, `--dtype float32` and the model whose path
this prints, and give its address. SGLang computes this first prompt, too, under a name of its own.
Nothing runs between the engines; they share the directory.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import urllib.request
from typing import Any

from answering import DOCUMENT, Answerer, options
from transformers import AutoTokenizer

from real_model import real_model
from small_models import ENGINE_ENVIRONMENT

QUESTION = "What does this text promise?"


def by_vllm(path: str, new_tokens: int, ids: list[int]) -> tuple[int, list[int]]:
    """Let vLLM answer: tokens loaded, and made."""
    from vllm import LLM, SamplingParams

    llm = LLM(
        model=str(real_model()),
        dtype="float32",
        enforce_eager=True,
        max_model_len=2048,
        kv_cache_memory_bytes=1 << 29,
        enable_prefix_caching=False,
        kv_transfer_config={
            "kv_connector": "VUAStorageConnector_V1",
            "kv_connector_module_path": "vua.vllm.kv_connector_v1",
            "kv_role": "kv_both",
            "kv_load_failure_policy": "recompute",
            "kv_connector_extra_config": {
                "shared_storage_path": path,
                "load_policy": "always",  # also where computing so little would be faster
                "witness_every": 0,  # else the first prompt found is computed, to compare
            },
        },
    )
    sampling = SamplingParams(temperature=0, max_tokens=new_tokens)
    (output,) = llm.generate([{"prompt_token_ids": ids}], sampling, use_tqdm=False)
    return output.num_cached_tokens, list(output.outputs[0].token_ids)


def by_sglang(url: str, new_tokens: int, ids: list[int]) -> tuple[int, list[int]]:
    """Let an SGLang server answer: tokens loaded from its storage, and made."""
    sampling = {"temperature": 0, "max_new_tokens": new_tokens}
    body = json.dumps({"input_ids": ids, "sampling_params": sampling}).encode()
    header = {"Content-Type": "application/json"}
    request = urllib.request.Request(f"{url}/generate", body, header)  # noqa: S310 - the user's own
    with urllib.request.urlopen(request) as stream:  # noqa: S310
        answer = json.load(stream)
    details = answer["meta_info"].get("cached_tokens_details") or {}
    return details.get("storage") or 0, answer["output_ids"]


def be_engine(name: str, chosen: Any) -> None:
    """Ask one engine, and print how much it loaded and what it answered."""
    text = DOCUMENT.read_text(encoding="utf-8")[:1500]
    messages = [{"role": "user", "content": f"{text}\n\n{QUESTION}"}]
    print(f"{name}: ", end="", flush=True)
    if name == "transformers":
        answerer = Answerer(chosen.path, chosen.new_tokens)
        with answerer.prefixes:
            answerer.answer(messages)
        return
    tokenizer: Any = AutoTokenizer.from_pretrained(real_model())
    asked = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=True)
    ids: list[int] = asked["input_ids"]
    if name == "vLLM":
        loaded, made = by_vllm(chosen.path, chosen.new_tokens, ids)
    else:
        loaded, made = by_sglang(chosen.sglang, chosen.new_tokens, ids)
    print(f"{loaded} of {len(ids)} tokens loaded")
    print(f"  {QUESTION!r} -> {tokenizer.decode(made, skip_special_tokens=True)!r}", flush=True)


def main() -> None:
    """Run the engines one after the other; or be one of them."""
    parser = options(__doc__)
    parser.add_argument("--sglang", metavar="URL", help="a server on the same directory")
    parser.add_argument("--engine", help="be this one")
    chosen = parser.parse_args()
    if chosen.engine:
        be_engine(chosen.engine, chosen)
        return
    print(f"model: {real_model()}", flush=True)
    if not chosen.sglang:
        print("SGLang is left out: give the address of its server with --sglang", flush=True)
    engines = ["vLLM", *(["SGLang"] if chosen.sglang else []), "transformers"]
    for name in engines:
        subprocess.run(
            [sys.executable, __file__, *sys.argv[1:], "--engine", name],
            env=os.environ | ENGINE_ENVIRONMENT,
            check=True,
        )


if __name__ == "__main__":
    main()
