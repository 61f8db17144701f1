/* HCCL between processes of one host, for simulated NPUs.
 *
 * A communicator is a piece of memory that its ranks share: rank 0 makes it (memfd_create), and its
 * root information, which torch_npu hands to the others, says where the kernel shows it
 * (/proc/PID/fd/N). It has no name of its own, so nothing is left behind however a process ends.
 *
 *     struct shared       one seat a rank: its process, its progress, the call it is in
 *     windows             WINDOW bytes a rank, what it gives in the current round of a collective
 *     boxes               one for each ordered pair of ranks, for send and receive
 *
 * Every collective is the same exchange: each rank gives each rank a block of bytes and takes one
 * from each, in rounds of what fits a window. Blocks are put side by side or reduced, in rank
 * order, so a result is the same on every rank and in every run. Ranks that disagree on the
 * operation, its data type or a size all fail and say who differs; one that waits too long
 * (HCCL_EXEC_TIMEOUT and HCCL_CONNECT_TIMEOUT, seconds, CANN's names and defaults) or whose peer is
 * gone fails by name.
 *
 * A send returns when the last of it is in the box; up to BOX bytes need no receiver.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <sched.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

int simulated_error(int code, const char *format, ...) __attribute__((format(printf, 2, 3)));

enum { /* HcclResult */
    OK = 0,
    BAD_PARAMETER = 1,
    NO_MEMORY = 3,
    NOT_SUPPORTED = 5,
    SYSTEM = 8,
    TIMEOUT = 9,
    REMOTE = 21,
};

enum { MOST_RANKS = 64, WINDOW = 1 << 20, BOX = 1 << 18, ROOT_INFORMATION = 4108 };

/* -- data types ------------------------------------------------------------------------------- */

enum { INT8, INT16, INT32, FP16, FP32, INT64, UINT64, UINT8, UINT16, UINT32, FP64, BF16, INT128,
       HIF8 = 14, FP8E4M3, FP8E5M2, FP8E8M0 };

static const struct {
    const char *name;
    unsigned size;
    int reduces; /* the header of HCCL lists these for its reductions */
} types[] = {
    [INT8] = {"int8", 1, 1},   [INT16] = {"int16", 2, 1}, [INT32] = {"int32", 4, 1},
    [FP16] = {"float16", 2, 1}, [FP32] = {"float32", 4, 1}, [INT64] = {"int64", 8, 1},
    [UINT64] = {"uint64", 8, 0}, [UINT8] = {"uint8", 1, 0}, [UINT16] = {"uint16", 2, 0},
    [UINT32] = {"uint32", 4, 0}, [FP64] = {"float64", 8, 0}, [BF16] = {"bfloat16", 2, 1},
    [INT128] = {"int128", 16, 0}, [HIF8] = {"hifloat8", 1, 0}, [FP8E4M3] = {"float8_e4m3", 1, 0},
    [FP8E5M2] = {"float8_e5m2", 1, 0}, [FP8E8M0] = {"float8_e8m0", 1, 0},
};

static int is_type(int type) {
    return type >= 0 && (size_t)type < sizeof types / sizeof *types && types[type].name;
}

enum { SUM, PROD, MAX, MIN, NONE };
static const char *reductions[] = {"sum", "prod", "max", "min", "none"};

static float bf16_to_float(uint16_t half) {
    uint32_t bits = (uint32_t)half << 16;
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

static uint16_t float_to_bf16(float value) { /* nearest, ties to even */
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    if (value != value) return 0x7fc0;
    return (uint16_t)((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

static float fp16_to_float(uint16_t half) {
    uint32_t sign = (uint32_t)(half & 0x8000) << 16, exponent = half >> 10 & 31, rest = half & 1023;
    uint32_t bits;
    float value;
    if (exponent == 0) { /* zero and subnormal: rest times 2^-24 */
        value = (float)rest * 0x1p-24f;
        return sign ? -value : value;
    }
    bits = sign | (exponent == 31 ? 255 : exponent + 112) << 23 | rest << 13;
    memcpy(&value, &bits, sizeof value);
    return value;
}

static uint16_t float_to_fp16(float value) { /* nearest, ties to even */
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    uint16_t sign = (uint16_t)(bits >> 16 & 0x8000);
    bits &= 0x7fffffff;
    if (bits > 0x7f800000) return sign | 0x7e00;
    if (bits >= 0x47800000) return sign | 0x7c00; /* 65536 and more */
    if (bits < 0x38800000) { /* subnormal: let the addition round to multiples of 2^-24 */
        float magnitude, magic = 0.5f;
        memcpy(&magnitude, &bits, sizeof magnitude);
        magnitude += magic;
        memcpy(&bits, &magnitude, sizeof bits);
        return sign | (uint16_t)(bits - 0x3f000000);
    }
    return sign | (uint16_t)((bits - 0x38000000 + 0xfff + (bits >> 13 & 1)) >> 13);
}

#define SAME(x) (x)
#define FOLD(STORED, WIDE, READ, WRITE)                                     \
    for (size_t i = 0; i < count; i++) {                                    \
        WIDE total = READ(((const STORED *)from[0])[i]);                    \
        for (unsigned rank = 1; rank < ranks; rank++) {                     \
            WIDE next = READ(((const STORED *)from[rank])[i]);              \
            if (operation == SUM) total += next;                            \
            else if (operation == PROD) total *= next;                      \
            else if (operation == MAX) total = next > total || next != next ? next : total; \
            else total = next < total || next != next ? next : total;       \
        }                                                                   \
        ((STORED *)to)[i] = WRITE(total);                                   \
    }                                                                       \
    break

/* to[i] = from[0][i] ∘ from[1][i] ∘ …, half types in float32 and rounded once. */
static void reduce(void *to, const char *from[], unsigned ranks, size_t size, int type,
                   int operation) {
    size_t count = size / types[type].size;
    switch (type) {
    case INT8: FOLD(int8_t, int8_t, SAME, SAME);
    case INT16: FOLD(int16_t, int16_t, SAME, SAME);
    case INT32: FOLD(int32_t, int32_t, SAME, SAME);
    case INT64: FOLD(int64_t, int64_t, SAME, SAME);
    case FP32: FOLD(float, float, SAME, SAME);
    case FP16: FOLD(uint16_t, float, fp16_to_float, float_to_fp16);
    case BF16: FOLD(uint16_t, float, bf16_to_float, float_to_bf16);
    }
}

/* -- communicators ---------------------------------------------------------------------------- */

struct call { /* what all ranks of a collective must agree on */
    char name[24];
    int type, operation;
    uint32_t root;
};

struct shared {
    struct seat {
        int32_t process; /* 0 before it came, -1 after it left */
        uint64_t arrived; /* at how many meetings */
        struct call call;
        uint64_t gives[MOST_RANKS], expects[MOST_RANKS]; /* bytes to and from each rank */
    } seats[MOST_RANKS];
};

struct box {
    uint32_t full; /* 0 free, 1 holds a piece, 2 the receiver expected another size */
    uint32_t piece; /* bytes in it */
    uint64_t total; /* bytes of the whole message */
    uint64_t expected; /* what the receiver wanted, when full is 2 */
    char data[BOX];
};

struct communicator {
    struct shared *shared;
    char *windows;
    struct box *boxes;
    size_t size;
    unsigned rank, ranks;
    char name[128];
};

#define LOAD(place) __atomic_load_n(&(place), __ATOMIC_ACQUIRE)
#define STORE(place, value) __atomic_store_n(&(place), value, __ATOMIC_RELEASE)

static double seconds(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (double)now.tv_sec + (double)now.tv_nsec / 1e9;
}

static double setting(const char *name, double otherwise) {
    const char *value = getenv(name);
    return value && atof(value) > 0 ? atof(value) : otherwise;
}

struct patience {
    unsigned turns;
    double until;
};

/* Rests a moment, longer each time; an error once it waited too long or `peer` is gone. */
static int rest(struct patience *patience, const struct communicator *c, unsigned peer,
                const char *name, const char *limit, double otherwise) {
    if (!patience->until) patience->until = seconds() + setting(limit, otherwise);
    if (++patience->turns < 64) {
        sched_yield();
        return OK;
    }
    int32_t process = LOAD(c->shared->seats[peer].process);
    if (process < 0 || (process && kill(process, 0) && errno == ESRCH))
        return simulated_error(REMOTE, "%s: rank %u waits for rank %u, whose process is gone", name,
                               c->rank, peer);
    if (seconds() > patience->until)
        return simulated_error(TIMEOUT, "%s: rank %u waited %g s (%s) for rank %u of %u", name,
                               c->rank, setting(limit, otherwise), limit, peer, c->ranks);
    unsigned more = patience->turns - 64;
    struct timespec moment = {0, more < 20 ? 20000 : more < 200 ? 100000 : 1000000};
    nanosleep(&moment, NULL);
    return OK;
}

#define EXECUTION "HCCL_EXEC_TIMEOUT", 1836
#define CONNECTION "HCCL_CONNECT_TIMEOUT", 120

/* Returns once every rank has come here as often as this one. */
static int meet(struct communicator *c, const char *name) {
    struct seat *seats = c->shared->seats;
    uint64_t meeting = seats[c->rank].arrived + 1;
    STORE(seats[c->rank].arrived, meeting);
    struct patience patience = {0};
    for (unsigned peer = 0; peer < c->ranks; peer++)
        while (LOAD(seats[peer].arrived) < meeting) {
            int error = rest(&patience, c, peer, name, EXECUTION);
            if (error) return error;
        }
    return OK;
}

int HcclGetRootInfo(char *information) {
    int file = memfd_create("simulated-hccl", MFD_CLOEXEC);
    if (file < 0)
        return simulated_error(SYSTEM, "HcclGetRootInfo: no shared memory: %s", strerror(errno));
    memset(information, 0, ROOT_INFORMATION);
    snprintf(information, ROOT_INFORMATION, "/proc/%d/fd/%d", getpid(), file);
    return OK;
}

int HcclCommInitRootInfo(uint32_t ranks, const char *information, uint32_t rank, void **out) {
    if (ranks < 1 || ranks > MOST_RANKS || rank >= ranks)
        return simulated_error(BAD_PARAMETER,
                               "HcclCommInitRootInfo: rank %u of %u; at most %d are simulated",
                               rank, ranks, MOST_RANKS);
    size_t windows = sizeof(struct shared), boxes = windows + (size_t)ranks * WINDOW;
    size_t size = boxes + (size_t)ranks * ranks * sizeof(struct box);
    int file = open(information, O_RDWR | O_CLOEXEC);
    if (file < 0)
        return simulated_error(SYSTEM,
                               "HcclCommInitRootInfo: rank %u cannot reach the memory of rank 0 "
                               "(%.64s: %s); simulated ranks are processes of one user and host",
                               rank, information, strerror(errno));
    char *memory = MAP_FAILED;
    if (!ftruncate(file, (off_t)size)) /* sparse: only what is used takes memory */
        memory = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    close(file);
    if (memory == MAP_FAILED)
        return simulated_error(NO_MEMORY, "HcclCommInitRootInfo: %s", strerror(errno));
    struct communicator *c = malloc(sizeof *c);
    *c = (struct communicator){.shared = (struct shared *)memory, .windows = memory + windows,
                               .boxes = (struct box *)(memory + boxes), .size = size,
                               .rank = rank, .ranks = ranks};
    snprintf(c->name, sizeof c->name, "%.120s", information);
    STORE(c->shared->seats[rank].process, getpid());
    struct patience patience = {0};
    for (unsigned peer = 0; peer < ranks; peer++)
        while (!LOAD(c->shared->seats[peer].process)) {
            int error = rest(&patience, c, peer, "HcclCommInitRootInfo", CONNECTION);
            if (error) {
                munmap(memory, size);
                free(c);
                return error;
            }
        }
    int root, process; /* everybody is here: rank 0 need not show the memory any longer */
    if (rank == 0 && sscanf(information, "/proc/%d/fd/%d", &process, &root) == 2 &&
        process == getpid())
        close(root);
    *out = c;
    return OK;
}

int HcclCommInitRootInfoConfig(uint32_t ranks, const char *information, uint32_t rank,
                               const void *configuration, void **out) {
    (void)configuration; /* buffer sizes, determinism and names change no result here */
    return HcclCommInitRootInfo(ranks, information, rank, out);
}

int HcclCommDestroy(struct communicator *c) {
    STORE(c->shared->seats[c->rank].process, -1);
    munmap(c->shared, c->size);
    free(c);
    return OK;
}

int HcclGetCommName(struct communicator *c, char *name) {
    memcpy(name, c->name, sizeof c->name);
    return OK;
}

int HcclGetRankSize(struct communicator *c, uint32_t *ranks) { return *ranks = c->ranks, OK; }
int HcclGetRankId(struct communicator *c, uint32_t *rank) { return *rank = c->rank, OK; }
int HcclGetCommAsyncError(struct communicator *c, int *error) { return (void)c, *error = OK, OK; }
uint32_t HcclGetCommConfigCapability(void) { return 0; }
int HcclSetConfig(int configuration, int value) { return (void)configuration, (void)value, OK; }
const char *HcclGetErrorString(int code) { return code ? "simulated HCCL failed" : "no error"; }

/* -- collectives ------------------------------------------------------------------------------ */

struct block {
    char *data;
    size_t size; /* bytes */
};

static int differ(struct communicator *c) {
    struct seat *seats = c->shared->seats;
    const struct call *first = &seats[0].call;
    for (unsigned rank = 1; rank < c->ranks; rank++) {
        const struct call *other = &seats[rank].call;
        if (memcmp(first, other, sizeof *first))
            return simulated_error(
                BAD_PARAMETER,
                "%s: the ranks disagree: rank 0 calls %s (%s, %s, root %u), rank %u calls %s (%s, "
                "%s, root %u); nothing was exchanged",
                seats[c->rank].call.name, first->name, types[first->type].name,
                reductions[first->operation], first->root, rank, other->name,
                types[other->type].name, reductions[other->operation], other->root);
    }
    for (unsigned from = 0; from < c->ranks; from++)
        for (unsigned to = 0; to < c->ranks; to++)
            if (seats[from].gives[to] != seats[to].expects[from])
                return simulated_error(BAD_PARAMETER,
                                       "%s: the ranks disagree: rank %u gives %llu bytes to rank "
                                       "%u, which expects %llu; nothing was exchanged",
                                       first->name, from,
                                       (unsigned long long)seats[from].gives[to], to,
                                       (unsigned long long)seats[to].expects[from]);
    return OK;
}

/* What of a block belongs to a round. */
static struct block piece(struct block whole, size_t round, size_t part) {
    size_t start = round * part;
    if (start >= whole.size) return (struct block){NULL, 0};
    size_t left = whole.size - start;
    return (struct block){whole.data + start, left < part ? left : part};
}

/* Gives give[r] to each rank r and takes take[r] from it. With `same`, all get the same block. With
 * a reduction, all take[r] are one place. */
static int exchange(struct communicator *c, struct call call, const struct block *give, int same,
                    const struct block *take) {
    struct seat *seats = c->shared->seats, *mine = &seats[c->rank];
    size_t part = same ? WINDOW : WINDOW / c->ranks & ~(size_t)63;
    mine->call = call;
    for (unsigned peer = 0; peer < c->ranks; peer++) {
        mine->gives[peer] = give[peer].size;
        mine->expects[peer] = take[peer].size;
    }
    size_t rounds = 1;
    for (size_t round = 0; round < rounds; round++) {
        for (unsigned peer = 0; peer < c->ranks; peer++) {
            struct block given = piece(give[peer], round, part);
            char *place = c->windows + (size_t)c->rank * WINDOW + (same ? 0 : peer * part);
            if (given.size) memcpy(place, given.data, given.size);
            if (same && given.size) break;
        }
        int error = meet(c, call.name);
        if (error) return error;
        if (round == 0) {
            error = differ(c);
            for (unsigned from = 0; from < c->ranks && !error; from++)
                for (unsigned to = 0; to < c->ranks; to++) {
                    size_t needed = (seats[from].gives[to] + part - 1) / part;
                    if (needed > rounds) rounds = needed;
                }
        }
        const char *sources[MOST_RANKS];
        for (unsigned peer = 0; peer < c->ranks; peer++)
            sources[peer] = c->windows + (size_t)peer * WINDOW + (same ? 0 : c->rank * part);
        for (unsigned peer = 0; peer < c->ranks && !error; peer++) {
            struct block taken = piece(take[peer], round, part);
            if (!taken.size) continue;
            if (call.operation == NONE) {
                memcpy(taken.data, sources[peer], taken.size);
            } else {
                reduce(taken.data, sources, c->ranks, taken.size, call.type, call.operation);
                break;
            }
        }
        int gone = meet(c, call.name);
        if (error || gone) return error ? error : gone;
    }
    return OK;
}

static struct call named(const char *name, int type, int operation, uint32_t root) {
    struct call call;
    memset(&call, 0, sizeof call); /* compared byte by byte */
    strncpy(call.name, name, sizeof call.name - 1);
    call.type = type;
    call.operation = operation;
    call.root = root;
    return call;
}

static int refused(const struct communicator *c, struct call call) {
    if (!is_type(call.type))
        return simulated_error(BAD_PARAMETER, "%s: no data type %d", call.name, call.type);
    if (call.root >= c->ranks)
        return simulated_error(BAD_PARAMETER, "%s: no rank %u among %u", call.name, call.root,
                               c->ranks);
    if (call.operation < SUM || call.operation > NONE)
        return simulated_error(NOT_SUPPORTED, "%s: no reduction %d", call.name, call.operation);
    if (call.operation != NONE && !types[call.type].reduces)
        return simulated_error(NOT_SUPPORTED, "%s: HCCL does not reduce %s", call.name,
                               types[call.type].name);
    return OK;
}

/* Starts a collective: its call, and no blocks in either direction. */
#define COLLECTIVE(name, type, operation, root)                    \
    struct call call = named(name, type, operation, root);         \
    int bad = refused(c, call);                                    \
    if (bad) return bad;                                           \
    struct block give[MOST_RANKS] = {0}, take[MOST_RANKS] = {0};   \
    const size_t unit = types[type].size

#define EACH(rank) for (unsigned rank = 0; rank < c->ranks; rank++)

int HcclAllReduce(void *in, void *out, uint64_t count, int type, int operation,
                  struct communicator *c, void *stream) {
    (void)stream;
    COLLECTIVE("HcclAllReduce", type, operation, 0);
    EACH(r) give[r] = (struct block){in, count * unit}, take[r] = (struct block){out, count * unit};
    return exchange(c, call, give, 1, take);
}

int HcclReduce(void *in, void *out, uint64_t count, int type, int operation, uint32_t root,
               struct communicator *c, void *stream) {
    (void)stream;
    COLLECTIVE("HcclReduce", type, operation, root);
    give[root] = (struct block){in, count * unit};
    if (c->rank == root) EACH(r) take[r] = (struct block){out, count * unit};
    return exchange(c, call, give, 1, take);
}

int HcclBroadcast(void *buffer, uint64_t count, int type, uint32_t root, struct communicator *c,
                  void *stream) {
    (void)stream;
    COLLECTIVE("HcclBroadcast", type, NONE, root);
    take[root] = (struct block){buffer, count * unit};
    if (c->rank == root) EACH(r) give[r] = (struct block){buffer, count * unit};
    return exchange(c, call, give, 1, take);
}

int HcclAllGather(void *in, void *out, uint64_t count, int type, struct communicator *c,
                  void *stream) {
    (void)stream;
    COLLECTIVE("HcclAllGather", type, NONE, 0);
    EACH(r) {
        give[r] = (struct block){in, count * unit};
        take[r] = (struct block){(char *)out + r * count * unit, count * unit};
    }
    return exchange(c, call, give, 1, take);
}

int HcclAllGatherV(void *in, uint64_t count, void *out, const uint64_t *counts,
                   const uint64_t *places, int type, struct communicator *c, void *stream) {
    (void)stream;
    COLLECTIVE("HcclAllGatherV", type, NONE, 0);
    EACH(r) {
        give[r] = (struct block){in, count * unit};
        take[r] = (struct block){(char *)out + places[r] * unit, counts[r] * unit};
    }
    return exchange(c, call, give, 1, take);
}

int HcclReduceScatter(void *in, void *out, uint64_t count, int type, int operation,
                      struct communicator *c, void *stream) {
    (void)stream;
    COLLECTIVE("HcclReduceScatter", type, operation, 0);
    EACH(r) {
        give[r] = (struct block){(char *)in + r * count * unit, count * unit};
        take[r] = (struct block){out, count * unit};
    }
    return exchange(c, call, give, 0, take);
}

int HcclReduceScatterV(void *in, const uint64_t *counts, const uint64_t *places, void *out,
                       uint64_t count, int type, int operation, struct communicator *c,
                       void *stream) {
    (void)stream;
    COLLECTIVE("HcclReduceScatterV", type, operation, 0);
    EACH(r) {
        give[r] = (struct block){(char *)in + places[r] * unit, counts[r] * unit};
        take[r] = (struct block){out, count * unit};
    }
    return exchange(c, call, give, 0, take);
}

int HcclScatter(void *in, void *out, uint64_t count, int type, uint32_t root,
                struct communicator *c, void *stream) {
    (void)stream;
    COLLECTIVE("HcclScatter", type, NONE, root);
    take[root] = (struct block){out, count * unit};
    if (c->rank == root)
        EACH(r) give[r] = (struct block){(char *)in + r * count * unit, count * unit};
    return exchange(c, call, give, 0, take);
}

int HcclAlltoAllV(const void *in, const uint64_t *sent, const uint64_t *from, int type,
                  const void *out, const uint64_t *received, const uint64_t *to, int out_type,
                  struct communicator *c, void *stream) {
    (void)stream;
    COLLECTIVE("HcclAlltoAllV", type, NONE, 0);
    if (out_type != type)
        return simulated_error(BAD_PARAMETER, "HcclAlltoAllV: gives and takes different types");
    EACH(r) {
        give[r] = (struct block){(char *)in + from[r] * unit, sent[r] * unit};
        take[r] = (struct block){(char *)out + to[r] * unit, received[r] * unit};
    }
    return exchange(c, call, give, 0, take);
}

int HcclAlltoAll(const void *in, uint64_t sent, int type, const void *out, uint64_t received,
                 int out_type, struct communicator *c, void *stream) {
    uint64_t give[MOST_RANKS], from[MOST_RANKS], take[MOST_RANKS], to[MOST_RANKS];
    EACH(r) give[r] = sent, from[r] = r * sent, take[r] = received, to[r] = r * received;
    return HcclAlltoAllV(in, give, from, type, out, take, to, out_type, c, stream);
}

int HcclBarrier(struct communicator *c, void *stream) {
    (void)stream;
    COLLECTIVE("HcclBarrier", INT8, NONE, 0);
    (void)unit;
    return exchange(c, call, give, 1, take);
}

/* -- send and receive ------------------------------------------------------------------------- */

struct transfer {
    struct communicator *c;
    int receives;
    char *data;
    uint64_t total, done; /* bytes */
    uint32_t peer;
    int finished;
};

static const char *transfer_name(const struct transfer *t) {
    return t->receives ? "HcclRecv" : "HcclSend";
}

/* One piece further, if the box allows it; `*moved` then. */
static int advance(struct transfer *t, int *moved) {
    unsigned me = t->c->rank, n = t->c->ranks;
    struct box *box = &t->c->boxes[t->receives ? t->peer * n + me : me * n + t->peer];
    uint32_t full = LOAD(box->full);
    if (!t->receives && full == 2)
        return simulated_error(BAD_PARAMETER,
                               "HcclSend: rank %u sent %llu bytes to rank %u, which expected %llu",
                               me, (unsigned long long)box->total, t->peer,
                               (unsigned long long)box->expected);
    if (full != (uint32_t)t->receives) return OK;
    if (t->receives) {
        if (box->total != t->total) {
            box->expected = t->total;
            STORE(box->full, 2);
            return simulated_error(BAD_PARAMETER,
                                   "HcclRecv: rank %u expected %llu bytes from rank %u, which sent "
                                   "%llu",
                                   me, (unsigned long long)t->total, t->peer,
                                   (unsigned long long)box->total);
        }
        memcpy(t->data + t->done, box->data, box->piece);
        t->done += box->piece;
        STORE(box->full, 0);
    } else {
        uint64_t left = t->total - t->done;
        box->total = t->total;
        box->piece = left < BOX ? (uint32_t)left : BOX;
        memcpy(box->data, t->data + t->done, box->piece);
        t->done += box->piece;
        STORE(box->full, 1);
    }
    t->finished = t->done == t->total;
    *moved = 1;
    return OK;
}

/* All of them at once, those between the same ranks in order. */
static int run(struct transfer *transfers, size_t count) {
    struct patience patience = {0};
    for (size_t open = count; open;) {
        int moved = 0, error = OK;
        const struct transfer *waiting = NULL;
        for (size_t i = 0; i < count; i++) {
            struct transfer *t = &transfers[i];
            if (t->finished) continue;
            int first = 1;
            for (size_t j = 0; j < i && first; j++)
                first = transfers[j].finished || transfers[j].c != t->c ||
                        transfers[j].receives != t->receives || transfers[j].peer != t->peer;
            if (!first) continue;
            if ((error = advance(t, &moved))) return error;
            open -= (size_t)t->finished;
            if (!t->finished) waiting = t;
        }
        if (moved) patience = (struct patience){0};
        else if (waiting)
            error = rest(&patience, waiting->c, waiting->peer, transfer_name(waiting), EXECUTION);
        if (error) return error;
    }
    return OK;
}

static __thread struct {
    int depth;
    size_t count, room;
    struct transfer *transfers;
} group;

/* Runs a transfer now, or keeps it for the end of the group. */
static int transfer(struct communicator *c, int receives, void *data, uint64_t count, int type,
                    uint32_t peer) {
    struct transfer one = {.c = c, .receives = receives, .data = data, .peer = peer};
    int bad = refused(c, named(transfer_name(&one), type, NONE, peer));
    if (bad) return bad;
    one.total = count * types[type].size;
    if (!group.depth) return run(&one, 1);
    if (group.count == group.room) {
        group.room = group.room ? 2 * group.room : 16;
        group.transfers = realloc(group.transfers, group.room * sizeof one);
    }
    group.transfers[group.count++] = one;
    return OK;
}

int HcclSend(void *data, uint64_t count, int type, uint32_t peer, struct communicator *c,
             void *stream) {
    (void)stream;
    return transfer(c, 0, data, count, type, peer);
}

int HcclRecv(void *data, uint64_t count, int type, uint32_t peer, struct communicator *c,
             void *stream) {
    (void)stream;
    return transfer(c, 1, data, count, type, peer);
}

int HcclGroupStart(void) {
    group.depth++;
    return OK;
}

int HcclGroupEnd(void) {
    if (--group.depth) return OK;
    int error = run(group.transfers, group.count);
    group.count = 0;
    return error;
}

struct item { /* HcclSendRecvItem */
    int kind; /* 0 send, 1 receive */
    void *data;
    uint64_t count;
    int type;
    uint32_t peer;
};

int HcclBatchSendRecv(struct item *items, uint32_t count, struct communicator *c, void *stream) {
    (void)stream;
    HcclGroupStart();
    int error = OK;
    for (uint32_t i = 0; i < count && !error; i++)
        error = transfer(c, items[i].kind, items[i].data, items[i].count, items[i].type,
                         items[i].peer);
    int ended = HcclGroupEnd();
    return error ? error : ended;
}
