"""Agents with one system prompt, each in a process of its own: the first computes it, all load it.

    python examples/agents.py [--path DIR] [--new-tokens N]

Nothing runs between the processes; they share the directory.
"""

from __future__ import annotations

import subprocess
import sys

from answering import DOCUMENT, Answerer, options

TASKS = ("Name one thing to check.", "Write a title.", "Which word is the most important?")


def agent(path: str, new_tokens: int, task: str) -> None:
    """One agent: the system prompt that all share, and its own task."""
    rules = "You are a careful agent. These rules hold:\n" + DOCUMENT.read_text("utf-8")[:2000]
    answerer = Answerer(path, new_tokens)
    with answerer.prefixes:
        answerer.answer([{"role": "system", "content": rules}, {"role": "user", "content": task}])


def main() -> None:
    """Run the first agent, then the others at once; or be one of them."""
    parser = options(__doc__)
    parser.add_argument("--task", help="be one agent, with this task")
    chosen = parser.parse_args()
    if chosen.task:
        agent(chosen.path, chosen.new_tokens, chosen.task)
        return
    shared = ["--path", chosen.path, "--new-tokens", str(chosen.new_tokens)]
    commands = [[sys.executable, __file__, *shared, "--task", task] for task in TASKS]
    subprocess.run(commands[0], check=True)
    others = [subprocess.Popen(command) for command in commands[1:]]
    statuses = [process.wait() for process in others]
    if any(statuses):
        sys.exit("an agent has failed")


if __name__ == "__main__":
    main()
