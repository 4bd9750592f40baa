/* Copies past the caches. */
#ifndef VUA_STREAM_H
#define VUA_STREAM_H
#include <stdint.h>
#include <string.h>
#ifdef __SSE2__
#include <emmintrin.h>
#endif

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
