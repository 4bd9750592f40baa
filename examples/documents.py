"""Retrieved documents in the order that hits most: stored ones first, as they were stored.

    python examples/documents.py [--path DIR] [--new-tokens N]

A search ranks the same documents otherwise for each question, and only a common beginning is
shared. `order_documents` looks up in which order the longest beginning is stored.
"""

from __future__ import annotations

from collections.abc import Sequence

from answering import DOCUMENT, Answerer, options

from vua.catalog.prefix import order_documents

FOUND = (
    ("What is promised?", (2, 0, 1)),
    ("What is not promised?", (0, 1, 2)),
    ("Who tests it?", (1, 3, 2)),
)
"""Questions, and the documents that a search has found for each, the best first."""


def main() -> None:
    """Ask each question with its documents in the order that is stored furthest."""
    chosen = options(__doc__).parse_args()
    answerer = Answerer(chosen.path, chosen.new_tokens)
    text = DOCUMENT.read_text(encoding="utf-8")
    with answerer.prefixes:
        for question, found in FOUND:
            documents = [f"{text[900 * one : 900 * (one + 1)]}\n\n" for one in found]

            def prompt(places: Sequence[int], documents: Sequence[str] = documents) -> list[int]:
                content = "".join(documents[one] for one in places)
                ids: list[int] = answerer.tokenizer.apply_chat_template(
                    [{"role": "user", "content": content}], continue_final_message=True,
                    return_dict=True,
                )["input_ids"]  # fmt: skip
                return ids

            places, tokens, _ = order_documents(chosen.path, len(documents), prompt)
            order = [found[one] for one in places]
            print(f"documents {found} as {order}: {tokens} tokens are stored")
            content = "".join(documents[one] for one in places)
            answerer.answer([{"role": "user", "content": f"{content}{question}"}])


if __name__ == "__main__":
    main()
