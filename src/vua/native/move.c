/* Copy K and V between chunks and an engine's pages: boxes of heads, tokens and dims whose elements
 * lie at any strides on both sides, as in pages that keep K transposed. In one call for all
 * segments of a chunk: one release of the GIL, and a second core where that pays.
 *
 * It calls no Python, and writes exactly the elements of its boxes. A helper thread that gets no core
 * before all is done is not waited for: beside an engine that computes on every core that would take
 * longer than the copies.
 */
#define _GNU_SOURCE
#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "load.h"

/* Squares of elements whose rows become columns. Bits are moved, whatever they mean. */
#ifdef __SSE2__
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

/* Lives as long as a thread looks at it; `kinds` only until all boxes are done. */
struct job {
    const struct boxes *kinds; /* K's and V's */
    uint64_t kind_count;
    int alike;      /* whether there are as many of each */
    uint64_t count; /* of all of them */
    int stream;     /* whether what is copied will not be in the caches afterwards anyway */
    _Atomic uint64_t next, done, users;
};

/* Elements in a row, and bytes from one to the next on both sides. */
struct loop {
    uint64_t count, to, from;
};

#define COPY(TYPE)                                                                                 \
    static void copy_##TYPE(char *to, const char *from, const struct loop *outer,                  \
                            const struct loop *inner)                                              \
    {                                                                                              \
        for (uint64_t i = 0; i < outer->count; i++, to += outer->to, from += outer->from) {        \
            char *t = to;                                                                          \
            const char *f = from;                                                                  \
            for (uint64_t j = 0; j < inner->count; j++, t += inner->to, f += inner->from)          \
                *(TYPE *)t = *(const TYPE *)f;                                                     \
        }                                                                                          \
    }

COPY(uint8_t)
COPY(uint16_t)
COPY(uint32_t)
COPY(uint64_t)

static void copy_each(char *to, const char *from, const struct loop *outer,
                      const struct loop *inner, uint64_t item)
{
    if (item == 1)
        copy_uint8_t(to, from, outer, inner);
    else if (item == 2)
        copy_uint16_t(to, from, outer, inner);
    else if (item == 4)
        copy_uint32_t(to, from, outer, inner);
    else
        copy_uint64_t(to, from, outer, inner);
}

/* Copy a box of rows without gaps, head by head or, where a token's heads lie side by side on either
 * side, token by token: what is read then are whole pages, from front to back. */
static void copy_rows(const struct boxes *b, uint64_t at, int stream)
{
    uint64_t row = b->dims * b->item, tokens = b->tokens[at];
    if (b->to.token == row && b->from.token == row)
        row *= tokens, tokens = 1;
    const int by_token = b->to.head < b->to.token || b->from.head < b->from.token;
    const uint64_t outer = by_token ? tokens : b->heads, inner = by_token ? b->heads : tokens;
    for (uint64_t i = 0; i < outer; i++)
        for (uint64_t j = 0; j < inner; j++) {
            const uint64_t token = by_token ? i : j, head = by_token ? j : i;
            char *to = (char *)(b->target[at] + head * b->to.head + token * b->to.token);
            const char *from =
                (const char *)(b->source[at] + head * b->from.head + token * b->from.token);
            if (stream)
                stream_row(to, from, row);
            else
                memcpy(to, from, row);
        }
}

/* Copy rows of one side that are columns of the other: `far` elements lie side by side in the source,
 * `near` elements in the target. Squares by vectors, what is left over one by one. */
static void copy_turned(char *to, const char *from, const struct loop *far, const struct loop *near,
                        uint64_t item, int stream)
{
    const uint64_t side = item == 2 || item == 4 ? turn_side(item) : 0;
    const uint64_t wide = side ? near->count - near->count % side : 0;
    const uint64_t high = wide ? far->count - far->count % side : 0;
    stream = stream && ((uint64_t)to | far->to | wide * item) % 64 == 0; /* whole lines of caches */
    for (uint64_t i = 0; i < high; i += side)
        for (uint64_t j = 0; j < wide; j += side)
            turn_square(to + i * far->to + j * item, far->to, from + j * near->from + i * item,
                        near->from, item, stream);
    const struct loop low = {far->count - high, far->to, far->from};
    const struct loop rest = {near->count - wide, near->to, near->from};
    const struct loop turned = {high, far->to, far->from};
    copy_each(to + high * far->to, from + high * item, &low, near, item);
    copy_each(to + wide * item, from + wide * near->from, &turned, &rest, item);
}

void vua_copy_box(const struct boxes *b, uint64_t at, int stream)
{
    if (b->to.dim == b->item && b->from.dim == b->item) {
        copy_rows(b, at, stream);
        return;
    }
    const struct loop tokens = {b->tokens[at], b->to.token, b->from.token};
    const struct loop dims = {b->dims, b->to.dim, b->from.dim};
    const int across = tokens.to < dims.to; /* the inner loop: what is closer in the target */
    const struct loop *outer = across ? &dims : &tokens, *inner = across ? &tokens : &dims;
    const int turned = inner->to == b->item && outer->from == b->item;
    for (uint64_t head = 0; head < b->heads; head++) {
        char *to = (char *)(b->target[at] + head * b->to.head);
        const char *from = (const char *)(b->source[at] + head * b->from.head);
        if (turned)
            copy_turned(to, from, outer, inner, b->item, stream);
        else
            copy_each(to, from, outer, inner, b->item);
    }
}

static void work(struct job *job)
{
    uint64_t at;
    while ((at = atomic_fetch_add(&job->next, 1)) < job->count) {
        const struct boxes *kind = job->kinds; /* K and V by turns: they share pages */
        if (job->alike) {
            kind += at % job->kind_count;
            at /= job->kind_count;
        }
        while (at >= kind->count)
            at -= kind++->count;
        vua_copy_box(kind, at, job->stream);
        if (job->stream)
            stream_end(); /* whoever sees the box done sees its bytes */
        atomic_fetch_add(&job->done, 1);
    }
}

static void leave(struct job *job)
{
    if (atomic_fetch_sub(&job->users, 1) == 1)
        free(job);
}

static void *help(void *argument)
{
    work(argument);
    leave(argument);
    return NULL;
}

static void call_help(struct job *job)
{
    pthread_attr_t detached;
    pthread_t thread;
    if (pthread_attr_init(&detached) != 0)
        return;
    atomic_fetch_add(&job->users, 1);
    if (pthread_attr_setdetachstate(&detached, PTHREAD_CREATE_DETACHED) != 0 ||
        pthread_create(&thread, &detached, help, job) != 0)
        atomic_fetch_sub(&job->users, 1);
    pthread_attr_destroy(&detached);
}

/* Return whether all was copied; it is not where there is no memory for the job. */
int vua_move(const struct boxes *kinds, uint64_t kind_count, uint64_t threads, int stream)
{
    struct job *job = calloc(1, sizeof *job);
    if (job == NULL)
        return 0;
    job->kinds = kinds;
    job->kind_count = kind_count;
    job->stream = stream;
    job->alike = 1;
    for (uint64_t kind = 0; kind < kind_count; kind++) {
        job->count += kinds[kind].count;
        job->alike &= kinds[kind].count == kinds[0].count;
    }
    job->users = 1;
    while (--threads > 0)
        call_help(job);
    work(job);
    while (atomic_load(&job->done) < job->count) /* a helper is about to end its last box */
        sched_yield();
    leave(job);
    return 1;
}
