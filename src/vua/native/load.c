/* Read and hash a batch of entry files in one call: open, preadv, XXH3, close for each.
 *
 * The loop of vua.store.Loader without Python between its system calls, so that a batch costs one
 * release of the GIL and can use a second core while the first one hashes. It decides nothing: a
 * file that is not exactly as expected ends the batch, and the Python path looks into why. It
 * keeps no state and calls no Python.
 *
 * Built on first use by vua/native/__init__.py with the system's C compiler, loaded with ctypes.
 * Linux (openat2, preadv2), 64 bits.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <linux/openat2.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <unistd.h>

enum { ROWS_MAX = 1024, STATE_NBYTES = 1024, THREADS_MAX = 8, ARRAYS_MAX = 2 };
enum { COLD_THREADS = 8 }; /* that wait for a device or a server, which want several requests */

/* xxhash.h's streaming interface, found in the xxhash module by the caller. */
struct xxh3 {
    int (*reset)(void *state);
    int (*update)(void *state, const void *data, size_t nbytes);
    uint64_t (*digest)(const void *state);
};

/* One head of one layer of K or V, in file order. One of array ARRAYS_MAX goes to the sink: it is
 * read only because a checksum covers it. */
struct run {
    uint64_t array, head, layer;
    uint64_t sink;   /* place in each piece of it */
    uint64_t nbytes; /* of each of its own pieces */
};

/* One read: runs [run, run_stop), behind the header where `header` says so. */
struct slice {
    uint64_t run, run_stop, header, nbytes, offset, unit, unit_stop;
};

/* What is the same for all files of a batch. The same fields as vua.native.Batch. */
struct batch {
    struct xxh3 hash;
    uint64_t file_nbytes, header_nbytes;
    uint64_t table_offset;      /* of the checksums, in the header */
    const struct slice *slices;
    uint64_t slice_count;
    const struct run *runs;
    const uint64_t *unit_nbytes, *unit_place; /* [units]; place of its checksum in the table */
    uint64_t pieces;            /* of a chunk in memory */
    uint64_t sink_nbytes;       /* all pieces of it */
    /* Where tokens lie: see vua.layout.MemoryMap. */
    const uint64_t *base[ARRAYS_MAX];         /* [layers] */
    uint64_t head_stride[ARRAYS_MAX];
    const uint64_t *piece_offset[ARRAYS_MAX]; /* [pieces of all places] */
};

enum { NOWAIT = 1 }; /* of flags: touch nothing that is not cached */

struct work {
    const struct batch *batch;
    int dir_fd;
    const char *paths;          /* [files][path_nbytes], each with a final 0 */
    uint64_t path_nbytes, files;
    uint64_t place;             /* of the first file's chunk in memory */
    char *headers;              /* [files][header_nbytes] */
    uint64_t flags;
    const uint32_t *uids;       /* whose files are read; NULL: anybody's */
    uint64_t uid_count;
    _Atomic uint64_t next, good; /* next file to take; files before the first bad one */
    _Atomic int cold;           /* whether a file was not in the page cache */
    pthread_t more[COLD_THREADS];
    uint64_t more_count;        /* threads started once a file was cold */
};

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

/* Fill the rows; return whether all bytes came. Goes on after short reads, as network file systems
 * and signals give them. `*how` is how to read: once a file is found cold, its part [offset, stop)
 * is asked for as a whole, more files are read at a time, and reads wait. */
static int read_rows(struct work *work, int fd, const struct iovec *rows, uint64_t count,
                     uint64_t nbytes, uint64_t offset, uint64_t stop, int *how)
{
    struct iovec left[ROWS_MAX];
    for (;;) {
        ssize_t got = preadv2(fd, rows, (int)count, (off_t)offset, *how);
        if (got < 0 && errno == EINTR)
            continue;
        if (got < 0 && *how != 0 && !(work->flags & NOWAIT) &&
            (errno == EAGAIN || errno == EOPNOTSUPP)) {
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

/* Write the iovecs of a slice, those that follow each other in memory as one; return how many. */
static uint64_t aim(struct iovec *rows, const struct batch *batch, const struct slice *slice,
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

/* Where a walk over rows stands. */
struct cursor {
    const struct iovec *row;
    uint64_t done; /* bytes of that row */
};

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

static int is_trusted(const struct work *work, const struct stat *status)
{
    if (!S_ISREG(status->st_mode) || status->st_nlink > 1)
        return 0;
    for (uint64_t i = 0; work->uids != NULL; i++) {
        if (i == work->uid_count)
            return 0;
        if (work->uids[i] == status->st_uid)
            break;
    }
    return 1;
}

static int load_open_file(struct work *work, int fd, uint64_t file, char *sink)
{
    const struct batch *batch = work->batch;
    struct iovec rows[ROWS_MAX];
    struct stat status;
    int how = RWF_NOWAIT;
    if (fstat(fd, &status) < 0 || !is_trusted(work, &status) ||
        (uint64_t)status.st_size != batch->file_nbytes)
        return 0;
    char *header = work->headers + file * batch->header_nbytes;
    const struct slice *last = &batch->slices[batch->slice_count - 1];
    for (const struct slice *s = batch->slices; s <= last; s++) {
        uint64_t count = aim(rows, batch, s, header, sink, work->place + file);
        if (count == 0 || !read_rows(work, fd, rows, count, s->nbytes, s->offset,
                                      last->offset + last->nbytes, &how))
            return 0;
        struct cursor at = {rows + (s->header != 0), 0};
        for (uint64_t unit = s->unit; unit < s->unit_stop; unit++) {
            uint64_t expected;
            memcpy(&expected, header + batch->table_offset + 8 * batch->unit_place[unit], 8);
            if (hash_next(&batch->hash, &at, batch->unit_nbytes[unit]) != expected)
                return 0;
        }
    }
    return 1;
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
    char *sink = work->batch->sink_nbytes ? malloc(work->batch->sink_nbytes) : NULL;
    for (;;) {
        uint64_t file = atomic_fetch_add(&work->next, 1);
        if (file >= atomic_load(&work->good))
            break; /* all taken, or behind a bad one */
        int fd = open_file(work, file);
        int good = fd >= 0 && (sink || !work->batch->sink_nbytes) &&
            load_open_file(work, fd, file, sink);
        if (fd >= 0)
            close(fd);
        if (!good)
            lower(&work->good, file);
    }
    free(sink);
    return NULL;
}

static uint64_t start(pthread_t *threads, uint64_t count, struct work *work)
{
    uint64_t begun = 0;
    while (begun < count && pthread_create(&threads[begun], NULL, run, work) == 0)
        begun++;
    return begun;
}

/* Called by whoever finds a cold file; the first one does it. */
static void start_more(struct work *work)
{
    uint64_t taken = atomic_load(&work->next);
    if (taken < work->files && !atomic_exchange(&work->cold, 1)) {
        uint64_t left = work->files - taken;
        work->more_count = start(work->more, left < COLD_THREADS ? left : COLD_THREADS, work);
    }
}

/* Return how many files from the first on were read and hashed to what their own tables say. */
uint64_t vua_load(const struct batch *batch, int dir_fd, const char *paths, uint64_t path_nbytes,
                  uint64_t files, uint64_t place, char *headers, uint64_t threads, uint64_t flags,
                  const uint32_t *uids, uint64_t uid_count)
{
    struct work work = {
        batch, dir_fd, paths, path_nbytes, files, place, headers, flags, uids, uid_count,
        .good = files,
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
