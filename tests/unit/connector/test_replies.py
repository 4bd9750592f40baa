"""Mirrors `vua.connector.replies`: when generated chunks stop being stored, and begin again."""

from __future__ import annotations

import unittest

from vua.connector.replies import MOST_CHUNKS, Replies

LOG = "vllm.vua.scheduler"


def reply(number: int) -> bytes:
    """The prefix hash of a reply's first chunk."""
    return number.to_bytes(32, "big")


def stored(replies: Replies, numbers: range, chunks: int = 20) -> int:
    """How many chunks of these replies are wanted, one after the other."""
    return sum(replies.wanted(reply(number), 1) for number in numbers for _ in range(chunks))


class RepliesTest(unittest.TestCase):
    def test_a_prompt_that_begins_with_a_reply_ends_the_pause(self) -> None:
        """Also with one that was not stored; and each reply counts once."""
        replies = Replies()
        with self.assertLogs(LOG, "WARNING"):
            stored(replies, range(100))
        for _ in range(5):
            replies.asked([b"a system prompt", reply(99)])

        again = stored(replies, range(100, 500))
        self.assertTrue(MOST_CHUNKS <= again < 2 * MOST_CHUNKS, again)

    def test_conversations_are_stored(self) -> None:
        """Many at once, in turns: after the first continued replies all of a turn is stored."""
        replies, users, chunks = Replies(), 32, 20
        with self.assertLogs(LOG, "WARNING"):
            stored(replies, range(users), chunks)
        for turn in range(1, 40):
            for user in range(users):
                replies.asked([reply(at * users + user) for at in range(turn)])
            now = stored(replies, range(turn * users, (turn + 1) * users), chunks)
            self.assertEqual(users * chunks, now, turn)
