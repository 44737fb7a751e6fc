/* Streams of tokens from engines to clients, without Python: a thread moves whole chunks of
 * HTTP/1.1 chunked bodies from an engine's socket to a client's until anything else happens. Then
 * the stream goes back to its owner, with the bytes that were read and not sent. Where a stream is
 * journaled, it comes back at the first event of another form, too, with notes of those before.
 *
 * One lock guards the table and everything in it, and is held for nanoseconds. A stream that is
 * `busy` belongs to the thread, which works on it without the lock; whoever takes it away waits.
 * Sockets are duplicated, so that a number that is closed and given out again is never served.
 */
#define _GNU_SOURCE
#include "native.h"
#include "token_events.h"

#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <signal.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

enum {
    ONE_READ = 64 << 10, /* bytes; longer chunks go to the owner */
    MOST_EVENTS = 64,    /* of one wait */
    MOST_DIGITS = 7,     /* of the size of a chunk */
    SIZE_LINE = MOST_DIGITS + 2,
};

static const uint64_t WAKE = UINT64_MAX; /* no key: its low half is no slot */

typedef enum { ENDED, FULL, BYTES, NO_MEMORY, TAKEN_AWAY } Reason;
static const char *const REASONS[] = {"ended", "full", "bytes", "memory", "removed"};

typedef enum { FREE, RELAYED, RETURNED } State;

typedef struct Stream {
    State state;
    uint32_t slot, generation;
    bool busy, wanted; /* the thread works on it; somebody waits until it does not */
    bool events_only;  /* the last bytes of a chunk must end an event that is an object */
    TokenEvents *events; /* of a stream that is journaled, else NULL */
    int engine, client;
    int64_t nbytes, chunks;
    double heard;
    char tail[2];
    Reason reason;
    char *data; /* bytes that were read: `unsent` of whole chunks, then `rest` */
    size_t unsent, rest;
    struct Stream *next;
} Stream;

typedef struct {
    PyObject_HEAD
    pthread_mutex_t lock;
    pthread_cond_t idle; /* a wanted stream is not busy any more */
    pthread_t thread;
    bool running;
    int epoll, wake, returned; /* `returned` is readable while streams are */
    int most_fd;               /* the highest number that a duplicate may have */
    Stream **table;
    uint32_t slots;
    Stream *free, *first, **last; /* the returned ones, the oldest first */
    char received[ONE_READ], made[2 * ONE_READ]; /* the thread's; `made`: what a client gets */
} Relay;

static double now(void) {
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return (double)time.tv_sec + (double)time.tv_nsec * 1e-9;
}

static uint64_t key_of(const Stream *stream) {
    return (uint64_t)stream->generation << 32 | stream->slot;
}

/* With the lock. Returns NULL if the stream has ended. */
static Stream *find(const Relay *relay, uint64_t key) {
    const uint32_t slot = (uint32_t)key;
    Stream *stream = slot < relay->slots ? relay->table[slot] : NULL;
    return stream != NULL && stream->state != FREE && key_of(stream) == key ? stream : NULL;
}

/* With the lock. */
static void close_sockets(const Relay *relay, Stream *stream) {
    if (stream->state != RELAYED)
        return;
    /* Before close: the socket's other descriptor would keep the registration alive. */
    epoll_ctl(relay->epoll, EPOLL_CTL_DEL, stream->engine, NULL);
    close(stream->engine);
    close(stream->client);
}

/* With the lock. */
static void release(Relay *relay, Stream *stream) {
    close_sockets(relay, stream);
    free(stream->data);
    free_token_events(stream->events);
    stream->data = NULL;
    stream->events = NULL;
    stream->state = FREE;
    stream->generation++;
    stream->next = relay->free;
    relay->free = stream;
}

/* The thread ----------------------------------------------------------------------------------- */

static int hexadecimal(char c) {
    if (c >= '0' && c <= '9')
        return c - '0';
    c |= 0x20;
    return c >= 'a' && c <= 'f' ? c - 'a' + 10 : -1;
}

/* Returns the bytes of the first chunk if all of it is there, and it is not the last one; else 0.
 * `body` gets where its content begins, `size` how long that is. Extensions are nobody's here. */
static size_t whole_chunk(const char *text, size_t length, size_t *body, size_t *size) {
    size_t at = 0, value = 0;
    for (int d; at < length && at <= MOST_DIGITS && (d = hexadecimal(text[at])) >= 0; at++)
        value = value * 16 + (size_t)d;
    if (at == 0 || at > MOST_DIGITS || value == 0 || length - at < 4 || value > length - at - 4)
        return 0;
    const size_t end = at + 2 + value;
    if (memcmp(text + at, "\r\n", 2) != 0 || memcmp(text + end, "\r\n", 2) != 0)
        return 0;
    *body = at + 2;
    *size = value;
    return end + 2;
}

static void count_chunk(Stream *stream, const char *content, size_t size) {
    stream->tail[0] = size > 1 ? content[size - 2] : stream->tail[1];
    stream->tail[1] = content[size - 1];
    stream->chunks++;
    stream->nbytes += (int64_t)size;
}

/* Returns the bytes at the beginning that may go to the client as they are. */
static size_t passable(Stream *stream, const char *text, size_t length) {
    size_t at = 0, body, size, whole;
    while ((whole = whole_chunk(text + at, length - at, &body, &size)) > 0) {
        const char *content = text + at + body;
        if (stream->events_only && (size < 3 || memcmp(content + size - 3, "}\n\n", 3) != 0))
            break;
        count_chunk(stream, content, size);
        at += whole;
    }
    return at;
}

/* Returns the bytes at the beginning of which `made` gets what the client gets, and its size. */
static size_t journaled(Stream *stream, const char *text, size_t length, char *made,
                        size_t *made_size) {
    size_t at = 0, body, size, whole;
    char *end = made, line[SIZE_LINE + 1];
    while ((whole = whole_chunk(text + at, length - at, &body, &size)) > 0) {
        char *content = end + SIZE_LINE; /* until its size is known, which comes before it */
        if (!pass_token_events(stream->events, text + at + body, size, content, &size))
            break;
        count_chunk(stream, content, size);
        const size_t digits = (size_t)snprintf(line, sizeof line, "%zx\r\n", size);
        memcpy(end, line, digits);
        memmove(end + digits, content, size);
        memcpy(end + digits + size, "\r\n", 2);
        end += digits + size + 2;
        at += whole;
    }
    *made_size = (size_t)(end - made);
    return at;
}

/* Without the lock, on a busy stream. Returns whether it stays here; `heard` gets when it read. */
static bool move(Relay *relay, Stream *stream, double *heard) {
    char *const received = relay->received;
    const ssize_t got = recv(stream->engine, received, ONE_READ, MSG_DONTWAIT);
    if (got < 0 && (errno == EAGAIN || errno == EWOULDBLOCK || errno == EINTR))
        return true;
    stream->reason = ENDED; /* or broken: its owner will find the same */
    if (got <= 0)
        return false;
    *heard = now();
    const char *made = received;
    size_t whole, size, sent = 0, length = (size_t)got;
    if (stream->events != NULL) {
        made = relay->made;
        whole = journaled(stream, received, length, relay->made, &size);
    } else {
        whole = size = passable(stream, received, length);
    }
    if (size > 0) {
        const ssize_t n = send(stream->client, made, size, MSG_DONTWAIT | MSG_NOSIGNAL);
        sent = n > 0 ? (size_t)n : 0; /* a client that is gone is its owner's to find */
    }
    if (sent == size && whole == length)
        return true;
    stream->unsent = size - sent;
    stream->rest = length - whole;
    stream->data = malloc(stream->unsent + stream->rest);
    if (stream->data == NULL) {
        stream->unsent = stream->rest = 0;
        stream->reason = NO_MEMORY;
        return false;
    }
    memcpy(stream->data, made + sent, stream->unsent);
    memcpy(stream->data + stream->unsent, received + whole, stream->rest);
    stream->reason = sent < size ? FULL : BYTES;
    return false;
}

/* With the lock. */
static void give_back(Relay *relay, Stream *stream) {
    const uint64_t one = 1;
    close_sockets(relay, stream);
    stream->state = RETURNED;
    stream->next = NULL;
    *relay->last = stream;
    relay->last = &stream->next;
    (void)!write(relay->returned, &one, sizeof one); /* if it is full, it is readable already */
}

/* With the lock, which it gives up meanwhile. */
static void serve(Relay *relay, Stream *stream) {
    double heard = 0;
    stream->busy = true;
    pthread_mutex_unlock(&relay->lock);
    const bool stays = move(relay, stream, &heard);
    pthread_mutex_lock(&relay->lock);
    stream->busy = false;
    if (heard > 0)
        stream->heard = heard;
    if (!stays)
        give_back(relay, stream);
    if (stream->wanted)
        pthread_cond_signal(&relay->idle);
}

static void *run(void *argument) {
    Relay *relay = argument;
    struct epoll_event events[MOST_EVENTS];
    for (;;) {
        const int count = epoll_wait(relay->epoll, events, MOST_EVENTS, -1);
        for (int i = 0; i < count; i++) {
            if (events[i].data.u64 == WAKE)
                return NULL;
            pthread_mutex_lock(&relay->lock);
            Stream *stream = find(relay, events[i].data.u64);
            if (stream != NULL && stream->state == RELAYED && !stream->wanted)
                serve(relay, stream);
            pthread_mutex_unlock(&relay->lock);
        }
    }
}

/* Called by Python, from one thread ------------------------------------------------------------ */

/* With the lock. Returns a stream that is not in use; NULL without memory. */
static Stream *new_stream(Relay *relay) {
    Stream *stream = relay->free;
    if (stream != NULL) {
        relay->free = stream->next;
    } else {
        Stream **table = relay->slots < WAKE >> 32
                             ? realloc(relay->table, (relay->slots + 1) * sizeof *table)
                             : NULL;
        if (table != NULL)
            relay->table = table;
        stream = table != NULL ? calloc(1, sizeof *stream) : NULL;
        if (stream == NULL)
            return NULL;
        stream->slot = relay->slots;
        table[relay->slots++] = stream;
    }
    const uint32_t slot = stream->slot, generation = stream->generation;
    *stream = (Stream){.slot = slot, .generation = generation, .state = RELAYED, .heard = now()};
    return stream;
}

static int duplicate(int fd, int most) {
    const int copy = fcntl(fd, F_DUPFD_CLOEXEC, 0);
    if (copy > most) {
        close(copy);
        errno = EMFILE;
        return -1;
    }
    return copy;
}

/* Owns the duplicates and `events`, also where it fails. Returns the key. */
static PyObject *add_stream(Relay *relay, int engine, int client, bool events_only,
                            TokenEvents *events) {
    uint64_t key = 0;
    int failure = ENOMEM;
    pthread_mutex_lock(&relay->lock);
    Stream *stream = new_stream(relay);
    if (stream != NULL) {
        stream->engine = engine;
        stream->client = client;
        stream->events_only = events_only;
        stream->events = events;
        key = key_of(stream);
        struct epoll_event wanted = {.events = EPOLLIN, .data.u64 = key};
        failure = epoll_ctl(relay->epoll, EPOLL_CTL_ADD, engine, &wanted) < 0 ? errno : 0;
        if (failure != 0)
            release(relay, stream);
    }
    pthread_mutex_unlock(&relay->lock);
    if (stream == NULL) {
        close(engine);
        close(client);
        free_token_events(events);
    }
    if (failure == 0)
        return PyLong_FromUnsignedLongLong(key);
    errno = failure;
    return PyErr_SetFromErrno(PyExc_OSError);
}

static PyObject *add(PyObject *self, PyObject *args) {
    Relay *relay = (Relay *)self;
    TokenEvents *events = NULL;
    PyObject *form;
    int engine, client, events_only;
    if (!PyArg_ParseTuple(args, "iipO", &engine, &client, &events_only, &form))
        return NULL;
    if (!relay->running)
        return PyErr_Format(PyExc_ValueError, "the relay is closed");
    if (form != Py_None && (events = new_token_events(form)) == NULL)
        return NULL;
    engine = duplicate(engine, relay->most_fd);
    client = engine < 0 ? -1 : duplicate(client, relay->most_fd);
    if (client < 0) {
        PyErr_SetFromErrno(PyExc_OSError);
        if (engine >= 0)
            close(engine);
        free_token_events(events);
        return NULL;
    }
    return add_stream(relay, engine, client, events_only, events);
}

static PyObject *record_of(const Stream *stream) {
    const char *data = stream->data != NULL ? stream->data : "", *notes = "";
    size_t noted = 0;
    if (stream->events != NULL)
        notes = token_notes(stream->events, &noted);
    return Py_BuildValue("KsLLdy#y#y#y#", key_of(stream), REASONS[stream->reason],
                         (long long)stream->nbytes, (long long)stream->chunks, stream->heard,
                         stream->tail, (Py_ssize_t)sizeof stream->tail, data,
                         (Py_ssize_t)stream->unsent, data + stream->unsent,
                         (Py_ssize_t)stream->rest, notes, (Py_ssize_t)noted);
}

/* With the lock. */
static void unlink_returned(Relay *relay, const Stream *stream) {
    Stream **at = &relay->first;
    while (*at != stream)
        at = &(*at)->next;
    *at = stream->next;
    if (*at == NULL)
        relay->last = at;
}

static PyObject *take(PyObject *self, PyObject *args) {
    Relay *relay = (Relay *)self;
    uint64_t count;
    (void)args;
    pthread_mutex_lock(&relay->lock);
    Stream *stream = relay->first;
    if (stream == NULL && relay->running)
        (void)!read(relay->returned, &count, sizeof count);
    pthread_mutex_unlock(&relay->lock);
    if (stream == NULL)
        Py_RETURN_NONE;
    PyObject *record = record_of(stream); /* without memory it stays, and is asked for again */
    if (record != NULL) {
        pthread_mutex_lock(&relay->lock);
        unlink_returned(relay, stream);
        release(relay, stream);
        pthread_mutex_unlock(&relay->lock);
    }
    return record;
}

static PyObject *remove_stream(PyObject *self, PyObject *args) {
    Relay *relay = (Relay *)self;
    unsigned long long key;
    if (!PyArg_ParseTuple(args, "K", &key))
        return NULL;
    Stream *stream;
    Py_BEGIN_ALLOW_THREADS
    pthread_mutex_lock(&relay->lock);
    stream = find(relay, key);
    if (stream != NULL) {
        stream->wanted = true;
        while (stream->busy)
            pthread_cond_wait(&relay->idle, &relay->lock);
        if (stream->state == RELAYED)
            stream->reason = TAKEN_AWAY;
    }
    pthread_mutex_unlock(&relay->lock);
    Py_END_ALLOW_THREADS
    if (stream == NULL)
        Py_RETURN_NONE;
    PyObject *record = record_of(stream);
    pthread_mutex_lock(&relay->lock);
    if (record == NULL) { /* without memory it stays, and may be asked for again */
        stream->wanted = false;
    } else {
        if (stream->state == RETURNED)
            unlink_returned(relay, stream);
        release(relay, stream);
    }
    pthread_mutex_unlock(&relay->lock);
    return record;
}

static PyObject *heard_of(PyObject *self, PyObject *args) {
    Relay *relay = (Relay *)self;
    unsigned long long key;
    if (!PyArg_ParseTuple(args, "K", &key))
        return NULL;
    pthread_mutex_lock(&relay->lock);
    const Stream *stream = find(relay, key);
    const double heard = stream != NULL ? stream->heard : 0;
    pthread_mutex_unlock(&relay->lock);
    return PyFloat_FromDouble(heard);
}

static PyObject *returned_fd(PyObject *self, PyObject *args) {
    (void)args;
    return PyLong_FromLong(((Relay *)self)->returned);
}

static void close_fd(int *fd) {
    if (*fd >= 0)
        close(*fd);
    *fd = -1;
}

static void stop(Relay *relay) {
    const uint64_t one = 1;
    if (relay->running) {
        relay->running = false;
        (void)!write(relay->wake, &one, sizeof one);
        Py_BEGIN_ALLOW_THREADS
        pthread_join(relay->thread, NULL);
        Py_END_ALLOW_THREADS
    }
    for (uint32_t slot = 0; slot < relay->slots; slot++) {
        close_sockets(relay, relay->table[slot]);
        free(relay->table[slot]->data);
        free_token_events(relay->table[slot]->events);
        free(relay->table[slot]);
    }
    relay->slots = 0;
    relay->free = relay->first = NULL;
    close_fd(&relay->epoll);
    close_fd(&relay->wake);
    close_fd(&relay->returned);
}

static PyObject *close_relay(PyObject *self, PyObject *args) {
    (void)args;
    stop((Relay *)self);
    Py_RETURN_NONE;
}

static void destroy(PyObject *self) {
    Relay *relay = (Relay *)self;
    PyTypeObject *type = Py_TYPE(self);
    stop(relay);
    free(relay->table);
    pthread_cond_destroy(&relay->idle);
    pthread_mutex_destroy(&relay->lock);
    ((freefunc)PyType_GetSlot(type, Py_tp_free))(self);
    Py_DECREF(type);
}

/* Returns 0 or an error number. Python's signal handlers run in Python's threads. */
static int start(Relay *relay) {
    struct epoll_event wake = {.events = EPOLLIN, .data.u64 = WAKE};
    sigset_t all, before;
    relay->epoll = epoll_create1(EPOLL_CLOEXEC);
    relay->wake = eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC);
    relay->returned = eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC);
    if (relay->epoll < 0 || relay->wake < 0 || relay->returned < 0 ||
        epoll_ctl(relay->epoll, EPOLL_CTL_ADD, relay->wake, &wake) < 0)
        return errno;
    sigfillset(&all);
    pthread_sigmask(SIG_BLOCK, &all, &before);
    const int failure = pthread_create(&relay->thread, NULL, run, relay);
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    relay->running = failure == 0;
    return failure;
}

static PyObject *new_relay(PyTypeObject *type, PyObject *args, PyObject *named) {
    int most_fd;
    (void)named;
    if (!PyArg_ParseTuple(args, "i", &most_fd))
        return NULL;
    Relay *relay = (Relay *)((allocfunc)PyType_GetSlot(type, Py_tp_alloc))(type, 0);
    if (relay == NULL)
        return NULL;
    pthread_mutex_init(&relay->lock, NULL);
    pthread_cond_init(&relay->idle, NULL);
    relay->last = &relay->first;
    relay->most_fd = most_fd;
    const int failure = start(relay);
    if (failure != 0) {
        Py_DECREF(relay);
        errno = failure;
        return PyErr_SetFromErrno(PyExc_OSError);
    }
    return (PyObject *)relay;
}

static PyMethodDef relay_methods[] = {
    {"add", add, METH_VARARGS, "Relay a stream; return its key."},
    {"take", take, METH_NOARGS, "Return a stream that came back, or None."},
    {"remove", remove_stream, METH_VARARGS, "Take a stream away now."},
    {"heard", heard_of, METH_VARARGS, "Return when a stream's engine last sent something."},
    {"fileno", returned_fd, METH_NOARGS, "Return what is readable while streams came back."},
    {"close", close_relay, METH_NOARGS, "End the thread and all streams."},
    {NULL, NULL, 0, NULL},
};

static PyType_Slot relay_slots[] = {
    {Py_tp_new, new_relay},
    {Py_tp_dealloc, destroy},
    {Py_tp_methods, relay_methods},
    {Py_tp_doc, "Passes streams of chunks from engines to clients in a thread."},
    {0, NULL},
};

static PyType_Spec relay_spec = {
    .name = "kvconnect._native.Relay",
    .basicsize = sizeof(Relay),
    .flags = Py_TPFLAGS_DEFAULT,
    .slots = relay_slots,
};

int add_relay(PyObject *module) {
    PyObject *type = PyType_FromModuleAndSpec(module, &relay_spec, NULL);
    if (type == NULL)
        return -1;
    const int failure = PyModule_AddType(module, (PyTypeObject *)type);
    Py_DECREF(type);
    return failure;
}
