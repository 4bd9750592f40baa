/* Read and hash a batch of entry files in one call: open, preadv, XXH3, close for each; or as a
 * stream, by threads that read on while what they have read is used.
 *
 * One release of the GIL for all of them. Threads take parts of files in order, so that a large file
 * has several of them, too. It decides nothing: a file that is not exactly as expected ends the
 * batch, and the Python path looks into why. It keeps no state and calls no Python.
 *
 * Built by hatch_build.py, loaded with ctypes. Linux (openat2, preadv2), 64 bits; any C library: what
 * was added to glibc after 2.17 is called by its number.
 */
#define _GNU_SOURCE
#include <fcntl.h>
#include <linux/openat2.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "load.h"

static int open_path(const struct work *work, uint64_t file)
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

/* Read what the checksum blocks of a file have to hash to. */
static int read_header(struct work *work, int fd, uint64_t file)
{
    const uint64_t nbytes = work->batch->header_nbytes;
    const struct iovec row = {work->into->headers + vua_row(work, file) * nbytes, nbytes};
    int how = RWF_NOWAIT;
    return vua_read_rows(work, fd, &row, 1, nbytes, 0, nbytes, &how);
}

/* Open a file, if it is one to believe, and say in `opened` how it is to be read. */
static int open_file(struct work *work, uint64_t file, struct opened *opened)
{
    uint64_t *inode = work->into->inodes + 2 * vua_row(work, file);
    struct stat status;
    int fd = open_path(work, file);
    if (fd < 0)
        return 0;
    if (fstat(fd, &status) == 0 && vua_is_plain(&status, work->trusted) &&
        (uint64_t)status.st_size == work->batch->file_nbytes) {
        inode[0] = status.st_dev;
        inode[1] = status.st_ino;
        int cold = work->flags & DIRECT && vua_is_cold(fd);
        if ((!cold || !(work->flags & NOWAIT)) &&
            (work->batch->spread == NULL || read_header(work, fd, file))) {
            if (cold)
                work->found_cold(work);
            opened->direct = cold && work->bounce != NULL && fcntl(fd, F_SETFL, O_DIRECT) == 0;
            opened->fd = fd;
            return 1;
        }
    }
    close(fd);
    return 0;
}

/* Have a file open for one of its parts: the thread that comes first opens it, others wait. */
static int enter(struct work *work, uint64_t file)
{
    struct opened *opened = &work->opened[file - work->first];
    pthread_mutex_lock(&work->lock);
    while (opened->state == OPENING)
        pthread_cond_wait(&work->changed, &work->lock);
    if (opened->state == CLOSED) {
        opened->state = OPENING;
        pthread_mutex_unlock(&work->lock);
        int good = open_file(work, file, opened);
        pthread_mutex_lock(&work->lock);
        opened->state = good ? OPEN : BAD;
        pthread_cond_broadcast(&work->changed);
    }
    int good = opened->state == OPEN;
    pthread_mutex_unlock(&work->lock);
    return good;
}

/* Whether a file that was read is the one that is wanted, byte for byte. The thread that read the
 * header or the last part compares it: then it is in that core's cache. */
static int is_wanted(struct work *work, uint64_t file, int of_header)
{
    const uint64_t *digests = vua_digests(work, file);
    const char *header = work->into->headers + vua_row(work, file) * work->batch->header_nbytes;
    if (work->form == NULL)
        return 1;
    if (of_header)
        return vua_header_is(work->batch, work->form, file, header);
    return digests == NULL || vua_blocks_are(work->batch, header, digests);
}

/* A part of a file has been read, or not; the last one closes it. Returns whether it is good. */
static int leave(struct work *work, uint64_t file, int good)
{
    struct opened *opened = &work->opened[file - work->first];
    if (!good)
        atomic_store(&opened->spoiled, 1);
    if (atomic_fetch_add(&opened->parts_done, 1) + 1 == work->parts) {
        close(opened->fd);
        if (good && !opened->spoiled && !is_wanted(work, file, 0)) {
            atomic_store(&opened->spoiled, 1);
            good = 0;
        }
        pthread_mutex_lock(&work->lock);
        opened->state = opened->spoiled ? BAD : READ;
        pthread_cond_broadcast(&work->changed);
        pthread_mutex_unlock(&work->lock);
    }
    return good;
}

/* Do reads through the page cache. Returns whether all of them were done. */
static int load_cached(struct work *work, int fd, uint64_t file, const struct read *r,
                       const struct read *stop, char *discard)
{
    const struct batch *batch = work->batch;
    const struct read *last = &batch->reads[batch->read_count - 1];
    char *header = work->into->headers + vua_row(work, file) * batch->header_nbytes;
    uint64_t *digests = vua_digests(work, file), place = vua_place(work, file);
    struct iovec rows[ROWS_MAX];
    int how = RWF_NOWAIT;
    for (; r < stop; r++) {
        uint64_t count = vua_iovecs_of_read(rows, batch, r, header, discard, place);
        struct cursor at = {rows + (r->header != 0), 0};
        if (count == 0 ||
            !vua_read_rows(work, fd, rows, count, r->nbytes, r->offset,
                           last->offset + last->nbytes, &how))
            return 0;
        vua_hash_blocks(batch, at, r->block, r->block_stop, digests);
    }
    return 1;
}

/* Do reads through the page cache of what nobody hashes here: those that follow each other by one
 * call. Returns whether all of them were done. */
static int load_unhashed(struct work *work, int fd, uint64_t file, const struct read *r,
                         const struct read *stop, char *discard)
{
    const struct batch *batch = work->batch;
    const struct read *last = &batch->reads[batch->read_count - 1];
    char *header = work->into->headers + vua_row(work, file) * batch->header_nbytes;
    struct iovec rows[ROWS_MAX], some[ROWS_MAX];
    int how = RWF_NOWAIT;
    while (r < stop) {
        const uint64_t offset = r->offset;
        uint64_t count = 0, nbytes = 0;
        for (; r < stop && r->offset == offset + nbytes; nbytes += r++->nbytes) {
            uint64_t more =
                vua_iovecs_of_read(some, batch, r, header, discard, vua_place(work, file));
            if (more == 0)
                return 0;
            if (count + more > ROWS_MAX)
                break;
            memcpy(rows + count, some, more * sizeof *some);
            count += more;
        }
        if (!vua_read_rows(work, fd, rows, count, nbytes, offset, last->offset + last->nbytes,
                           &how))
            return 0;
    }
    return 1;
}

/* Do reads through the page cache and `buffer` to where elements are spread. Returns whether all
 * of them were done. */
static int load_spread(struct work *work, int fd, uint64_t file, const struct read *r,
                       const struct read *stop, char *buffer)
{
    const struct batch *batch = work->batch;
    const char *header = work->into->headers + vua_row(work, file) * batch->header_nbytes;
    uint64_t *digests = work->into->digests + vua_row(work, file) * batch->block_count;
    int how = RWF_NOWAIT;
    for (; r < stop; r++) {
        const uint64_t skip = r->header ? batch->header_nbytes : 0; /* it has been read */
        const struct iovec row = {buffer, r->nbytes - skip};
        if (row.iov_len == 0)
            continue;
        if (row.iov_len > work->bounce_nbytes ||
            !vua_read_rows(work, fd, &row, 1, row.iov_len, r->offset + skip,
                           r->offset + r->nbytes, &how))
            return 0;
        vua_spread(batch, r, buffer, header, vua_place(work, file), digests);
    }
    return 1;
}

static int load_part(struct work *work, uint64_t file, uint64_t part, char *discard, char *bounce)
{
    const struct batch *batch = work->batch;
    const uint64_t each = READS_OF_PART, first = part * each;
    const uint64_t left = batch->read_count - first;
    const struct read *r = batch->reads + first, *stop = r + (left < each ? left : each);
    struct opened *opened = &work->opened[file - work->first];
    if (batch->spread != NULL)
        return bounce != NULL && load_spread(work, opened->fd, file, r, stop, bounce);
    if (opened->direct) {
        if (bounce != NULL && vua_load_direct(work, opened->fd, file, r, stop, discard, bounce))
            return 1;
        opened->direct = 0; /* not to be had there */
        fcntl(opened->fd, F_SETFL, 0);
    }
    return (work->flags & UNHASHED ? load_unhashed : load_cached)(work, opened->fd, file, r, stop,
                                                                  discard);
}

static void lower(_Atomic uint64_t *value, uint64_t to)
{
    uint64_t seen = atomic_load(value);
    while (to < seen && !atomic_compare_exchange_weak(value, &seen, to))
        ;
}

/* End with the files before this one. */
static void end_at(struct work *work, uint64_t file)
{
    lower(&work->good, file);
    pthread_mutex_lock(&work->lock);
    pthread_cond_broadcast(&work->changed);
    pthread_mutex_unlock(&work->lock);
}

/* Wait until a file's row is free, and return whether the file is wanted then. */
static int have_room(struct work *work, uint64_t file)
{
    if (file >= atomic_load(&work->free)) {
        pthread_mutex_lock(&work->lock);
        while (file >= atomic_load(&work->free) && file < atomic_load(&work->good))
            pthread_cond_wait(&work->changed, &work->lock);
        pthread_mutex_unlock(&work->lock);
    }
    return file < atomic_load(&work->good);
}

static void *run(void *argument)
{
    struct work *work = argument;
    const uint64_t discard_nbytes = work->batch->discard_nbytes;
    char *kept = work->into->discard;
    char *own = discard_nbytes && !kept ? malloc(discard_nbytes) : NULL;
    uint64_t taken = work->bounce ? atomic_fetch_add(&work->bounces_taken, 1) : 0;
    char *bounce = taken < work->bounces ? work->bounce + taken * work->bounce_nbytes : NULL;
    for (;;) {
        uint64_t next = atomic_fetch_add(&work->next, 1), file = work->first + next / work->parts;
        if (!have_room(work, file))
            break; /* all taken, or behind a bad one */
        char *discard = kept ? kept + vua_row(work, file) * discard_nbytes : own;
        const uint64_t part = next % work->parts;
        int good = enter(work, file);
        if (good) {
            good = (discard || !discard_nbytes) && load_part(work, file, part, discard, bounce) &&
                   (part > 0 || is_wanted(work, file, 1));
            good = leave(work, file, good);
        }
        if (!good)
            end_at(work, file);
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
    uint64_t all = (work->stop - work->first) * work->parts, taken = atomic_load(&work->next);
    if (atomic_fetch_add(&work->cold, 1) == 0 && taken < all) {
        uint64_t left = all - taken, most = COLD_THREADS - work->threads;
        work->more_count = start(work->more, left < most ? left : most, work);
    }
}

/* Wait for all threads, and close what parts that were not wanted any more left open. */
static void finish(struct work *work, pthread_t *threads, uint64_t count)
{
    while (count > 0)
        pthread_join(threads[--count], NULL);
    while (work->more_count > 0) /* started by one that has ended by now */
        pthread_join(work->more[--work->more_count], NULL);
    for (uint64_t file = 0; file < work->stop - work->first; file++)
        if (work->opened[file].state == OPEN)
            close(work->opened[file].fd);
}

/* Read files [first, stop) of `paths`, `[stop][path_nbytes]`, each with a final 0, and hash them.
 * Rows of `into` and chunk places count from 0 and `place`. Threads share files that are large.
 * With a `form` a file that is not what it says ends the batch, too.
 * Cold ones are read past the page cache where there is a `bounce`: `bounces` times `bounce_nbytes`
 * of page aligned memory, both in pages. Returns up to which file all were read. */
uint64_t vua_load(const struct batch *batch, const struct tables *into, int dir_fd,
                  const char *paths, uint64_t path_nbytes, uint64_t first, uint64_t stop,
                  uint64_t place, uint64_t threads, uint64_t flags, const uint32_t *uids,
                  uint64_t uid_count, char *bounce, uint64_t bounce_nbytes, uint64_t bounces,
                  const struct form *form)
{
    const struct users trusted = {uids, uid_count};
    struct opened few[64] = {0}, *opened = few;
    if (stop - first > sizeof few / sizeof *few)
        opened = calloc(stop - first, sizeof *opened);
    if (opened == NULL)
        return first;
    struct work work = {
        batch, into, dir_fd, paths, path_nbytes, first, stop, place, NULL, 0, flags, &trusted,
        bounce, bounce_nbytes, bounces, opened,
        .parts = (batch->read_count + READS_OF_PART - 1) / READS_OF_PART,
        .threads = threads < THREADS_MAX ? threads : THREADS_MAX,
        .lock = PTHREAD_MUTEX_INITIALIZER, .changed = PTHREAD_COND_INITIALIZER,
        .free = stop, .good = stop, .found_cold = start_more, .form = form,
    };
    pthread_t helpers[THREADS_MAX];
    uint64_t started = start(helpers, work.threads - 1, &work);
    run(&work);
    finish(&work, helpers, started);
    if (opened != few)
        free(opened);
    return atomic_load(&work.good);
}

/* A load that goes on while what it has read is used. */
struct stream {
    struct work work;
    struct users trusted;
    uint64_t read; /* leading files that have been read */
    uint64_t started;
    pthread_t threads[THREADS_MAX];
    struct opened opened[];
};

/* Begin to read `count` files as vua_load does, by threads of its own: file f to chunk place
 * `places[f % ring]`, and that row of `into`, once it is free. A file is read only if it is what
 * `form` says. All that is given stays there until vua_stream_close. Returns NULL where no thread
 * can be had. */
void *vua_stream_open(const struct batch *batch, const struct tables *into, int dir_fd,
                      const char *paths, uint64_t path_nbytes, const struct form *form,
                      uint64_t count,
                      const uint64_t *places, uint64_t ring, uint64_t threads, uint64_t flags,
                      const uint32_t *uids, uint64_t uid_count, char *bounce,
                      uint64_t bounce_nbytes, uint64_t bounces)
{
    struct stream *stream = calloc(1, sizeof *stream + count * sizeof *stream->opened);
    if (stream == NULL)
        return NULL;
    stream->trusted = (struct users){uids, uid_count};
    stream->work = (struct work){
        batch, into, dir_fd, paths, path_nbytes, 0, count, 0, places, ring, flags,
        &stream->trusted, bounce, bounce_nbytes, bounces, stream->opened,
        .parts = (batch->read_count + READS_OF_PART - 1) / READS_OF_PART,
        .threads = threads < THREADS_MAX ? threads : THREADS_MAX,
        .lock = PTHREAD_MUTEX_INITIALIZER, .changed = PTHREAD_COND_INITIALIZER,
        .free = ring, .good = count, .found_cold = start_more, .form = form,
    };
    stream->started = start(stream->threads, stream->work.threads, &stream->work);
    if (stream->started > 0)
        return stream;
    free(stream);
    return NULL;
}

/* Files [0, done) are done with: their rows and places may be written again. Wait until files
 * [0, upto) have been read; return how many of them were: fewer behind a bad one. */
uint64_t vua_stream_wait(struct stream *stream, uint64_t done, uint64_t upto)
{
    struct work *work = &stream->work;
    pthread_mutex_lock(&work->lock);
    if (done + work->ring > atomic_load(&work->free)) {
        atomic_store(&work->free, done + work->ring);
        pthread_cond_broadcast(&work->changed);
    }
    for (;;) {
        while (stream->read < work->stop && stream->opened[stream->read].state == READ)
            stream->read++;
        uint64_t good = atomic_load(&work->good);
        if (stream->read >= (upto < good ? upto : good))
            break;
        pthread_cond_wait(&work->changed, &work->lock);
    }
    pthread_mutex_unlock(&work->lock);
    return stream->read < upto ? stream->read : upto;
}

/* End it, and wait until nothing is read any more. */
void vua_stream_close(struct stream *stream)
{
    end_at(&stream->work, 0);
    finish(&stream->work, stream->threads, stream->started);
    free(stream);
}
