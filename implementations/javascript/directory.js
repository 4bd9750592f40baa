// A cache in a directory: its descriptions, and entries under their names.

import fs from "node:fs";
import os from "node:os";
import path from "node:path";
import { randomBytes } from "node:crypto";
import { GROUP, ITEMSIZE, Miss, checkLayout, demand, parseShard, planOf, read, shardName, sizesOf, textOf, wholeShard, written } from "./entry.js";
import { chunkKeys, identityOf, namespaceOf } from "./keys.js";
import { sealOf } from "./seal.js";

const { O_RDONLY, O_NOFOLLOW, O_NONBLOCK } = fs.constants;
const LAYOUT = ["layers", "kv_heads", "k_dim", "v_dim", "dtype", "chunk_tokens"];
const IDENTITY = ["version", "namespace", "model", "weights", "adapter", "kv_dtype", "kv_scales", "rope", "epoch", "chunk_tokens", "name"];

// -- namespace.json -------------------------------------------------------------------------------

function jsonOf(value, indent = "") {
  if (typeof value !== "object") return JSON.stringify(value).replace(/[\u0080-\uffff]/g, (one) => "\\u" + one.charCodeAt(0).toString(16).padStart(4, "0"));
  const deeper = indent + " ";
  if (Array.isArray(value)) return `[\n${value.map((each) => deeper + jsonOf(each, deeper)).join(",\n")}\n${indent}]`;
  return `{\n${Object.entries(value).map(([name, each]) => `${deeper}"${name}": ${jsonOf(each, deeper)}`).join(",\n")}\n${indent}}`;
}

const layoutText = (layout) => Object.fromEntries([...LAYOUT, ...(layout.group ? ["group"] : [])].map((name) => [name, layout[name]]));

/** The text of a namespace.json. */
export function descriptionText(given, layouts) {
  const identity = identityOf(given);
  const described = {
    format: "vua.namespace.v1",
    identity: { version: "vua.identity.v1", namespace: namespaceOf(identity), ...identity },
    layout: layoutText(layouts[0]),
  };
  if (layouts.length > 1) described.further_groups = layouts.slice(1).map(layoutText);
  return jsonOf(described) + "\n";
}

const isObject = (value) => value !== null && typeof value === "object" && !Array.isArray(value);
const has = (value, names) => names.every((name) => Object.hasOwn(value, name));
const strangers = (value, names) => Object.keys(value).filter((name) => !names.includes(name));
function jsonIn(bytes) {
  try {
    return JSON.parse(textOf(bytes));
  } catch (problem) {
    const end = bytes.indexOf(',\n "counted": '); // for people: damage in it does not matter
    if (end >= 0) return jsonIn(Buffer.concat([bytes.subarray(0, end), Buffer.from("}")]));
    throw new Miss("damaged", `not JSON: ${problem.message}`);
  }
}

/** `{ identity, layouts }` of the bytes of a namespace.json in the directory `name`; throws a Miss. */
export function parseDescription(bytes, name) {
  const described = jsonIn(bytes);
  demand(isObject(described) && described.format === "vua.namespace.v1", "not a description");
  const { identity, layout, further_groups: further = [] } = described;
  demand(isObject(identity) && has(identity, IDENTITY) && !strangers(identity, IDENTITY).length && identity.version === "vua.identity.v1", "not an identity");
  demand(
    IDENTITY.every((member) => (member === "chunk_tokens" ? Number.isInteger(identity[member]) : typeof identity[member] === "string")),
    "members of the identity have wrong types",
  );
  demand(identity.chunk_tokens >= 1 && identity.chunk_tokens <= 65536, "chunk_tokens out of range");
  demand(["", "neox", "interleaved"].includes(identity.rope), "an unknown rope");
  demand(namespaceOf(identity) === identity.namespace, "the identity has another digest");
  demand(Array.isArray(further) && further.length < 64, "groups out of range");
  const layouts = [layout, ...further];
  for (const one of layouts) {
    demand(isObject(one) && has(one, LAYOUT) && !strangers(one, [...LAYOUT, "group"]).length && typeof one.dtype === "string" && typeof (one.group ?? "") === "string", "not a layout");
    checkLayout(one);
  }
  demand(identity.namespace === name, "it describes another namespace", "foreign");
  return { identity, layouts };
}

// -- files ----------------------------------------------------------------------------------------

/** The bytes of a regular file of a trusted user, below `root` without links; throws a Miss. */
function bytesOf(root, parts, maxNbytes) {
  let at = root;
  for (const part of parts.slice(0, -1)) {
    at = path.join(at, part);
    const found = fs.lstatSync(at, { throwIfNoEntry: false });
    demand(found?.isDirectory(), "not stored", "absent");
  }
  let fd;
  try {
    fd = fs.openSync(path.join(at, parts.at(-1)), O_RDONLY | O_NOFOLLOW | O_NONBLOCK);
  } catch (problem) {
    throw new Miss("absent", `not stored: ${problem.code}`);
  }
  try {
    const found = fs.fstatSync(fd);
    const own = found.uid === process.geteuid();
    demand(found.isFile() && (own || (found.uid === 0 && found.nlink === 1)), "not a regular file of a trusted user", "untrusted");
    demand(found.size <= maxNbytes, "too long");
    return fs.readFileSync(fd);
  } finally {
    fs.closeSync(fd);
  }
}

function makeDirectory(place) {
  try {
    fs.mkdirSync(place, 0o700);
    fs.chmodSync(place, 0o700);
  } catch (problem) {
    if (problem.code !== "EEXIST") throw problem;
  }
}

let serial = 0;

function writeFile(place, bytes, temporary) {
  const at = path.join(path.dirname(place), temporary);
  const fd = fs.openSync(at, fs.constants.O_WRONLY | fs.constants.O_CREAT | fs.constants.O_EXCL | O_NOFOLLOW, 0o600);
  try {
    try {
      fs.fchmodSync(fd, 0o600);
      fs.writeFileSync(fd, bytes);
    } finally {
      fs.closeSync(fd);
    }
    fs.renameSync(at, place);
  } catch (problem) {
    fs.rmSync(at, { force: true });
    throw problem;
  }
}

const smallName = () => `.tmp-${randomBytes(8).toString("hex")}`;
const tag = `${os.hostname().slice(0, 32).replaceAll("/", "_")}-${randomBytes(4).toString("hex")}-${process.pid}`;

/** The caches of one identity in a directory. `key`: 32 bytes, for sealed files of a `kind`. */
export class Namespace {
  constructor(root, identity, layouts, { key = null, kind = "aes-256-gcm", writer = "javascript" } = {}) {
    layouts.forEach(checkLayout);
    Object.assign(this, { root, identity: identityOf(identity), layouts, writer });
    this.name = namespaceOf(identity);
    this.seal = key && sealOf(key, this.name, kind);
    this.path = path.join(root, this.name);
  }

  /** The namespace `name` below `root`, as its namespace.json says; throws a Miss. */
  static open(root, name, options) {
    const { identity, layouts } = parseDescription(bytesOf(root, [name, "namespace.json"], 1 << 20), name);
    return new Namespace(root, identity, layouts, options);
  }

  keys(tokens, extras) {
    return chunkKeys(tokens, this.identity.chunk_tokens, extras, this.seal?.names);
  }

  asked(layout, shard, key) {
    return { namespace: this.name, layout, shard, key, seal: this.seal };
  }

  // -- reading

  /** `{ k, v }` of a shard of a chunk, from one file or from several that hold it together; throws a Miss. */
  get(layout, key, shard = wholeShard(layout)) {
    const folder = [this.name, key.name.slice(0, 2), key.name];
    const at = path.join(this.root, ...folder);
    const names = fs.existsSync(at) ? fs.readdirSync(at) : [];
    const found = names.map((name) => name.endsWith(".safetensors") && parseShard(name.slice(0, -12))).filter((one) => one && one.group === shard.group);
    found.sort((one, other) => area(other) - area(one));
    const { extents, layers, heads } = sizesOf(layout, shard);
    const out = extents.map((extent) => Buffer.alloc(heads * layers * extent));
    const missing = new Set(Array.from({ length: heads * layers }, (_, cell) => cell));
    let why = new Miss("absent", "not stored");
    for (const one of found) {
      const cells = [...missing].filter((cell) => holds(one, shard.heads[0] + Math.floor(cell / layers), shard.layers[0] + (cell % layers)));
      if (!cells.length) continue;
      try {
        const asked = this.asked(layout, one, key);
        const entry = read(bytesOf(this.root, [...folder, `${shardName(one)}.safetensors`], planOf(asked).nbytes), asked);
        for (const cell of cells) {
          const [head, layer] = [shard.heads[0] + Math.floor(cell / layers), shard.layers[0] + (cell % layers)];
          const place = (head - one.heads[0]) * (one.layers[1] - one.layers[0]) + layer - one.layers[0];
          out.forEach((bytes, i) => entry["kv"[i]].copy(bytes, cell * extents[i], place * extents[i], (place + 1) * extents[i]));
          missing.delete(cell);
        }
      } catch (problem) {
        if (!(problem instanceof Miss)) throw problem;
        why = problem;
      }
    }
    if (missing.size) throw why;
    return { k: out[0], v: out[1] };
  }

  /** How many chunks of a prompt, from the first one on, are there for a group of layers that needs all. */
  longest(layout, keys) {
    let count = 0;
    for (; count < keys.length; count++) {
      try {
        this.get(layout, keys[count]);
      } catch (problem) {
        if (!(problem instanceof Miss)) throw problem;
        break;
      }
    }
    return count;
  }

  // -- writing

  /** Makes what is missing of the root, its mark and the description. */
  create() {
    makeDirectory(this.root);
    const mark = path.join(this.root, "vua.json");
    if (!fs.existsSync(mark)) {
      if (fs.readdirSync(this.root).length) throw new Error(`${this.root} is not empty and has no vua.json: nothing is written there`);
      writeFile(mark, '{"format": "vua.root.v1"}\n', smallName());
    }
    makeDirectory(this.path);
    try {
      Namespace.open(this.root, this.name);
    } catch (problem) {
      if (!(problem instanceof Miss)) throw problem;
      writeFile(path.join(this.path, "namespace.json"), descriptionText(this.identity, this.layouts), smallName());
    }
  }

  /** Stores a shard of a chunk unless it is there; returns whether it was written. Call it front to back. */
  put(layout, key, arrays, { shard = wholeShard(layout), ...options } = {}) {
    const asked = this.asked(layout, shard, key);
    const folder = path.join(this.path, key.name.slice(0, 2), key.name);
    const place = path.join(folder, `${shardName(shard)}.safetensors`);
    const there = fs.lstatSync(place, { throwIfNoEntry: false });
    if (there?.isFile() && there.size === planOf(asked).nbytes) return false;
    makeDirectory(path.dirname(folder));
    makeDirectory(folder);
    writeFile(place, written(asked, arrays, { writer: this.writer, ...options }), `.tmp-${tag}-${serial++}`);
    if (key.previous) fs.closeSync(fs.openSync(path.join(folder, `after-${key.previous}`), "a", 0o600));
    const before = key.previous || (key.first ? key.parent : "");
    const parent = before && fs.statSync(path.join(this.path, before.slice(0, 2), before), { bigint: true, throwIfNoEntry: false });
    if (parent) {
      const seconds = Number(parent.mtimeNs - 1000n) / 1e9;
      fs.utimesSync(folder, seconds, seconds);
    }
    return true;
  }
}

const area = ({ layers, heads }) => (layers[1] - layers[0]) * (heads[1] - heads[0]);
const holds = ({ layers, heads }, head, layer) => heads[0] <= head && head < heads[1] && layers[0] <= layer && layer < layers[1];

/** The numbers of the chunks that a group of layers needs for a prefix of some tokens. */
export function neededChunks(layout, tokens) {
  const [size, group] = [layout.chunk_tokens, layout.group ?? ""];
  const first = group ? Math.max(0, tokens - Number(group.slice(1)) + 1) : 0;
  const [start, stop] = [Math.floor(first / size), Math.ceil(tokens / size)];
  return Array.from({ length: stop - start }, (_, i) => start + i);
}
