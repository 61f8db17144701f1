/* CANN's runtime for one process on a machine without an NPU.
 *
 * Owns: devices and their visibility, device memory and its accounting, streams and events,
 * operator descriptors. Built as libascendcl.so; the other CANN libraries are empty and depend on
 * it. The signatures are those of CANN's public headers acl_rt.h, acl_base.h, acl_op.h and
 * acl_op_compiler.h.
 *
 * Device memory is host memory. Streams run in order and at once: whatever was submitted is done
 * when the call returns. What would compute on a device fails with its own name, except the three
 * operators that torch_npu calls behind PyTorch's dispatcher: Identity, Fill and PadV3.
 *
 * Every function returns 0 or an aclError, and leaves the reason for aclGetRecentErrMsg.
 */
#define _GNU_SOURCE
#include <pthread.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

enum {
    OK = 0,
    BAD_PARAMETER = 107000,      /* ACL_ERROR_RT_PARAM_INVALID */
    BAD_DEVICE = 107001,         /* ACL_ERROR_RT_INVALID_DEVICEID */
    NO_CONTEXT = 107002,         /* ACL_ERROR_RT_CONTEXT_NULL */
    OUT_OF_MEMORY = 207001,      /* ACL_ERROR_RT_MEMORY_ALLOCATION */
    NOT_SIMULATED = 200001,      /* ACL_ERROR_API_NOT_SUPPORT */
    PAGE = 4096, /* CANN aligns to 512 bytes; the page before a block holds its header */
    MOST_DEVICES = 64,
};

/* -- errors ----------------------------------------------------------------------------------- */

static __thread char message[1024];

/* Keeps a reason for aclGetRecentErrMsg and returns `code`. */
__attribute__((format(printf, 2, 3))) int simulated_error(int code, const char *format, ...) {
    va_list arguments;
    va_start(arguments, format);
    int written = snprintf(message, sizeof message, "simulated NPU: ");
    vsnprintf(message + written, sizeof message - written, format, arguments);
    va_end(arguments);
    return code;
}

int simulated_missing(const char *name) {
    return simulated_error(NOT_SIMULATED, "%s is not simulated; it needs a real NPU", name);
}

const char *aclGetRecentErrMsg(void) {
    static __thread char taken[sizeof message];
    memcpy(taken, message, sizeof message);
    message[0] = '\0';
    return taken;
}

/* -- devices ---------------------------------------------------------------------------------- */

static struct device {
    int physical;
    size_t used; /* bytes, under `accounting` */
} devices[MOST_DEVICES];
static uint32_t device_count;
static size_t device_memory; /* bytes of each device */
static pthread_once_t counted = PTHREAD_ONCE_INIT;
static pthread_mutex_t accounting = PTHREAD_MUTEX_INITIALIZER;
static __thread int current = -1;

/* ASCEND_RT_VISIBLE_DEVICES is ascending and comma-separated; it counts as far as it is that. */
static void count_devices(void) {
    const char *count = getenv("SLIME_NPU_SIMULATOR_DEVICES");
    const char *memory = getenv("SLIME_NPU_SIMULATOR_MEMORY");
    int present = count ? atoi(count) : 8;
    if (present > MOST_DEVICES) present = MOST_DEVICES;
    device_memory = memory ? strtoull(memory, NULL, 10) : (size_t)64 << 30;

    const char *visible = getenv("ASCEND_RT_VISIBLE_DEVICES");
    if (!visible) {
        for (int i = 0; i < present; i++) devices[device_count++].physical = i;
        return;
    }
    for (int last = -1;;) {
        char *end;
        long device = strtol(visible, &end, 10);
        int number = *visible >= '0' && *visible <= '9' && (*end == ',' || *end == '\0');
        if (!number || device <= last || device >= present) return;
        devices[device_count++].physical = last = (int)device;
        if (*end == '\0') return;
        visible = end + 1;
    }
}

static int known(int device) {
    pthread_once(&counted, count_devices);
    return device >= 0 && (uint32_t)device < device_count;
}

int aclrtGetDeviceCount(uint32_t *count) {
    pthread_once(&counted, count_devices);
    *count = device_count;
    return OK;
}

int aclrtSetDevice(int32_t device) {
    if (!known(device))
        return simulated_error(BAD_DEVICE, "there is no device %d; %u can be seen", device,
                               device_count);
    current = device;
    return OK;
}

int aclrtGetDevice(int32_t *device) {
    if (current < 0) return simulated_error(NO_CONTEXT, "this thread has set no device");
    *device = current;
    return OK;
}

int aclrtResetDevice(int32_t device) {
    if (current == device) current = -1;
    return OK;
}

int aclrtGetLogicDevIdByUserDevId(int32_t device, int32_t *logical) {
    if (!known(device)) return simulated_error(BAD_DEVICE, "there is no device %d", device);
    *logical = devices[device].physical;
    return OK;
}

/* A context is its device's entry. */
int aclrtGetCurrentContext(void **context) {
    if (current < 0) return simulated_error(NO_CONTEXT, "this thread has set no device");
    *context = &devices[current];
    return OK;
}

int aclrtSetCurrentContext(void *context) {
    current = (int)((struct device *)context - devices);
    return OK;
}

int aclrtGetPrimaryCtxState(int32_t device, uint32_t *flags, int32_t *active) {
    *flags = 0;
    *active = device == current;
    return OK;
}

int aclrtDeviceCanAccessPeer(int32_t *can, int32_t device, int32_t peer) {
    *can = device != peer;
    return OK;
}

int aclrtDeviceEnablePeerAccess(int32_t peer, uint32_t flags) {
    (void)flags;
    return known(peer) ? OK : simulated_error(BAD_DEVICE, "there is no device %d", peer);
}

int aclrtDeviceGetBareTgid(int32_t *pid) {
    *pid = getpid();
    return OK;
}

const char *aclrtGetSocName(void) { return "Ascend910B3"; }

/* 910B3: 20 cube and 40 vector cores, 192 MiB of L2. */
int aclGetDeviceCapability(uint32_t device, int information, int64_t *value) {
    static const int64_t values[] = {20, 40, (int64_t)192 << 20};
    if (!known((int)device)) return simulated_error(BAD_DEVICE, "there is no device %u", device);
    if (information < 0 || information > 2)
        return simulated_error(BAD_PARAMETER, "aclGetDeviceCapability: no number %d", information);
    *value = values[information];
    return OK;
}

int aclInit(const char *configuration) {
    (void)configuration;
    pthread_once(&counted, count_devices);
    return OK;
}

int aclFinalize(void) { return OK; }

/* Settings that change nothing here: how long to wait, and how a device rounds and saturates. */
int aclrtSetOpWaitTimeout(uint32_t seconds) { return (void)seconds, OK; }
int aclrtSetOpExecuteTimeOut(uint32_t seconds) { return (void)seconds, OK; }
int aclrtSetDeviceSatMode(int mode) { return (void)mode, OK; }
int aclSetCompileopt(int option, const char *value) { return (void)option, (void)value, OK; }
static int64_t options[16]; /* aclSysParamOpt: determinism and the like; only read back */
int aclrtSetSysParamOpt(int option, int64_t value) {
    if (option < 0 || option >= 16)
        return simulated_error(BAD_PARAMETER, "aclrtSetSysParamOpt: %d is not known", option);
    options[option] = value;
    return OK;
}
int aclrtCtxSetSysParamOpt(int option, int64_t value) { return aclrtSetSysParamOpt(option, value); }
int aclrtGetSysParamOpt(int option, int64_t *value) {
    if (option < 0 || option >= 16)
        return simulated_error(BAD_PARAMETER, "aclrtGetSysParamOpt: %d is not known", option);
    *value = options[option];
    return OK;
}
int aclrtGetLastError(int level) { return (void)level, OK; }
int aclrtPeekAtLastError(int level) { return (void)level, OK; }
void aclAppLog(int level, const char *function, const char *file, uint32_t line, const char *format,
               ...) {
    (void)level, (void)function, (void)file, (void)line, (void)format;
}

/* -- memory ----------------------------------------------------------------------------------- */

struct header { /* in the page before the memory */
    size_t size;
    int device;
};

static int reserve(int device, size_t size) {
    pthread_mutex_lock(&accounting);
    size_t free = device_memory - devices[device].used;
    int enough = size <= free;
    if (enough) devices[device].used += size;
    pthread_mutex_unlock(&accounting);
    if (enough) return OK;
    return simulated_error(OUT_OF_MEMORY,
                           "EL0004: Failed to allocate %zu bytes on device %d: %zu of %zu are free",
                           size, device, free, device_memory);
}

static void give_back(int device, size_t size) {
    pthread_mutex_lock(&accounting);
    devices[device].used -= size;
    pthread_mutex_unlock(&accounting);
}

int aclrtMalloc(void **pointer, size_t size, int policy) {
    (void)policy;
    if (current < 0) return simulated_error(NO_CONTEXT, "aclrtMalloc: no device was set");
    int error = reserve(current, size);
    if (error) return error;
    struct header *header = mmap(NULL, size + PAGE, PROT_READ | PROT_WRITE,
                                 MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (header == MAP_FAILED) {
        give_back(current, size);
        return simulated_error(OUT_OF_MEMORY, "EL0004: Failed to allocate %zu bytes of host memory",
                               size);
    }
    *header = (struct header){size, current};
    *pointer = (char *)header + PAGE;
    return OK;
}

int aclrtMallocAlign32(void **pointer, size_t size, int policy) {
    return aclrtMalloc(pointer, size, policy);
}

int aclrtFree(void *pointer) {
    struct header *header = (struct header *)((char *)pointer - PAGE);
    give_back(header->device, header->size);
    munmap(header, header->size + PAGE);
    return OK;
}

int aclrtMallocHost(void **pointer, size_t size) {
    *pointer = aligned_alloc(64, (size + 63) & ~(size_t)63);
    return *pointer ? OK : simulated_error(OUT_OF_MEMORY, "no %zu bytes of host memory", size);
}

int aclrtFreeHost(void *pointer) {
    free(pointer);
    return OK;
}

int aclrtGetMemInfo(int attribute, size_t *free, size_t *total) {
    (void)attribute;
    if (current < 0) return simulated_error(NO_CONTEXT, "aclrtGetMemInfo: no device was set");
    pthread_mutex_lock(&accounting);
    *free = device_memory - devices[current].used;
    pthread_mutex_unlock(&accounting);
    *total = device_memory;
    return OK;
}

int aclrtMemcpy(void *to, size_t room, const void *from, size_t size, int kind) {
    (void)kind;
    if (size > room)
        return simulated_error(BAD_PARAMETER, "aclrtMemcpy: %zu bytes into %zu", size, room);
    memmove(to, from, size);
    return OK;
}

int aclrtMemcpyAsync(void *to, size_t room, const void *from, size_t size, int kind, void *stream) {
    (void)stream;
    return aclrtMemcpy(to, room, from, size, kind);
}

int aclrtMemset(void *pointer, size_t room, int32_t value, size_t size) {
    if (size > room)
        return simulated_error(BAD_PARAMETER, "aclrtMemset: %zu bytes into %zu", size, room);
    memset(pointer, value, size);
    return OK;
}

int aclrtMemsetAsync(void *pointer, size_t room, int32_t value, size_t size, void *stream) {
    (void)stream;
    return aclrtMemset(pointer, room, value, size);
}

/* -- memory in two steps, for expandable segments --------------------------------------------- */

struct physical { /* what aclrtMallocPhysical counts; a page comes into being where it is mapped */
    size_t size;
    int device, mapped;
};

static struct range { /* reserved or mapped addresses; CANN's callers name only their start */
    void *start;
    size_t size;
    struct physical *physical; /* NULL if only reserved */
    struct range *next;
} *ranges;

static void remember(void *start, size_t size, struct physical *physical) {
    struct range *range = malloc(sizeof *range);
    pthread_mutex_lock(&accounting);
    *range = (struct range){start, size, physical, ranges};
    ranges = range;
    pthread_mutex_unlock(&accounting);
}

/* Takes a range from the list; its size is 0 if there was none. */
static struct range forget(void *start, int mapped) {
    struct range found = {0};
    pthread_mutex_lock(&accounting);
    for (struct range **link = &ranges; *link; link = &(*link)->next)
        if ((*link)->start == start && !!(*link)->physical == mapped) {
            struct range *range = *link;
            found = *range;
            *link = range->next;
            free(range);
            break;
        }
    pthread_mutex_unlock(&accounting);
    return found;
}

static int place(void *start, size_t size, int protection) {
    int flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED;
    if (mmap(start, size, protection, flags, -1, 0) != MAP_FAILED) return OK;
    return simulated_error(OUT_OF_MEMORY, "no %zu bytes of host memory", size);
}

int aclrtReserveMemAddress(void **start, size_t size, size_t alignment, void *wish,
                           uint64_t flags) {
    (void)alignment, (void)wish, (void)flags;
    *start = mmap(NULL, size, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (*start == MAP_FAILED)
        return simulated_error(OUT_OF_MEMORY, "aclrtReserveMemAddress: no %zu bytes", size);
    remember(*start, size, NULL);
    return OK;
}

int aclrtReleaseMemAddress(void *start) {
    struct range range = forget(start, 0);
    if (!range.size) return simulated_error(BAD_PARAMETER, "aclrtReleaseMemAddress: not reserved");
    munmap(range.start, range.size);
    return OK;
}

int aclrtMallocPhysical(void **handle, size_t size, const void *properties, uint64_t flags) {
    (void)properties, (void)flags;
    if (current < 0) return simulated_error(NO_CONTEXT, "aclrtMallocPhysical: no device was set");
    int error = reserve(current, size);
    if (error) return error;
    struct physical *physical = malloc(sizeof *physical);
    *physical = (struct physical){size, current, 0};
    *handle = physical;
    return OK;
}

int aclrtFreePhysical(void *handle) {
    struct physical *physical = handle;
    give_back(physical->device, physical->size);
    free(physical);
    return OK;
}

int aclrtMapMem(void *start, size_t size, size_t offset, void *handle, uint64_t flags) {
    (void)flags;
    struct physical *physical = handle;
    if (physical->mapped || offset || size != physical->size)
        return simulated_error(NOT_SIMULATED, "aclrtMapMem: memory is mapped once and whole");
    int error = place(start, size, PROT_READ | PROT_WRITE);
    if (error) return error;
    physical->mapped = 1;
    remember(start, size, physical);
    return OK;
}

int aclrtUnmapMem(void *start) {
    struct range range = forget(start, 1);
    if (!range.size) return simulated_error(BAD_PARAMETER, "aclrtUnmapMem: not mapped");
    range.physical->mapped = 0;
    return place(range.start, range.size, PROT_NONE);
}

/* -- streams and events ----------------------------------------------------------------------- */

struct stream {
    int32_t id;
};

struct event {
    struct timespec recorded;
};

int aclrtCreateStream(void **stream) {
    static int32_t made;
    struct stream *new = malloc(sizeof *new);
    new->id = __atomic_fetch_add(&made, 1, __ATOMIC_RELAXED);
    *stream = new;
    return OK;
}

int aclrtCreateStreamWithConfig(void **stream, uint32_t priority, uint32_t flag) {
    (void)priority, (void)flag;
    return aclrtCreateStream(stream);
}

int aclrtDestroyStream(void *stream) {
    free(stream);
    return OK;
}

int aclrtDestroyStreamForce(void *stream) { return aclrtDestroyStream(stream); }

int aclrtStreamGetId(void *stream, int32_t *id) {
    *id = stream ? ((struct stream *)stream)->id : -1;
    return OK;
}

int aclrtStreamQuery(void *stream, int *status) {
    (void)stream;
    *status = 0; /* ACL_STREAM_STATUS_COMPLETE */
    return OK;
}

int aclrtSetStreamFailureMode(void *stream, uint64_t mode) { return (void)stream, (void)mode, OK; }
int aclrtSynchronizeStream(void *stream) { return (void)stream, OK; }
int aclrtSynchronizeStreamWithTimeout(void *stream, int32_t ms) {
    return (void)stream, (void)ms, OK;
}
int aclrtSynchronizeDevice(void) { return OK; }
int aclrtSynchronizeDeviceWithTimeout(int32_t ms) { return (void)ms, OK; }
int aclrtStreamWaitEvent(void *stream, void *event) { return (void)stream, (void)event, OK; }
int aclrtProcessReport(int32_t timeout) { return (void)timeout, OK; }

int aclrtCreateEventExWithFlag(void **event, uint32_t flag) {
    (void)flag;
    *event = calloc(1, sizeof(struct event));
    return OK;
}

int aclrtCreateEventWithFlag(void **event, uint32_t flag) {
    return aclrtCreateEventExWithFlag(event, flag);
}

int aclrtDestroyEvent(void *event) {
    free(event);
    return OK;
}

int aclrtRecordEvent(void *event, void *stream) {
    (void)stream;
    clock_gettime(CLOCK_MONOTONIC, &((struct event *)event)->recorded);
    return OK;
}

int aclrtResetEvent(void *event, void *stream) { return (void)event, (void)stream, OK; }
int aclrtSynchronizeEvent(void *event) { return (void)event, OK; }

int aclrtQueryEventStatus(void *event, int *status) {
    (void)event;
    *status = 1; /* ACL_EVENT_RECORDED_STATUS_COMPLETE */
    return OK;
}

int aclrtQueryEventWaitStatus(void *event, int *status) {
    (void)event;
    *status = 0; /* ACL_EVENT_WAIT_STATUS_COMPLETE */
    return OK;
}

static double milliseconds(const struct event *event) {
    return (double)event->recorded.tv_sec * 1e3 + (double)event->recorded.tv_nsec / 1e6;
}

/* The host's time between the two. */
int aclrtEventElapsedTime(float *ms, void *start, void *end) {
    *ms = (float)(milliseconds(end) - milliseconds(start));
    return OK;
}

int aclrtEventGetTimestamp(void *event, uint64_t *microseconds) {
    *microseconds = (uint64_t)(milliseconds(event) * 1e3);
    return OK;
}

int aclrtLaunchHostFunc(void *stream, void (*function)(void *), void *arguments) {
    (void)stream;
    function(arguments);
    return OK;
}

/* -- the profiler's own calls: nobody listens ------------------------------------------------- */

int32_t MsprofRegisterCallback(uint32_t module, void *callback) {
    return (void)module, (void)callback, OK;
}
int32_t MsprofReportApi(uint32_t aging, const void *api) { return (void)aging, (void)api, OK; }
int32_t MsprofReportCompactInfo(uint32_t aging, const void *data, uint32_t size) {
    return (void)aging, (void)data, (void)size, OK;
}
int32_t MsprofReportAdditionalInfo(uint32_t aging, const void *data, uint32_t size) {
    return (void)aging, (void)data, (void)size, OK;
}
uint64_t MsprofGetHashId(const char *information, size_t length) {
    uint64_t hash = 14695981039346656037u; /* FNV-1a */
    for (size_t i = 0; i < length; i++)
        hash = (hash ^ (unsigned char)information[i]) * 1099511628211u;
    return hash;
}
uint64_t MsprofSysCycleTime(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (uint64_t)now.tv_sec * 1000000000u + (uint64_t)now.tv_nsec;
}

/* -- operators behind the dispatcher ---------------------------------------------------------- */

struct aclTensorDesc {
    int type, format, count;
    int64_t sizes[8];
};

struct aclDataBuffer {
    void *data;
    size_t size;
};

struct aclTensorDesc *aclCreateTensorDesc(int type, int count, const int64_t *sizes, int format) {
    struct aclTensorDesc *new = calloc(1, sizeof *new);
    *new = (struct aclTensorDesc){.type = type, .format = format, .count = count};
    for (int i = 0; i < count && i < 8; i++) new->sizes[i] = sizes[i];
    return new;
}
void aclDestroyTensorDesc(const struct aclTensorDesc *description) { free((void *)description); }
int aclGetTensorDescType(const struct aclTensorDesc *description) { return description->type; }
int aclGetTensorDescFormat(const struct aclTensorDesc *description) { return description->format; }
size_t aclGetTensorDescNumDims(const struct aclTensorDesc *description) {
    return (size_t)description->count;
}
int aclGetTensorDescDimV2(const struct aclTensorDesc *description, size_t index, int64_t *size) {
    if (index >= (size_t)description->count || index >= 8)
        return simulated_error(BAD_PARAMETER, "aclGetTensorDescDimV2: no dimension %zu", index);
    *size = description->sizes[index];
    return OK;
}
int aclSetTensorFormat(struct aclTensorDesc *d, int format) { return (void)d, (void)format, OK; }
int aclSetTensorShape(struct aclTensorDesc *d, int count, const int64_t *sizes) {
    return (void)d, (void)count, (void)sizes, OK;
}
int aclSetTensorPlaceMent(struct aclTensorDesc *d, int type) { return (void)d, (void)type, OK; }
void aclSetTensorDescName(struct aclTensorDesc *d, const char *name) { (void)d, (void)name; }

struct aclDataBuffer *aclCreateDataBuffer(void *data, size_t size) {
    struct aclDataBuffer *new = malloc(sizeof *new);
    *new = (struct aclDataBuffer){data, size};
    return new;
}
int aclDestroyDataBuffer(const struct aclDataBuffer *buffer) {
    free((void *)buffer);
    return OK;
}

/* Attributes matter to none of the three. */
void *aclopCreateAttr(void) { return malloc(1); }
void aclopDestroyAttr(const void *attributes) { free((void *)attributes); }
int aclopSetAttrBool(void *a, const char *n, uint8_t v) { return (void)a, (void)n, (void)v, OK; }
int aclopSetAttrInt(void *a, const char *n, int64_t v) { return (void)a, (void)n, (void)v, OK; }
int aclopSetAttrFloat(void *a, const char *n, float v) { return (void)a, (void)n, (void)v, OK; }
int aclopSetAttrString(void *a, const char *n, const char *v) {
    return (void)a, (void)n, (void)v, OK;
}
int aclopSetAttrDataType(void *a, const char *n, int v) { return (void)a, (void)n, (void)v, OK; }
int aclopSetAttrListInt(void *a, const char *n, int c, const int64_t *v) {
    return (void)a, (void)n, (void)c, (void)v, OK;
}
int aclopSetAttrListFloat(void *a, const char *n, int c, const float *v) {
    return (void)a, (void)n, (void)c, (void)v, OK;
}
int aclopSetAttrListBool(void *a, const char *n, int c, const uint8_t *v) {
    return (void)a, (void)n, (void)c, (void)v, OK;
}
int aclopSetAttrListListInt(void *a, const char *n, int c, const int *s, const int64_t *const v[]) {
    return (void)a, (void)n, (void)c, (void)s, (void)v, OK;
}

/* Repeats `value` (`size` bytes) until `to` is full. */
static void fill(char *to, size_t room, const void *value, size_t size) {
    for (; room >= size; to += size, room -= size) memcpy(to, value, size);
}

static int is_row(const struct aclTensorDesc *description) {
    for (int i = 0; i < description->count - 1; i++)
        if (description->sizes[i] != 1) return 0;
    return description->count >= 1;
}

int aclopCompileAndExecute(const char *name, int inputs, const struct aclTensorDesc *const in[],
                           const struct aclDataBuffer *const from[], int outputs,
                           const struct aclTensorDesc *const out[],
                           struct aclDataBuffer *const to[], const void *attributes, int engine,
                           int compilation, const char *path, void *stream) {
    (void)attributes, (void)engine, (void)compilation, (void)path, (void)stream;
    if (inputs < 1 || outputs != 1) return simulated_missing(name);
    int same = in[0]->type == out[0]->type;
    if (!strcmp(name, "Identity") && same && from[0]->size == to[0]->size) {
        memmove(to[0]->data, from[0]->data, from[0]->size);
        return OK;
    }
    if (!strcmp(name, "Fill") && inputs == 2 && in[1]->type == out[0]->type) {
        fill(to[0]->data, to[0]->size, from[1]->data, from[1]->size);
        return OK;
    }
    /* Padding one row to its right, which is how a buffer of HCCL's is aligned. */
    if (!strcmp(name, "PadV3") && inputs == 3 && same && in[2]->type == in[0]->type &&
        is_row(in[0]) && is_row(out[0]) && from[0]->size <= to[0]->size) {
        memmove(to[0]->data, from[0]->data, from[0]->size);
        fill((char *)to[0]->data + from[0]->size, to[0]->size - from[0]->size, from[2]->data,
             from[2]->size);
        return OK;
    }
    return simulated_missing(name);
}
