/* Hash and write a batch of entry files in one call: directory, create, pwritev, rename for each.
 *
 * One release of the GIL for all of them, and a second core. Each part of a chunk is hashed and then
 * written while it is in the caches; the header, which needs all checksums, is written last.
 * vua.native.fallback.write_entries does the same in Python.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <linux/openat2.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "load.h"

enum { PATH_ROOM = 512, FAN_DIGITS = 2, CHECK_DIGITS = 16 };
enum { UNTRIED, PRESENT, WRITTEN }; /* what became of a file; -errno where it failed */

/* How files are written. The same fields as vua.native.saves.WriteOptions. */
struct writing {
    const char *name;      /* of a file in its chunk's directory */
    const char *temporary; /* what its name begins with until it is complete */
    uint64_t check_offset; /* in the header, of its check of itself; 0: headers are complete */
    uint64_t allocate;     /* from this size on files get their room before their bytes */
    uint64_t directory_mode, file_mode;
    struct users trusted;
};

struct saves {
    const struct batch *batch;
    const struct writing *how;
    int dir_fd;
    const char *paths; /* [files][path_nbytes] of the chunks' directories, each with a final 0 */
    uint64_t path_nbytes, files;
    uint64_t place;    /* of the first file's chunk in memory */
    char *headers;     /* [files][header_nbytes] */
    int32_t *statuses; /* [files] */
    _Atomic uint64_t next;
    _Atomic int failed;
};

/* Open a directory below another one; no symbolic link is followed on the way. */
static int open_beneath(int dir_fd, const char *path)
{
    struct open_how how = {
        .flags = O_RDONLY | O_CLOEXEC | O_NONBLOCK | O_DIRECTORY,
        .resolve = RESOLVE_NO_SYMLINKS | RESOLVE_BENEATH,
    };
    return (int)syscall(SYS_openat2, dir_fd, path, &how, sizeof how);
}

/* Give what was just made the mode that is wanted, whatever the umask; S_ISGID comes by itself. */
static int set_mode(int fd, uint64_t wanted)
{
    struct stat status;
    if (fstat(fd, &status) < 0)
        return 0;
    mode_t mode = status.st_mode & 07777;
    mode_t owners = (mode_t)wanted & S_IRWXU;
    return mode == wanted || mode == (wanted | S_ISGID) || fchmod(fd, (mode_t)wanted) == 0 ||
           (mode & owners) == owners; /* some mounts refuse every chmod */
}

static void close_quietly(int fd)
{
    int error = errno;
    close(fd);
    errno = error;
}

/* Open a directory of a directory, made where it is missing; a link is not followed. */
static int open_made(int parent, const char *name, uint64_t mode)
{
    int made = mkdirat(parent, name, 0700) == 0;
    if (!made && errno != EEXIST)
        return -1;
    int flags = O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC;
    int fd = openat(parent, name, flags);
    if (fd < 0 && made && errno == EACCES && fchmodat(parent, name, (mode_t)mode, 0) == 0)
        fd = openat(parent, name, flags); /* the umask took all of its rights */
    if (fd >= 0 && made && !set_mode(fd, mode)) {
        close_quietly(fd);
        return -1;
    }
    return fd;
}

/* Open a chunk's directory, made where it is missing. */
static int open_chunk(const struct saves *saves, const char *path)
{
    int fd = open_beneath(saves->dir_fd, path);
    if (fd >= 0 || (errno != ENOENT && errno != ENOSYS && errno != EPERM))
        return fd; /* a kernel or sandbox may not have openat2 */
    const char fan[] = {path[0], path[1], 0};
    int parent = open_made(saves->dir_fd, fan, saves->how->directory_mode);
    if (parent < 0)
        return -1;
    fd = open_made(parent, path + FAN_DIGITS + 1, saves->how->directory_mode);
    close_quietly(parent);
    return fd;
}

static int write_rows(int fd, struct iovec *rows, uint64_t count, uint64_t nbytes, uint64_t offset)
{
    while (nbytes > 0) {
        ssize_t put = pwritev(fd, rows, (int)count, (off_t)offset);
        if (put < 0 && errno == EINTR)
            continue;
        if (put < 0)
            return 0;
        if (put == 0 || (uint64_t)put > nbytes) {
            errno = EIO;
            return 0;
        }
        nbytes -= (uint64_t)put;
        offset += (uint64_t)put;
        while (count > 0 && (size_t)put >= rows->iov_len)
            put -= (ssize_t)rows++->iov_len, count--;
        if (count > 0) {
            rows->iov_base = (char *)rows->iov_base + put;
            rows->iov_len -= (size_t)put;
        }
    }
    return 1;
}

/* Complete the header: a checksum of all of it, taken with zeros for the check's own digits. */
static void check_header(const struct saves *saves, char *header)
{
    const struct xxh3 *hash = &saves->batch->hash;
    _Alignas(64) char state[STATE_NBYTES];
    char digits[CHECK_DIGITS + 1];
    memset(header + saves->how->check_offset, '0', CHECK_DIGITS);
    hash->reset(state);
    hash->update(state, header, saves->batch->header_nbytes);
    snprintf(digits, sizeof digits, "%016llx", (unsigned long long)hash->digest(state));
    memcpy(header + saves->how->check_offset, digits, CHECK_DIGITS);
}

static int write_bytes(const struct saves *saves, int fd, uint64_t file)
{
    const struct batch *batch = saves->batch;
    char *header = saves->headers + file * batch->header_nbytes;
    struct iovec rows[ROWS_MAX];
    if (batch->file_nbytes >= saves->how->allocate)
        (void)fallocate(fd, 0, 0, (off_t)batch->file_nbytes); /* if not, the writes will see to it */
    for (uint64_t n = 1; n <= batch->read_count; n++) { /* the first one, with the header, last */
        const struct read *r = &batch->reads[n % batch->read_count];
        uint64_t count = vua_iovecs_of_read(rows, batch, r, header, NULL, saves->place + file);
        struct cursor at = {rows + (r->header != 0), 0};
        if (count == 0) {
            errno = EMSGSIZE;
            return 0;
        }
        if (saves->how->check_offset) { /* of whole files: each checksum stands at its own place */
            uint64_t *table = (uint64_t *)(header + batch->table_offset);
            vua_hash_blocks(batch, at, r->block, r->block_stop, table);
            if (r->header)
                check_header(saves, header);
        }
        if (!write_rows(fd, rows, count, r->nbytes, r->offset))
            return 0;
    }
    return 1;
}

/* Write a file into its chunk's directory: complete under its name, or not at all. */
static int write_file(const struct saves *saves, int directory, uint64_t file)
{
    const struct writing *how = saves->how;
    char temporary[PATH_ROOM];
    int length = snprintf(temporary, sizeof temporary, "%s-%llu", how->temporary,
                          (unsigned long long)file);
    if (length < 0 || length >= PATH_ROOM) {
        errno = ENAMETOOLONG;
        return 0;
    }
    int flags = O_WRONLY | O_CREAT | O_EXCL | O_NOFOLLOW | O_CLOEXEC;
    int fd = openat(directory, temporary, flags, 0600);
    if (fd < 0)
        return 0;
    int good = set_mode(fd, how->file_mode) && write_bytes(saves, fd, file);
    if (good)
        good = close(fd) == 0; /* network file systems report write errors here */
    else
        close_quietly(fd);
    if (good && renameat(directory, temporary, directory, how->name) == 0)
        return 1;
    int error = errno;
    unlinkat(directory, temporary, 0);
    errno = error;
    return 0;
}

/* Write a file unless one of that length is there; what else has its name is replaced. */
static int save(const struct saves *saves, uint64_t file)
{
    int directory = open_chunk(saves, saves->paths + file * saves->path_nbytes);
    if (directory < 0)
        return -errno;
    struct stat found;
    int status;
    if (fstatat(directory, saves->how->name, &found, AT_SYMLINK_NOFOLLOW) == 0 &&
        vua_is_plain(&found, &saves->how->trusted) &&
        (uint64_t)found.st_size == saves->batch->file_nbytes)
        status = PRESENT;
    else
        status = write_file(saves, directory, file) ? WRITTEN : -errno;
    close(directory);
    return status;
}

static void *run(void *argument)
{
    struct saves *saves = argument;
    while (!atomic_load(&saves->failed)) {
        uint64_t file = atomic_fetch_add(&saves->next, 1);
        if (file >= saves->files)
            break;
        saves->statuses[file] = save(saves, file);
        if (saves->statuses[file] <= UNTRIED)
            atomic_store(&saves->failed, 1);
    }
    return NULL;
}

/* Write the files of chunks that lie in memory from a place on, in order but for the threads', up
 * to one that cannot be. `statuses`, zeros so far, tell what became of each. */
void vua_save(const struct batch *batch, const struct writing *how, int dir_fd, const char *paths,
              uint64_t path_nbytes, uint64_t files, uint64_t place, char *headers,
              uint64_t threads, int32_t *statuses)
{
    struct saves saves = {
        batch, how, dir_fd, paths, path_nbytes, files, place, headers, statuses, 0, 0,
    };
    pthread_t helpers[THREADS_MAX];
    uint64_t started = 0;
    while (started + 1 < threads && started < THREADS_MAX &&
           pthread_create(&helpers[started], NULL, run, &saves) == 0)
        started++;
    run(&saves);
    while (started > 0)
        pthread_join(helpers[--started], NULL);
}
