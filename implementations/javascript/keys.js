// Names: of namespaces, of chunks, and the digests of configs and weights that they are made of.

import { createHash, createHmac } from "node:crypto";
import { basename } from "node:path";
import { readFileSync } from "node:fs";

const MEMBERS = ["model", "weights", "adapter", "kv_dtype", "kv_scales", "rope", "epoch", "chunk_tokens"];

export const sha256 = (...parts) => createHash("sha256").update(Buffer.concat(parts)).digest();
export const hmac = (key, ...parts) => createHmac("sha256", key).update(Buffer.concat(parts)).digest();

export function le32(number) {
  const bytes = Buffer.alloc(4);
  bytes.writeUInt32LE(number);
  return bytes;
}

export function le64(number) {
  const bytes = Buffer.alloc(8);
  bytes.writeBigUInt64LE(BigInt(number));
  return bytes;
}

/** UTF-8, with three bytes for a lone surrogate. */
export function utf8(text) {
  const parts = [];
  for (const letter of String(text)) {
    const code = letter.codePointAt(0);
    const alone = code >= 0xd800 && code < 0xe000;
    parts.push(alone ? Buffer.from([0xe0 | (code >> 12), 0x80 | ((code >> 6) & 63), 0x80 | (code & 63)]) : Buffer.from(letter));
  }
  return Buffer.concat(parts);
}

export const framed = (bytes) => Buffer.concat([le64(bytes.length), bytes]);

/** An identity with all members; those that are not given are empty. */
export function identityOf(given) {
  const identity = Object.fromEntries(MEMBERS.map((name) => [name, given[name] ?? (name === "chunk_tokens" ? 64 : "")]));
  return { ...identity, name: given.name ?? "" };
}

/** The name of a namespace, 64 hex digits. */
export function namespaceOf(given) {
  const identity = identityOf(given);
  const texts = ["vua.identity.v1", ...MEMBERS.flatMap((name) => [name, identity[name]])];
  return sha256(...texts.map((text) => framed(utf8(text)))).toString("hex");
}

/**
 * The chunks of a prompt, from the first one on: `{ name, parent, previous, first, last }`. `parent` is in hex or 64 times
 * `-`; `previous` names the chunk before where extras hide it in `parent`.
 *
 * @param tokens token ids
 * @param extras for a chunk's number a list of [tag, value], a text and bytes
 * @param secret a key's `names`, for sealed files
 */
export function chunkKeys(tokens, chunkTokens, extras = {}, secret = null) {
  const digest = secret ? (...parts) => hmac(secret, ...parts) : sha256;
  const keys = [];
  let before = Buffer.alloc(0);
  for (let i = 0; (i + 1) * chunkTokens <= tokens.length; i++) {
    const ids = Buffer.concat(tokens.slice(i * chunkTokens, (i + 1) * chunkTokens).map(le32));
    const pairs = extras[i];
    let parent = before;
    if (pairs) {
      const parts = pairs.flatMap(([tag, value]) => [framed(utf8(tag)), framed(Buffer.from(value))]);
      parent = digest(Buffer.from("vua.extras.v1"), framed(before), framed(le32(pairs.length)), ...parts);
    }
    const key = digest(parent, ids);
    keys.push({
      name: key.toString("hex"),
      parent: parent.toString("hex") || "-".repeat(64),
      previous: pairs && i > 0 ? before.toString("hex") : "",
      first: i * chunkTokens,
      last: (i + 1) * chunkTokens,
    });
    before = key;
  }
  return keys;
}

// -- a config's digest ----------------------------------------------------------------------------

const IGNORED = new Set(
  (
    "_attn_implementation _attn_implementation_autoset _attn_implementation_internal _auto_class _commit_hash " +
    "_experts_implementation _experts_implementation_internal _is_quantized _name_or_path _output_attentions " +
    "activation_dropout attention_dropout attention_probs_dropout_prob attn_dropout attn_implementation " +
    "attn_pdrop bos_token_id chunk_size_feed_forward classifier_dropout decoder_layerdrop " +
    "decoder_start_token_id do_sample dropout dtype embd_pdrop embed_dropout embedding_dropout eos_token_id " +
    "ffn_dropout generation_config gradient_checkpointing hidden_dropout hidden_dropout_prob id2label " +
    "init_std initializer_factor initializer_range label2id layerdrop max_length min_length model_max_length " +
    "name_or_path num_beams num_labels num_return_sequences output_attentions output_hidden_states " +
    "output_router_logits pad_token_id problem_type repetition_penalty resid_dropout resid_pdrop " +
    "residual_dropout return_dict router_aux_loss_coef sep_token_id temperature tie_word_embeddings " +
    "tokenizer_class top_k top_p torch_dtype transformers_version use_cache"
  ).split(" "),
);

function byCodePoints(a, b) {
  const [one, other] = [[...a], [...b]];
  for (let i = 0; i < one.length && i < other.length; i++) {
    if (one[i] !== other[i]) return one[i].codePointAt(0) - other[i].codePointAt(0);
  }
  return one.length - other.length;
}

function escaped(text) {
  const hex = (letter) => "\\u" + letter.charCodeAt(0).toString(16).padStart(4, "0");
  return JSON.stringify(text).replace(/[\u007f-\uffff]/g, (letter) => (letter === "\x7f" ? letter : hex(letter)));
}

function numberText(value) {
  if (Number.isInteger(value)) return BigInt(value).toString();
  const [digits, exponent] = value.toExponential().split("e");
  const power = Number(exponent);
  if (power >= -4) return String(value);
  return `${digits}e-${String(-power).padStart(2, "0")}`;
}

function canonical(value) {
  if (value === null || typeof value === "boolean") return String(value);
  if (typeof value === "number") return numberText(value);
  if (typeof value === "string") return escaped(value);
  if (Array.isArray(value)) return `[${value.map(canonical).join(",")}]`;
  const names = Object.keys(value).sort(byCodePoints);
  return `{${names.map((name) => `${escaped(name)}:${canonical(value[name])}`).join(",")}}`;
}

const KNOWN_ROTATION = new Set(
  (
    "arcee cohere cohere2 ernie4_5 falcon gemma gemma2 gemma3_text glm glm4 glm4_moe gpt_neox gpt_oss gptj " +
    "granite granitemoe hunyuan_v1_dense hunyuan_v1_moe llama mellum mistral mixtral nemotron olmo olmo2 " +
    "olmo3 olmoe opt phi phi3 qwen2 qwen2_moe qwen3 qwen3_moe seed_oss smollm3 stablelm starcoder2"
  ).split(" "),
);

const ROTATION = new Set(
  (
    "rope_type type rope_theta partial_rotary_factor factor attention_factor low_freq_factor high_freq_factor " +
    "original_max_position_embeddings beta_fast beta_slow mscale mscale_all_dim truncate"
  ).split(" "),
);

const isObject = (value) => typeof value === "object" && value !== null && !Array.isArray(value);

function namesItsLength(rotation) {
  if (!Object.keys(rotation).every((name) => ROTATION.has(name))) return false;
  if (["default", "linear"].includes(rotation.rope_type)) return true;
  const isNumber = (name) => typeof rotation[name] === "number";
  const complete = isNumber("factor") && isNumber("original_max_position_embeddings");
  return complete && ["llama3", "yarn"].includes(rotation.rope_type);
}

/** Whether `max_position_embeddings` counts. */
function longestCounts(config) {
  const rope = config.rope_parameters;
  if (!isObject(rope) || !KNOWN_ROTATION.has(config.model_type)) return true;
  if (["vua.code", "vua.class", "vua.sglang_code"].some((name) => name in config)) return true;
  const parts = Object.values(rope).filter(isObject);
  if (!parts.length || "rope_type" in rope) parts.push(rope);
  return !parts.every(namesItsLength);
}

/** The text of a config that is digested. Integers above 2^53 are not kept by JSON.parse of JavaScript. */
export function configText(config) {
  const counting = Object.fromEntries(Object.entries(config).filter(([name]) => !IGNORED.has(name)));
  if (!longestCounts(config)) delete counting.max_position_embeddings;
  if (counting.sliding_window === 0) counting.sliding_window = null;
  return canonical(counting);
}

/** An identity's `model` for a config as `to_dict()` of transformers gives it. */
export const configDigest = (config) => sha256(Buffer.from("vua.config.v2\n" + configText(config))).toString("hex");

// -- weights --------------------------------------------------------------------------------------

const PIECE = 1 << 22;

function tree(head, bytes) {
  const pieces = [];
  for (let at = 0; at < bytes.length; at += PIECE) pieces.push(sha256(bytes.subarray(at, at + PIECE)));
  return sha256(head, le64(bytes.length), ...pieces);
}

/** An identity's `weights` for the paths of all weight files. */
export function weightsDigest(paths) {
  const tensors = new Map();
  const entries = [];
  for (const path of paths) {
    const [data, name] = [readFileSync(path), framed(Buffer.from(basename(path)))];
    if (!path.endsWith(".safetensors")) {
      entries.push(Buffer.concat([Buffer.from("file"), name, tree(Buffer.concat([Buffer.from("file")]), data)]));
      continue;
    }
    const start = 8 + Number(data.readBigUInt64LE(0));
    for (const [tensor, said] of Object.entries(JSON.parse(data.toString("utf8", 8, start)))) {
      if (tensor === "__metadata__") continue;
      const head = [tensor, said.dtype, `[${said.shape.join(", ")}]`].map((text) => framed(utf8(text)));
      const [begin, end] = said.data_offsets;
      const digest = tree(Buffer.concat([Buffer.from("tensor"), ...head]), data.subarray(start + begin, start + end));
      const holders = tensors.get(tensor) ?? new Map();
      tensors.set(tensor, holders.set(digest.toString("hex"), [...(holders.get(digest.toString("hex")) ?? []), name]));
    }
  }
  for (const holders of tensors.values()) {
    for (const [digest, names] of holders) {
      const files = holders.size > 1 ? names.sort(Buffer.compare) : [];
      entries.push(Buffer.concat([Buffer.from("tensor"), Buffer.from(digest, "hex"), ...files]));
    }
  }
  const unique = [...new Map(entries.map((entry) => [entry.toString("hex"), entry])).values()].sort(Buffer.compare);
  return sha256(framed(Buffer.from("vua.weights.v2")), ...unique.map(framed)).toString("hex");
}
