/* Stands for the CUDA driver where there is none: copies and launches happen at once, in host
   memory, unless a test has queues for them; every call is checked as the driver checks it. What a driver answers only after the
   fact (a sticky error), or only to some (a thread without a context), is answered here too.

   Numbers are those of cuda.h. "stub_" functions are for tests. The few functions of the runtime
   (libcudart) are here because both share one thing: the runtime's last error. */

#define _GNU_SOURCE
#include <dlfcn.h>
#include <pthread.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

typedef int Status;
typedef uint64_t Address;

enum {
    SUCCESS = 0,
    INVALID_VALUE = 1,
    OUT_OF_MEMORY = 2,
    NOT_INITIALIZED = 3,
    NO_BINARY_FOR_GPU = 209,
    NOT_FOUND = 500,
    INVALID_DEVICE = 101,
    INVALID_CONTEXT = 201,
    INVALID_HANDLE = 400,
    NOT_READY = 600,
    ALREADY_REGISTERED = 712,
    NOT_REGISTERED = 713,
};

enum { DEVICES = 2, STREAMS = 4096, EVENTS = 65536, RANGES = 4096, DEPTH = 8, NAMES = 64 };
enum { LEAST = 0, GREATEST = -5 };
enum { HOST_POINTERS_OF_REGISTERED = 91 }; /* an attribute of a device */
enum { IN_ORDER = 1 }; /* of a copy: its source is read when its stream has come to it */
enum { PER_THREAD = 2, LEGACY = 1 }; /* handles that stand for null streams */

typedef struct {
    Address start;
    size_t bytes;
    int locked; /* page-locked host memory; 0: memory of the device */
} Range;

typedef struct {
    int device;
    int priority;
    unsigned flags;
} Stream;

typedef struct {
    int device;
    unsigned flags;
    int records;
    int alive;
} Event;

typedef struct {
    int order;
    int source_hint[2];
    int target_hint[2];
    unsigned flags;
} Attributes;

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static int initialized;
static int contexts[DEVICES]; /* a context is the address of its entry; the value counts retains */
static Stream streams[STREAMS];
static int num_streams;
static Event events[EVENTS];
static int num_events;
static Range ranges[RANGES];
static int num_ranges;
static size_t lockable = SIZE_MAX; /* bytes that may be page-locked */
static size_t lockable_range = SIZE_MAX; /* of these, by one call */
static int everything_reached; /* copies reach all memory of the process */
static int other_addresses; /* the device reaches page-locked memory at others than the host */
static Status sticky;              /* what a lost device answers to everything */
static const char *refused = "";   /* the call that is refused next */
static Status refusal;
static int calls_of[NAMES];
static int held_of[NAMES]; /* of these, calls of threads that held Python's lock */
static size_t most_copies[2]; /* of one batch, of threads that did not hold it and that did */
static const char *names[NAMES];
static const char *kernels[NAMES]; /* by handle, less one */
static Status (*launched)(void *function, unsigned grid, unsigned threads, void *stream,
                          void **arguments);

/* The work of a device that does it later. They are called without the lock, because they wait for
   Python's, which a caller that waits may hold. All are NULL where work is done at once. */
typedef struct {
    Status (*copy)(void *stream, const Address *targets, const Address *sources,
                   const size_t *sizes, size_t copies, int order);
    Status (*record)(void *stream, void *event);
    Status (*follow)(void *stream, void *event);
    Status (*await)(void *event);
    Status (*query)(void *event);
    double (*seconds)(void *start, void *end); /* negative: not yet */
} Queues;
static Queues queues;

static __thread void *stack[DEPTH]; /* the top is the thread's current context */
static __thread int depth;
static __thread Status last_error; /* of the runtime */
static int last_order;             /* of the last batch that was taken */

static int holds_python(void)
{
    int (*check)(void);
    *(void **)&check = dlsym(RTLD_DEFAULT, "PyGILState_Check");
    return check && check();
}

static void count(const char *name)
{
    for (int i = 0; i < NAMES; i++) {
        if (names[i] == NULL)
            names[i] = name;
        if (strcmp(names[i], name) == 0) {
            calls_of[i]++;
            held_of[i] += holds_python();
            return;
        }
    }
}

/* What every call begins with; the lock is held from here on. */
static Status enter(const char *name, int needs_context)
{
    pthread_mutex_lock(&lock);
    count(name);
    if (strcmp(refused, name) == 0) {
        refused = "";
        return refusal;
    }
    if (!initialized)
        return NOT_INITIALIZED;
    if (sticky)
        return sticky;
    if (needs_context && (depth == 0 || stack[depth - 1] == NULL))
        return INVALID_CONTEXT;
    return SUCCESS;
}

static Status leave(Status status)
{
    pthread_mutex_unlock(&lock);
    return status;
}

static int is_context(void *context)
{
    int *entry = context;
    return entry == NULL || (entry >= contexts && entry < contexts + DEVICES && *entry > 0);
}

static int current_device(void)
{
    return (int)((int *)stack[depth - 1] - contexts);
}

/* A stream that was made here, in the current context; null streams are left to the caller. */
static Status check_stream(void *handle)
{
    uintptr_t number = (uintptr_t)handle;
    if (number <= PER_THREAD)
        return SUCCESS;
    Stream *stream = handle;
    if (stream < streams || stream >= streams + num_streams)
        return INVALID_HANDLE;
    return stream->device == current_device() ? SUCCESS : INVALID_HANDLE;
}

static int covered(Address start, size_t bytes)
{
    if (everything_reached)
        return start && bytes;
    for (int i = 0; i < num_ranges; i++)
        if (start >= ranges[i].start && start - ranges[i].start + bytes <= ranges[i].bytes)
            return 1;
    return 0;
}

/* Tests --------------------------------------------------------------------------------------- */

void stub_reset(void)
{
    pthread_mutex_lock(&lock);
    initialized = num_streams = num_events = num_ranges = 0;
    memset(contexts, 0, sizeof contexts);
    memset(calls_of, 0, sizeof calls_of);
    memset(held_of, 0, sizeof held_of);
    memset(most_copies, 0, sizeof most_copies);
    memset(names, 0, sizeof names);
    lockable = lockable_range = SIZE_MAX;
    other_addresses = everything_reached = 0;
    sticky = SUCCESS;
    refused = "";
    launched = NULL;
    queues = (Queues){0};
    memset(kernels, 0, sizeof kernels);
    depth = 0;
    last_error = SUCCESS;
    pthread_mutex_unlock(&lock);
}

void stub_device_memory(Address start, size_t bytes)
{
    ranges[num_ranges++] = (Range){start, bytes, 0};
}

void stub_limit_locked(size_t bytes) { lockable = bytes; }
void stub_limit_range(size_t bytes) { lockable_range = bytes; }
void stub_reach_everything(void) { everything_reached = 1; }
void stub_other_addresses(void) { other_addresses = 1; }
void stub_lose_device(Status status) { sticky = status; }
void stub_queues(const Queues *given) { queues = *given; }

void stub_launched(Status (*function)(void *, unsigned, unsigned, void *, void **))
{
    launched = function;
}

/* Let modules have a kernel; the name must stay where it is. */
void stub_kernel(int handle, const char *name) { kernels[handle - 1] = name; }

/* Answer the next call of this name so; the name must stay where it is. */
void stub_refuse(const char *name, Status status)
{
    refused = name;
    refusal = status;
}

static int number_of(const int *of, const char *name)
{
    for (int i = 0; i < NAMES && names[i]; i++)
        if (strcmp(names[i], name) == 0)
            return of[i];
    return 0;
}

int stub_calls(const char *name) { return number_of(calls_of, name); }
int stub_held(const char *name) { return number_of(held_of, name); }
size_t stub_most_copies(int held) { return most_copies[held]; }

int stub_priority(void *stream) { return ((Stream *)stream)->priority; }
unsigned stub_flags(void *stream) { return ((Stream *)stream)->flags; }
int stub_last_order(void) { return last_order; }
int stub_retained(int device) { return contexts[device]; }

size_t stub_locked(void)
{
    size_t bytes = 0;
    for (int i = 0; i < num_ranges; i++)
        bytes += ranges[i].locked ? ranges[i].bytes : 0;
    return bytes;
}

/* The driver ---------------------------------------------------------------------------------- */

Status cuInit(unsigned flags)
{
    pthread_mutex_lock(&lock);
    initialized = 1;
    return leave(flags ? INVALID_VALUE : SUCCESS);
}

Status cuDriverGetVersion(int *version)
{
    *version = 13000;
    return SUCCESS;
}

Status cuDeviceGet(int *device, int ordinal)
{
    Status status = enter("cuDeviceGet", 0);
    if (!status && (ordinal < 0 || ordinal >= DEVICES))
        status = INVALID_DEVICE;
    if (!status)
        *device = ordinal;
    return leave(status);
}

Status cuDeviceGetAttribute(int *value, int attribute, int device)
{
    Status status = enter("cuDeviceGetAttribute", 0);
    if (!status && (device < 0 || device >= DEVICES))
        status = INVALID_DEVICE;
    if (!status && attribute != HOST_POINTERS_OF_REGISTERED)
        status = INVALID_VALUE;
    if (!status)
        *value = !other_addresses;
    return leave(status);
}

Status cuDevicePrimaryCtxRetain(void **context, int device)
{
    Status status = enter("cuDevicePrimaryCtxRetain", 0);
    if (!status && (device < 0 || device >= DEVICES))
        status = INVALID_DEVICE;
    if (!status) {
        contexts[device]++;
        *context = &contexts[device];
    }
    return leave(status);
}

Status cuCtxSetCurrent(void *context)
{
    Status status = enter("cuCtxSetCurrent", 0);
    if (!status && !is_context(context))
        status = INVALID_CONTEXT;
    if (!status) {
        depth = depth ? depth : 1;
        stack[depth - 1] = context;
    }
    return leave(status);
}

Status cuCtxGetCurrent(void **context)
{
    Status status = enter("cuCtxGetCurrent", 0);
    if (!status)
        *context = depth ? stack[depth - 1] : NULL;
    return leave(status);
}

Status cuCtxPushCurrent_v2(void *context)
{
    Status status = enter("cuCtxPushCurrent", 0);
    if (!status && (context == NULL || !is_context(context) || depth == DEPTH))
        status = INVALID_CONTEXT;
    if (!status)
        stack[depth++] = context;
    return leave(status);
}

Status cuCtxPopCurrent_v2(void **context)
{
    Status status = enter("cuCtxPopCurrent", 1);
    if (!status)
        *context = stack[--depth];
    return leave(status);
}

Status cuCtxGetStreamPriorityRange(int *least, int *greatest)
{
    Status status = enter("cuCtxGetStreamPriorityRange", 1);
    if (!status) {
        *least = LEAST;
        *greatest = GREATEST;
    }
    return leave(status);
}

Status cuStreamCreateWithPriority(void **stream, unsigned flags, int priority)
{
    Status status = enter("cuStreamCreateWithPriority", 1);
    if (!status && flags > 1)
        status = INVALID_VALUE;
    if (!status && num_streams == STREAMS)
        status = OUT_OF_MEMORY;
    if (!status) {
        priority = priority > LEAST ? LEAST : priority < GREATEST ? GREATEST : priority;
        streams[num_streams] = (Stream){current_device(), priority, flags};
        *stream = &streams[num_streams++];
    }
    return leave(status);
}

enum { EVENT_FLAGS = 7, NO_TIMING = 2 };

static Status check_event(void *handle)
{
    Event *event = handle;
    if (event < events || event >= events + num_events || !event->alive)
        return INVALID_HANDLE;
    return event->device == current_device() ? SUCCESS : INVALID_HANDLE;
}

Status cuEventCreate(void **event, unsigned flags)
{
    Status status = enter("cuEventCreate", 1);
    if (!status && flags & ~EVENT_FLAGS)
        status = INVALID_VALUE;
    if (!status && num_events == EVENTS)
        status = OUT_OF_MEMORY;
    if (!status) {
        events[num_events] = (Event){current_device(), flags, 0, 1};
        *event = &events[num_events++];
    }
    return leave(status);
}

Status cuEventDestroy_v2(void *event)
{
    Status status = enter("cuEventDestroy", 1);
    if (!status)
        status = check_event(event);
    if (!status)
        ((Event *)event)->alive = 0;
    return leave(status);
}

Status cuEventRecord(void *event, void *stream)
{
    Status status = enter("cuEventRecord", 1);
    if (!status)
        status = check_event(event);
    if (!status)
        status = check_stream(stream);
    if (!status)
        ((Event *)event)->records++;
    leave(status);
    return !status && queues.record ? queues.record(stream, event) : status;
}

Status cuStreamWaitEvent(void *stream, void *event, unsigned flags)
{
    Status status = enter("cuStreamWaitEvent", 1);
    if (!status)
        status = check_stream(stream);
    if (!status)
        status = check_event(event);
    if (!status && flags > 1)
        status = INVALID_VALUE;
    leave(status);
    return !status && queues.follow ? queues.follow(stream, event) : status;
}

Status cuEventSynchronize(void *event)
{
    Status status = enter("cuEventSynchronize", 1);
    if (!status)
        status = check_event(event);
    leave(status);
    return !status && queues.await ? queues.await(event) : status;
}

Status cuEventQuery(void *event)
{
    Status status = enter("cuEventQuery", 1);
    if (!status)
        status = check_event(event);
    leave(status);
    return !status && queues.query ? queues.query(event) : status;
}

Status cuEventElapsedTime(float *milliseconds, void *start, void *end)
{
    Status status = enter("cuEventElapsedTime", 1);
    if (!status)
        status = check_event(start);
    if (!status)
        status = check_event(end);
    if (!status) {
        const Event *first = start, *last = end;
        if (!first->records || !last->records || (first->flags | last->flags) & NO_TIMING)
            status = INVALID_HANDLE;
    }
    leave(status);
    const double seconds = !status && queues.seconds ? queues.seconds(start, end) : 0.002;
    if (!status && seconds < 0)
        status = NOT_READY;
    if (!status)
        *milliseconds = (float)(1e3 * seconds);
    return status;
}

int stub_events(void)
{
    int count = 0;
    for (int i = 0; i < num_events; i++)
        count += events[i].alive;
    return count;
}

static Status register_range(Address start, size_t bytes)
{
    size_t locked = 0;
    for (int i = 0; i < num_ranges; i++) {
        if (!ranges[i].locked)
            continue;
        locked += ranges[i].bytes;
        if (start < ranges[i].start + ranges[i].bytes && ranges[i].start < start + bytes)
            return ALREADY_REGISTERED;
    }
    if (bytes > lockable_range || bytes > lockable || locked > lockable - bytes ||
        num_ranges == RANGES)
        return OUT_OF_MEMORY;
    ranges[num_ranges++] = (Range){start, bytes, 1};
    return SUCCESS;
}

Status cuMemHostRegister_v2(void *start, size_t bytes, unsigned flags)
{
    Status status = enter("cuMemHostRegister", 1);
    if (!status && (start == NULL || bytes == 0 || flags > 15))
        status = INVALID_VALUE;
    if (!status)
        status = register_range((Address)start, bytes);
    return leave(status);
}

Status cuMemHostUnregister(void *start)
{
    Status status = enter("cuMemHostUnregister", 1);
    if (!status) {
        int at = 0;
        while (at < num_ranges && !(ranges[at].locked && ranges[at].start == (Address)start))
            at++;
        if (at == num_ranges)
            status = NOT_REGISTERED;
        else
            ranges[at] = ranges[--num_ranges];
    }
    return leave(status);
}

static Status move(Address target, Address source, size_t bytes)
{
    /* Pageable memory would be copied as well, but before the call returns; nothing here may. */
    if (!covered(target, bytes) || !covered(source, bytes))
        return INVALID_VALUE;
    if (!queues.copy)
        memcpy((void *)target, (void *)source, bytes);
    return SUCCESS;
}

Status cuMemcpyAsync(Address target, Address source, size_t bytes, void *stream)
{
    Status status = enter("cuMemcpyAsync", 1);
    if (!status)
        status = check_stream(stream);
    if (!status)
        status = move(target, source, bytes);
    leave(status);
    return !status && queues.copy ? queues.copy(stream, &target, &source, &bytes, 1, IN_ORDER)
                                  : status;
}

#ifndef WITHOUT_BATCH
static Status check_attributes(const Attributes *all, const size_t *firsts, size_t number,
                               size_t copies)
{
    if (number == 0 || number > copies || firsts[0] != 0)
        return INVALID_VALUE;
    for (size_t i = 0; i < number; i++) {
        if (firsts[i] >= copies || (i && firsts[i] <= firsts[i - 1]))
            return INVALID_VALUE;
        if (all[i].order < 1 || all[i].order > 3 || all[i].flags > 1)
            return INVALID_VALUE;
        if (all[i].source_hint[0] < 0 || all[i].source_hint[0] > 4 || all[i].target_hint[0] < 0 ||
            all[i].target_hint[0] > 4)
            return INVALID_VALUE;
    }
    return SUCCESS;
}

static Status batch(const char *name, const Address *targets, const Address *sources,
                    const size_t *sizes, size_t copies, const Attributes *attributes,
                    const size_t *firsts, size_t number, size_t *failed, void *stream)
{
    Status status = enter(name, 1);
    size_t *most = &most_copies[holds_python()];
    *most = copies > *most ? copies : *most;
    if (!status && (uintptr_t)stream <= PER_THREAD)
        status = INVALID_VALUE; /* no null stream takes a batch */
    if (!status)
        status = check_stream(stream);
    if (!status && (copies == 0 || !targets || !sources || !sizes || !attributes || !firsts))
        status = INVALID_VALUE;
    if (!status)
        status = check_attributes(attributes, firsts, number, copies);
    for (size_t i = 0; !status && i < copies; i++) {
        status = sizes[i] ? move(targets[i], sources[i], sizes[i]) : INVALID_VALUE;
        if (status && failed)
            *failed = i;
    }
    if (!status)
        last_order = attributes[0].order;
    leave(status);
    return !status && queues.copy
               ? queues.copy(stream, targets, sources, sizes, copies, attributes[0].order)
               : status;
}

Status cuMemcpyBatchAsync(const Address *targets, const Address *sources, const size_t *sizes,
                          size_t copies, const Attributes *attributes, const size_t *firsts,
                          size_t number, size_t *failed, void *stream)
{
    return failed == NULL ? INVALID_VALUE
                          : batch("cuMemcpyBatchAsync", targets, sources, sizes, copies,
                                  attributes, firsts, number, failed, stream);
}
#endif

#ifdef WITH_SECOND_BATCH
Status cuMemcpyBatchAsync_v2(const Address *targets, const Address *sources, const size_t *sizes,
                             size_t copies, const Attributes *attributes, const size_t *firsts,
                             size_t number, void *stream)
{
    return batch("cuMemcpyBatchAsync_v2", targets, sources, sizes, copies, attributes, firsts,
                 number, NULL, stream);
}
#endif

enum { FAT_BINARY = (int)0xBA55ED50 }; /* what one begins with */

Status cuModuleLoadData(void **module, const void *image)
{
    Status status = enter("cuModuleLoadData", 1);
    if (!status && (!image || memcmp(image, &(int){FAT_BINARY}, sizeof(int))))
        status = NO_BINARY_FOR_GPU;
    if (!status)
        *module = kernels;
    return leave(status);
}

Status cuModuleGetFunction(void **function, void *module, const char *name)
{
    Status status = enter("cuModuleGetFunction", 1);
    if (!status && module != kernels)
        status = INVALID_HANDLE;
    uintptr_t handle = 0;
    while (!status && handle < NAMES && (!kernels[handle] || strcmp(kernels[handle], name)))
        handle++;
    if (!status && handle == NAMES)
        status = NOT_FOUND;
    if (!status)
        *function = (void *)(handle + 1);
    return leave(status);
}

Status cuLaunchKernel(void *function, unsigned x, unsigned y, unsigned z, unsigned threads_x,
                      unsigned threads_y, unsigned threads_z, unsigned shared, void *stream,
                      void **arguments, void **extra)
{
    Status status = enter("cuLaunchKernel", 1);
    if (!status)
        status = check_stream(stream);
    uint64_t threads = (uint64_t)threads_x * threads_y * threads_z;
    if (!status && (!function || !x || !y || !z || !threads || threads > 1024 || shared > 49152))
        status = INVALID_VALUE;
    if (!status && (!arguments == !extra))
        status = INVALID_VALUE;
    leave(status); /* a kernel here waits for Python's lock, which a caller that waits may hold */
    return !status && launched ? launched(function, x, threads_x, stream, arguments) : status;
}

/* The runtime: a call that fails leaves its error behind, and a checked launch takes it for its
   own. */

Status cudaHostRegister(void *start, size_t bytes, unsigned flags)
{
    Status status = cuMemHostRegister_v2(start, bytes, flags);
    last_error = status ? status : last_error;
    return status;
}

Status cudaHostUnregister(void *start)
{
    Status status = cuMemHostUnregister(start);
    last_error = status ? status : last_error;
    return status;
}

Status cudaGetLastError(void)
{
    Status status = last_error;
    last_error = SUCCESS;
    return status;
}
