/* The chunks in a directory and their mtimes, by one call that needs no GIL: a pass over a million
 * chunks would keep an engine from it for seconds.
 *
 * Built together with load.c.
 */
#define _GNU_SOURCE
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <stdint.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

enum { NAME_NBYTES = 64 };

static int is_chunk(const char *name)
{
    return strlen(name) == NAME_NBYTES && strspn(name, "0123456789abcdef") == NAME_NBYTES;
}

/* Fill names[room][64] and mtimes_ns[room] with the chunks in the directory behind a descriptor.
 * Returns how many there are, of which those beyond the room are not looked at, or -errno. */
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
        if (fstatat(fd, entry->d_name, &status, AT_SYMLINK_NOFOLLOW) != 0 ||
            !S_ISDIR(status.st_mode))
            continue;
        memcpy(names + found * NAME_NBYTES, entry->d_name, NAME_NBYTES);
        if (__builtin_mul_overflow(status.st_mtim.tv_sec, INT64_C(1000000000), &mtimes_ns[found]) ||
            __builtin_add_overflow(mtimes_ns[found], status.st_mtim.tv_nsec, &mtimes_ns[found]))
            mtimes_ns[found] = INT64_MAX; /* after the year 2261 */
        found++;
    }
    int64_t why = -errno;
    rewinddir(entries); /* whoever lists by this descriptor next begins at the front, too */
    closedir(entries);
    return why < 0 ? why : found;
}
