/* List the chunks in a directory and their mtimes, measure and delete chunks, by calls that need no
 * GIL: a pass over a million chunks would keep an engine from it for seconds, and a thread that
 * evicts would take it for each call of the system.
 *
 * Built together with load.c.
 */
#define _GNU_SOURCE
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

enum { NAME_NBYTES = 64 };

static int is_chunk(const char *name)
{
    return strlen(name) == NAME_NBYTES && strspn(name, "0123456789abcdef") == NAME_NBYTES;
}

static int64_t ns_of(struct timespec at)
{
    int64_t ns;
    if (__builtin_mul_overflow(at.tv_sec, INT64_C(1000000000), &ns) ||
        __builtin_add_overflow(ns, at.tv_nsec, &ns))
        return INT64_MAX; /* after the year 2261 */
    return ns;
}

/* Fill names[room][64] and mtimes_ns[room] with the chunks in the directory behind a descriptor.
 * Without `mtimes_ns` only names are looked at. Returns how many there are, of which those beyond
 * the room are not looked at, or -errno. */
int64_t vua_list(int directory, char *names, int64_t *mtimes_ns, int64_t room)
{
    int fd = fcntl(directory, F_DUPFD_CLOEXEC, 0); /* needs no right to search */
    DIR *entries = fd < 0 ? NULL : fdopendir(fd);
    if (entries == NULL) {
        int64_t why = -errno;
        if (fd >= 0)
            close(fd);
        return why;
    }
    int64_t found = 0;
    const struct dirent *entry;
    while (errno = 0, (entry = readdir(entries)) != NULL) {
        struct stat status;
        if (!is_chunk(entry->d_name))
            continue;
        if (found >= room) {
            found++;
            continue;
        }
        if (mtimes_ns != NULL) {
            if (fstatat(fd, entry->d_name, &status, AT_SYMLINK_NOFOLLOW) != 0 ||
                !S_ISDIR(status.st_mode))
                continue;
            mtimes_ns[found] = ns_of(status.st_mtim);
        }
        memcpy(names + found * NAME_NBYTES, entry->d_name, NAME_NBYTES);
        found++;
    }
    int64_t why = -errno;
    rewinddir(entries); /* whoever lists by this descriptor next begins at the front, too */
    closedir(entries);
    return why < 0 ? why : found;
}

enum { PATH_ROOM = 128, LISTING_NBYTES = 4096, MOST_FILES = 16 };

/* A chunk's directory, below that of its namespace. */
static void path_of(const char *name, char path[PATH_ROOM])
{
    snprintf(path, PATH_ROOM, "%.2s/%.*s", name, NAME_NBYTES, name);
}

/* Set `nbytes[count]` to the bytes of the regular files of each chunk in `names[count][64]`, or to
 * -errno where its directory cannot be opened. */
void vua_sizes(int space, const char *names, int64_t count, int64_t *nbytes)
{
    for (int64_t at = 0; at < count; at++) {
        char path[PATH_ROOM];
        path_of(names + at * NAME_NBYTES, path);
        int fd = openat(space, path, O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC);
        DIR *entries = fd < 0 ? NULL : fdopendir(fd);
        nbytes[at] = entries == NULL ? -errno : 0;
        if (entries == NULL) {
            if (fd >= 0)
                close(fd);
            continue;
        }
        const struct dirent *entry;
        while ((entry = readdir(entries)) != NULL) {
            struct stat status;
            if (fstatat(fd, entry->d_name, &status, AT_SYMLINK_NOFOLLOW) == 0 &&
                S_ISREG(status.st_mode))
                nbytes[at] += status.st_size;
        }
        closedir(entries);
    }
}

#define LONGEST_NS INT64_C(20000000) /* of one call: the caller has a lease to renew */

static int64_t clock_ns(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return now.tv_sec * INT64_C(1000000000) + now.tv_nsec;
}

struct entry_names {
    int count;
    const char *names[MOST_FILES];
};

static const char *known_name(const char *name, const char *known)
{
    for (; *known != '\0'; known += strlen(known) + 1)
        if (strcmp(name, known) == 0)
            return known;
    return NULL;
}

/* List a directory, whose position is at the front; whether it holds files with known names alone,
 * and not too many. False where the file system does not tell what is a file. */
static int holds_entries(int fd, const char *known, struct entry_names *found)
{
    _Alignas(struct dirent) char listing[LISTING_NBYTES];
    long nbytes;
    found->count = 0;
    while ((nbytes = syscall(SYS_getdents64, fd, listing, sizeof listing)) > 0) {
        long at = 0;
        while (at < nbytes) {
            const struct dirent *entry = (const struct dirent *)(listing + at);
            at += entry->d_reclen;
            if (strcmp(entry->d_name, ".") == 0 || strcmp(entry->d_name, "..") == 0)
                continue;
            const char *name = known_name(entry->d_name, known);
            if (name == NULL || entry->d_type != DT_REG || found->count == MOST_FILES)
                return 0;
            found->names[found->count++] = name;
        }
    }
    return nbytes == 0;
}

/* Delete the files; whether all went. */
static int delete_files(int fd, const struct entry_names *files, int64_t *nbytes)
{
    for (int at = 0; at < files->count; at++) {
        struct stat status;
        if (fstatat(fd, files->names[at], &status, AT_SYMLINK_NOFOLLOW) != 0 ||
            unlinkat(fd, files->names[at], 0) != 0)
            return 0;
        if (status.st_nlink <= 1)
            *nbytes += status.st_size;
    }
    return 1;
}

enum { UNTOUCHED, DELETED, GONE, ASIDE, UNUSUAL }; /* what became of a chunk */

/* Move a chunk's directory aside and delete it, if it holds nothing but entries, has this mtime and
 * did not change from `seen_ns` on; else it is UNUSUAL and stays. GONE: there is none. ASIDE: it
 * was moved, and something is left of it. */
static uint8_t delete_chunk(int space, const char *chunk, const char *aside, const char *known,
                            int64_t mtime_ns, int64_t seen_ns, int64_t *nbytes)
{
    struct stat status;
    struct entry_names files;
    uint8_t done = UNUSUAL;
    int fd = openat(space, chunk, O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC);
    if (fd < 0)
        return errno == ENOENT ? GONE : UNUSUAL;
    if (fstat(fd, &status) == 0 && ns_of(status.st_mtim) == mtime_ns &&
        ns_of(status.st_ctim) < seen_ns && holds_entries(fd, known, &files) &&
        renameat(space, chunk, space, aside) == 0) {
        done = ASIDE;
        /* A pin, a file or a child may have come since the directory was listed. */
        if (lseek(fd, 0, SEEK_SET) == 0 && holds_entries(fd, known, &files) &&
            fstat(fd, &status) == 0 && ns_of(status.st_mtim) == mtime_ns) {
            if (delete_files(fd, &files, nbytes) && unlinkat(space, aside, AT_REMOVEDIR) == 0)
                done = DELETED;
        }
    }
    close(fd);
    return done;
}

/* Delete chunks in order, up to the first that Python has to look at, or until as many bytes are
 * free as are wanted, or 20 ms are over. The caller has seen that all may go.
 *
 * `names[count][64]`, `mtimes_ns[count]`: the chunks; `aside`: what comes before a number of four
 * hex digits in the path to which a chunk is moved. `known`: names of entries, each with a final 0,
 * the last one empty. `nbytes`: how much to free, and what was. `done[count]`: what became of each.
 *
 * Returns how many are DELETED or GONE. */
int64_t vua_delete(int space, const char *names, const int64_t *mtimes_ns, int64_t count,
                   int64_t seen_ns, const char *aside, const char *known, int64_t *nbytes,
                   uint8_t *done)
{
    int64_t wanted = *nbytes, until_ns = clock_ns() + LONGEST_NS, at = 0;
    *nbytes = 0;
    for (; at < count && *nbytes < wanted && (at == 0 || clock_ns() < until_ns); at++) {
        char chunk[PATH_ROOM], trash[PATH_ROOM];
        const char *name = names + at * NAME_NBYTES;
        path_of(name, chunk);
        snprintf(trash, sizeof trash, "%s%04x", aside, (unsigned)(at & 0xffff));
        done[at] = delete_chunk(space, chunk, trash, known, mtimes_ns[at], seen_ns, nbytes);
        if (done[at] != DELETED && done[at] != GONE)
            break;
    }
    return at;
}
