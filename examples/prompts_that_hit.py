"""What makes prompts hit: for each advice, the tokens found of a second prompt without and with it.

    python examples/prompts_that_hit.py

Each case is a directory of its own, with one prompt stored. The tokenizer is a real model's, the
chat template one as most models have it; K and V are zeros, since only names count here.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from typing import Any, TypeAlias

import torch
from answering import real_model
from transformers import AutoTokenizer

from vua.catalog.prefix import order_documents
from vua.core import VUA, VUAConfig

Ids: TypeAlias = list[int]
Case: TypeAlias = tuple[Ids, Ids | Callable[[str], Ids], int]
"""A prompt that is stored, the next one (perhaps made for what a directory holds), a chunk."""

CHUNK = 64
TEMPLATE = (
    "{% for one in messages %}<|im_start|>{{ one.role }}\n"
    "{% if loop.first and tools %}{{ tools | tojson }}\n{% endif %}"
    "{{ one.content if keep_thinking else one.content.split('</think>')[-1] }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
TOKENIZER: Any = AutoTokenizer.from_pretrained(real_model())
END = TOKENIZER.encode("<|im_end|>\n<|im_start|>assistant\n")
RULES = " ".join(
    f"Rule {n}: answer by section {n} of the handbook, and name it." for n in range(32)
)
QUESTIONS = "Which rule is the third?", "May I leave early on Fridays?"
TOOLS = [
    {"name": name, "description": f"Looks up the {name} of a place, by its name and the day."}
    for name in ("weather", "traffic", "population", "history", "time")
]
DOCUMENTS = [" ".join(f"Document {one}, sentence {n}." for n in range(30)) for one in "ABC"]
ANSWER = (
    f"<think>{' '.join(f'I read section {n}.' for n in range(20))}</think>Section three says so."
)


def prompt(system: str, *turns: str, tools: Any = None, **options: Any) -> Ids:
    """The ids of a chat: what the system says, then user and assistant in turn."""
    messages = [{"role": "system", "content": system}]
    messages += [
        {"role": "assistant" if at % 2 else "user", "content": turn}
        for at, turn in enumerate(turns)
    ]
    ids: Ids = TOKENIZER.apply_chat_template(
        messages, tools=tools, chat_template=TEMPLATE, add_generation_prompt=True,
        return_dict=True, **options,
    )["input_ids"]  # fmt: skip
    return ids


def cases() -> Iterator[tuple[str, Case, Case]]:
    """Yield each advice, two prompts without it, and two with it."""
    one, other = QUESTIONS

    def both(ask: Callable[[str, str], Ids], *values: str) -> Case:
        return ask(values[0], one), ask(values[1], other), CHUNK

    for what, *values in (("date", "Today is 28 May, 14:05.", "Today is 28 May, 14:06."),
                          ("user's name", "You help Ada.", "You help Bob.")):  # fmt: skip
        yield (
            f"the {what} last",
            both(lambda said, asked: prompt(f"{said} {RULES}", asked), *values),
            both(lambda said, asked: prompt(RULES, f"{said} {asked}"), *values),
        )
    by_name = sorted(TOOLS, key=lambda tool: tool["name"])
    yield (
        "tools in one order, as by name",
        (prompt(RULES, one, tools=TOOLS), prompt(RULES, other, tools=TOOLS[::-1]), CHUNK),
        (prompt(RULES, one, tools=by_name), prompt(RULES, other, tools=by_name), CHUNK),
    )

    def ranked(places: tuple[int, ...], asked: str = "") -> Ids:
        return prompt("", "\n".join([*(DOCUMENTS[at] for at in places), asked]))

    def ordered(path: str) -> Ids:
        """The documents in the order that is stored furthest."""
        places, _, _ = order_documents(path, 3, lambda some: ranked(tuple(some))[: -len(END)])
        return ranked(tuple(places), other)

    yield (
        "documents in the order that is stored (`order_documents`)",
        (ranked((0, 1, 2), one), ranked((2, 0, 1), other), CHUNK),
        (ranked((0, 1, 2), one), ordered, CHUNK),
    )
    turns = [f"Turn {n}: {' '.join(f'word {n} {m}' for m in range(8))}" for n in range(19)]
    yield (
        "a history that is cut seldom, and by half",
        (prompt(RULES, *turns[0:15]), prompt(RULES, *turns[2:17]), CHUNK),
        (prompt(RULES, *turns[8:15]), prompt(RULES, *turns[8:17]), CHUNK),
    )
    stored = prompt(RULES, one) + TOKENIZER.encode(ANSWER, add_special_tokens=False)
    yield (
        "thinking that stays in the history, where answers are stored",
        (stored, prompt(RULES, one, ANSWER, other), CHUNK),
        (stored, prompt(RULES, one, ANSWER, other, keep_thinking=True), CHUNK),
    )
    short = prompt("Translate into French.", one), prompt("Translate into French.", one)
    yield "a chunk that is shorter than the prompts: 16, not 64", (*short, 64), (*short, 16)
    shared = prompt(RULES, one), prompt(RULES, other)
    yield "smaller chunks, where prompts share little: 64, not 256", (*shared, 256), (*shared, 64)


def found(case: Case) -> str:
    """Store a case's first prompt; say how many tokens of the second are found."""
    first, second, size = case
    with tempfile.TemporaryDirectory() as path, VUA(VUAConfig(split_factor=size), path) as vua:
        if whole := len(first) // size * size:
            zeros = torch.zeros(1, 1, whole, 8)
            vua.put(first[:whole], [[zeros, zeros]])
        ids = second if isinstance(second, list) else second(path)
        return f"{vua.lookup(ids)[0]} of {len(ids)}"


def main() -> None:
    """Print a table of all cases."""
    print("| advice | found without it | with it |\n|---|--:|--:|")
    for advice, without, with_it in cases():
        print(f"| {advice} | {found(without)} | {found(with_it)} |", flush=True)


if __name__ == "__main__":
    main()
