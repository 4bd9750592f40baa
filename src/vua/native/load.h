/* What the C files share: the plan and memory as vua/native/transfer.py has them, the steps of rows.c,
 * and copies of boxes and rows (move.c). */
#ifndef VUA_LOAD_H
#define VUA_LOAD_H
#include <pthread.h>
#include <stdatomic.h>
#include <stdint.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/uio.h>
#ifdef __SSE2__
#include <emmintrin.h>
#endif

enum { ROWS_MAX = 1024, STATE_NBYTES = 1024, THREADS_MAX = 8, ARRAYS_MAX = 2 };
enum { COLD_THREADS = 16 }; /* that wait for a device or a server, which want several requests */
#define NOWHERE UINT64_MAX /* offset of a segment that is not wanted, where elements are spread */
enum { READS_OF_PART = 4 }; /* of a file, that a thread reads in turn: a MiB in all */

/* xxhash.h's streaming interface, found in the xxhash module by the caller. */
struct xxh3 {
    int (*reset)(void *state);
    int (*update)(void *state, const void *data, size_t nbytes);
    uint64_t (*digest)(const void *state);
};

/* One head of one layer of K or V, in file order. One of array ARRAYS_MAX goes to the discard
 * buffer: it is read only because a checksum covers it. */
struct extent {
    uint64_t array, head, layer;
    uint64_t discard; /* place in each segment of the discard buffer */
    uint64_t nbytes;  /* of each of its own segments */
};

/* What one system call reads: extents [extent, extent_stop), behind the header where `header` says
 * so; checksum blocks [block, block_stop). */
struct read {
    uint64_t extent, extent_stop, header, nbytes, offset, block, block_stop;
};

/* How elements lie in memory whose tokens are no rows without gaps. The same fields as
 * vua.native.Spread. */
struct spread {
    uint64_t item;                               /* bytes of an element */
    uint64_t dims[ARRAYS_MAX];                   /* elements of a token */
    uint64_t token[ARRAYS_MAX], dim[ARRAYS_MAX]; /* bytes from one to the next */
};

/* What is the same for all files of a batch. The same fields as vua.native.Transfer. */
struct batch {
    struct xxh3 hash;
    uint64_t file_nbytes, header_nbytes;
    uint64_t table_offset;      /* of the checksums, in the header */
    const struct read *reads;
    uint64_t read_count;
    const struct extent *extents;
    const uint64_t *block_nbytes, *block_place; /* [blocks]; place of its checksum in the table */
    uint64_t block_count;
    uint64_t segments;          /* of a chunk in memory */
    uint64_t discard_nbytes;    /* all segments of it */
    /* Where tokens lie: see vua.native.Transfer. */
    const uint64_t *base[ARRAYS_MAX];           /* [layers] */
    uint64_t head_stride[ARRAYS_MAX];
    const uint64_t *segment_offset[ARRAYS_MAX]; /* [segments of all places] */
    const struct spread *spread; /* NULL: rows without gaps */
};

/* Whose files are read; without uids anybody's. */
struct users {
    const uint32_t *uids;
    uint64_t count;
};

/* Of flags: touch nothing that is not cached; read past the page cache what is not in it; leave the
 * hashing to the caller. */
enum { NOWAIT = 1, DIRECT = 2, UNHASHED = 4 };

/* Memory for what is read of files beside their K and V. The same fields as vua.native.Headers. */
struct tables {
    char *headers;     /* [files][header_nbytes] */
    uint64_t *digests; /* [files][blocks]: what the blocks hash to */
    uint64_t *inodes;  /* [files][2]: device and inode */
    char *discard;     /* [files][discard_nbytes]; NULL: nobody wants to see it */
};

/* What the headers of some files must be, byte for byte. The same fields as
 * vua.native.HeaderForm. */
struct form {
    const char *start, *middles, *end; /* the same for all; of each file, [files]; the same again */
    const unsigned char *variable;     /* before the end: a byte, or kinds of bytes, marked KINDS */
    const unsigned char *kinds;        /* [256]: bits of the kinds that a byte is of */
    uint64_t start_nbytes, middle_nbytes, end_nbytes, variable_nbytes;
    uint64_t check_offset;             /* of the self-check, CHECK_NBYTES of hexadecimal digits */
};
enum { KINDS = 0x80, CHECK_NBYTES = 16 };

/* A file of which parts are being read. */
struct opened {
    enum { CLOSED, OPENING, OPEN, READ, BAD } state; /* READ: as a whole, and closed again */
    int fd;
    _Atomic int direct;       /* read past the page cache */
    _Atomic uint32_t parts_done;
    _Atomic int spoiled;      /* a part could not be read */
};

struct work {
    const struct batch *batch;
    const struct tables *into;
    int dir_fd;
    const char *paths;          /* [files][path_nbytes], each with a final 0 */
    uint64_t path_nbytes, first, stop;
    uint64_t place;             /* of file 0's chunk in memory */
    const uint64_t *places;     /* [ring]: files take these rows and places in turn; NULL: own ones */
    uint64_t ring;
    uint64_t flags;
    const struct users *trusted;
    char *bounce;               /* for direct reads of cold files, page aligned; NULL: none */
    uint64_t bounce_nbytes;     /* of each thread's share, in pages */
    uint64_t bounces;           /* shares */
    struct opened *opened;      /* [stop - first] */
    uint64_t parts;             /* of each file */
    uint64_t threads;           /* that were there from the beginning */
    pthread_mutex_t lock;       /* of the files' states */
    pthread_cond_t changed;
    _Atomic uint64_t free;      /* files before this one have a free row; the lock to change it */
    _Atomic uint64_t bounces_taken;
    _Atomic uint64_t next;      /* part to take, of all files' */
    _Atomic uint64_t good;      /* the first bad file */
    _Atomic uint64_t cold;      /* files that were not in the page cache, or not as a whole */
    pthread_t more[COLD_THREADS];
    uint64_t more_count;        /* threads started once a file was cold */
    void (*found_cold)(struct work *); /* called for each cold file: starts them */
    const struct form *form;    /* what the files must be; NULL: the caller judges */
};

/* A file's row of the tables, and its chunk's place in memory. */
static inline uint64_t vua_row(const struct work *work, uint64_t file)
{
    return work->places ? work->places[file % work->ring] : file;
}

static inline uint64_t vua_place(const struct work *work, uint64_t file)
{
    return work->places ? vua_row(work, file) : work->place + file;
}

/* Where a file's blocks are to be hashed to; NULL: they are not. */
static inline uint64_t *vua_digests(const struct work *work, uint64_t file)
{
    return work->flags & UNHASHED
               ? NULL
               : work->into->digests + vua_row(work, file) * work->batch->block_count;
}

/* Where a walk over rows stands. */
struct cursor {
    const struct iovec *row;
    uint64_t done; /* bytes of that row */
};

/* Fill the rows; return whether all bytes came. Goes on after short reads, as network file systems
 * and signals give them. `*how` is how to read: once a file is found cold, its part [offset, stop)
 * is asked for as a whole, more files are read at a time, and reads wait. */
int vua_read_rows(struct work *work, int fd, const struct iovec *rows, uint64_t count,
                  uint64_t nbytes, uint64_t offset, uint64_t stop, int *how);

/* Write the iovecs of a read, those that follow each other in memory as one; return how many. None
 * where elements are spread. */
uint64_t vua_iovecs_of_read(struct iovec *rows, const struct batch *batch, const struct read *read,
                            char *header, char *discard, uint64_t place);

/* Hash checksum blocks [block, stop), which begin at the cursor, into `digests`, [blocks], if any. */
void vua_hash_blocks(const struct batch *batch, struct cursor at, uint64_t block, uint64_t stop,
                     uint64_t *digests);

/* Hash the bytes of a read, which lie at `from`, and copy them to their place. Returns whether it
 * could be. */
int vua_take(const struct batch *batch, const struct read *read, const char *from, char *header,
             char *discard, uint64_t place, uint64_t *digests);

/* Hash the checksum blocks of a read, which lie at `from`, and copy those that hash to what the
 * file's header says to where their elements are spread: nothing else is written. */
void vua_spread(const struct batch *batch, const struct read *read, const char *from,
                const char *header, uint64_t place, uint64_t *digests);

/* Whether a header is the one that a file must have. */
int vua_header_is(const struct batch *batch, const struct form *form, uint64_t file,
                  const char *header);

/* Whether a file's blocks hash to what its header says. */
int vua_blocks_are(const struct batch *batch, const char *header, const uint64_t *digests);

/* Whether this is a regular file with one name, of a user who is trusted. */
int vua_is_plain(const struct stat *status, const struct users *trusted);

/* Whether the page cache has nothing of a file's beginning. A read that does not wait would tell
 * too, but makes the system fetch the file. No where the system cannot tell (before Linux 6.5, and
 * for files that this process may not write). */
int vua_is_cold(int fd);

/* Do reads [first, stop) of a file past the page cache: their pages need not be found memory
 * for, and displace none. Straight to their place where that is whole pages, else through `bounce`.
 * Returns whether all were read. */
int vua_load_direct(struct work *work, int fd, uint64_t file, const struct read *first,
                    const struct read *stop, char *discard, char *bounce);

/* Where one element of a box is, from its first one, in bytes. */
struct stride {
    uint64_t head, token, dim;
};

/* StridedCopy of one shape, but for their tokens. The same fields as vua.native.moves.StridedCopy. */
struct boxes {
    uint64_t count, heads, dims, item; /* item: bytes of an element; 1, 2, 4 or 8 */
    struct stride to, from;
    const uint64_t *target, *source, *tokens; /* [count]; addresses of their first elements */
};

/* Copy one of them; with `stream` past the caches, until stream_end(). */
void vua_copy_box(const struct boxes *boxes, uint64_t at, int stream);

/* The processor itself sees what is read next in long rows, hardly in short ones. */
enum { SHORT_NBYTES = 4096, AHEAD_NBYTES = 2048 };

/* Copy a row past the caches where it is whole lines of them: a line that is written as a whole need
 * not be read first, which is a third of a large copy's traffic. (The C library does so for one large
 * copy, but not for many rows.) */
static inline void stream_row(char *to, const char *from, uint64_t nbytes)
{
#ifdef __SSE2__
    if (((uint64_t)to | nbytes) % 64 == 0) {
        const uint64_t ahead = nbytes <= SHORT_NBYTES ? AHEAD_NBYTES : 0;
        for (const char *stop = from + nbytes; from < stop; from += 64, to += 64) {
            __builtin_prefetch(from + ahead, 0, 0);
            for (int part = 0; part < 64; part += 16)
                _mm_stream_si128((__m128i *)(to + part),
                                 _mm_loadu_si128((const __m128i *)(from + part)));
        }
        return;
    }
#endif
    memcpy(to, from, nbytes);
}

/* Whoever sees what this thread writes next sees the streamed rows, too. */
static inline void stream_end(void)
{
#ifdef __SSE2__
    _mm_sfence();
#endif
}
#endif
