/* Copies of boxes of elements, see move.c; and of rows past the caches. */
#ifndef VUA_MOVE_H
#define VUA_MOVE_H
#include <stdint.h>
#include <string.h>
#ifdef __SSE2__
#include <emmintrin.h>
#endif

/* Where one element of a box is, from its first one, in bytes. */
struct stride {
    uint64_t head, token, dim;
};

/* StridedCopy of one shape, but for their tokens. The same fields as vua.native.moves.StridedCopy. */
struct boxes {
    uint64_t count, heads, dims, item; /* item: bytes of an element; 1, 2, 4 or 8 */
    struct stride to, from;
    const uint64_t *target, *source, *tokens; /* [count]; addresses of their first elements */
};

/* Copy one of them; with `stream` past the caches, until stream_end(). */
void vua_copy_box(const struct boxes *boxes, uint64_t at, int stream);

/* The processor itself sees what is read next in long rows, hardly in short ones. */
enum { SHORT_NBYTES = 4096, AHEAD_NBYTES = 2048 };

/* Copy a row past the caches where it is whole lines of them: a line that is written as a whole need
 * not be read first, which is a third of a large copy's traffic. (The C library does so for one large
 * copy, but not for many rows.) */
static inline void stream_row(char *to, const char *from, uint64_t nbytes)
{
#ifdef __SSE2__
    if (((uint64_t)to | nbytes) % 64 == 0) {
        const uint64_t ahead = nbytes <= SHORT_NBYTES ? AHEAD_NBYTES : 0;
        for (const char *stop = from + nbytes; from < stop; from += 64, to += 64) {
            __builtin_prefetch(from + ahead, 0, 0);
            for (int part = 0; part < 64; part += 16)
                _mm_stream_si128((__m128i *)(to + part),
                                 _mm_loadu_si128((const __m128i *)(from + part)));
        }
        return;
    }
#endif
    memcpy(to, from, nbytes);
}

/* Whoever sees what this thread writes next sees the streamed rows, too. */
static inline void stream_end(void)
{
#ifdef __SSE2__
    _mm_sfence();
#endif
}
#endif
