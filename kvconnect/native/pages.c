/* Pages of a request: bounds, positions and digests. No input or output. */
#include "pages.h"

/* Checking a request ------------------------------------------------------------------------- */

void release_pages(Pages *pages) {
    for (int i = 0; i < 2; i++)
        PyBuffer_Release(&pages->views[i]);
}

static bool check_runs(Pages *pages) {
    for (int64_t phase = 0; phase < pages->phases; phase++) {
        int64_t total = 0;
        for (int64_t i = 0; i < pages->num_runs; i++) {
            const Segment *s = &pages->segments[phase * pages->num_runs + i];
            if (s->offset < 0 || s->stride < 0 || s->length < 1 ||
                __builtin_add_overflow(total, s->length, &total)) {
                PyErr_Format(PyExc_ValueError,
                             "segment %lld of phase %lld is malformed: offset %lld, stride %lld, "
                             "length %lld",
                             (long long)i, (long long)phase, (long long)s->offset,
                             (long long)s->stride, (long long)s->length);
                return false;
            }
        }
        if (phase > 0 && total != pages->block_bytes) {
            PyErr_Format(PyExc_ValueError, "phase %lld has %lld bytes, phase 0 has %lld",
                         (long long)phase, (long long)total, (long long)pages->block_bytes);
            return false;
        }
        pages->block_bytes = total;
    }
    int64_t all;
    if (__builtin_mul_overflow(pages->block_bytes, pages->num_blocks, &all)) {
        PyErr_SetString(PyExc_ValueError, "the pages together are larger than any memory");
        return false;
    }
    return true;
}

/* The largest page whose runs of this phase lie inside the memory, -1 if none. */
static int64_t last_page(const Pages *pages, int64_t phase) {
    int64_t last = INT64_MAX;
    for (int64_t i = 0; i < pages->num_runs; i++) {
        const Segment *s = &pages->segments[phase * pages->num_runs + i];
        const int64_t room = pages->nbytes - s->length;
        if (s->offset > room)
            return -1;
        if (s->stride > 0 && (room - s->offset) / s->stride < last)
            last = (room - s->offset) / s->stride;
    }
    return last;
}

static bool check_ids(const Pages *pages) {
    int64_t *last = PyMem_New(int64_t, (size_t)pages->phases);
    if (last == NULL) {
        PyErr_NoMemory();
        return false;
    }
    for (int64_t phase = 0; phase < pages->phases; phase++)
        last[phase] = last_page(pages, phase);
    int64_t i = 0;
    while (i < pages->num_blocks && pages->ids[i] >= 0 &&
           pages->ids[i] / pages->phases <= last[pages->ids[i] % pages->phases])
        i++;
    PyMem_Free(last);
    if (i < pages->num_blocks)
        PyErr_Format(PyExc_IndexError, "wire block %lld lies outside the memory of %zd bytes",
                     (long long)pages->ids[i], pages->nbytes);
    return i == pages->num_blocks;
}

bool check_pages(Pages *pages, PyObject *segments, PyObject *ids) {
    const Py_ssize_t numbers = acquire_int64(segments, "segments", &pages->views[0]);
    const Py_ssize_t blocks = numbers < 0 ? -1 : acquire_int64(ids, "ids", &pages->views[1]);
    if (blocks < 0)
        return false;
    /* In this order, and with these limits, no product or sum below can overflow. */
    if (numbers < 3 || pages->phases < 1 || pages->phases > numbers / 3 ||
        numbers % (3 * pages->phases) != 0 || pages->nbytes < 0 || pages->period < 0 ||
        pages->period > INT32_MAX || pages->phase0 < 0) {
        PyErr_Format(PyExc_ValueError,
                     "malformed request: %zd segment numbers, %lld phases, memory of %zd bytes, "
                     "digest (%lld, %lld)",
                     numbers, pages->phases, pages->nbytes, pages->period, pages->phase0);
        return false;
    }
    pages->segments = pages->views[0].buf;
    pages->ids = pages->views[1].buf;
    pages->num_runs = numbers / 3 / pages->phases;
    pages->num_blocks = blocks;
    if (pages->period > 0)
        pages->phase0 %= pages->period;
    return check_runs(pages) && check_ids(pages);
}

/* Walking over pages ------------------------------------------------------------------------- */

int64_t next_piece(const Pages *pages, Walk *walk, int64_t limit, char **at) {
    const int64_t id = pages->ids[walk->block];
    const Segment *s = &pages->segments[id % pages->phases * pages->num_runs + walk->run];
    const int64_t left = s->length - walk->offset;
    const int64_t nbytes = left < limit ? left : limit;
    *at = (char *)(uintptr_t)pages->address + s->offset + id / pages->phases * s->stride +
          walk->offset;
    walk->offset += nbytes;
    if (nbytes == left) {
        walk->offset = 0;
        if (++walk->run == pages->num_runs) {
            walk->run = 0;
            walk->block++;
        }
    }
    return nbytes;
}

int64_t num_digests(const Pages *pages, int64_t num_blocks) {
    if (pages->period == 0)
        return 0;
    return (pages->phase0 + num_blocks + pages->period - 1) / pages->period -
           (pages->phase0 + pages->period - 1) / pages->period;
}

PyObject *new_digests(const Pages *pages) {
    return PyBytes_FromStringAndSize(NULL, 8 * (Py_ssize_t)num_digests(pages, pages->num_blocks));
}

void digest_bytes(const Pages *pages, Digester *digester, int64_t nbytes) {
    if (pages->period == 0)
        return;
    while (nbytes > 0) {
        const Walk from = digester->walk;
        char *at;
        const int64_t piece = next_piece(pages, &digester->walk, nbytes, &at);
        nbytes -= piece;
        if ((pages->phase0 + from.block) % pages->period != 0)
            continue;
        if (from.run == 0 && from.offset == 0)
            XXH3_64bits_reset(&digester->state);
        XXH3_64bits_update(&digester->state, at, (size_t)piece);
        if (digester->walk.block > from.block) {
            const uint64_t digest = XXH3_64bits_digest(&digester->state);
            for (int i = 0; i < 8; i++)
                *digester->out++ = (unsigned char)(digest >> (8 * i));
        }
    }
}

PyObject *digest_pages(PyObject *module, PyObject *args) {
    Pages pages = {.period = 1};
    PyObject *segments, *ids, *digests = NULL;

    (void)module;
    if (!PyArg_ParseTuple(args, "(Kn)OLO", &pages.address, &pages.nbytes, &segments,
                          &pages.phases, &ids))
        return NULL;
    if (check_pages(&pages, segments, ids))
        digests = new_digests(&pages);
    if (digests != NULL) {
        Digester digester = {.out = (unsigned char *)PyBytes_AsString(digests)};
        Py_BEGIN_ALLOW_THREADS
        digest_bytes(&pages, &digester, pages.block_bytes * pages.num_blocks);
        Py_END_ALLOW_THREADS
    }
    release_pages(&pages);
    return digests;
}
