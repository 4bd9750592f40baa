"""Buckets: engines on several hosts, transformers, the rights that are needed."""

from __future__ import annotations

import copy
import json
import re
import shutil
import time
import unittest
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, Final
from urllib.parse import parse_qs, urlsplit

import pytest
import torch

from buckets import memory_url, moto, seaweedfs, speaking_to
from commands import run as command
from commands import run_json
from e2e.harness import PROMPT, Batch, EngineTest, Phase, Served, run
from helpers import DirectoryTest, caches_of, kv_bits
from proxy import FaultyProxy
from small_models import make_model
from vua import VUA, VUAConfig, VUAError
from vua.format.entry import ENCRYPTED
from vua.format.parse import parse_entry
from vua.security.keyring import tenant_of, write_key
from vua.storage.bucket import Bucket

pytestmark = pytest.mark.thorough


pytest.importorskip("obstore")

BATCH = Batch([PROMPT])


@pytest.mark.vllm
class BucketTest(EngineTest):
    @classmethod
    def setUpClass(cls) -> None:
        super().setUpClass()
        cls.server = seaweedfs()
        cls.enterClassContext(speaking_to(cls.server.endpoint))

    def setUp(self) -> None:
        """Take an empty place."""
        super().setUp()
        self.url = self.server.place()

    def on(
        self, host: str, *batches: Batch, url: str = "", role: str = "kv_both", **extra: Any
    ) -> Served:
        """Run an engine on a host, with a directory of its own before the bucket; "": without."""
        url, near = url or self.url, self.root.parent / host
        near.mkdir(exist_ok=True)
        path = [str(near), url] if host else url
        extra = {"shared_storage_path": path, **extra}
        phase = Phase(batches, root=self.root, extra=extra, transfer={"kv_role": role})
        (served,) = run(phase)
        self.assertIsNone(served.problem)
        return served

    def arrived(self) -> int:
        return len(self.chunks())

    def all_arrive(self, count: int, known: Batch) -> None:
        """What a host did not send when its engine ended, at most for 5 s, it sends later."""
        stop_s = time.monotonic() + 100
        while self.arrived() < count and time.monotonic() < stop_s:
            self.on("a", known)  # looks for it when it starts
        self.assertEqual(count, self.arrived())

    def chunks(self, url: str = "") -> dict[str, bytes]:
        """The entries in a bucket, by the names of their chunks: each is of one shard."""
        bucket = Bucket.at(url or self.url)
        keys = [one.key for one in bucket.walk() if one.key.endswith(".safetensors")]
        return {key.split("/")[-2]: bytes(bucket.get(key)[1]) for key in keys}

    def test_from_host_to_host(self) -> None:
        """A cold engine on one host; a warm one on another, which has an empty directory."""
        (expected,) = self.baseline(BATCH)
        cold = self.on("a", BATCH)
        self.assertEqual(([expected], [0]), (cold.tokens, cold.cached))
        self.all_arrive(10, BATCH)
        warm = self.on("b", BATCH)
        self.assertEqual(([expected], [640]), (warm.tokens, warm.cached))
        self.assertEqual(640, warm.counts["tokens_loaded"])
        control = self.on("c", BATCH, url=self.server.place())
        self.assertEqual(([expected], [0]), (control.tokens, control.cached))

    def keys_of(self, *salts: str) -> dict[str, Any]:
        """Give an engine keys of tenants, each made once; return its settings."""
        at = self.root.with_name("-".join(salts))
        at.mkdir()
        for salt in salts:
            name = f"{tenant_of(salt.encode())}.key"
            made = self.root.with_name(name)
            if not made.exists():
                write_key(made)
            shutil.copy2(made, at / name)
        return {"security": {"tenant_keys": str(at)}}

    def test_tenants(self) -> None:
        """What a tenant has stored is loaded with its key, and nothing of it without."""
        alice, bob, nobody = (Batch([PROMPT], salt=salt) for salt in ("alice", "bob", None))
        (expected,) = self.baseline(BATCH)
        both, bobs = self.keys_of("alice", "bob"), self.keys_of("bob")

        cold = self.on("", alice, **both)
        self.assertEqual(([expected], [0]), (cold.tokens, cold.cached))
        stored = self.chunks()
        warm = self.on("", alice, **both)
        self.assertEqual(([expected], [640]), (warm.tokens, warm.cached))
        self.assertEqual(640, warm.counts["tokens_loaded"])
        other = self.on("", bob, alice, nobody, role="kv_consumer", **bobs)
        self.assertEqual(([expected] * 3, [0] * 3), (other.tokens, other.cached))
        self.assertEqual(0, other.counts.get("tokens_loaded", 0))
        self.tells_nothing(stored, "alice")

        self.on("", bob, **both)
        self.assertEqual(20, self.arrived())
        (keys,) = both["security"].values()
        (Path(keys) / f"{tenant_of(b'alice')}.key").unlink()
        after = self.on("", alice, bob, **both)
        self.assertEqual(([expected] * 2, [0, 640]), (after.tokens, after.cached))
        self.assertEqual(stored, {name: self.chunks()[name] for name in stored})
        (found,) = run_json("verify", self.url, "--tenant-keys", keys)[1]["namespaces"]
        self.assertEqual([10, 10], list(found["sealed"].values()))
        self.assertEqual([10], list(found["authentic"].values()))

    def tells_nothing(self, stored: dict[str, bytes], salt: str) -> None:
        """Neither names nor bytes of chunks are those that an engine without keys stores."""
        url = self.server.place()
        self.on("", Batch([PROMPT], salt=salt), url=url)
        plain = self.chunks(url)
        self.assertEqual(10, len(plain))
        self.assertFalse(plain.keys() & stored.keys())
        self.assertEqual({ENCRYPTED}, {parse_entry(data).kind for data in stored.values()})
        for data in plain.values():
            self.assertEqual("", parse_entry(data).kind)
            self.assertFalse(any(data[-64:] in sealed for sealed in stored.values()))


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
    """A user of a bucket who needs rights, and an empty place in it."""

    def __init__(self) -> None:
        """Make the user, who has no right yet."""
        from moto.core import enable_iam_authentication

        self.enforced = enable_iam_authentication
        """What to enter while each request needs a right."""
        self.name = memory_url().rpartition("/")[2]
        self.url = f"s3://vua/{self.name}"
        self.requests: list[tuple[str, dict[str, list[str]]]] = []
        """Methods and queries of what was sent."""
        self.server = moto()
        admin = {"aws_access_key_id": "any", "aws_secret_access_key": "any"}
        self._iam = boto3.session.Session().client(
            "iam", endpoint_url=self.server, region_name="us-east-1", **admin
        )
        self._iam.create_user(UserName=self.name)
        self.key = self._iam.create_access_key(UserName=self.name)["AccessKey"]

    @classmethod
    @contextmanager
    def here(cls) -> Iterator[User]:
        """A user as whom this process speaks to the bucket."""
        user = cls()
        proxy = FaultyProxy(user.server, user.note)
        keys = {
            "AWS_ACCESS_KEY_ID": user.key["AccessKeyId"],
            "AWS_SECRET_ACCESS_KEY": user.key["SecretAccessKey"],
        }
        with closing(proxy), speaking_to(proxy.endpoint, **keys):
            yield user

    def note(self, number: int, method: str, path: str) -> str:
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
        code, out, problem = command(words[0], self.url, *words[1:])
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
        with User.here() as user:
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
            with self.subTest(action), User.here() as user:
                key = self.stored_by(user)
                user.allow(without(policies()[0], action))
                with user.enforced():
                    self.assertEqual(NEED[action], user.failures(key))

    def test_said(self) -> None:
        """A command that is refused says what was refused, and which right is missing."""
        with User.here() as user:
            self.stored_by(user)
            for action, words in (
                ("s3:DeleteObject", ("gc", user.url, "--max-bytes", "0")),
                ("s3:DeleteObject", ("rm", user.url, "--all")),
                ("s3:ListBucket", ("ls", user.url)),
                ("s3:PutObject", ("ttl", user.url, "1d")),
            ):
                user.allow(without(policies()[0], action))
                with self.subTest(words), user.enforced():
                    code, _, problem = command(*words)
                    self.assertEqual(2, code)
                    self.assertRegex(problem, rf"{user.url}.*refused .*AccessDenied.*{action}")


CHUNK = 16


class FacesTest(DirectoryTest):
    """A real server; the engines' own models."""

    def setUp(self) -> None:
        """Begin with an empty place in its bucket."""
        super().setUp()
        self.enterContext(speaking_to(seaweedfs().endpoint))
        self.url = seaweedfs().place()

    def stored(self, url: str) -> int:
        return sum(one.key.endswith(".safetensors") for one in Bucket.at(url).walk())

    def test_transformers(self) -> None:
        """The same tokens with the prefix that another cache object stored, alone and in tiers."""
        from transformers import AutoModelForCausalLM

        from vua.transformers import PrefixCache

        make_model(self.root / "model")
        model = AutoModelForCausalLM.from_pretrained(
            self.root / "model", attn_implementation="eager"
        )
        ids = torch.randint(4, 512, (1, 150), generator=torch.Generator().manual_seed(1))
        places = [self.url, [str(self.root / "near"), self.url], self.url]
        lengths, outputs = [], []
        for place in places:
            with PrefixCache(model, place, chunk_tokens=CHUNK) as prefixes:
                prefixes.ready()
                prefix = prefixes.load(ids)
                lengths.append(prefix.num_tokens)
                output = model.generate(
                    *(ids,),
                    past_key_values=prefix.cache,
                    max_new_tokens=8,
                    min_new_tokens=8,
                    do_sample=False,
                )
                prefixes.save(ids, prefix.cache)
                outputs.append(output.tolist())
        self.assertEqual([0, 144, 144], lengths)
        self.assertEqual([outputs[0]] * 3, outputs)
        self.assertEqual(10, self.stored(self.url))  # 9 chunks, and the probe of the model
