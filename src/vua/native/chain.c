/* The prefix hashes of a prompt's chunks in one call: vua.keys explains what they are.
 *
 * Built together with load.c.
 */
#include <stddef.h>
#include <stdint.h>

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
