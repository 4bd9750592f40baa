"""Opens a sealed file, by docs/format.md alone. `InvalidTag`: another key, or changed bytes."""

import hmac
import json
import struct

from cryptography.hazmat.primitives.ciphers.aead import AESGCM


def framed(part: bytes) -> bytes:
    return struct.pack("<Q", len(part)) + part


def derived(key: bytes, *parts: str) -> bytes:
    info = b"".join(framed(part.encode()) for part in parts)
    return hmac.digest(key, info + b"\x01", "sha256")


def opened(data: bytes, key: bytes) -> dict[str, bytes]:
    (length,) = struct.unpack("<Q", data[:8])
    start, header = 8 + length, json.loads(data[8 : 8 + length])
    said = header["__metadata__"]
    kind = said["seal"]
    files = derived(key, "vua.files.v2", kind, said["namespace"])
    nonce, h = bytes.fromhex(said["nonce"]), data[: data.index(b',"created"')]
    cipher = AESGCM(hmac.digest(files, nonce + h, "sha256"))
    itemsize = 1 if kind == "aes-256-gcm" else {"BF16": 2, "F16": 2, "F32": 4}[said["dtype"]]
    arrays = [name for name in "kv" if name in header]
    extents = {
        name: header[name]["shape"][2] * header[name]["shape"][3] * itemsize for name in arrays
    }
    step, block, found = max(1, 131072 // max(extents.values())), 0, {}
    tags = data[start + header["tags"]["data_offsets"][0] :]
    for name in arrays:
        heads, layers, at = *header[name]["shape"][:2], start + header[name]["data_offsets"][0]
        found[name] = b""
        for layer in list(range(0, layers, step)) * heads:
            nbytes = min(step, layers - layer) * extents[name]
            stored, tag, number = (
                data[at : at + nbytes],
                tags[16 * block :][:16],
                block.to_bytes(12, "big"),
            )
            if kind == "gmac":
                cipher.decrypt(number, tag, framed(h) + stored)
            else:
                stored = cipher.decrypt(number, stored + tag, framed(h))
            found[name], at, block = found[name] + stored, at + nbytes, block + 1
    return found
