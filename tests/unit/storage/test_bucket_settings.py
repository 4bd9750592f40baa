"""Mirrors `vua.storage.bucket_client`: what is wrong is found first, and said with what to do."""

from __future__ import annotations

import contextlib
import json
import os
import socket
from collections.abc import Iterator
from unittest import mock

import pytest
import torch

from buckets import moto, speaking_to
from commands import run
from helpers import DirectoryTest, caches_of
from vua.core import VUA, VUAConfig
from vua.errors import ConfigError, StorageError, VUAError
from vua.storage.bucket import Bucket

pytest.importorskip("obstore")

CONFIG = VUAConfig(split_factor=4, model="tiny")
TOKENS = torch.arange(12)
KV = caches_of(layers=1, heads=1, tokens=12, dim=8)
NOBODY = "http://127.0.0.1:9"

UNUSABLE = (
    ("AWS_ACCESS_KEY_ID", "geheim\n"),
    ("AWS_SESSION_TOKEN", "geheim\ngeheim"),
    ("AWS_REGION", "us-east-1\n"),
    ("AWS_ENDPOINT_URL", "127.0.0.1:9"),
    ("AWS_ENDPOINT_URL", "http://127.0.0.1:port"),
    ("AWS_ENDPOINT_URL", "http://me:geheim@127.0.0.1:9"),
    ("AWS_ENDPOINT_URL", "ftp://host"),
)
"""Settings that no server ever sees; of most the client panics."""


@contextlib.contextmanager
def failing(module: object, names: tuple[str, ...], problem: BaseException) -> Iterator[None]:
    with contextlib.ExitStack() as stack:
        for name in names:
            stack.enter_context(mock.patch.object(module, name, side_effect=problem))
        yield


class SettingsTest(DirectoryTest):
    """A bucket that has one wrong setting, alone and behind a directory."""

    def setUp(self) -> None:
        super().setUp()
        clean = {name: text for name, text in os.environ.items() if not name.startswith("AWS_")}
        self.enterContext(mock.patch.dict(os.environ, clean, clear=True))
        self.enterContext(mock.patch.dict(os.environ, {"HOME": str(self.root)}))
        self.numbers = iter(range(1000))

    def url(self) -> str:
        """Return the URL of a place that this process has not opened yet."""
        return f"s3://vua/{self.root.name}-{next(self.numbers)}"

    def test_unusable(self) -> None:
        """An error says what to check and no secret, to the library and of a command."""
        for name, value in UNUSABLE:
            with self.subTest(name, value=value), speaking_to(NOBODY, **{name: value}):
                with self.assertRaises(StorageError) as refused:
                    VUA(CONFIG, self.url())
                said = str(refused.exception)
                self.assertRegex(said, "check credential|builder error|connection refused")
                self.assertNotIn("geheim", said)
                VUA(CONFIG, [str(self.root / "near"), self.url()]).close()
                code, _, err = run("gc", self.url(), "--max-bytes", "1G", "--yes")
                self.assertEqual(2, code)
                self.assertNotIn("geheim", err)

    def test_half_a_pair(self) -> None:
        """A key without its secret is no credential."""
        refused = self.assertRaisesRegex(ConfigError, "AWS_SECRET_ACCESS_KEY is not")
        with mock.patch.dict(os.environ, {"AWS_ACCESS_KEY_ID": "abc"}), refused:
            Bucket.at(self.url())

    @pytest.mark.thorough
    def test_panic(self) -> None:
        """Whatever the client breaks off with is an error of VUA, also in a directory's tier."""
        import obstore

        class PanicException(BaseException):  # as pyo3 has it; none of Exception's
            """A panic of the client."""

        with speaking_to(moto()):
            url = self.url()
            with VUA(CONFIG, [str(self.root / "near"), url]) as vua:
                panics = PanicException("called `Result::unwrap()`: InvalidHeaderValue")
                names = ("put", "head", "get", "list", "list_with_delimiter", "sign", "delete")
                with failing(obstore, names, panics):
                    bucket = Bucket.at(self.url())
                    for ask in (
                        lambda: bucket.put("x", b"1"), lambda: bucket.head("x"),
                        lambda: bucket.get("x"), lambda: list(bucket.walk()),
                        bucket.folders, lambda: bucket.delete(["x"]),
                    ):  # fmt: skip
                        bucket.breaker.went(well=True)
                        with self.assertRaisesRegex(StorageError, "panicked.*credential"):
                            ask()
                    self.assertEqual(3, vua.put(TOKENS, KV))
                    self.assertEqual(12, vua.get_closest(TOKENS).num_tokens)

    @pytest.mark.thorough
    def test_nobody_listens(self) -> None:
        """The error says which endpoint refuses the connection."""
        with socket.socket() as one:
            one.bind(("127.0.0.1", 0))
            endpoint = f"http://127.0.0.1:{one.getsockname()[1]}"
        with speaking_to(endpoint):
            with self.assertRaisesRegex(StorageError, f"{endpoint}.*connection refused"):
                Bucket.at(self.url()).head("x")
            with self.assertLogs("vua", "WARNING") as said:
                VUA(CONFIG, [str(self.root / "near"), self.url()]).close()
            self.assertRegex("".join(said.output), f"{endpoint}.*connection refused")

    @pytest.mark.thorough
    def test_profile(self) -> None:
        """A profile's credentials, region and endpoint are used, as by boto3."""
        pytest.importorskip("botocore")
        (self.root / ".aws").mkdir()
        (self.root / ".aws" / "config").write_text(
            f"[profile mine]\nregion = eu-west-3\nendpoint_url = {moto()}\n"
        )
        (self.root / ".aws" / "credentials").write_text(
            "[mine]\naws_access_key_id = A\naws_secret_access_key = geheim\n"
        )
        settings = {"AWS_PROFILE": "mine", "AWS_ALLOW_HTTP": "true"}
        with mock.patch.dict(os.environ, settings), VUA(CONFIG, self.url()) as vua:
            self.assertEqual(3, vua.put(TOKENS, KV))
            self.assertEqual(12, vua.get_closest(TOKENS).num_tokens)
        refused = self.assertRaisesRegex(VUAError, "nobody")
        with mock.patch.dict(os.environ, {**settings, "AWS_PROFILE": "nobody"}), refused:
            VUA(CONFIG, self.url())
        without = mock.patch.dict("sys.modules", {"botocore.session": None})
        refused = self.assertRaisesRegex(ConfigError, "AWS_PROFILE.*boto3")
        with mock.patch.dict(os.environ, settings), without, refused:
            VUA(CONFIG, self.url())

    @pytest.mark.thorough
    def test_process(self) -> None:
        """Credentials by a program of the profile, and by its failing."""
        pytest.importorskip("botocore")
        (self.root / ".aws").mkdir()
        said = json.dumps({"Version": 1, "AccessKeyId": "A", "SecretAccessKey": "geheim"})
        program = self.root / "lend"
        program.write_text(f"#!/bin/sh\necho '{said}'\n")
        program.chmod(0o700)
        config = self.root / ".aws" / "config"
        config.write_text(f"[default]\ncredential_process = {program}\nendpoint_url = {moto()}\n")
        with mock.patch.dict(os.environ, {"AWS_ALLOW_HTTP": "true"}):
            with VUA(CONFIG, self.url()) as vua:
                self.assertEqual(3, vua.put(TOKENS, KV))
            program.write_text("#!/bin/sh\necho no luck >&2; exit 1\n")
            with self.assertRaisesRegex(VUAError, "no luck"):
                VUA(CONFIG, self.url())

    @pytest.mark.thorough
    def test_no_credentials(self) -> None:
        """Where nothing is found the error says what to set."""
        server = {"AWS_ENDPOINT_URL": moto(), "AWS_ALLOW_HTTP": "true",
                  "AWS_METADATA_ENDPOINT": f"{moto()}/none"}  # fmt: skip
        refused = self.assertRaisesRegex(StorageError, "no credentials.*AWS_ACCESS_KEY_ID")
        with mock.patch.dict(os.environ, server), refused:
            Bucket.at(self.url()).put("x", b"1")

    def test_google_and_azure(self) -> None:
        """What their client cannot read is named."""
        file = self.root / "adc.json"
        file.write_text('{"type": "external_account"}')
        name = "GOOGLE_APPLICATION_CREDENTIALS"
        for number, path in enumerate((file, "none")):
            refused = self.assertRaisesRegex(ConfigError, name)
            with mock.patch.dict(os.environ, {name: str(path)}), refused:
                Bucket.at(f"gs://bucket/{number}")
        with self.assertRaisesRegex(ConfigError, "AZURE_STORAGE_ACCOUNT_NAME"):
            Bucket.at("az://container/x")
