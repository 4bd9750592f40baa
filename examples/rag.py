"""Several questions about one document: it is computed for the first, and loaded for the others.

    python examples/rag.py [--path DIR] [--new-tokens N]

The document comes first in the prompt, and the question last: only a common beginning is shared.
"""

from __future__ import annotations

from answering import DOCUMENT, Answerer, options

QUESTIONS = ("What is this text about?", "Who should read it?", "What does it promise?")


def main() -> None:
    """Ask each question in a conversation of its own."""
    chosen = options(__doc__).parse_args()
    answerer = Answerer(chosen.path, chosen.new_tokens)
    document = DOCUMENT.read_text(encoding="utf-8")[:3000]
    with answerer.prefixes:
        for question in QUESTIONS:
            answerer.answer([{"role": "user", "content": f"{document}\n\n{question}"}])


if __name__ == "__main__":
    main()
