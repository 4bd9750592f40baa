// XXH3-64 and XXH64 with seed 0, from the specification of xxHash (doc/xxhash_spec.md and XXH3's reference).

const SECRET = Buffer.from(
  "b8fe6c3923a44bbe7c01812cf721ad1cded46de9839097db7240a4a4b7b3671fcb79e64eccc0e578825ad07dccff7221" +
    "b8084674f743248ee03590e6813a264c3c2852bb91c300cb88d0658b1b532ea371644897a20df94e3819ef46a9deacd8a8" +
    "fa763fe39c343ff9dcbbc7c70b4f1d8a51e04bcdb45931c89f7ec9d9787364eac5ac8334d3ebc3c581a0fffa1363eb17" +
    "0ddd51b7f0da49d316552629d4689e2b16be587d47a1fc8ff8b8d17ad031ce45cb3a8f95160428afd7fbcabb4b407e",
  "hex",
);
const MASK = (1n << 64n) - 1n;
const LOW = 0xffffffffn;
const [A1, A2, A3] = [0x9e3779b1n, 0x85ebca77n, 0xc2b2ae3dn];
const B1 = 0x9e3779b185ebca87n;
const B2 = 0xc2b2ae3d27d4eb4fn;
const B3 = 0x165667b19e3779f9n;
const B4 = 0x85ebca77c2b2ae63n;
const B5 = 0x27d4eb2f165667c5n;
const MX = 0x9fb21c651e98df25n;

const read32 = (data, at) => BigInt(data.readUInt32LE(at));
const read64 = (data, at) => data.readBigUInt64LE(at);
const key = (at) => SECRET.readBigUInt64LE(at);
const KEYS = Array.from({ length: 24 }, (_, at) => key(8 * at)); // of whole stripes
const rotated = (x, by) => ((x << by) | (x >> (64n - by))) & MASK;

function folded(a, b) {
  const product = a * b;
  return (product & MASK) ^ (product >> 64n);
}

function swapped(x) {
  const bytes = Buffer.alloc(8);
  bytes.writeBigUInt64LE(x);
  return bytes.readBigUInt64BE();
}

function avalanche(h) {
  h = ((h ^ (h >> 37n)) * 0x165667919e3779f9n) & MASK;
  return h ^ (h >> 32n);
}

function avalanche64(h) {
  h = ((h ^ (h >> 33n)) * B2) & MASK;
  h = ((h ^ (h >> 29n)) * B3) & MASK;
  return h ^ (h >> 32n);
}

const mixed = (data, at, place) => folded(read64(data, at) ^ key(place), read64(data, at + 8) ^ key(place + 8));

function short(data) {
  const n = data.length;
  if (n === 0) return avalanche64(key(56) ^ key(64));
  if (n < 4) {
    const bytes = (BigInt(data[0]) << 16n) | (BigInt(data[n >> 1]) << 24n) | BigInt(data[n - 1]) | BigInt(n << 8);
    return avalanche64(bytes ^ read32(SECRET, 0) ^ read32(SECRET, 4));
  }
  if (n <= 8) {
    let h = (read32(data, n - 4) + (read32(data, 0) << 32n)) ^ key(8) ^ key(16);
    h ^= rotated(h, 49n) ^ rotated(h, 24n);
    h = (h * MX) & MASK;
    h = ((h ^ ((h >> 35n) + BigInt(n))) * MX) & MASK;
    return h ^ (h >> 28n);
  }
  const low = read64(data, 0) ^ key(24) ^ key(32);
  const high = read64(data, n - 8) ^ key(40) ^ key(48);
  return avalanche((BigInt(n) + swapped(low) + high + folded(low, high)) & MASK);
}

function middle(data) {
  const n = data.length;
  let h = BigInt(n) * B1;
  if (n <= 128) {
    for (let i = Math.floor((n - 1) / 32); i >= 0; i--) {
      h += mixed(data, 16 * i, 32 * i) + mixed(data, n - 16 * (i + 1), 32 * i + 16);
    }
    return avalanche(h & MASK);
  }
  for (let i = 0; i < 8; i++) h += mixed(data, 16 * i, 16 * i);
  h = avalanche(h & MASK);
  for (let i = 8; i < n >> 4; i++) h += mixed(data, 16 * i, 16 * (i - 8) + 3);
  return avalanche((h + mixed(data, n - 16, 136 - 17)) & MASK);
}

function accumulate(sums, data, at, keyAt) {
  for (let i = 0; i < 8; i++) {
    const value = data.readBigUInt64LE(at + 8 * i);
    const keyed = value ^ keyAt(i);
    sums[i ^ 1] = (sums[i ^ 1] + value) & MASK;
    sums[i] = (sums[i] + (keyed & LOW) * (keyed >> 32n)) & MASK;
  }
}

function long(data) {
  const n = data.length;
  const sums = [A3, B1, B2, B3, B4, A2, B5, A1];
  const stripes = Math.floor((n - 1) / 64);
  for (let stripe = 0; stripe < stripes; stripe++) {
    const place = stripe % 16;
    accumulate(sums, data, 64 * stripe, (i) => KEYS[place + i]);
    if (place === 15) {
      for (let i = 0; i < 8; i++) sums[i] = ((sums[i] ^ (sums[i] >> 47n) ^ KEYS[16 + i]) * A1) & MASK;
    }
  }
  accumulate(sums, data, n - 64, (i) => key(121 + 8 * i));
  let h = BigInt(n) * B1;
  for (let i = 0; i < 4; i++) h += folded(sums[2 * i] ^ key(11 + 16 * i), sums[2 * i + 1] ^ key(19 + 16 * i));
  return avalanche(h & MASK);
}

/** XXH3-64 of a Buffer, as a BigInt. */
export function xxh3(data) {
  if (data.length <= 16) return short(data);
  return data.length <= 240 ? middle(data) : long(data);
}

/** XXH64 of a Buffer, as a BigInt. */
export function xxh64(data) {
  const round = (sum, value) => (rotated((sum + value * B2) & MASK, 31n) * B1) & MASK;
  let [h, at] = [B5, 0];
  if (data.length >= 32) {
    const sums = [(B1 + B2) & MASK, B2, 0n, -B1 & MASK];
    for (; at + 32 <= data.length; at += 32) for (let i = 0; i < 4; i++) sums[i] = round(sums[i], read64(data, at + 8 * i));
    h = sums.reduce((sum, one, i) => (sum + rotated(one, [1n, 7n, 12n, 18n][i])) & MASK, 0n);
    for (const one of sums) h = ((h ^ round(0n, one)) * B1 + B4) & MASK;
  }
  h = (h + BigInt(data.length)) & MASK;
  for (; at + 8 <= data.length; at += 8) h = (rotated(h ^ round(0n, read64(data, at)), 27n) * B1 + B4) & MASK;
  if (at + 4 <= data.length) {
    h = (rotated(h ^ ((read32(data, at) * B1) & MASK), 23n) * B2 + B3) & MASK;
    at += 4;
  }
  for (; at < data.length; at++) h = (rotated(h ^ ((BigInt(data[at]) * B5) & MASK), 11n) * B1) & MASK;
  return avalanche64(h);
}
