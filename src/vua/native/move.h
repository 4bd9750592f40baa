/* Copies of boxes of elements; see move.c. */
#ifndef VUA_MOVE_H
#define VUA_MOVE_H
#include <stdint.h>

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
#endif
