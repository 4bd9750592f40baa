// Decompresses one zstd frame that states the size of its content and needs no dictionary (RFC 8878).

import { xxh64 } from "./xxh3.js";

const MAX_BLOCK = 1 << 17;

function check(holds, text) {
  if (!holds) throw new Error(`zstd: ${text}`);
}

const topBit = (x) => 31 - Math.clz32(x);

/** Bits from the front of bytes; the first ones are the lowest. */
class Forward {
  constructor(bytes) {
    [this.bytes, this.at] = [bytes, 0];
  }

  read(count) {
    check(this.at + count <= 8 * this.bytes.length, "a table is cut short");
    let found = 0;
    for (let i = 0; i < count; i++, this.at++) found |= ((this.bytes[this.at >> 3] >> (this.at & 7)) & 1) << i;
    return found;
  }
}

/** Bits from the end of bytes, after the last 1; zeros come before the first one. */
class Backward {
  constructor(bytes) {
    check(bytes.length > 0 && bytes[bytes.length - 1] !== 0, "a stream without an end");
    this.bytes = bytes;
    this.left = 8 * (bytes.length - 1) + topBit(bytes[bytes.length - 1]);
  }

  read(count) {
    let found = 0;
    for (let i = 0; i < count; i++) {
      this.left--;
      const bit = this.left < 0 ? 0 : (this.bytes[this.left >> 3] >> (this.left & 7)) & 1;
      found = found * 2 + bit;
    }
    return found;
  }
}

function fseTable(counts, accuracy) {
  const size = 1 << accuracy;
  const symbols = new Array(size);
  const next = counts.map((count) => Math.abs(count));
  let high = size;
  counts.forEach((count, symbol) => {
    if (count < 0) symbols[--high] = symbol;
  });
  let place = 0;
  counts.forEach((count, symbol) => {
    for (let i = 0; i < count; i++) {
      symbols[place] = symbol;
      do place = (place + (size >> 1) + (size >> 3) + 3) & (size - 1);
      while (place >= high);
    }
  });
  check(place === 0, "a table of wrong counts");
  const states = symbols.map((symbol) => {
    const state = next[symbol]++;
    const bits = accuracy - topBit(state);
    return { symbol, bits, base: (state << bits) - size };
  });
  return { accuracy, states };
}

/** Reads a table's description; returns the table and how many bytes it takes. */
function readFse(bytes, maxAccuracy, maxSymbol) {
  const stream = new Forward(bytes);
  const accuracy = stream.read(4) + 5;
  check(accuracy <= maxAccuracy, "a table too fine");
  const counts = [];
  let left = 1 << accuracy;
  while (left > 0) {
    const bits = topBit(left + 1) + 1;
    const spare = (1 << bits) - 1 - (left + 1);
    let value = stream.read(bits - 1);
    if (value >= spare && stream.read(1)) value += (1 << (bits - 1)) - spare;
    const count = value - 1;
    left -= Math.abs(count);
    counts.push(count);
    for (let zeros = 3; count === 0 && zeros === 3; ) {
      zeros = stream.read(2);
      for (let i = 0; i < zeros; i++) counts.push(0);
    }
    check(counts.length <= maxSymbol + 1, "a table with too many symbols");
  }
  check(left === 0, "a table of wrong counts");
  return [fseTable(counts, accuracy), (stream.at + 7) >> 3];
}

class State {
  constructor(table, stream) {
    [this.table, this.stream] = [table, stream];
    this.entry = table.states[stream.read(table.accuracy)];
  }

  get symbol() {
    return this.entry.symbol;
  }

  advance() {
    this.entry = this.table.states[this.entry.base + this.stream.read(this.entry.bits)];
  }
}

function readWeights(bytes) {
  const head = bytes[0];
  if (head >= 128) {
    const count = head - 127;
    const nbytes = (count + 1) >> 1;
    check(bytes.length > nbytes, "weights are cut short");
    return [Array.from({ length: count }, (_, i) => (i % 2 ? bytes[1 + (i >> 1)] & 15 : bytes[1 + (i >> 1)] >> 4)), 1 + nbytes];
  }
  check(head > 0 && bytes.length > head, "weights are cut short");
  const part = bytes.subarray(1, 1 + head);
  const [table, nbytes] = readFse(part, 6, 255);
  const stream = new Backward(part.subarray(nbytes));
  const states = [new State(table, stream), new State(table, stream)];
  check(stream.left >= 0, "weights are cut short");
  const weights = [];
  for (let turn = 0; ; turn ^= 1) {
    weights.push(states[turn].symbol);
    states[turn].advance();
    check(weights.length < 255, "too many weights");
    if (stream.left < 0) {
      weights.push(states[turn ^ 1].symbol);
      return [weights, 1 + head];
    }
  }
}

/** Reads the description of a Huffman code; returns its table and how many bytes it takes. */
function readHuffman(bytes) {
  check(bytes.length > 0, "no code");
  const [weights, nbytes] = readWeights(bytes);
  const sum = weights.reduce((total, weight) => total + (weight ? 2 ** (weight - 1) : 0), 0);
  check(sum > 0, "a code without symbols");
  const bits = topBit(sum) + 1;
  const rest = (1 << bits) - sum;
  check(bits <= 11 && (rest & (rest - 1)) === 0, "a code that is not complete");
  weights.push(topBit(rest) + 1);
  const ones = weights.filter((weight) => weight === 1).length;
  check(ones >= 2 && ones % 2 === 0 && weights.length <= 256, "a code that is not complete");
  const table = [];
  for (let weight = 1; weight <= bits; weight++) {
    weights.forEach((each, symbol) => {
      if (each === weight) for (let i = 0; i < 1 << (weight - 1); i++) table.push({ symbol, bits: bits + 1 - weight });
    });
  }
  return [{ bits, table }, nbytes];
}

function huffmanStream(bytes, code, out) {
  const stream = new Backward(bytes);
  let state = stream.read(code.bits);
  for (let i = 0; i < out.length; i++) {
    const entry = code.table[state];
    out[i] = entry.symbol;
    state = ((state << entry.bits) & ((1 << code.bits) - 1)) | stream.read(entry.bits);
  }
  check(stream.left === -code.bits, "literals of another length");
}

function readLiterals(block, memory) {
  check(block.length > 0, "an empty block");
  const [type, format] = [block[0] & 3, (block[0] >> 2) & 3];
  if (type < 2) {
    const headNbytes = format === 1 ? 2 : format === 3 ? 3 : 1;
    check(block.length >= headNbytes, "literals are cut short");
    const size = format === 1 || format === 3 ? block.readUIntLE(0, headNbytes) >> 4 : block[0] >> 3;
    check(size <= MAX_BLOCK, "too many literals");
    const end = headNbytes + (type === 0 ? size : 1);
    check(end <= block.length, "literals are cut short");
    return [type === 0 ? block.subarray(headNbytes, end) : Buffer.alloc(size, block[headNbytes]), end];
  }
  const [headNbytes, width] = [[3, 10], [3, 10], [4, 14], [5, 18]][format];
  check(block.length >= headNbytes, "literals are cut short");
  const sizes = BigInt(block.readUIntLE(0, headNbytes)) >> 4n;
  const size = Number(sizes & ((1n << BigInt(width)) - 1n));
  const stored = Number(sizes >> BigInt(width));
  const end = headNbytes + stored;
  check(size <= MAX_BLOCK && end <= block.length, "literals are cut short");
  let part = block.subarray(headNbytes, end);
  if (type === 2) {
    const [code, nbytes] = readHuffman(part);
    memory.huffman = code;
    part = part.subarray(nbytes);
  }
  check(memory.huffman, "literals without a code");
  const out = Buffer.alloc(size);
  if (format === 0) {
    huffmanStream(part, memory.huffman, out);
    return [out, end];
  }
  check(part.length >= 6, "literals are cut short");
  const each = (size + 3) >> 2;
  check(3 * each <= size, "too few literals");
  let at = 6;
  for (let i = 0; i < 4; i++) {
    const stop = i < 3 ? at + part.readUInt16LE(2 * i) : part.length;
    check(stop <= part.length, "literals are cut short");
    huffmanStream(part.subarray(at, stop), memory.huffman, out.subarray(i * each, i < 3 ? (i + 1) * each : size));
    at = stop;
  }
  return [out, end];
}

// prettier-ignore
const KINDS = [
  { name: "literals", accuracy: 9, most: 35, preset: 6,
    counts: [4, 3, 2, 2, 2, 2, 2, 2, 2, 2, 2, 2, 2, 1, 1, 1, 2, 2, 2, 2, 2, 2, 2, 2, 2, 3, 2, 1, 1, 1, 1, 1, -1, -1, -1, -1] },
  { name: "offsets", accuracy: 8, most: 31, preset: 5,
    counts: [1, 1, 1, 1, 1, 1, 2, 2, 2, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, -1, -1, -1, -1, -1] },
  { name: "matches", accuracy: 9, most: 52, preset: 6,
    counts: [1, 4, 3, 2, 2, 2, 2, 2, 2, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1,
      -1, -1, -1, -1, -1, -1, -1] },
];

/** The first value of each code and its number of further bits, from a list of these numbers. */
function lengths(first, bits) {
  return bits.map((count) => {
    const entry = { first, count };
    first += 2 ** count;
    return entry;
  });
}

// prettier-ignore
const LITERAL_LENGTHS = lengths(0, [...Array(16).fill(0), 1, 1, 1, 1, 2, 2, 3, 3, 4, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16]);
// prettier-ignore
const MATCH_LENGTHS = lengths(3, [...Array(32).fill(0), 1, 1, 1, 1, 2, 2, 3, 3, 4, 4, 5, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16]);

function readTables(block, at, memory) {
  const modes = block[at++];
  check((modes & 3) === 0, "reserved bits");
  KINDS.forEach((kind, place) => {
    const mode = (modes >> (6 - 2 * place)) & 3;
    if (mode === 0) memory[kind.name] = fseTable(kind.counts, kind.preset);
    if (mode === 1) {
      check(at < block.length && block[at] <= kind.most, "an unknown code");
      memory[kind.name] = { accuracy: 0, states: [{ symbol: block[at++], bits: 0, base: 0 }] };
    }
    if (mode === 2) {
      const [table, nbytes] = readFse(block.subarray(at), kind.accuracy, kind.most);
      memory[kind.name] = table;
      at += nbytes;
    }
    check(memory[kind.name], "no table to repeat");
  });
  return at;
}

function compressedBlock(block, memory, out, start) {
  let [literals, at] = readLiterals(block, memory);
  check(at < block.length, "no sequences");
  let count = block[at++];
  if (count >= 128) {
    check(at + (count === 255) < block.length, "sequences are cut short");
    count = count < 255 ? ((count - 128) << 8) + block[at++] : block.readUInt16LE((at += 2) - 2) + 0x7f00;
  }
  let place = start;
  const copyLiterals = (length) => {
    check(length <= literals.length && place + length <= out.length, "more bytes than there are");
    place += literals.copy(out, place, 0, length);
    literals = literals.subarray(length);
  };
  if (count > 0) {
    check(at < block.length, "sequences are cut short");
    at = readTables(block, at, memory);
    const stream = new Backward(block.subarray(at));
    const [literal, offset, match] = KINDS.map((kind) => new State(memory[kind.name], stream));
    for (let i = 0; i < count; i++) {
      const value = 2 ** offset.symbol + stream.read(offset.symbol);
      const { first: more, count: moreBits } = MATCH_LENGTHS[match.symbol];
      const length = more + stream.read(moreBits);
      const { first: fresh, count: freshBits } = LITERAL_LENGTHS[literal.symbol];
      const before = fresh + stream.read(freshBits);
      check(stream.left >= 0, "sequences are cut short");
      copyLiterals(before);
      const recent = memory.offsets3;
      let distance = value - 3;
      if (value <= 3) {
        const which = value - 1 + (before === 0);
        distance = which === 3 ? recent[0] - 1 : recent[which];
        if (which > 0) recent.splice(Math.min(which, 2), 1);
        else recent.shift();
      } else recent.pop();
      check(distance > 0 && distance <= place, "a match before the beginning");
      recent.unshift(distance);
      check(place + length <= out.length, "more bytes than there are");
      for (let n = 0; n < length; n++, place++) out[place] = out[place - distance];
      if (i < count - 1) [literal, match, offset].forEach((state) => state.advance());
    }
    check(stream.left === 0, "sequences of another length");
  } else check(at === block.length, "bytes after the sequences");
  copyLiterals(literals.length);
  return place;
}

/** Returns the content, of `size` bytes, of a frame that is all of `data`; throws an Error where it is not that. */
export function decompress(data, size) {
  check(data.length >= 6 && data.readUInt32LE(0) === 0xfd2fb528, "not a frame");
  const flags = data[4];
  const single = (flags >> 5) & 1;
  check((flags & 8) === 0, "reserved bits");
  let at = single ? 5 : 6;
  const window = single ? size : 2 ** (10 + (data[5] >> 3)) * (1 + (data[5] & 7) / 8);
  const idNbytes = [0, 1, 2, 4][flags & 3];
  const sizeNbytes = [single, 2, 4, 8][flags >> 6];
  check(data.length >= at + idNbytes + sizeNbytes, "the header is cut short");
  check(!idNbytes || data.readUIntLE(at, idNbytes) === 0, "a dictionary");
  at += idNbytes;
  check(sizeNbytes, "no size of the content");
  const said = sizeNbytes === 8 ? Number(data.readBigUInt64LE(at)) : data.readUIntLE(at, sizeNbytes) + 256 * (sizeNbytes === 2);
  check(said === size, `content of ${said} bytes, expected ${size}`);
  at += sizeNbytes;
  const out = Buffer.alloc(size);
  const memory = { offsets3: [1, 4, 8] };
  let place = 0;
  for (let last = 0; !last; ) {
    check(at + 3 <= data.length, "a block is cut short");
    const head = data.readUIntLE(at, 3);
    const [type, nbytes] = [(head >> 1) & 3, head >> 3];
    [last, at] = [head & 1, at + 3];
    const stop = at + (type === 1 ? 1 : nbytes);
    check(type !== 3 && nbytes <= Math.min(MAX_BLOCK, window) && stop <= data.length, "a block of a wrong size");
    if (type === 2) place = compressedBlock(data.subarray(at, stop), memory, out, place);
    else {
      check(place + nbytes <= size, "more bytes than there are");
      if (type === 1) out.fill(data[at], place, place + nbytes);
      else data.copy(out, place, at, stop);
      place += nbytes;
    }
    at = stop;
  }
  check(place === size, "fewer bytes than there should be");
  if (flags & 4) {
    check(at + 4 <= data.length && BigInt(data.readUInt32LE(at)) === (xxh64(out) & 0xffffffffn), "the checksum is wrong");
    at += 4;
  }
  check(at === data.length, "bytes after the frame");
  return out;
}
