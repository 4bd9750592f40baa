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
#include <fcntl.h>
#include <linux/openat2.h>
#include <stdlib.h>
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
        work->found_cold(work);
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
        {uids, uid_count}, bounce, bounce_nbytes, bounces, .good = files, .found_cold = start_more,
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
