// Compressed objects: the plain file of one. Compressors differ, so this implementation writes none.

import { Miss, demand, jsonHeader } from "./entry.js";
import { decompress } from "./zstd.js";

const SEGMENT = 262144;
const START = 1024;

function startText(width, header, payload, segments) {
  const lengths = 4 * Math.ceil(payload / SEGMENT);
  const array = (name, dtype, size, begin, nbytes) =>
    `"${name}":{"dtype":"${dtype}","shape":[${nbytes / size}],"data_offsets":[${begin},${begin + nbytes}]}`;
  return (
    `{"__metadata__":{"format":"vua.compressed.v1","codec":"planes-zstd","width":"${width}","header":"${header}","payload":"${payload}"},` +
    `${array("lengths", "U32", 4, 0, lengths)},${array("header", "U8", 1, lengths, header)},` +
    `${array("segments", "U8", 1, lengths + header, segments)}}`
  );
}

/** The plain file, to be judged as any other; throws a Miss. */
export function plainOf(data) {
  demand(data.length >= START && data.readBigUInt64LE(0) === BigInt(START - 8), "not a compressed object");
  const said = jsonHeader(data.subarray(0, START));
  const [width, header, payload] = ["width", "header", "payload"].map((name) => Number(said.__metadata__?.[name]));
  const offsets = said.segments?.data_offsets ?? [];
  const segments = offsets[1] - offsets[0];
  demand([1, 2, 4, 8].includes(width) && header > 0 && header <= 1 << 20, "width or header out of range");
  demand(payload > 0 && payload % width === 0 && payload <= 64 * segments, "a payload out of range");
  const text = startText(width, header, payload, segments);
  demand(text.length <= START - 8 && data.toString("latin1", 8, START) === text.padEnd(START - 8), "another header");
  const count = Math.ceil(payload / SEGMENT);
  demand(data.length === START + 4 * count + header + segments, "another length");
  const lengths = Array.from({ length: count }, (_, i) => data.readUInt32LE(START + 4 * i));
  demand(lengths.reduce((a, b) => a + b) === segments, "segments of another length");
  let at = START + 4 * count;
  const parts = [data.subarray(at, at + header)];
  at += header;
  lengths.forEach((length, i) => {
    parts.push(expanded(data.subarray(at, at + length), Math.min(SEGMENT, payload - i * SEGMENT), width));
    at += length;
  });
  return Buffer.concat(parts);
}

function expanded(stored, nbytes, width) {
  const count = nbytes / width;
  const lastNbytes = stored.length - count * (width - 1);
  demand(lastNbytes >= 0 && lastNbytes <= count, "a segment of a wrong length");
  let last = stored.subarray(0, lastNbytes);
  if (lastNbytes !== count) {
    try {
      last = decompress(last, count);
    } catch (problem) {
      throw new Miss("damaged", problem.message);
    }
  }
  const out = Buffer.alloc(nbytes);
  for (let i = 0; i < count; i++) {
    out[i * width + width - 1] = last[i];
    for (let byte = 0; byte < width - 1; byte++) out[i * width + byte] = stored[lastNbytes + byte * count + i];
  }
  return out;
}
