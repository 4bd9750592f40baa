/* Read and hash a batch of entry files in one call: open, preadv, XXH3, close for each.
 *
 * The loop of vua.store.Loader without Python between its system calls, so that a batch costs one
 * release of the GIL and can use a second core while the first one hashes. It decides nothing: a
 * file that is not exactly as expected ends the batch, and the Python path looks into why. It
 * allocates nothing, keeps no state, and calls no Python.
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
#include <string.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <unistd.h>

enum { ROWS_MAX = 1024, STATE_NBYTES = 1024, THREADS_MAX = 8 };

/* xxhash.h's streaming interface, found in the xxhash module by the caller. */
struct xxh3 {
    int (*reset)(void *state);
    int (*update)(void *state, const void *data, size_t nbytes);
    uint64_t (*digest)(const void *state);
};

/* One read: rows [row, row_stop) of a file's iovecs, which hold units [unit, unit_stop). */
struct slice {
    uint64_t row, row_stop, nbytes, offset, unit, unit_stop;
};

/* What is the same for all files of a batch. The same fields as vua.native.Batch. */
struct batch {
    struct xxh3 hash;
    uint64_t file_nbytes, header_nbytes;
    const struct slice *slices;
    uint64_t slice_count;
    const uint64_t *unit_row;   /* [units + 1] first row of each unit */
    const uint64_t *unit_place; /* [units] place of its checksum in the file's table */
    uint64_t table_offset;      /* of the table in the header */
    uint64_t row_count;         /* iovecs of each file; row 0 is the header */
};

enum { NOWAIT = 1 }; /* of flags: touch nothing that is not cached */

struct work {
    const struct batch *batch;
    int dir_fd;
    const char *paths;          /* [files][path_nbytes], each with a final 0 */
    uint64_t path_nbytes, files;
    const struct iovec *iovecs; /* [files][row_count] */
    uint64_t flags;
    const uint32_t *uids;       /* whose files are read; NULL: anybody's */
    uint64_t uid_count;
    _Atomic uint64_t next, good; /* next file to take; files before the first bad one */
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

/* Fill the rows; return whether all bytes came. Goes on after short reads, as network file systems
 * and signals give them. */
static int read_rows(int fd, const struct iovec *rows, uint64_t count, uint64_t nbytes,
                     uint64_t offset, uint64_t flags)
{
    struct iovec left[ROWS_MAX];
    const int how = flags & NOWAIT ? RWF_NOWAIT : 0;
    for (;;) {
        ssize_t got = preadv2(fd, rows, (int)count, (off_t)offset, how);
        if (got < 0 && errno == EINTR)
            continue;
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

static uint64_t hash_rows(const struct xxh3 *hash, const struct iovec *row, const struct iovec *stop)
{
    _Alignas(64) char state[STATE_NBYTES];
    hash->reset(state);
    while (row < stop) {
        const char *start = row->iov_base;
        size_t nbytes = row->iov_len;
        while (++row < stop && start + nbytes == row->iov_base)
            nbytes += row->iov_len;
        hash->update(state, start, nbytes);
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

static int load_open_file(const struct work *work, int fd, const struct iovec *rows)
{
    const struct batch *batch = work->batch;
    struct stat status;
    if (fstat(fd, &status) < 0 || !is_trusted(work, &status) ||
        (uint64_t)status.st_size != batch->file_nbytes)
        return 0;
    const char *table = (const char *)rows[0].iov_base + batch->table_offset;
    for (uint64_t i = 0; i < batch->slice_count; i++) {
        const struct slice *s = &batch->slices[i];
        if (!read_rows(fd, rows + s->row, s->row_stop - s->row, s->nbytes, s->offset,
                       work->flags))
            return 0;
        for (uint64_t unit = s->unit; unit < s->unit_stop; unit++) {
            uint64_t expected;
            memcpy(&expected, table + 8 * batch->unit_place[unit], 8);
            if (hash_rows(&batch->hash, rows + batch->unit_row[unit],
                          rows + batch->unit_row[unit + 1]) != expected)
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
    for (;;) {
        uint64_t file = atomic_fetch_add(&work->next, 1);
        if (file >= atomic_load(&work->good))
            return NULL; /* all taken, or behind a bad one */
        int fd = open_file(work, file);
        int good = fd >= 0 &&
            load_open_file(work, fd, work->iovecs + file * work->batch->row_count);
        if (fd >= 0)
            close(fd);
        if (!good)
            lower(&work->good, file);
    }
}

/* Return how many files from the first on were read and hashed to what their own tables say. */
uint64_t vua_load(const struct batch *batch, int dir_fd, const char *paths, uint64_t path_nbytes,
                  uint64_t files, const struct iovec *iovecs, uint64_t threads, uint64_t flags,
                  const uint32_t *uids, uint64_t uid_count)
{
    struct work work = {batch, dir_fd, paths, path_nbytes, files, iovecs, flags,
                        uids, uid_count, 0, files};
    pthread_t helpers[THREADS_MAX];
    uint64_t started = 0;
    while (started + 1 < threads && started < THREADS_MAX &&
           pthread_create(&helpers[started], NULL, run, &work) == 0)
        started++;
    run(&work);
    while (started > 0)
        pthread_join(helpers[--started], NULL);
    return atomic_load(&work.good);
}
