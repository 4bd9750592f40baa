"""Keys in a real engine: sealed chunks give the same tokens, deleted keys cost hits alone."""

from __future__ import annotations

import pytest

from e2e.damage import stored
from e2e.harness import PROMPT, Batch, EngineTest
from vua.format.parse import parse_entry
from vua.security.keyring import tenant_of, write_key

pytestmark = [pytest.mark.vllm, pytest.mark.thorough]


class KeysTest(EngineTest):
    def test_tenants(self) -> None:
        """Who has a key hits its own; who has none is served uncached; a deleted key is a miss."""
        keys = self.root / "keys"
        keys.mkdir(parents=True)
        write_key(self.root / "own.key")
        key = keys / f"{tenant_of(b'alice')}.key"
        write_key(key)
        security = {"key_file": str(self.root / "own.key"), "tenant_keys": str(keys)}
        extra = {"security": security, "strict": True}
        salts = ("alice", "carol", "")
        batches = [Batch([PROMPT], salt=salt or None) for salt in salts]
        cache = self.root / "cache"
        expected = self.baseline(*batches)

        cold = self.serve(*batches, root=cache, extra=extra)
        warm = self.serve(*batches, root=cache, extra=extra)
        kinds = sorted(parse_entry(path.read_bytes()).kind for path in stored(cache))
        key.unlink()
        after = self.serve(*batches, root=cache, extra=extra)

        self.assertEqual([expected] * 3, [cold.tokens, warm.tokens, after.tokens])
        self.assertEqual([[0, 0, 0], [640, 0, 640]], [cold.cached, warm.cached])
        self.assertEqual([0, 0, 640], after.cached)
        self.assertEqual(["aes-256-gcm"] * 10 + ["gmac"] * 10, kinds)
