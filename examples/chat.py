"""A chat of several turns: each turn loads what the turns before it have computed.

    python examples/chat.py [--path DIR] [--new-tokens N]

Run it again: a restarted process loads the whole history.
"""

from __future__ import annotations

from answering import DOCUMENT, Answerer, Messages, options

QUESTIONS = (
    "Here is a text:\n" + DOCUMENT.read_text(encoding="utf-8")[:1500] + "\nWhat is it about?",
    "Here is more of it:\n" + DOCUMENT.read_text(encoding="utf-8")[1500:2500] + "\nWhat is new?",
    "Thank you. And in one sentence?",
)


def main() -> None:
    """Ask the questions one after the other."""
    chosen = options(__doc__).parse_args()
    answerer = Answerer(chosen.path, chosen.new_tokens)
    messages: Messages = []
    with answerer.prefixes:
        for question in QUESTIONS:
            messages.append({"role": "user", "content": question})
            messages.append({"role": "assistant", "content": answerer.answer(messages)})


if __name__ == "__main__":
    main()
