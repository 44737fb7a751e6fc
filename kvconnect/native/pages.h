/* Pages in a KV cache as net.c sends and receives them: checked once, then walked over. */
#ifndef KVCONNECT_PAGES_H
#define KVCONNECT_PAGES_H

#include "native.h"

#include <stdbool.h>

#define XXH_INLINE_ALL
#include "vendor/xxhash.h"

/* Pages of one call: wire blocks ids[0 ... num_blocks - 1], each made of num_runs byte runs. */
typedef struct {
    unsigned long long address;
    Py_ssize_t nbytes;
    Py_buffer views[2];
    const Segment *segments;
    const int64_t *ids;
    int64_t num_runs, num_blocks, block_bytes;
    long long phases, period, phase0;
} Pages;

/* The next byte: a position in ids, a run of that block, an offset in that run. */
typedef struct {
    int64_t block, run, offset;
} Walk;

/* Hashes pages while it walks over them; each block's digest goes to `out` when it is complete. */
typedef struct {
    Walk walk;
    XXH3_state_t state;
    unsigned char *out;
} Digester;

/* Completes what the argument parser filled in; false with an exception set. To be released. */
bool check_pages(Pages *pages, PyObject *segments, PyObject *ids);
void release_pages(Pages *pages);

/* Steps over the rest of a run, at most `limit` bytes; returns how many, and where they are. */
int64_t next_piece(const Pages *pages, Walk *walk, int64_t limit, char **at);

/* How many of the first `num_blocks` blocks are hashed. */
int64_t num_digests(const Pages *pages, int64_t num_blocks);

/* A new bytes object with room for all digests, NULL with an exception set. */
PyObject *new_digests(const Pages *pages);

/* Takes the next `nbytes` of the walk. */
void digest_bytes(const Pages *pages, Digester *digester, int64_t nbytes);

#endif
