import assert from "node:assert/strict";
import { execFileSync } from "node:child_process";
import { createHash } from "node:crypto";
import fs from "node:fs";
import os from "node:os";
import path from "node:path";
import test from "node:test";
import { fileURLToPath } from "node:url";
import { Namespace, descriptionText, neededChunks } from "../directory.js";
import { Miss, parseShard, shardName, wholeShard, written } from "../entry.js";
import { askedOf, descriptionKind, judged, kindOf } from "../judge.js";
import { chunkKeys, configDigest, configText, namespaceOf, sha256, weightsDigest } from "../keys.js";
import { tenantFile } from "../seal.js";
import { xxh3 } from "../xxh3.js";

const ROOT = fileURLToPath(new URL("../../../", import.meta.url));
const PAGE = fs.readFileSync(path.join(ROOT, "docs/format.md"), "utf8");
const TABLE = JSON.parse(fs.readFileSync(path.join(ROOT, "implementations/conformance/cases.json"), "utf8"));
const KEY = Buffer.from(Array.from({ length: 32 }, (_, i) => i));
const TOKENS = [3, 1, 4, 1, 5, 9, 2, 6];

/** The values of the page's example that begins with a line, by the text before column 17. */
function example(first) {
  const block = PAGE.split("```\n").find((text) => text.startsWith(first));
  return Object.fromEntries(block.trimEnd().split("\n").map((line) => [line.slice(0, 17).trim(), line.slice(17)]));
}

function temporary(context) {
  const folder = fs.mkdtempSync(path.join(os.tmpdir(), "vua-js-"));
  context.after(() => fs.rmSync(folder, { recursive: true }));
  return folder;
}

test("XXH3 has the values of xxHash's own test vectors", () => {
  assert.equal(xxh3(Buffer.alloc(0)).toString(16), "2d06800538d394c2");
  // the SHA-256 of the sums of 600 lengths, as the xxhash package computes them
  const sums = Array.from({ length: 600 }, (_, n) => xxh3(Buffer.from(Array.from({ length: n }, (_, i) => (i * i * 7 + i) & 255))));
  assert.equal(sha256(Buffer.from(sums.join())).toString("hex"), "791bac98aee1099ca0ea65fab06e3c5e184a0fd994d83b538fb6388c82ffeefe");
});

test("golden files are read, and written byte for byte", () => {
  for (const cache of ["golden", "golden_sealed_v2"]) {
    const root = path.join(ROOT, "tests", cache);
    for (const name of fs.readdirSync(root)) {
      const plain = Namespace.open(root, name);
      const { model } = plain.identity;
      const sealed = cache !== "golden" && { key: KEY, kind: model === "golden encrypted" ? "aes-256-gcm" : "gmac" };
      const namespace = Namespace.open(root, name, { ...sealed });
      const [described, counted] = fs.readFileSync(path.join(root, name, "namespace.json"), "utf8").split(',\n "counted": ');
      assert.equal(descriptionText(plain.identity, plain.layouts), counted ? `${described}\n}\n` : described);
      assert.equal(counted !== undefined, model === "golden latent");
      const hasExtras = /latent|encrypted/.test(model);
      const keys = namespace.keys(TOKENS, hasExtras ? { 0: [["salt", "a secret"]], 1: [["image", [1, 2]], ["lora", ""]] } : {});
      const [layout] = namespace.layouts;
      assert.equal(namespace.longest(layout, keys), 2);
      keys.forEach((key, chunk) => {
        const arrays = namespace.get(layout, key);
        assert.equal(arrays.k.toString("hex"), expected(layout, chunk, 0, layout.k_dim));
        if (layout.v_dim) assert.equal(arrays.v.toString("hex"), expected(layout, chunk, 1000, layout.v_dim));
        const folder = path.join(root, name, key.name.slice(0, 2), key.name);
        assert.equal(fs.existsSync(path.join(folder, `after-${key.previous}`)), key.previous !== "");
        const whole = path.join(folder, `l0-${layout.layers}.h0-${layout.kv_heads}.safetensors`);
        if (fs.existsSync(whole)) {
          const file = fs.readFileSync(whole);
          const nonce = /"nonce":"([0-9a-f]{32})"/.exec(file.toString("latin1"))?.[1];
          const again = written(namespace.asked(layout, wholeShard(layout), key), arrays, { writer: "golden", created: 1767225600, nonce });
          assert.ok(again.equals(file), `${cache} ${model} ${chunk}`);
        }
      });
    }
  }
});

test("golden layers with a window are read, and written byte for byte", (context) => {
  const [name] = fs.readdirSync(path.join(ROOT, "tests/golden_windows"));
  const namespace = Namespace.open(path.join(ROOT, "tests/golden_windows"), name);
  const described = descriptionText(namespace.identity, namespace.layouts);
  assert.equal(described, fs.readFileSync(path.join(ROOT, "tests/golden_windows", name, "namespace.json"), "utf8"));
  const keys = namespace.keys(TOKENS);
  const again = new Namespace(temporary(context), namespace.identity, namespace.layouts, { writer: "golden" });
  again.create();
  assert.deepEqual(namespace.layouts.map((layout) => layout.group), [undefined, "w4"]);
  for (const layout of namespace.layouts) {
    for (const chunk of neededChunks(layout, 8)) {
      const arrays = namespace.get(layout, keys[chunk]);
      again.put(layout, keys[chunk], arrays, { created: 1767225600 });
      const place = path.join(name, keys[chunk].name.slice(0, 2), keys[chunk].name, `${shardName(wholeShard(layout))}.safetensors`);
      const golden = fs.readFileSync(path.join(ROOT, "tests/golden_windows", place));
      assert.ok(fs.readFileSync(path.join(again.root, place)).equals(golden), place);
    }
  }
  assert.throws(() => namespace.get(namespace.layouts[1], keys[0]), Miss); // its window does not reach there
  assert.throws(() => new Namespace("", namespace.identity, [{ ...namespace.layouts[1], group: "s4" }]), Miss);
});

/** What make_golden.py puts in an array: element [layer][head][token][i] is a number counted through, plus `base`. */
function expected({ layers, kv_heads, chunk_tokens }, chunk, base, dim) {
  const out = Buffer.alloc(2 * layers * kv_heads * chunk_tokens * dim);
  let at = 0;
  for (let head = 0; head < kv_heads; head++) {
    for (let layer = 0; layer < layers; layer++) {
      for (let token = chunk * chunk_tokens; token < (chunk + 1) * chunk_tokens; token++) {
        for (let i = 0; i < dim; i++, at += 2) out.writeUInt16LE(base + ((layer * kv_heads + head) * TOKENS.length + token) * dim + i, at);
      }
    }
  }
  return out.toString("hex");
}

test("the page's examples have these values", (context) => {
  const plain = example("identity bytes");
  assert.equal(namespaceOf({ model: "golden whole", kv_dtype: "BF16", chunk_tokens: 4 }), plain.namespace);
  assert.deepEqual(chunkKeys(TOKENS, 4).map((key) => key.name), [plain["chunk 0"], plain["chunk 1"]]);
  const extras = example("parent 0 hashed");
  const keys = chunkKeys(TOKENS, 4, { 0: [["salt", "a secret"]], 1: [["image", [1, 2]], ["lora", ""]] });
  assert.deepEqual(keys.map((key) => key.parent), [extras["parent 0"], extras["parent 1"]]);
  assert.deepEqual(keys.map((key) => key.name), [extras["chunk 0"], extras["chunk 1"]]);
  const identity = example("config  ");
  const config = JSON.parse(identity.config);
  assert.equal(configText(config), identity.text);
  assert.equal(configDigest(config), identity.model);
  const file = path.join(temporary(context), "model.safetensors");
  fs.writeFileSync(file, Buffer.from(identity["weights' file"], "hex"));
  assert.equal(weightsDigest([file]), identity.weights);
  const numbers = [1e-5, 1.5e-7, 0.0001, 0.1, 1e22, 123456789012, -0, 2.5, -1e-10];
  assert.equal(configText({ n: numbers }), '{"n":[1e-05,1.5e-07,0.0001,0.1,10000000000000000000000,123456789012,0,2.5,-1e-10]}');
  assert.equal(tenantFile("customer 7"), "732c2107f43cd5d6b0538627fe4d8fc3.key");
});

test("each row of the conformance table is taken or refused as it says", () => {
  const right = new Map();
  for (const row of TABLE.files) {
    const golden = fs.readFileSync(path.join(ROOT, "tests", row.file));
    const data = Buffer.alloc(row.length ?? golden.length);
    golden.copy(data);
    for (const [at, hex] of row.edits) data.write(hex, at, "hex");
    assert.equal(createHash("sha256").update(data).digest("hex"), row.sha256, row.name);
    const { answer, why } = judged(data, TABLE.entries[row.asked]);
    const about = `${row.name} (${row.asked}): ${answer} ${why}`;
    if (row.name === "unchanged") right.set(row.asked, answer);
    assert.equal(answer, row.expected === "right" ? right.get(row.asked) : "miss", about);
    assert.notEqual(right.get(row.asked), "miss", about);
    if (row.expected === "right") assert.equal(kindOf(data), "sound", about);
    if (row.expected === "damaged" && !TABLE.entries[row.asked].seal) assert.equal(kindOf(data), "damaged", about);
  }
  for (const row of TABLE.descriptions) assert.equal(descriptionKind(Buffer.from(row.text), row.directory), row.expected, row.name);
});

test("keys of the table follow from tokens and extras", () => {
  for (const [place, entry] of Object.entries(TABLE.entries)) {
    const extras = Object.fromEntries(Object.entries(entry.extras).map(([chunk, pairs]) => [chunk, pairs.map(([tag, hex]) => [tag, Buffer.from(hex, "hex")])]));
    const keys = chunkKeys(entry.tokens, entry.layout.chunk_tokens, extras, askedOf(entry).seal?.names);
    const { name, parent } = keys[entry.key.first / entry.layout.chunk_tokens];
    assert.deepEqual({ name, parent }, { name: entry.key.name, parent: entry.key.parent }, place);
  }
});

test("what is put is got, in other shards, too; a link, a pipe or a directory is a miss", (context) => {
  const root = path.join(temporary(context), "kv");
  const layout = { layers: 5, kv_heads: 3, k_dim: 8, v_dim: 2, dtype: "F32", chunk_tokens: 4 };
  const namespace = new Namespace(root, { model: "mine", kv_dtype: "F32", chunk_tokens: 4 }, [layout]);
  namespace.create();
  assert.equal(fs.statSync(root).mode & 0o777, 0o700);
  const keys = namespace.keys(TOKENS, { 1: [["salt", "x"]] });
  const bytes = (count, from) => Buffer.from(Array.from({ length: count }, (_, i) => (i + from) & 255));
  const whole = { k: bytes(3 * 5 * 4 * 8 * 4, 0), v: bytes(3 * 5 * 4 * 2 * 4, 7) };
  assert.ok(namespace.put(layout, keys[0], whole));
  assert.ok(!namespace.put(layout, keys[0], whole));
  for (const [a, b] of [[0, 1], [1, 3]]) {
    const part = { k: whole.k.subarray(a * 640, b * 640), v: whole.v.subarray(a * 160, b * 160) };
    assert.ok(namespace.put(layout, keys[1], part, { shard: { group: "", layers: [0, 5], heads: [a, b] } }));
  }
  for (const key of keys) assert.deepEqual(namespace.get(layout, key), whole);
  const some = namespace.get(layout, keys[1], { group: "", layers: [2, 4], heads: [1, 2] });
  assert.ok(some.k.equals(whole.k.subarray((5 + 2) * 128, (5 + 4) * 128)));
  const place = ({ name }, file = "") => path.join(root, namespace.name, name.slice(0, 2), name, file);
  assert.ok(fs.statSync(place(keys[0])).mtimeMs > fs.statSync(place(keys[1])).mtimeMs);
  assert.ok(fs.existsSync(place(keys[1], `after-${keys[0].name}`)));
  const file = place(keys[0], "l0-5.h0-3.safetensors");
  assert.equal(fs.statSync(file).mode & 0o777, 0o600);
  const miss = () => assert.throws(() => namespace.get(layout, keys[0]), Miss);
  fs.renameSync(file, path.join(root, "aside"));
  miss();
  fs.symlinkSync(path.join(root, "aside"), file);
  miss();
  fs.unlinkSync(file);
  fs.mkdirSync(file);
  miss();
  fs.rmdirSync(file);
  execFileSync("mkfifo", [file]);
  miss();
  fs.unlinkSync(file);
  const folder = place(keys[0]);
  fs.renameSync(folder, path.join(root, "moved"));
  fs.renameSync(path.join(root, "aside"), path.join(root, "moved/l0-5.h0-3.safetensors"));
  fs.symlinkSync(path.join(root, "moved"), folder);
  miss();
  fs.unlinkSync(folder);
  fs.renameSync(path.join(root, "moved"), folder);
  fs.renameSync(file, path.join(root, "aside"));
  fs.linkSync(path.join(root, "aside"), file);
  assert.deepEqual(namespace.get(layout, keys[0]), whole);
  const stranger = path.join(temporary(context), "home");
  fs.mkdirSync(stranger);
  fs.writeFileSync(path.join(stranger, "photograph"), "");
  assert.throws(() => new Namespace(stranger, { model: "mine" }, [layout]).create(), /vua.json/);
  assert.deepEqual(fs.readdirSync(stranger), ["photograph"]);
});

test("which chunks a prefix needs", () => {
  const layout = { chunk_tokens: 8 };
  assert.deepEqual(neededChunks(layout, 20), [0, 1, 2]);
  assert.deepEqual(neededChunks({ ...layout, group: "w20" }, 64), [5, 6, 7]);
  assert.deepEqual(neededChunks({ ...layout, group: "w1" }, 64), []);
  for (const name of ["l0-0.h0-1", "l00-1.h0-1", "w0.l0-1.h0-1", "x5.l0-1.h0-1", "p0.l0-1.h0-1", "p1w.l0-1.h0-1", "l0-1.h0-1.", "l1-0.h0-1"]) assert.equal(parseShard(name), null);
  assert.deepEqual(parseShard("w128.l0-18.h2-8"), { group: "w128", layers: [0, 18], heads: [2, 8] });
});
