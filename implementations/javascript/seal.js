// Keys, and the tags of sealed files.

import { createCipheriv, createDecipheriv } from "node:crypto";
import { framed, hmac, sha256 } from "./keys.js";

const derived = (key, ...parts) => hmac(key, ...parts.map((part) => framed(Buffer.from(part))), Buffer.from([1]));

/** What a key of 32 bytes gives in a namespace, for files of a kind: "gmac" or "aes-256-gcm". */
export function sealOf(key, namespace, kind) {
  return {
    kind,
    id: derived(key, "vua.key-id.v1").toString("hex", 0, 8),
    names: derived(key, "vua.names.v1", kind, namespace),
    files: derived(key, "vua.files.v2", kind, namespace),
  };
}

/** The name of the key file of the tenant with this salt. */
export const tenantFile = (salt) => sha256(Buffer.from("vua.tenant.v1"), Buffer.from(salt)).toString("hex", 0, 16) + ".key";

const ownKey = (seal, nonce, bound) => hmac(seal.files, Buffer.from(nonce, "hex"), bound);

function nonceOf(block) {
  const bytes = Buffer.alloc(12);
  bytes.writeUInt32BE(block, 8);
  return bytes;
}

function* blocksOf(payload, sizes) {
  let at = 0;
  for (const nbytes of sizes) yield payload.subarray(at, (at += nbytes));
}

/** K and V as they are stored, and the tags. `bound` is h. */
export function closed(seal, nonce, bound, payload, sizes) {
  const key = ownKey(seal, nonce, bound);
  const [stored, tags] = [[], []];
  for (const block of blocksOf(payload, sizes)) {
    const cipher = createCipheriv("aes-256-gcm", key, nonceOf(tags.length));
    const encrypts = seal.kind === "aes-256-gcm";
    cipher.setAAD(encrypts ? framed(bound) : Buffer.concat([framed(bound), block]));
    stored.push(encrypts ? cipher.update(block) : block);
    cipher.final();
    tags.push(cipher.getAuthTag());
  }
  return [Buffer.concat(stored), Buffer.concat(tags)];
}

/** K and V in clear; null where a tag is wrong. */
export function opened(seal, nonce, bound, payload, sizes, tags) {
  const key = ownKey(seal, nonce, bound);
  const clear = [];
  for (const block of blocksOf(payload, sizes)) {
    const i = clear.length;
    const cipher = createDecipheriv("aes-256-gcm", key, nonceOf(i));
    const encrypts = seal.kind === "aes-256-gcm";
    cipher.setAAD(encrypts ? framed(bound) : Buffer.concat([framed(bound), block]));
    cipher.setAuthTag(tags.subarray(16 * i, 16 * i + 16));
    clear.push(encrypts ? cipher.update(block) : block);
    try {
      cipher.final();
    } catch {
      return null;
    }
  }
  return Buffer.concat(clear);
}
