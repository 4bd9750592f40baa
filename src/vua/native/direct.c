/* Loads of files that the page cache does not have, past it; a part of load.c. */
#define _GNU_SOURCE
#include <errno.h>
#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "load.h"

enum { SYS_CACHESTAT = 451 }; /* the same number on every architecture */
enum { LOOKED_AT = 1 << 16 }; /* bytes of a file that tell whether the page cache has it */
enum { PAGE = 4096 };         /* what direct reads are aligned to: a multiple of disks' blocks */

int vua_is_cold(int fd)
{
    struct { uint64_t offset, nbytes; } range = {0, LOOKED_AT};
    struct { uint64_t cached, dirty, writeback, evicted, recently_evicted; } found = {1, 0, 0, 0, 0};
    return syscall(SYS_CACHESTAT, fd, &range, &found, 0) == 0 && found.cached == 0;
}

/* Some reads that follow each other in a file, and where in it their pages lie. */
struct part {
    const struct read *first, *stop;
    uint64_t begin, end; /* `end` may lie behind the last page's beginning */
};

/* The reads from `r` on that fit into a bounce buffer together, and at least one. */
static struct part next_part(const struct work *work, const struct read *r,
                             const struct read *stop)
{
    struct part part = {r, r + 1, r->offset / PAGE * PAGE, r->offset + r->nbytes};
    while (part.stop < stop && part.stop->offset == part.end &&
           part.end + part.stop->nbytes - part.begin <= work->bounce_nbytes)
        part.end += part.stop++->nbytes;
    return part;
}

/* Write the iovecs of a part, and return how many, if each is whole pages; else 0. */
static uint64_t iovecs_of_pages(struct iovec *rows, const struct work *work, struct part part,
                                char *header, char *discard, uint64_t place)
{
    struct iovec some[ROWS_MAX];
    uint64_t count = 0;
    for (const struct read *r = part.first; r < part.stop; r++) {
        uint64_t more = vua_iovecs_of_read(some, work->batch, r, header, discard, place);
        if (more == 0 || count + more > ROWS_MAX)
            return 0;
        for (uint64_t row = 0; row < more; row++, count++) {
            if (((uint64_t)some[row].iov_base | some[row].iov_len) % PAGE != 0)
                return 0;
            rows[count] = some[row];
        }
    }
    return part.begin == part.first->offset ? count : 0;
}

/* Read a part straight to its place. */
static int load_pages(struct work *work, int fd, struct part part, const struct iovec *rows,
                      uint64_t count, char *header, uint64_t *digests)
{
    const struct read *first = part.first;
    const struct batch *batch = work->batch;
    int how = 0;
    if (!vua_read_rows(work, fd, rows, count, part.end - part.begin, part.begin, part.end, &how))
        return 0;
    if (first->header)
        memcpy(header, rows->iov_base, batch->header_nbytes);
    struct cursor at = {rows + (first->header != 0), 0};
    vua_hash_blocks(batch, at, first->block, part.stop[-1].block_stop, digests);
    return 1;
}

/* Read a part into `bounce`, but for what of its last page lies behind the end of the file. */
static int read_pages(int fd, char *bounce, struct part part, uint64_t file_nbytes)
{
    uint64_t nbytes = (part.end - part.begin + PAGE - 1) / PAGE * PAGE, done = 0;
    uint64_t there = file_nbytes - part.begin < nbytes ? file_nbytes - part.begin : nbytes;
    while (done < there) {
        ssize_t got = pread(fd, bounce + done, nbytes - done, (off_t)(part.begin + done));
        if (got < 0 && errno == EINTR)
            continue;
        if (got <= 0)
            return 0;
        done += (uint64_t)got;
        if (done < there && done % PAGE != 0)
            return 0;
    }
    return 1;
}

int vua_load_direct(struct work *work, int fd, uint64_t file, const struct read *first,
                    const struct read *stop, char *discard, char *bounce)
{
    const struct batch *batch = work->batch;
    const uint64_t place = vua_place(work, file);
    char *header = work->into->headers + vua_row(work, file) * batch->header_nbytes;
    uint64_t *digests = vua_digests(work, file);
    struct iovec rows[ROWS_MAX];
    struct part part;
    for (const struct read *r = first; r < stop; r = part.stop) {
        part = next_part(work, r, stop);
        if (part.end - part.begin > work->bounce_nbytes)
            return 0; /* a checksum block, or a header, that is larger: there are none so far */
        uint64_t count = iovecs_of_pages(rows, work, part, bounce, discard, place);
        if (count > 0) {
            if (!load_pages(work, fd, part, rows, count, header, digests))
                return 0;
            continue;
        }
        if (!read_pages(fd, bounce, part, batch->file_nbytes))
            return 0;
        for (; r < part.stop; r++)
            if (!vua_take(batch, r, bounce + (r->offset - part.begin), header, discard, place,
                      digests))
                return 0;
    }
    return 1;
}
