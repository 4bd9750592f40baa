/* The token ids of a prompt as they are hashed, and the prefix hashes of its chunks, each in one call:
 * vua.format.keys explains what they are.
 *
 * Built together with load.c.
 */
#include <stddef.h>
#include <stdint.h>
#include <string.h>

enum { DIGEST_NBYTES = 32, CONTEXT_NBYTES = 256 };

/* libcrypto's SHA-256, found in Python's own hashlib by the caller. */
struct sha256 {
    int (*init)(void *context);
    int (*update)(void *context, const void *data, size_t nbytes);
    int (*final)(unsigned char *digest, void *context);
};

/* Fill digests[chunks][32] with SHA-256(digest before, or parent || the chunk's ids). */
void vua_chain(const struct sha256 *sha256, const char *parent, uint64_t parent_nbytes,
               const char *ids, uint64_t chunk_nbytes, uint64_t chunks, unsigned char *digests)
{
    _Alignas(64) unsigned char context[CONTEXT_NBYTES];
    const void *before = parent;
    uint64_t before_nbytes = parent_nbytes;
    for (uint64_t chunk = 0; chunk < chunks; chunk++) {
        sha256->init(context);
        sha256->update(context, before, before_nbytes);
        sha256->update(context, ids + chunk * chunk_nbytes, chunk_nbytes);
        sha256->final(digests, context);
        before = digests, before_nbytes = DIGEST_NBYTES;
        digests += DIGEST_NBYTES;
    }
}

/* Put token ids of 4 or 8 bytes each into 32 bits; whether all of them fit and none is negative. */
int vua_ids(const void *from, uint64_t item, int is_signed, uint64_t count, uint32_t *to)
{
    uint64_t outside = 0;
    if (item == 8) {
        for (uint64_t i = 0; i < count; i++) {
            uint64_t id = ((const uint64_t *)from)[i];
            outside |= id >> 32; /* of a negative one, too */
            to[i] = (uint32_t)id;
        }
    } else {
        memcpy(to, from, count * sizeof *to);
        uint64_t seen[4] = {0, 0, 0, 0}, eight[4], i = 0; /* signs of two ids each */
        for (; is_signed && i + 8 <= count; i += 8) {
            memcpy(eight, to + i, sizeof eight);
            for (int at = 0; at < 4; at++)
                seen[at] |= eight[at];
        }
        for (; is_signed && i < count; i++)
            seen[0] |= to[i];
        outside = (seen[0] | seen[1] | seen[2] | seen[3]) & UINT64_C(0x8000000080000000);
    }
    return outside == 0;
}
