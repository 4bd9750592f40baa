/* Read and hash a batch of entry files in one call: open, preadv, XXH3, close for each.
 *
 * The loop of vua.store.store.Loader without Python between its system calls, so that a batch costs one
 * release of the GIL and can use a second core while the first one hashes. It decides nothing: a
 * file that is not exactly as expected ends the batch, and the Python path looks into why. It
 * keeps no state and calls no Python.
 *
 * Built by hatch_build.py, loaded with ctypes. Linux (openat2, preadv2), 64 bits; any C library: what
 * was added to glibc after 2.17 is called by its number.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <linux/openat2.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "load.h"

static int open_file(const struct work *work, uint64_t file)
{
    struct open_how how = {
        .flags = O_RDONLY | O_CLOEXEC | O_NONBLOCK | O_NOFOLLOW,
        .resolve = RESOLVE_NO_SYMLINKS | RESOLVE_BENEATH,
    };
    if (work->flags & NOWAIT)
        how.resolve |= RESOLVE_CACHED;
    const char *path = work->paths + file * work->path_nbytes;
    return (int)syscall(SYS_openat2, work->dir_fd, path, &how, sizeof how);
}

static void start_more(struct work *work);

static ssize_t read_some(int fd, const struct iovec *rows, uint64_t count, uint64_t offset, int how)
{
    if (how == 0)
        return preadv(fd, rows, (int)count, (off_t)offset);
    return syscall(SYS_preadv2, fd, rows, count, offset, 0L, how); /* 0: the offset's upper half */
}

int vua_read_rows(struct work *work, int fd, const struct iovec *rows, uint64_t count,
                  uint64_t nbytes, uint64_t offset, uint64_t stop, int *how)
{
    struct iovec left[ROWS_MAX];
    for (;;) {
        ssize_t got = read_some(fd, rows, count, offset, *how);
        if (got < 0 && errno == EINTR)
            continue;
        if (got < 0 && *how != 0 && !(work->flags & NOWAIT) &&
            (errno == EAGAIN || errno == EOPNOTSUPP || errno == ENOSYS)) {
            *how = 0;
            posix_fadvise(fd, (off_t)offset, (off_t)(stop - offset), POSIX_FADV_WILLNEED);
            start_more(work);
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

/* Hash the chunk at a place in memory. Returns whether it could be. Of a batch without a sink. */
int vua_hash(const struct batch *batch, uint64_t place, uint64_t *digests)
{
    struct iovec rows[ROWS_MAX];
    char header[1]; /* is not looked at */
    const struct slice *stop = batch->slices + batch->slice_count;
    for (const struct slice *s = batch->slices; s < stop; s++) {
        if (vua_aim(rows, batch, s, header, NULL, place) == 0)
            return 0;
        struct cursor at = {rows + (s->header != 0), 0};
        vua_hash_units(batch, at, s->unit, s->unit_stop, digests);
    }
    return 1;
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

/* Load a file through the page cache. Returns whether all of it was read. */
static int load_cached(struct work *work, int fd, uint64_t file, char *header, char *sink)
{
    const struct batch *batch = work->batch;
    struct iovec rows[ROWS_MAX];
    int how = RWF_NOWAIT;
    const struct slice *last = &batch->slices[batch->slice_count - 1];
    for (const struct slice *s = batch->slices; s <= last; s++) {
        uint64_t count = vua_aim(rows, batch, s, header, sink, work->place + file);
        struct cursor at = {rows + (s->header != 0), 0};
        if (count == 0 ||
            !vua_read_rows(work, fd, rows, count, s->nbytes, s->offset,
                           last->offset + last->nbytes, &how))
            return 0;
        vua_hash_units(batch, at, s->unit, s->unit_stop, work->digests + file * batch->unit_count);
    }
    return 1;
}

static int load_open_file(struct work *work, int fd, uint64_t file, char *sink, char *bounce)
{
    const struct batch *batch = work->batch;
    char *header = work->headers + file * batch->header_nbytes;
    struct stat status;
    if (fstat(fd, &status) < 0 || !vua_is_plain(&status, &work->trusted) ||
        (uint64_t)status.st_size != batch->file_nbytes)
        return 0;
    work->inodes[2 * file] = status.st_dev;
    work->inodes[2 * file + 1] = status.st_ino;
    if (work->flags & DIRECT && vua_is_cold(fd)) {
        if (work->flags & NOWAIT)
            return 0;
        start_more(work);
        if (bounce != NULL && fcntl(fd, F_SETFL, O_DIRECT) == 0 &&
            vua_load_direct(work, fd, file, header, sink, bounce))
            return 1;
        fcntl(fd, F_SETFL, 0); /* not to be had there */
    }
    return load_cached(work, fd, file, header, sink);
}

static void lower(_Atomic uint64_t *value, uint64_t to)
{
    uint64_t seen = atomic_load(value);
    while (to < seen && !atomic_compare_exchange_weak(value, &seen, to))
        ;
}

static void *run(void *argument)
{
    struct work *work = argument;
    const uint64_t sink_nbytes = work->batch->sink_nbytes;
    char *own = sink_nbytes && !work->discard ? malloc(sink_nbytes) : NULL;
    uint64_t part = work->bounce ? atomic_fetch_add(&work->bounces_taken, 1) : 0;
    char *bounce = part < work->bounces ? work->bounce + part * work->bounce_nbytes : NULL;
    for (;;) {
        uint64_t file = atomic_fetch_add(&work->next, 1);
        if (file >= atomic_load(&work->good))
            break; /* all taken, or behind a bad one */
        char *sink = work->discard ? work->discard + file * sink_nbytes : own;
        int fd = open_file(work, file);
        int good = fd >= 0 && (sink || !sink_nbytes) &&
            load_open_file(work, fd, file, sink, bounce);
        if (fd >= 0)
            close(fd);
        if (!good)
            lower(&work->good, file);
    }
    free(own);
    return NULL;
}

static uint64_t start(pthread_t *threads, uint64_t count, struct work *work)
{
    uint64_t begun = 0;
    while (begun < count && pthread_create(&threads[begun], NULL, run, work) == 0)
        begun++;
    return begun;
}

/* Called for each cold file; the first one starts threads. */
static void start_more(struct work *work)
{
    uint64_t taken = atomic_load(&work->next);
    if (atomic_fetch_add(&work->cold, 1) == 0 && taken < work->files) {
        uint64_t left = work->files - taken;
        work->more_count = start(work->more, left < COLD_THREADS ? left : COLD_THREADS, work);
    }
}

/* Return how many files from the first on were read, and hashed into `digests`.
 * Cold ones are read past the page cache where there is a `bounce`: `bounces`
 * times `bounce_nbytes` of page aligned memory, both in pages. */
uint64_t vua_load(const struct batch *batch, int dir_fd, const char *paths, uint64_t path_nbytes,
                  uint64_t files, uint64_t place, char *headers, uint64_t *digests, uint64_t *inodes,
                  char *discard, uint64_t threads, uint64_t flags, const uint32_t *uids, uint64_t uid_count, char *bounce, uint64_t bounce_nbytes,
                  uint64_t bounces)
{
    struct work work = {
        batch, dir_fd, paths, path_nbytes, files, place, headers, digests, inodes, discard, flags,
        {uids, uid_count}, bounce, bounce_nbytes, bounces, .good = files,
    };
    pthread_t helpers[THREADS_MAX];
    uint64_t started = start(helpers, threads < THREADS_MAX ? threads - 1 : THREADS_MAX, &work);
    run(&work);
    while (started > 0)
        pthread_join(helpers[--started], NULL);
    while (work.more_count > 0) /* started by one that has ended by now */
        pthread_join(work.more[--work.more_count], NULL);
    return atomic_load(&work.good);
}
