/* Network loops: pages go through a socket from and to where they lie in a KV cache.
 *
 * As in native.c a request is checked in full first, then the GIL is released once for all of its
 * bytes. The socket may be in any mode: every call says MSG_DONTWAIT, and waiting is a poll in
 * short slices, so that a stop is noticed and a peer that makes no progress is given up.
 */
#define _GNU_SOURCE
#include "pages.h"

#include <errno.h>
#include <poll.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/uio.h>
#include <time.h>

enum {
    MAX_IOVECS = 1024, /* IOV_MAX on Linux */
    /* Bytes of one system call: few enough to be in the cache still when they are hashed, and when
     * the kernel's buffers are used again. Over loopback, on two free cores, 512 KiB moved 5.5 to 6
     * GB/s, 256 KiB 3, 1 MiB 4 to 4.5, 4 MiB 3, 16 MiB 2.5. */
    BATCH_BYTES = 512 << 10,
    POLL_MS = 50,
    SCRATCH_BYTES = 32 << 10,
};

/* Adds iovecs after the first `count`; returns the count then and adds their bytes to `nbytes`. */
static int fill_batch(const Pages *pages, Walk *walk, struct iovec *iov, int count,
                      int64_t *nbytes) {
    int64_t total = 0;
    while (count < MAX_IOVECS && total < BATCH_BYTES && walk->block < pages->num_blocks) {
        char *at;
        const int64_t piece = next_piece(pages, walk, BATCH_BYTES - total, &at);
        iov[count++] = (struct iovec){at, (size_t)piece};
        total += piece;
    }
    *nbytes += total;
    return count;
}

/* Moving bytes -------------------------------------------------------------------------------- */

typedef enum { MOVED, STOPPED, STALLED, CLOSED, FAILED } Status;

typedef struct {
    int fd;
    bool sending;
    const char *stop; /* NULL: not to be stopped any more */
    int stall_ms;
    int64_t idle_since_ms; /* -1: bytes moved since the last wait */
    int error;
} Link;

static int64_t now_ms(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (int64_t)now.tv_sec * 1000 + now.tv_nsec / 1000000;
}

static Status wait_for_link(Link *link) {
    const int64_t now = now_ms();
    if (link->idle_since_ms < 0)
        link->idle_since_ms = now;
    const int64_t left = link->idle_since_ms + link->stall_ms - now;
    if (left <= 0)
        return STALLED;
    struct pollfd poller = {.fd = link->fd, .events = link->sending ? POLLOUT : POLLIN};
    if (poll(&poller, 1, left < POLL_MS ? (int)left : POLL_MS) < 0 && errno != EINTR) {
        link->error = errno;
        return FAILED;
    }
    return MOVED;
}

/* Drops the first `nbytes` from a list of iovecs; returns how many are used up. */
static int advance(struct iovec *iov, size_t nbytes) {
    int used = 0;
    while (nbytes > 0 && nbytes >= iov[used].iov_len)
        nbytes -= iov[used++].iov_len;
    if (nbytes > 0) {
        iov[used].iov_base = (char *)iov[used].iov_base + nbytes;
        iov[used].iov_len -= nbytes;
    }
    return used;
}

/* Moves all bytes of a batch; `moved` grows by those that did, whatever the outcome. The stop is
 * looked at right before every system call, and after it was seen none writes into these iovecs. */
static Status move_batch(Link *link, struct iovec *iov, int count, int64_t *moved) {
    while (count > 0) {
        if (link->stop != NULL && __atomic_load_n(link->stop, __ATOMIC_ACQUIRE) != 0)
            return STOPPED;
        struct msghdr message = {.msg_iov = iov, .msg_iovlen = (size_t)count};
        const ssize_t nbytes = link->sending
                                   ? sendmsg(link->fd, &message, MSG_DONTWAIT | MSG_NOSIGNAL)
                                   : recvmsg(link->fd, &message, MSG_DONTWAIT);
        if (nbytes > 0) {
            link->idle_since_ms = -1;
            *moved += nbytes;
            const int used = advance(iov, (size_t)nbytes);
            iov += used;
            count -= used;
        } else if (nbytes == 0) {
            return CLOSED;
        } else if (errno == EAGAIN || errno == EWOULDBLOCK) {
            const Status status = wait_for_link(link);
            if (status != MOVED)
                return status;
        } else if (errno != EINTR) {
            link->error = errno;
            return FAILED;
        }
    }
    return MOVED;
}

static Status send_all(const Pages *pages, Link *link, const Py_buffer *head, unsigned char *out) {
    struct iovec iov[MAX_IOVECS];
    Walk walk = {0, 0, 0};
    Digester digester = {.out = out};
    Status status = MOVED;
    int count = 0;
    if (head->len > 0)
        iov[count++] = (struct iovec){head->buf, (size_t)head->len};
    while (status == MOVED && (count > 0 || walk.block < pages->num_blocks)) {
        int64_t nbytes = 0, moved = 0;
        count = fill_batch(pages, &walk, iov, count, &nbytes);
        digest_bytes(pages, &digester, nbytes);
        status = move_batch(link, iov, count, &moved);
        count = 0;
    }
    return status;
}

/* Keeps the stream in step after a stop: what is left of the pages goes nowhere. */
static Status drain(Link *link, int64_t nbytes) {
    char scratch[SCRATCH_BYTES];
    Status status = MOVED;
    link->stop = NULL;
    while (status == MOVED && nbytes > 0) {
        struct iovec iov = {scratch, nbytes < SCRATCH_BYTES ? (size_t)nbytes : SCRATCH_BYTES};
        int64_t moved = 0;
        status = move_batch(link, &iov, 1, &moved);
        nbytes -= moved;
    }
    return status;
}

/* `landed` becomes the number of bytes that went into pages. */
static Status recv_all(const Pages *pages, Link *link, unsigned char *out, int64_t *landed) {
    struct iovec iov[MAX_IOVECS];
    Walk walk = {0, 0, 0};
    Digester digester = {.out = out};
    Status status = MOVED;
    while (status == MOVED && walk.block < pages->num_blocks) {
        int64_t nbytes = 0, moved = 0;
        const int count = fill_batch(pages, &walk, iov, 0, &nbytes);
        status = move_batch(link, iov, count, &moved);
        digest_bytes(pages, &digester, moved);
        *landed += moved;
    }
    if (status == STOPPED)
        status = drain(link, pages->block_bytes * pages->num_blocks - *landed);
    return status;
}

/* Python functions ---------------------------------------------------------------------------- */

static bool check_link(const Link *link, const Py_buffer *stop) {
    if (link->stall_ms < 1 || stop->len != 1) {
        PyErr_Format(PyExc_ValueError, "stall_ms is %d, stop has %zd bytes", link->stall_ms,
                     stop->len);
        return false;
    }
    return true;
}

static void raise_status(const Link *link, Status status) {
    if (status == STOPPED)
        PyErr_SetString(PyExc_InterruptedError, "stopped in the middle of pages");
    else if (status == STALLED)
        PyErr_Format(PyExc_TimeoutError, "no byte moved for %d ms", link->stall_ms);
    else if (status == CLOSED)
        PyErr_SetString(PyExc_ConnectionError, "the peer closed in the middle of pages");
    else {
        errno = link->error;
        PyErr_SetFromErrno(PyExc_OSError);
    }
}

PyObject *send_pages(PyObject *module, PyObject *args) {
    Pages pages = {0};
    Link link = {.sending = true, .idle_since_ms = -1};
    Py_buffer head, stop;
    PyObject *segments, *ids, *digests = NULL;
    Status status;

    (void)module;
    if (!PyArg_ParseTuple(args, "iy*(Kn)OLO(LL)iy*", &link.fd, &head, &pages.address,
                          &pages.nbytes, &segments, &pages.phases, &ids, &pages.period,
                          &pages.phase0, &link.stall_ms, &stop))
        return NULL;
    link.stop = stop.buf;
    if (check_link(&link, &stop) && check_pages(&pages, segments, ids))
        digests = new_digests(&pages);
    if (digests != NULL) {
        unsigned char *out = (unsigned char *)PyBytes_AsString(digests);
        Py_BEGIN_ALLOW_THREADS
        status = send_all(&pages, &link, &head, out);
        Py_END_ALLOW_THREADS
        if (status != MOVED) {
            raise_status(&link, status);
            Py_CLEAR(digests);
        }
    }
    release_pages(&pages);
    PyBuffer_Release(&head);
    PyBuffer_Release(&stop);
    return digests;
}

PyObject *recv_pages(PyObject *module, PyObject *args) {
    Pages pages = {0};
    Link link = {.sending = false, .idle_since_ms = -1};
    Py_buffer stop;
    PyObject *segments, *ids, *digests = NULL;
    int64_t landed = 0;
    Status status;

    (void)module;
    if (!PyArg_ParseTuple(args, "i(Kn)OLO(LL)iy*", &link.fd, &pages.address, &pages.nbytes,
                          &segments, &pages.phases, &ids, &pages.period, &pages.phase0,
                          &link.stall_ms, &stop))
        return NULL;
    link.stop = stop.buf;
    if (check_link(&link, &stop) && check_pages(&pages, segments, ids))
        digests = new_digests(&pages);
    if (digests != NULL) {
        unsigned char *out = (unsigned char *)PyBytes_AsString(digests);
        Py_BEGIN_ALLOW_THREADS
        status = recv_all(&pages, &link, out, &landed);
        Py_END_ALLOW_THREADS
        landed /= pages.block_bytes;
        if (status != MOVED) {
            raise_status(&link, status);
            Py_CLEAR(digests);
        } else if (landed < pages.num_blocks) {
            PyObject *all = digests;
            digests = PyBytes_FromStringAndSize((const char *)out,
                                                8 * (Py_ssize_t)num_digests(&pages, landed));
            Py_DECREF(all);
        }
    }
    release_pages(&pages);
    PyBuffer_Release(&stop);
    return digests ? Py_BuildValue("NL", digests, (long long)landed) : NULL;
}
