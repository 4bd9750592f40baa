// An entry: one shard of one chunk. Written, read by who knows what to expect, and inspected by tools.

import { randomBytes } from "node:crypto";
import { xxh3 } from "./xxh3.js";
import { closed, opened } from "./seal.js";

export const ITEMSIZE = Object.fromEntries(
  [
    [1, "I8 U8 BOOL F8_E4M3 F8_E5M2 F8_E8M0 F8_E4M3FNUZ F8_E5M2FNUZ"],
    [2, "F16 BF16 I16 U16"],
    [4, "F32 I32 U32"],
    [8, "F64 I64 U64"],
  ].flatMap(([size, names]) => names.split(" ").map((name) => [name, size])),
);
export const GROUP = /^(?:w[1-9][0-9]{0,8})?$/;
const MAX_HEADER = 1 << 20;
const NO_HASH = "-".repeat(64);
const BLANK = "0".repeat(16);
const CREATED = 1767225600; // of the header from which places are learned

/** Why a chunk is treated as not stored. `kind`: "damaged" or "foreign" (not the one asked for). */
export class Miss extends Error {
  constructor(kind, text) {
    super(text);
    this.kind = kind;
  }
}

export function demand(holds, text, kind = "damaged") {
  if (!holds) throw new Miss(kind, text);
}

// -- layouts and shards ---------------------------------------------------------------------------

const whole = (number, least, most) => Number.isInteger(number) && number >= least && number <= most;

/** Throws a Miss where a layout is not one. */
export function checkLayout(layout) {
  demand(whole(layout.layers, 1, 99999) && whole(layout.kv_heads, 1, 99999), "layers or KV heads out of range");
  demand(layout.layers * layout.kv_heads <= 1 << 20, "too many layers and KV heads");
  demand(whole(layout.k_dim, 1, 1 << 24) && whole(layout.v_dim, 0, 1 << 24), "k_dim or v_dim out of range");
  demand(whole(layout.chunk_tokens, 1, 65536), "chunk_tokens out of range");
  demand(Object.hasOwn(ITEMSIZE, layout.dtype), `dtype ${layout.dtype}`);
  demand(GROUP.test(layout.group ?? ""), `group ${layout.group}`);
}

/** The shard that a name stands for, `{ group, layers: [a, b], heads: [c, d] }`, or null. */
export function parseShard(name) {
  const found = /^(?:(w[1-9][0-9]{0,8})\.)?l([0-9]{1,5})-([0-9]{1,5})\.h([0-9]{1,5})-([0-9]{1,5})$/.exec(name);
  if (!found) return null;
  const [a, b, c, d] = found.slice(2).map(Number);
  const shard = { group: found[1] ?? "", layers: [a, b], heads: [c, d] };
  return a < b && c < d && shardName(shard) === name ? shard : null;
}

export function shardName({ group, layers, heads }) {
  return `${group ? group + "." : ""}l${layers.join("-")}.h${heads.join("-")}`;
}

export const wholeShard = (layout) => ({ group: layout.group ?? "", layers: [0, layout.layers], heads: [0, layout.kv_heads] });

/** Sizes: of extents, of checksum blocks (all, in file order), and how many blocks a head has. */
export function sizesOf(layout, shard) {
  const itemsize = ITEMSIZE[layout.dtype];
  const dims = layout.v_dim ? [layout.k_dim, layout.v_dim] : [layout.k_dim];
  const extents = dims.map((dim) => layout.chunk_tokens * dim * itemsize);
  const layers = shard.layers[1] - shard.layers[0];
  const heads = shard.heads[1] - shard.heads[0];
  const step = Math.max(1, Math.floor(131072 / Math.max(...extents)));
  return { itemsize, dims, extents, layers, heads, step, perHead: Math.ceil(layers / step) };
}

function blockSizes({ extents, layers, heads, step, perHead }) {
  const row = Array.from({ length: perHead }, (_, i) => Math.min(step, layers - i * step));
  return extents.flatMap((extent) => Array(heads).fill(row).flat().map((count) => count * extent));
}

// -- headers --------------------------------------------------------------------------------------

const digits = (number, width) => String(number).padStart(width, "0");
export const writerText = (name) => name.replace(/[^A-Za-z0-9 ./_+:-]/g, "_").slice(0, 48).padEnd(48);

/**
 * What a header has at which place.
 *
 * @param asked `{ namespace, layout, shard, key: { name, parent, first }, seal }`; `seal` of sealed files is what
 *   `sealOf` of seal.js returns
 */
export function planOf({ namespace, layout, shard, key, seal }) {
  checkLayout(layout);
  const sizes = sizesOf(layout, shard);
  const { itemsize, dims, layers, heads, perHead } = sizes;
  const blocks = dims.length * heads * perHead;
  const format = seal ? `vua.sealed.v2","seal":"${seal.kind}","dtype":"${layout.dtype}` : "vua.entry.v1";
  const [first, last] = [key.first, key.first + layout.chunk_tokens];
  demand(whole(key.first, 0, 9999999999 - layout.chunk_tokens) && key.first % layout.chunk_tokens === 0, "a position out of range");
  const start =
    `{"__metadata__":{"format":"${format}","namespace":"${namespace}","shard":"${shardName(shard)}",` +
    `"layers":"${layout.layers}","kv_heads":"${layout.kv_heads}","prefix_hash":"${key.name}","parent":"${key.parent}",` +
    `"tokens":"${digits(first, 10)}-${digits(last, 10)}"${seal ? `,"key":"${seal.id}"` : ""}`;
  const opaque = seal?.kind === "aes-256-gcm";
  const tables = [["checksums", "U64", [dims.length, heads, perHead], 8]];
  if (seal) tables.push(["tags", "U8", [dims.length, heads, perHead, 16], 1]);
  dims.forEach((dim, i) => {
    const row = opaque ? dim * itemsize : dim;
    tables.push(["kv"[i], opaque ? "U8" : layout.dtype, [heads, layers, layout.chunk_tokens, row], opaque ? 1 : itemsize]);
  });
  let offset = 0;
  const described = tables.map(([name, dtype, shape, size]) => {
    const begin = offset;
    offset += shape.reduce((product, each) => product * each, size);
    return `"${name}":{"dtype":"${dtype}","shape":[${shape}],"data_offsets":[${begin},${offset}]}`;
  });
  const end = `"},${described.join(",")}}`;
  const varying = variable(CREATED, "", seal && "0".repeat(32)).length;
  const tableNbytes = blocks * (seal ? 24 : 8);
  const before = 8 + start.length + varying + end.length + tableNbytes;
  const headerNbytes = Math.ceil(before / 4096) * 4096;
  demand(headerNbytes <= MAX_HEADER, "a header above 1 MiB");
  const payloadNbytes = sizes.heads * sizes.layers * sizes.extents.reduce((a, b) => a + b);
  return {
    sizes,
    blocks: blockSizes(sizes),
    start: Buffer.from(start),
    end: Buffer.from(end.padEnd(headerNbytes - 8 - start.length - varying - tableNbytes)),
    headerNbytes,
    nbytes: headerNbytes + payloadNbytes,
    tableAt: headerNbytes - tableNbytes,
    tagsAt: headerNbytes - tableNbytes + 8 * blocks,
    checkAt: 8 + start.length + varying - 16,
  };
}

function variable(created, writer, nonce) {
  const more = nonce ? `"nonce":"${nonce}",` : "";
  return `,"created":"${digits(created, 10)}","writer":"${writerText(writer)}",${more}"check":"${BLANK}`;
}

const VARIABLE = /^,"created":"([0-9]{10})","writer":"([A-Za-z0-9 .\/_+:-]{48})",(?:"nonce":"([0-9a-f]{32})",)?"check":"([0-9a-f]{16})$/;

function checkOf(header, checkAt) {
  const blank = Buffer.from(header);
  blank.write(BLANK, checkAt, "latin1");
  return xxh3(blank).toString(16).padStart(16, "0");
}

// -- writing --------------------------------------------------------------------------------------

/**
 * The bytes of a file.
 *
 * @param asked as for `planOf`
 * @param arrays `{ k, v }`, Buffers of the shard's K and V, `[heads, layers, tokens, dim]`
 */
export function written(asked, { k, v }, { writer = "javascript", created = Math.floor(Date.now() / 1000), nonce = randomBytes(16).toString("hex") } = {}) {
  const plan = planOf(asked);
  const payload = Buffer.concat(v ? [k, v] : [k]);
  if (plan.headerNbytes + payload.length !== plan.nbytes) throw new Error(`K and V of ${payload.length} bytes, expected ${plan.nbytes - plan.headerNbytes}`);
  const json = Buffer.concat([plan.start, Buffer.from(variable(created, writer, asked.seal && nonce)), plan.end]);
  const length = Buffer.alloc(8);
  length.writeBigUInt64LE(BigInt(json.length));
  let stored = payload;
  let tags = Buffer.alloc(0);
  if (asked.seal) [stored, tags] = closed(asked.seal, nonce, Buffer.concat([length, plan.start]), payload, plan.blocks);
  const header = Buffer.concat([length, json, checksums(stored, plan.blocks), tags]);
  header.write(checkOf(header, plan.checkAt), plan.checkAt, "latin1");
  return Buffer.concat([header, stored]);
}

function checksums(payload, blocks) {
  const table = Buffer.alloc(8 * blocks.length);
  let at = 0;
  blocks.forEach((nbytes, i) => {
    table.writeBigUInt64LE(xxh3(payload.subarray(at, at + nbytes)), 8 * i);
    at += nbytes;
  });
  return table;
}

function demandChecksums(data, plan) {
  const found = checksums(data.subarray(plan.headerNbytes), plan.blocks);
  demand(found.equals(data.subarray(plan.tableAt, plan.tagsAt)), "a checksum is wrong");
}

// -- reading --------------------------------------------------------------------------------------

/** K and V, `{ k, v, created, writer }`, of a file that is the entry asked for; throws a Miss otherwise. */
export function read(data, asked) {
  const plan = planOf(asked);
  demand(data.length === plan.nbytes, `${data.length} bytes, expected ${plan.nbytes}`);
  const said = readHeader(data, plan, asked.seal);
  let payload = data.subarray(plan.headerNbytes);
  demandChecksums(data, plan);
  if (asked.seal) {
    const tags = data.subarray(plan.tagsAt, plan.headerNbytes);
    const bound = data.subarray(0, 8 + plan.start.length);
    payload = opened(asked.seal, said.nonce, bound, payload, plan.blocks, tags);
    demand(payload, "a tag is wrong");
  }
  const { heads, layers, extents } = plan.sizes;
  const kNbytes = heads * layers * extents[0];
  const arrays = { k: payload.subarray(0, kNbytes) };
  if (extents.length > 1) arrays.v = payload.subarray(kNbytes);
  return { ...arrays, created: said.created, writer: said.writer };
}

function readHeader(data, plan, seal) {
  const json = plan.tableAt - 8;
  const endAt = plan.tableAt - plan.end.length;
  demand(data.length >= plan.headerNbytes && data.readBigUInt64LE(0) === BigInt(json), "another length of the header", "foreign");
  demand(data.subarray(8, 8 + plan.start.length).equals(plan.start), "another entry", "foreign");
  demand(data.subarray(endAt, plan.tableAt).equals(plan.end), "other arrays", "foreign");
  const found = VARIABLE.exec(data.toString("latin1", 8 + plan.start.length, endAt));
  demand(found && Boolean(found[3]) === Boolean(seal), "created, writer, nonce or check have another form");
  demand(checkOf(data.subarray(0, plan.headerNbytes), plan.checkAt) === found[4], "the check is wrong");
  return { created: Number(found[1]), writer: found[2].trimEnd(), nonce: found[3] };
}

// -- tools ----------------------------------------------------------------------------------------

const FORMATS = ["vua.entry.v1", "vua.sealed.v2"];

/** The text of bytes in UTF-8; throws an Error where they are not. */
export const textOf = (data) => new TextDecoder("utf-8", { fatal: true, ignoreBOM: true }).decode(data);

export function jsonHeader(data) {
  demand(data.length >= 8, "too short");
  const length = data.readBigUInt64LE(0);
  demand(length <= BigInt(Math.min(MAX_HEADER, data.length - 8)), "a header that is longer than it may be");
  try {
    const header = JSON.parse(textOf(data.subarray(8, 8 + Number(length))));
    demand(header !== null && typeof header === "object" && !Array.isArray(header), "the header is not an object");
    return header;
  } catch (problem) {
    throw problem instanceof Miss ? problem : new Miss("damaged", `the header is not JSON: ${problem.message}`);
  }
}

/**
 * What a header says about itself: `{ asked, plan, created, writer }`, without a look at K and V. `asked.seal` of a sealed
 * file has its kind and the key's id alone. Throws a Miss where it is damaged.
 */
export function inspect(data) {
  const header = jsonHeader(data);
  const said = header.__metadata__;
  demand(said !== null && typeof said === "object" && FORMATS.includes(said.format), "not an entry");
  const seal = said.format === "vua.entry.v1" ? null : { kind: said.seal, id: said.key };
  demand(!seal || (["gmac", "aes-256-gcm"].includes(seal.kind) && /^[0-9a-f]{16}$/.test(seal.id)), "an unknown seal");
  const shard = parseShard(said.shard);
  const tokens = /^([0-9]{10})-[0-9]{10}$/.exec(said.tokens);
  demand(shard && tokens && /^[0-9a-f]{64}$/.test(said.namespace) && /^[0-9a-f]{64}$/.test(said.prefix_hash), "members of a wrong form");
  demand(said.parent === NO_HASH || /^[0-9a-f]{64}$/.test(said.parent), "a parent of a wrong form");
  const [kShape, vShape] = [header.k?.shape, header.v?.shape];
  demand(Array.isArray(kShape) && kShape.length === 4 && (!header.v || (Array.isArray(vShape) && vShape.length === 4)), "arrays of a wrong form");
  const dtype = seal ? said.dtype : header.k.dtype;
  const itemsize = seal?.kind === "aes-256-gcm" ? ITEMSIZE[dtype] : 1;
  const layout = {
    layers: Number(said.layers),
    kv_heads: Number(said.kv_heads),
    k_dim: kShape[3] / itemsize,
    v_dim: header.v ? vShape[3] / itemsize : 0,
    dtype,
    chunk_tokens: kShape[2],
    group: shard.group,
  };
  checkLayout(layout);
  demand(shard.layers[1] <= layout.layers && shard.heads[1] <= layout.kv_heads, "a shard outside the model");
  const key = { name: said.prefix_hash, parent: said.parent, first: Number(tokens[1]) };
  demand(key.first === 0 || key.parent !== NO_HASH, "a later chunk without a parent");
  const asked = { namespace: said.namespace, layout, shard, key, seal };
  const plan = planOf(asked);
  return { asked, plan, ...readHeader(data, plan, seal) };
}

/** As `inspect`, and all checksums are right. Tags need a key: `read` judges them. */
export function verify(data) {
  const found = inspect(data);
  const { plan } = found;
  demand(data.length === plan.nbytes, `${data.length} bytes, expected ${plan.nbytes}`);
  demandChecksums(data, plan);
  return found;
}
