/* Squares of elements whose rows become columns. Bits are moved, whatever they mean. */
#ifndef VUA_TURN_H
#define VUA_TURN_H
#include <stdint.h>
#ifdef __SSE2__
#include <emmintrin.h>

/* Elements of a square's side: as many as a vector has. */
static inline uint64_t turn_side(uint64_t item)
{
    return sizeof(__m128i) / item;
}

static inline __m128i turn_load(const char *from)
{
    return _mm_loadu_si128((const __m128i *)from);
}

static inline void turn_store(char *to, __m128i row, int stream)
{
    if (stream)
        _mm_stream_si128((__m128i *)to, row);
    else
        _mm_storeu_si128((__m128i *)to, row);
}

/* Four by four elements of 4 bytes. */
static inline void turn_4(char *to, uint64_t to_row, const char *from, uint64_t from_row, int stream)
{
    const __m128i a = turn_load(from), b = turn_load(from + from_row);
    const __m128i c = turn_load(from + 2 * from_row), d = turn_load(from + 3 * from_row);
    const __m128i ab = _mm_unpacklo_epi32(a, b), cd = _mm_unpacklo_epi32(c, d);
    const __m128i AB = _mm_unpackhi_epi32(a, b), CD = _mm_unpackhi_epi32(c, d);
    turn_store(to, _mm_unpacklo_epi64(ab, cd), stream);
    turn_store(to + to_row, _mm_unpackhi_epi64(ab, cd), stream);
    turn_store(to + 2 * to_row, _mm_unpacklo_epi64(AB, CD), stream);
    turn_store(to + 3 * to_row, _mm_unpackhi_epi64(AB, CD), stream);
}

/* Eight by eight elements of 2 bytes: pairs of rows, then fours, then all. */
static inline void turn_2(char *to, uint64_t to_row, const char *from, uint64_t from_row, int stream)
{
    __m128i pairs[8], fours[8];
    for (int i = 0; i < 4; i++) {
        const __m128i a = turn_load(from + 2 * i * from_row);
        const __m128i b = turn_load(from + (2 * i + 1) * from_row);
        pairs[i] = _mm_unpacklo_epi16(a, b);
        pairs[i + 4] = _mm_unpackhi_epi16(a, b);
    }
    for (int i = 0; i < 8; i += 2) {
        fours[i] = _mm_unpacklo_epi32(pairs[i], pairs[i + 1]);
        fours[i + 1] = _mm_unpackhi_epi32(pairs[i], pairs[i + 1]);
    }
    for (int half = 0; half < 2; half++)
        for (int i = 0; i < 2; i++, to += 2 * to_row) {
            const __m128i low = fours[4 * half + i], high = fours[4 * half + 2 + i];
            turn_store(to, _mm_unpacklo_epi64(low, high), stream);
            turn_store(to + to_row, _mm_unpackhi_epi64(low, high), stream);
        }
}

/* Turn a square of items of 2 or 4 bytes; `to` lies at whole vectors where `stream` says so. */
static inline void turn_square(char *to, uint64_t to_row, const char *from, uint64_t from_row,
                               uint64_t item, int stream)
{
    (item == 2 ? turn_2 : turn_4)(to, to_row, from, from_row, stream);
}
#else
static inline uint64_t turn_side(uint64_t item)
{
    (void)item;
    return 0; /* without vectors there are no squares */
}

static inline void turn_square(char *to, uint64_t to_row, const char *from, uint64_t from_row,
                               uint64_t item, int stream)
{
    (void)to, (void)to_row, (void)from, (void)from_row, (void)item, (void)stream;
}
#endif
#endif
