/* Steps of a load and a save: the rows of a batch in memory, reading into them, hashing them. */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <linux/magic.h>
#include <string.h>
#include <sys/syscall.h>
#include <sys/vfs.h>
#include <unistd.h>
#include <stdlib.h>

#include "load.h"

static ssize_t read_some(int fd, const struct iovec *rows, uint64_t count, uint64_t offset, int how)
{
    if (how == 0)
        return preadv(fd, rows, (int)count, (off_t)offset);
    return syscall(SYS_preadv2, fd, rows, count, offset, 0L, how); /* 0: the offset's upper half */
}

/* Whether a file lies in memory only, whose reads never wait; such file systems cannot be asked. */
static int in_memory(int fd)
{
    struct statfs status;
    return fstatfs(fd, &status) == 0 && status.f_type == TMPFS_MAGIC;
}

int vua_read_rows(struct work *work, int fd, const struct iovec *rows, uint64_t count,
                  uint64_t nbytes, uint64_t offset, uint64_t stop, int *how)
{
    struct iovec left[ROWS_MAX];
    for (;;) {
        ssize_t got = read_some(fd, rows, count, offset, *how);
        if (got < 0 && errno == EINTR)
            continue;
        if (got < 0 && *how != 0 && errno == EOPNOTSUPP && in_memory(fd)) {
            *how = 0;
            continue;
        }
        if (got < 0 && *how != 0 && !(work->flags & NOWAIT) &&
            (errno == EAGAIN || errno == EOPNOTSUPP || errno == ENOSYS)) {
            *how = 0;
            posix_fadvise(fd, (off_t)offset, (off_t)(stop - offset), POSIX_FADV_WILLNEED);
            work->found_cold(work);
            continue;
        }
        if (got <= 0)
            return 0;
        if ((uint64_t)got == nbytes)
            return 1;
        nbytes -= (uint64_t)got;
        offset += (uint64_t)got;
        while ((size_t)got >= rows->iov_len)
            got -= (ssize_t)rows++->iov_len, count--;
        memmove(left, rows, count * sizeof *rows);
        left[0].iov_base = (char *)left[0].iov_base + got;
        left[0].iov_len -= (size_t)got;
        rows = left;
    }
}

uint64_t vua_iovecs_of_read(struct iovec *rows, const struct batch *batch, const struct read *read,
                            char *header, char *discard, uint64_t place)
{
    uint64_t count = 0;
    if (batch->spread != NULL)
        return 0;
    if (read->header)
        rows[count++] = (struct iovec){header, batch->header_nbytes};
    uint64_t kept = count; /* rows that nothing is added to */
    for (uint64_t i = read->extent; i < read->extent_stop; i++) {
        const struct extent *extent = &batch->extents[i];
        const uint64_t array = extent->array;
        const uint64_t *offsets = NULL;
        char *start = discard + extent->discard;
        if (array < ARRAYS_MAX) {
            start = (char *)(batch->base[array][extent->layer] +
                             extent->head * batch->head_stride[array]);
            offsets = batch->segment_offset[array] + place * batch->segments;
        }
        for (uint64_t segment = 0; segment < batch->segments; segment++) {
            char *at = start + (offsets ? offsets[segment]
                                        : segment * (batch->discard_nbytes / batch->segments));
            struct iovec *last = &rows[count - 1];
            if (count > kept && (char *)last->iov_base + last->iov_len == at) {
                last->iov_len += extent->nbytes;
            } else {
                if (count == ROWS_MAX)
                    return 0;
                rows[count++] = (struct iovec){at, extent->nbytes};
            }
        }
    }
    return count;
}

/* Hash the next bytes. */
static uint64_t hash_next(const struct xxh3 *hash, struct cursor *at, uint64_t nbytes)
{
    _Alignas(64) char state[STATE_NBYTES];
    hash->reset(state);
    while (nbytes > 0) {
        uint64_t some = at->row->iov_len - at->done;
        some = some < nbytes ? some : nbytes;
        hash->update(state, (const char *)at->row->iov_base + at->done, some);
        nbytes -= some;
        at->done += some;
        if (at->done == at->row->iov_len)
            at->row++, at->done = 0;
    }
    return hash->digest(state);
}

void vua_hash_blocks(const struct batch *batch, struct cursor at, uint64_t block, uint64_t stop,
                     uint64_t *digests)
{
    for (; digests != NULL && block < stop; block++)
        digests[block] = hash_next(&batch->hash, &at, batch->block_nbytes[block]);
}

/* Copy the K and V at a place in memory to their place in an entry that begins at `to`, and hash
 * them. The header is left alone. Returns whether it could be. Of a batch without a discard
 * buffer. */
int vua_gather(const struct batch *batch, uint64_t place, char *to, uint64_t *digests)
{
    struct iovec rows[ROWS_MAX];
    const struct read *stop = batch->reads + batch->read_count;
    for (const struct read *r = batch->reads; r < stop; r++) {
        char *at = to + r->offset;
        uint64_t count = vua_iovecs_of_read(rows, batch, r, at, NULL, place), row = r->header != 0;
        if (count == 0)
            return 0;
        struct cursor cursor = {rows + row, 0};
        vua_hash_blocks(batch, cursor, r->block, r->block_stop, digests);
        for (at += row ? batch->header_nbytes : 0; row < count; at += rows[row++].iov_len)
            stream_row(at, rows[row].iov_base, rows[row].iov_len);
    }
    stream_end();
    return 1;
}

int vua_take(const struct batch *batch, const struct read *read, const char *from,
             char *header, char *discard, uint64_t place, uint64_t *digests)
{
    struct iovec rows[ROWS_MAX];
    uint64_t count = vua_iovecs_of_read(rows, batch, read, header, discard, place);
    if (read->header) {
        memcpy(header, from, batch->header_nbytes);
        from += batch->header_nbytes;
    }
    struct iovec bytes = {(char *)from, read->nbytes};
    struct cursor at = {&bytes, 0};
    if (count == 0)
        return 0;
    vua_hash_blocks(batch, at, read->block, read->block_stop, digests);
    for (uint64_t row = read->header != 0; row < count; row++) {
        stream_row(rows[row].iov_base, from, rows[row].iov_len);
        from += rows[row].iov_len;
    }
    stream_end();
    return 1;
}

/* Copy an extent, which lies at `from`, to where its elements are spread. */
static void spread_extent(const struct batch *batch, const struct extent *extent, const char *from,
                          uint64_t place)
{
    const uint64_t array = extent->array;
    const uint64_t *offsets = batch->segment_offset[array] + place * batch->segments;
    const uint64_t start =
        batch->base[array][extent->layer] + extent->head * batch->head_stride[array];
    const struct spread *spread = batch->spread;
    const uint64_t row = spread->dims[array] * spread->item, tokens = extent->nbytes / row;
    for (uint64_t segment = 0; segment < batch->segments; segment++, from += extent->nbytes) {
        const uint64_t target = start + offsets[segment], source = (uint64_t)from;
        const struct boxes box = {
            1, 1, spread->dims[array], spread->item,
            .to = {0, spread->token[array], spread->dim[array]}, .from = {0, row, spread->item},
            &target, &source, &tokens,
        };
        if (offsets[segment] != NOWHERE)
            vua_copy_box(&box, 0, 1);
    }
}

/* What a block must hash to. */
static uint64_t expected_of(const struct batch *batch, const char *header, uint64_t block)
{
    uint64_t expected;
    memcpy(&expected, header + batch->table_offset + batch->block_place[block] * sizeof expected,
           sizeof expected);
    return expected;
}

int vua_blocks_are(const struct batch *batch, const char *header, const uint64_t *digests)
{
    for (uint64_t block = 0; block < batch->block_count; block++)
        if (digests[block] != expected_of(batch, header, block))
            return 0;
    return 1;
}

/* Whether a header hashes to its self-check, with zeros for the check's own digits. */
static int is_checked(const struct batch *batch, const struct form *form, const char *header)
{
    static const char blank[] = "0000000000000000", digits[] = "0123456789abcdef";
    _Alignas(64) char state[STATE_NBYTES];
    const char *check = header + form->check_offset, *rest = check + CHECK_NBYTES;
    batch->hash.reset(state);
    batch->hash.update(state, header, form->check_offset);
    batch->hash.update(state, blank, CHECK_NBYTES);
    batch->hash.update(state, rest, batch->header_nbytes - (uint64_t)(rest - header));
    uint64_t digest = batch->hash.digest(state);
    for (int at = CHECK_NBYTES - 1; at >= 0; at--, digest >>= 4)
        if (check[at] != digits[digest & 15])
            return 0;
    return 1;
}

int vua_header_is(const struct batch *batch, const struct form *form, uint64_t file,
                  const char *header)
{
    const char *middle = header + form->start_nbytes, *variable = middle + form->middle_nbytes;
    const char *end = variable + form->variable_nbytes;
    if (end + form->end_nbytes != header + batch->table_offset ||
        memcmp(header, form->start, form->start_nbytes) != 0 ||
        memcmp(middle, form->middles + file * form->middle_nbytes, form->middle_nbytes) != 0 ||
        memcmp(end, form->end, form->end_nbytes) != 0)
        return 0;
    for (uint64_t at = 0; at < form->variable_nbytes; at++) {
        const unsigned char found = (unsigned char)variable[at], wanted = form->variable[at];
        if (wanted & KINDS ? !(form->kinds[found] & wanted & ~KINDS) : found != wanted)
            return 0;
    }
    return is_checked(batch, form, header);
}

void vua_spread(const struct batch *batch, const struct read *read, const char *from,
                const char *header, uint64_t place, uint64_t *digests)
{
    const struct extent *extent = batch->extents + read->extent;
    for (uint64_t block = read->block; block < read->block_stop; block++) {
        const uint64_t nbytes = batch->block_nbytes[block];
        struct iovec bytes = {(char *)from, nbytes};
        struct cursor at = {&bytes, 0};
        const uint64_t expected = expected_of(batch, header, block);
        digests[block] = hash_next(&batch->hash, &at, nbytes);
        const char *stop = from + nbytes;
        for (; from < stop; from += extent++->nbytes * batch->segments)
            if (digests[block] == expected && extent->array < ARRAYS_MAX)
                spread_extent(batch, extent, from, place);
    }
    stream_end();
}

/* Put bytes [offset, offset + nbytes) of an entry, which lie at `from`, where they belong: those
 * reads that are there as a whole. Returns whether it could be. */
int vua_fill(const struct batch *batch, const struct tables *into, uint64_t file, uint64_t place,
             const char *from, uint64_t offset, uint64_t nbytes)
{
    const struct read *r = batch->reads, *stop = r + batch->read_count;
    char *own = into->discard || !batch->discard_nbytes ? NULL : malloc(batch->discard_nbytes);
    char *discard = into->discard ? into->discard + file * batch->discard_nbytes : own;
    int good = discard != NULL || !batch->discard_nbytes;
    for (; good && r < stop; r++)
        if (offset <= r->offset && r->offset + r->nbytes <= offset + nbytes)
            good = vua_take(batch, r, from + (r->offset - offset),
                            into->headers + file * batch->header_nbytes, discard, place,
                            into->digests + file * batch->block_count);
    free(own);
    return good;
}

int vua_is_plain(const struct stat *status, const struct users *trusted)
{
    if (!S_ISREG(status->st_mode) || (status->st_nlink > 1 && status->st_uid != geteuid()))
        return 0; /* another user's file may have been linked to here by a third one */
    for (uint64_t i = 0; trusted->uids != NULL; i++) {
        if (i == trusted->count)
            return 0;
        if (trusted->uids[i] == status->st_uid)
            break;
    }
    return 1;
}
