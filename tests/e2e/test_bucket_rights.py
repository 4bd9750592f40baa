"""The policies of docs/object-stores.md, on a server that asks for rights.

moto is that server, and does not enforce everything:

- the condition ``s3:prefix`` of ``s3:ListBucket``: here the listings that were sent are held
  against it;
- ``s3:GetObject`` on the source of a copy: it asks for ``s3:PutObject`` on the target alone;
- ``s3:DeleteObject`` on each object of a bulk deletion, as AWS does: it asks for it on the bucket,
  so the user of these tests has it there as well.
"""

from __future__ import annotations

import copy
import json
import re
import unittest
from collections.abc import Callable
from contextlib import ExitStack
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, Final
from urllib.parse import parse_qs, urlsplit

import pytest
import torch

from buckets import memory_url, moto, speaking_to
from commands import run, run_json
from e2e import harness
from helpers import caches_of, kv_bits
from proxy import FaultyProxy
from vua import VUA, NotWritableError, VUAConfig, VUAError
from vua.storage.bucket import Bucket

pytestmark = pytest.mark.thorough
pytest.importorskip("obstore")
boto3 = pytest.importorskip("boto3")

CONFIG: Final = VUAConfig(split_factor=4, model="tiny")
TOKENS: Final = torch.arange(12)
KV: Final = caches_of(layers=2, heads=2, tokens=12, dim=8)
DOC: Final = Path(__file__).parents[2] / "docs" / "object-stores.md"
NEED: Final = {
    "s3:ListBucket": {"ls", "verify", "pin", "gc", "rm"},
    "s3:GetObject": {"save", "load", "lookup", "ls", "verify", "pin", "gc", "rm"},
    "s3:PutObject": {"save", "refresh", "pin"},
    "s3:DeleteObject": {"pin", "gc", "rm"},
}
"""What fails without a right, on moto. On AWS a refresh needs ``s3:GetObject``, too."""


def policies() -> tuple[dict[str, Any], dict[str, Any]]:
    """The documented ones: of who reads and writes, of who only reads."""
    both, reading = re.findall(r'```json\n(\{"Version".*?)```', DOC.read_text(), re.DOTALL)
    return json.loads(both), json.loads(reading)


def without(policy: dict[str, Any], action: str) -> dict[str, Any]:
    policy = copy.deepcopy(policy)
    for statement in policy["Statement"]:
        statement["Action"] = [one for one in statement["Action"] if one != action]
    policy["Statement"] = [one for one in policy["Statement"] if one["Action"]]
    return policy


class User:
    """A user of a bucket who needs rights, and an empty place in it. A context manager."""

    def __init__(self) -> None:
        """Make the user, who has no right yet."""
        from moto.core import enable_iam_authentication

        self.enforced = enable_iam_authentication
        """What to enter while each request needs a right."""
        self.name = memory_url().rpartition("/")[2]
        self.url = f"s3://vua/{self.name}"
        self.requests: list[tuple[str, dict[str, list[str]]]] = []
        """Methods and queries of what was sent."""
        self._server = moto()
        admin = {"aws_access_key_id": "any", "aws_secret_access_key": "any"}
        self._iam = boto3.session.Session().client(
            "iam", endpoint_url=self._server, region_name="us-east-1", **admin
        )
        self._iam.create_user(UserName=self.name)
        self._key = self._iam.create_access_key(UserName=self.name)["AccessKey"]

    def __enter__(self) -> User:  # noqa: PYI034 - typing.Self needs Python 3.11
        """From now on this process speaks to the bucket as this user."""
        with ExitStack() as stack:
            proxy = FaultyProxy(self._server, self._note)
            stack.callback(proxy.close)
            stack.enter_context(
                speaking_to(
                    proxy.endpoint,
                    AWS_ACCESS_KEY_ID=self._key["AccessKeyId"],
                    AWS_SECRET_ACCESS_KEY=self._key["SecretAccessKey"],
                )
            )
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *problem: object) -> None:
        self._stack.close()

    def _note(self, number: int, method: str, path: str) -> str:
        del number
        self.requests.append((method, parse_qs(urlsplit(path).query, keep_blank_values=True)))
        return ""

    def allow(self, policy: dict[str, Any]) -> None:
        """Give the user these rights, and no others."""
        policy = copy.deepcopy(policy)
        if any("s3:DeleteObject" in one["Action"] for one in policy["Statement"]):
            on_bucket = {"Action": ["s3:DeleteObject"], "Resource": "arn:aws:s3:::BUCKET"}
            policy["Statement"].append({"Effect": "Allow", **on_bucket})  # for moto, see above
        text = json.dumps(policy).replace("BUCKET", "vua").replace("PREFIX", self.name)
        self._iam.put_user_policy(UserName=self.name, PolicyName="vua", PolicyDocument=text)

    def entries(self) -> list[str]:
        keys = (one.key for one in Bucket.at(self.url).walk())
        return sorted(key for key in keys if key.endswith(".safetensors"))

    def save(self, first: int = 0) -> None:
        """Store the prompt that begins with token ``first``. Raises VUAError, AssertionError."""
        with VUA(CONFIG, self.url) as vua:
            assert vua.put(TOKENS + first, KV) == 3

    def load(self) -> None:
        with VUA(CONFIG, self.url) as vua:
            found = vua.get_closest(TOKENS)
        assert (found.num_tokens, kv_bits(found.data)) == (12, kv_bits(KV))

    def lookup(self) -> None:
        with VUA(CONFIG, self.url) as vua:
            assert vua.lookup(TOKENS) == [12]

    def command(self, *words: str) -> None:
        """Run a command on the place. Raises AssertionError."""
        code, out, problem = run(words[0], self.url, *words[1:])
        assert code == 0, out + problem

    def failures(self, key: str) -> set[str]:
        """What does not work for a user who has stored a prompt; one entry of it is ``key``."""
        chunk = key.split("/")[2]
        works: dict[str, Callable[[], object]] = {
            "save": lambda: self.save(100),
            "load": self.load,
            "lookup": self.lookup,
            "refresh": lambda: Bucket.at(self.url).renew(key),
            "ls": lambda: self.command("ls", "--long"),
            "verify": lambda: self.command("verify"),
            "pin": lambda: (self.command("pin", chunk), self.command("pin", chunk, "--remove")),
            "gc": lambda: self.command("gc", "--max-bytes", "0"),
            "rm": lambda: self.command("rm", "--all"),
        }
        return {name for name, work in works.items() if not self._succeeds(work)}

    def _succeeds(self, work: Callable[[], object]) -> bool:
        try:
            work()
        except (AssertionError, VUAError, OSError):
            return False
        finally:
            Bucket.at(self.url).breaker.went(well=True)  # what comes next is to be tried, too
        return True


class PolicyTest(unittest.TestCase):
    """Each right is needed, and no other one."""

    def stored_by(self, user: User) -> str:
        """Give a user all documented rights, and store a prompt; return an entry's key."""
        user.allow(policies()[0])
        with user.enforced():
            user.save()
            return user.entries()[0]

    def test_documented(self) -> None:
        """With the documented rights everything works; only what is documented is sent."""
        with User() as user:
            key = self.stored_by(user)
            with user.enforced():
                self.assertEqual(set(), user.failures(key))
                self.assertEqual(["vua.json"], [one.key for one in Bucket.at(user.url).walk()])
                sent, user.requests = user.requests, []
                code, report = run_json("doctor", user.url)
                levels = {one["name"]: one["level"] for one in report["findings"]}
                self.assertEqual((0, {"ok"}), (code, set(levels.values())), report)
        listed = [query["prefix"][0] for _, query in sent if "list-type" in query]
        kinds = {(method, *sorted(set(query) & {"list-type", "delete"})) for method, query in sent}
        wanted = {("GET",), ("HEAD",), ("PUT",), ("GET", "list-type"), ("POST", "delete")}
        self.assertEqual(wanted, kinds)
        condition = policies()[0]["Statement"][0]["Condition"]["StringLike"]["s3:prefix"]
        patterns = [one.replace("PREFIX", user.name) for one in condition]
        for one in listed:
            self.assertTrue(any(fnmatchcase(one, pattern) for pattern in patterns), one)

    def test_each_is_needed(self) -> None:
        """Without any one of them something fails."""
        actions = [one for each in policies()[0]["Statement"] for one in each["Action"]]
        self.assertEqual(sorted(NEED), sorted(actions))
        for action in actions:
            with self.subTest(action), User() as user:
                key = self.stored_by(user)
                user.allow(without(policies()[0], action))
                with user.enforced():
                    self.assertEqual(NEED[action], user.failures(key))

    def test_said(self) -> None:
        """A command that is refused says what was refused, and which right is missing."""
        with User() as user:
            self.stored_by(user)
            for action, command in (
                ("s3:DeleteObject", ("gc", user.url, "--max-bytes", "0")),
                ("s3:DeleteObject", ("rm", user.url, "--all")),
                ("s3:ListBucket", ("ls", user.url)),
                ("s3:PutObject", ("ttl", user.url, "1d")),
            ):
                user.allow(without(policies()[0], action))
                with self.subTest(command), user.enforced():
                    code, _, problem = run(*command)
                    self.assertEqual(2, code)
                    self.assertRegex(problem, rf"{user.url}.*refused .*AccessDenied.*{action}")

    def test_reading_only(self) -> None:
        """Who may only read goes on reading, however many saves and renewals are refused."""
        with User() as user:
            key = self.stored_by(user)
            user.allow(policies()[1])
            with user.enforced():
                before = user.entries()
                for first in (100, 200, 300, 400):
                    with self.assertRaisesRegex(NotWritableError, "s3:PutObject"):
                        user.save(first)
                for _ in range(4):
                    self.assertFalse(Bucket.at(user.url).try_renew(key))
                user.lookup()
                user.load()
                self.assertEqual(before, user.entries())


@pytest.mark.vllm
class ReadingEngineTest(harness.EngineTest):
    """Engines that may only read."""

    def test_engines(self) -> None:
        """They load; what they compute is not stored, and no request fails for that."""
        stored = harness.Batch([harness.PROMPT])
        news = [harness.Batch([harness.tokens(300, seed=seed)]) for seed in (70, 71)]
        expected = self.baseline(stored, *news, stored)
        with User() as user:

            def served(*batches: harness.Batch, role: str) -> harness.Served:
                phase = harness.Phase(
                    batches,
                    root=self.root,
                    extra={"shared_storage_path": user.url},
                    transfer={"kv_role": role},
                )
                user.requests.clear()
                with user.enforced():
                    (answer,) = harness.run(phase)
                self.assertIsNone(answer.problem)
                return answer

            user.allow(policies()[0])
            self.assertEqual(expected[:1], served(stored, role="kv_both").tokens)
            user.allow(policies()[1])
            for role in ("kv_both", "kv_consumer"):
                answer = served(stored, *news, stored, role=role)
                self.assertEqual(expected, answer.tokens)
                self.assertEqual([640, 0, 0, 640], answer.cached)
                self.assertEqual(1280, answer.counts["tokens_loaded"])
                puts = sum(method == "PUT" for method, _ in user.requests)
                said = re.findall("chunks are not stored.*s3:PutObject", answer.log)
                self.assertEqual(role == "kv_both", puts > 0)
                self.assertEqual(role == "kv_both", len(said))
