// Answers the questions of VUA's own tests, tests/unit/format/test_javascript.py: node judge.js COMMAND ARGUMENTS.json

import { createHash } from "node:crypto";
import fs from "node:fs";
import { Miss, parseShard, read, sizesOf, verify, written } from "./entry.js";
import { Namespace, neededChunks, parseDescription } from "./directory.js";
import { configDigest, namespaceOf, weightsDigest } from "./keys.js";
import { sealOf } from "./seal.js";

/** What `read` is asked, from an entry as tests and the conformance table describe it. */
export function askedOf({ namespace, layout, shard, key, seal }) {
  return {
    namespace,
    layout,
    shard: parseShard(shard),
    key,
    seal: seal && sealOf(Buffer.from(seal.key, "hex"), namespace, seal.kind),
  };
}

/** "right" with the SHA-256 of K and V, or "miss". */
export function judged(data, entry) {
  try {
    const { k, v } = read(data, askedOf(entry));
    return { answer: createHash("sha256").update(k).update(v ?? "").digest("hex") };
  } catch (problem) {
    if (!(problem instanceof Miss)) throw problem;
    return { answer: "miss", kind: problem.kind, why: problem.message };
  }
}

/** What a tool says of a file that it knows nothing of: "sound" or "damaged". */
export function kindOf(data) {
  try {
    verify(data);
    return "sound";
  } catch (problem) {
    if (!(problem instanceof Miss)) throw problem;
    return "damaged";
  }
}

function write(payload, { entry, created, writer, nonce }) {
  const asked = askedOf(entry);
  const { extents, layers, heads } = sizesOf(asked.layout, asked.shard);
  const arrays = { k: payload.subarray(0, heads * layers * extents[0]) };
  if (extents.length > 1) arrays.v = payload.subarray(arrays.k.length);
  return written(asked, arrays, { created, writer, nonce });
}

// -- commands -------------------------------------------------------------------------------------

/**
 * `blob` is a file of bytes, `entries` what is asked for, `cases` are [entry, offset, length] of bytes in the blob. With
 * `writes` each case is K and V, and what is written is appended to the file `out`. Returns a line for each case.
 */
function judge({ blob, entries, cases, writes, out }) {
  const bytes = fs.readFileSync(blob);
  return cases.map(([which, offset, length]) => {
    const data = Buffer.from(bytes.subarray(offset, offset + length));
    if (!writes) return `${judged(data, entries[which]).answer} ${kindOf(data)}`;
    const file = write(data, { entry: entries[which], ...writes[which] });
    fs.appendFileSync(out, file);
    return String(file.length);
  });
}

/** What a namespace.json in a directory of this name is: "right", "damaged" or "foreign". */
export function descriptionKind(bytes, directory) {
  try {
    parseDescription(bytes, directory);
    return "right";
  } catch (problem) {
    if (!(problem instanceof Miss)) throw problem;
    return problem.kind;
  }
}

/** As `judge`, of bytes of a namespace.json. */
function describe({ blob, cases, directory }) {
  const bytes = fs.readFileSync(blob);
  return cases.map(([, offset, length]) => descriptionKind(bytes.subarray(offset, offset + length), directory));
}

function namespaceIn({ root, layout, model, key, kind }) {
  const identity = { model, chunk_tokens: layout.chunk_tokens };
  return new Namespace(root, identity, [layout], key ? { key: Buffer.from(key, "hex"), kind } : {});
}

/** Stores a prompt, of which `payload` is a file: K and V of one chunk after the other, both as long. */
function put({ payload, tokens, ...place }) {
  const [namespace, bytes, { layout }] = [namespaceIn(place), fs.readFileSync(payload), place];
  namespace.create();
  const keys = namespace.keys(tokens);
  const nbytes = bytes.length / keys.length;
  keys.forEach((key, i) => {
    const [k, v] = [0, 1].map((half) => bytes.subarray((i + half / 2) * nbytes, (i + (half + 1) / 2) * nbytes));
    namespace.put(layout, key, { k, v });
  });
  return [namespace.longest(layout, keys)];
}

/** K and V of a prompt's chunks, in hex. */
function get({ tokens, ...place }) {
  const namespace = namespaceIn(place);
  return namespace.keys(tokens).map((key) => {
    const { k, v } = namespace.get(place.layout, key);
    return k.toString("hex") + v.toString("hex");
  });
}

/** The identity under which vLLM stores what a model of this config computes, by the page's recipes. */
function engineIdentity({ config, weights, identity }) {
  const groups = {};
  (config.layer_types ?? []).forEach((kind, layer) => {
    const group = kind === "sliding_attention" ? `w${config.sliding_window}` : "";
    (groups[group] ??= []).push(layer);
  });
  const names = Object.keys(groups).sort();
  const more = { "vua.engine": ["vllm"] };
  if (names.some(Boolean)) more["vua.groups"] = names.map((group) => [group, ...groups[group]]);
  return { ...identity, model: configDigest({ ...config, ...more }), weights: weightsDigest(weights) };
}

/**
 * Reads what an engine has stored of a prompt below `root`, and writes the chunks that its whole prefix needs below `to`,
 * but for the first of those of the last group `without`. Returns the namespace and the files written.
 */
function copy({ root, to, tokens, without, ...model }) {
  const identity = engineIdentity(model);
  const from = Namespace.open(root, namespaceOf(identity));
  const into = new Namespace(to, { ...identity, name: from.identity.name }, from.layouts);
  into.create();
  const keys = from.keys(tokens);
  const wanted = from.layouts.flatMap((layout) => neededChunks(layout, tokens.length).map((chunk) => [chunk, layout]));
  const left = without ? wanted.find(([, layout]) => layout === from.layouts.at(-1)) : null;
  wanted.sort(([one], [other]) => one - other); // front to back
  const written = wanted.filter((one) => one !== left).map(([chunk, layout]) => {
    into.put(layout, keys[chunk], from.get(layout, keys[chunk]));
    return `${chunk} ${layout.group ?? ""}`;
  });
  return [from.name, ...written];
}

const COMMANDS = { judge, describe, put, get, copy };

if (process.argv[1]?.endsWith("judge.js")) {
  const [name, file] = process.argv.slice(2);
  console.log(COMMANDS[name](JSON.parse(fs.readFileSync(file, "utf8"))).join("\n"));
}
