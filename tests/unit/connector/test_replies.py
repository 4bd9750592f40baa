"""Mirrors `vua.connector.replies`: when generated chunks stop being stored, and begin again."""

from __future__ import annotations

import unittest

from vua.connector.replies import MOST_CHUNKS, MOST_REPLIES, Replies

LOG = "vllm.vua.scheduler"


def reply(number: int) -> bytes:
    """The prefix hash of a reply's first chunk."""
    return number.to_bytes(32, "big")


def stored(replies: Replies, numbers: range, chunks: int = 20) -> int:
    """How many chunks of these replies are wanted, one after the other."""
    return sum(replies.wanted(reply(number), 1) for number in numbers for _ in range(chunks))


class RepliesTest(unittest.TestCase):
    def test_replies_that_nobody_continues(self) -> None:
        """After so many chunks without a hit none is wanted, and one line says so."""
        replies = Replies()
        with self.assertLogs(LOG, "WARNING") as lines:
            self.assertEqual(MOST_REPLIES * 20, stored(replies, range(MOST_REPLIES)))
            self.assertEqual(1, stored(replies, range(100, 500)))

        self.assertEqual(1, len(lines.output))
        self.assertIn(f"{MOST_REPLIES * 20 + 1} generated chunks", lines.output[0])
        replies.asked([b"another prompt"])
        self.assertEqual(0, stored(replies, range(500, 600)))

    def test_a_prompt_that_begins_with_a_reply_ends_the_pause(self) -> None:
        """Also with one that was not stored; and each reply counts once."""
        replies = Replies()
        with self.assertLogs(LOG, "WARNING"):
            stored(replies, range(100))
        for _ in range(5):
            replies.asked([b"a system prompt", reply(99)])

        again = stored(replies, range(100, 500))
        self.assertTrue(MOST_CHUNKS <= again < 2 * MOST_CHUNKS, again)

    def test_one_long_reply_tells_nothing(self) -> None:
        """Nor do many short ones: both a number of chunks and one of replies must be reached."""
        with self.assertNoLogs(LOG):
            self.assertEqual(9000, stored(Replies(), range(1), 9000))
            self.assertEqual(200, stored(Replies(), range(200), 1))

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

    def test_old_hits_do_not_count_for_ever(self) -> None:
        """Where conversations end and single questions come, the pause comes, too."""
        replies = Replies()
        for number in range(5000):
            replies.wanted(reply(number), 1)
            replies.asked([reply(number)])
        with self.assertLogs(LOG, "WARNING"):
            self.assertLess(stored(replies, range(5000, 8000)), 3000 * 20 // 2)
