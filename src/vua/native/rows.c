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
#include "move.h"
#include "stream.h"

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

uint64_t vua_aim(struct iovec *rows, const struct batch *batch, const struct slice *slice,
                 char *header, char *sink, uint64_t place)
{
    uint64_t count = 0;
    if (batch->spread != NULL)
        return 0;
    if (slice->header)
        rows[count++] = (struct iovec){header, batch->header_nbytes};
    uint64_t kept = count; /* rows that nothing is added to */
    for (uint64_t i = slice->run; i < slice->run_stop; i++) {
        const struct run *run = &batch->runs[i];
        const uint64_t array = run->array;
        const uint64_t *offsets = NULL;
        char *start = sink + run->sink;
        if (array < ARRAYS_MAX) {
            start = (char *)(batch->base[array][run->layer] +
                             run->head * batch->head_stride[array]);
            offsets = batch->piece_offset[array] + place * batch->pieces;
        }
        for (uint64_t piece = 0; piece < batch->pieces; piece++) {
            char *at = start + (offsets ? offsets[piece] : piece * (batch->sink_nbytes / batch->pieces));
            struct iovec *last = &rows[count - 1];
            if (count > kept && (char *)last->iov_base + last->iov_len == at) {
                last->iov_len += run->nbytes;
            } else {
                if (count == ROWS_MAX)
                    return 0;
                rows[count++] = (struct iovec){at, run->nbytes};
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

void vua_hash_units(const struct batch *batch, struct cursor at, uint64_t unit, uint64_t stop,
                    uint64_t *digests)
{
    for (; unit < stop; unit++)
        digests[unit] = hash_next(&batch->hash, &at, batch->unit_nbytes[unit]);
}

/* Copy the K and V at a place in memory to their place in an entry that begins at `to`, and hash
 * them. The header is left alone. Returns whether it could be. Of a batch without a sink. */
int vua_gather(const struct batch *batch, uint64_t place, char *to, uint64_t *digests)
{
    struct iovec rows[ROWS_MAX];
    const struct slice *stop = batch->slices + batch->slice_count;
    for (const struct slice *s = batch->slices; s < stop; s++) {
        char *at = to + s->offset;
        uint64_t count = vua_aim(rows, batch, s, at, NULL, place), row = s->header != 0;
        if (count == 0)
            return 0;
        struct cursor cursor = {rows + row, 0};
        vua_hash_units(batch, cursor, s->unit, s->unit_stop, digests);
        for (at += row ? batch->header_nbytes : 0; row < count; at += rows[row++].iov_len)
            stream_row(at, rows[row].iov_base, rows[row].iov_len);
    }
    stream_end();
    return 1;
}

int vua_take(const struct batch *batch, const struct slice *slice, const char *from,
             char *header, char *sink, uint64_t place, uint64_t *digests)
{
    struct iovec rows[ROWS_MAX];
    uint64_t count = vua_aim(rows, batch, slice, header, sink, place);
    if (slice->header) {
        memcpy(header, from, batch->header_nbytes);
        from += batch->header_nbytes;
    }
    struct iovec bytes = {(char *)from, slice->nbytes};
    struct cursor at = {&bytes, 0};
    if (count == 0)
        return 0;
    vua_hash_units(batch, at, slice->unit, slice->unit_stop, digests);
    for (uint64_t row = slice->header != 0; row < count; row++) {
        stream_row(rows[row].iov_base, from, rows[row].iov_len);
        from += rows[row].iov_len;
    }
    stream_end();
    return 1;
}

/* Copy a run, which lies at `from`, to where its elements are spread. */
static void spread_run(const struct batch *batch, const struct run *run, const char *from,
                       uint64_t place)
{
    const uint64_t array = run->array, *offsets = batch->piece_offset[array] + place * batch->pieces;
    const uint64_t start = batch->base[array][run->layer] + run->head * batch->head_stride[array];
    const struct spread *spread = batch->spread;
    const uint64_t row = spread->dims[array] * spread->item, tokens = run->nbytes / row;
    for (uint64_t piece = 0; piece < batch->pieces; piece++, from += run->nbytes) {
        const uint64_t target = start + offsets[piece], source = (uint64_t)from;
        const struct boxes box = {
            1, 1, spread->dims[array], spread->item,
            .to = {0, spread->token[array], spread->dim[array]}, .from = {0, row, spread->item},
            &target, &source, &tokens,
        };
        if (offsets[piece] != NOWHERE)
            vua_copy_box(&box, 0, 1);
    }
}

void vua_spread(const struct batch *batch, const struct slice *slice, const char *from,
                const char *header, uint64_t place, uint64_t *digests)
{
    const struct run *run = batch->runs + slice->run;
    for (uint64_t unit = slice->unit; unit < slice->unit_stop; unit++) {
        const uint64_t nbytes = batch->unit_nbytes[unit];
        struct iovec bytes = {(char *)from, nbytes};
        struct cursor at = {&bytes, 0};
        uint64_t expected;
        memcpy(&expected, header + batch->table_offset + batch->unit_place[unit] * sizeof expected,
               sizeof expected);
        digests[unit] = hash_next(&batch->hash, &at, nbytes);
        for (const char *stop = from + nbytes; from < stop; from += run++->nbytes * batch->pieces)
            if (digests[unit] == expected && run->array < ARRAYS_MAX)
                spread_run(batch, run, from, place);
    }
    stream_end();
}

/* Put bytes [offset, offset + nbytes) of an entry, which lie at `from`, where they belong: those
 * slices that are whole. Returns whether it could be. */
int vua_fill(const struct batch *batch, const struct tables *into, uint64_t file, uint64_t place,
             const char *from, uint64_t offset, uint64_t nbytes)
{
    const struct slice *s = batch->slices, *stop = s + batch->slice_count;
    char *own = into->discard || !batch->sink_nbytes ? NULL : malloc(batch->sink_nbytes);
    char *sink = into->discard ? into->discard + file * batch->sink_nbytes : own;
    int good = sink != NULL || !batch->sink_nbytes;
    for (; good && s < stop; s++)
        if (offset <= s->offset && s->offset + s->nbytes <= offset + nbytes)
            good = vua_take(batch, s, from + (s->offset - offset),
                            into->headers + file * batch->header_nbytes, sink, place,
                            into->digests + file * batch->unit_count);
    free(own);
    return good;
}

int vua_is_plain(const struct stat *status, const struct users *trusted)
{
    if (!S_ISREG(status->st_mode) || status->st_nlink > 1)
        return 0;
    for (uint64_t i = 0; trusted->uids != NULL; i++) {
        if (i == trusted->count)
            return 0;
        if (trusted->uids[i] == status->st_uid)
            break;
    }
    return 1;
}
