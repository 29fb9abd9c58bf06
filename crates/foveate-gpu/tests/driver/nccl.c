/* NCCL for tests, without a GPU: ranks are threads of a process, and what they transfer is carried
 * out once all of them have asked for it; until then a communicator is in progress. NCCL: its
 * version. FAILS: what a communicator reports after its first transfer. ON_DEVICE: a communicator is done when
 * a transfer is queued, and the device waits for the others' part: no event is done that the thread recorded
 * behind it, until it is carried out or the communicator is aborted. ABORT_MS, DESTROY_MS: how
 * long that takes. BLOCKS: the CTAs that a communicator has to be made with, at most. Compiled with -DOLD_NCCL
 * it has no ncclCommFinalize, with -DWRONG it adds one rank too few. */
#include <pthread.h>
#include <stdlib.h>
#include <unistd.h>
#include "numbers.h"

#ifndef WRONG
#define WRONG 0
#endif

enum { MOST_RANKS = 8, MOST_CALLS = 256 };
typedef enum { ALL_REDUCE, ALL_GATHER, REDUCE_SCATTER, BROADCAST, SEND, RECEIVE } Kind;
typedef struct { Kind kind; const void *from; void *into; size_t count; int type, op, peer; } Call;
typedef struct World World;
/* `ended`: how many of its transfers are carried out, all when it is aborted. */
typedef struct { World *world; int rank, queued, failed; size_t asked; _Atomic size_t ended; Call calls[MOST_CALLS]; } Rank;
struct World { char id[128]; int ranks, joined; Rank *rank[MOST_RANKS]; World *next; };
typedef struct { char bytes[128]; } Id;
typedef struct {
    size_t bytes;
    unsigned magic, version;
    int blocking, cluster, least, most;
    const char *net;
    int split, traffic;
    const char *name;
    int last[8]; /* collnetEnable, CTAPolicy, shrinkShare, nvlsCTAs; 2.28: 2 more; 2.29: 2 more */
} Config;

int cuEventQuery(void *), cuCtxSetCurrent(void *);
void device_waits(const _Atomic size_t *ended, size_t count);
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static World *worlds;
static int ids;
static _Thread_local int depth, waiting;
static _Thread_local struct { Rank *rank; Call call; } group[MOST_CALLS];

static size_t number(const char *name, size_t otherwise) {
    const char *text = getenv(name);
    return text ? strtoull(text, 0, 10) : otherwise;
}
static int bytes(int type) { return type == U8 ? 1 : type == F16 || type == BF16 ? 2 : 4; }
/* From ncclDataType_t. */
static int type_of(int nccl) { return nccl == 1 ? U8 : nccl == 2 ? I32 : nccl == 6 ? F16 : nccl == 9 ? BF16 : F32; }

int ncclGetVersion(int *v) { return *v = (int)number("NCCL", 22803), 0; }
const char *ncclGetErrorString(int e) { return e == 6 ? "remote process exited or there was a network error" : "an error of tests"; }
const char *ncclGetLastError(void *c) { (void)c; return ""; }
int ncclGetUniqueId(Id *id) {
    memset(id, 0, sizeof *id);
    pthread_mutex_lock(&lock);
    memcpy(id, &(int){++ids}, sizeof ids);
    return pthread_mutex_unlock(&lock), 0;
}
/* Whether a version finds its own number and size, values that it may read as they should be, and nothing behind. */
static int is_of_version(const Config *c, size_t version) {
    size_t known = version < 22900 ? version : 22900;
    size_t bytes = known < 22700 ? 48 : known < 22800 ? 72 : known < 22900 ? 80 : 88;
    int undefined = (int)0x80000000, most = (int)number("BLOCKS", (size_t)undefined);
    int right = c->bytes == bytes && c->magic == 0xcafebeef && c->version == known && !c->blocking;
    right = right && c->cluster == undefined && c->most == most && c->least == (most == undefined ? undefined : 1) && !c->net;
    right = right && c->split == undefined && (known < 22500 || c->traffic == undefined) && (known < 22700 || !c->name);
    for (size_t i = 0; known >= 22700 && i < (bytes - 56) / 4; i++) right = right && c->last[i] == undefined;
    return right;
}
int ncclCommInitRankConfig(Rank **out, int ranks, Id id, int rank, Config *config) {
    if (!is_of_version(config, number("NCCL", 22803))) return 4;
    if (ranks > MOST_RANKS || rank >= ranks) return 4;
    pthread_mutex_lock(&lock);
    World *world = worlds;
    while (world && memcmp(world->id, id.bytes, sizeof world->id)) world = world->next;
    if (!world) {
        world = calloc(1, sizeof *world);
        memcpy(world->id, id.bytes, sizeof world->id);
        world->ranks = ranks, world->next = worlds, worlds = world;
    }
    *out = world->rank[rank] = calloc(1, sizeof **out);
    (*out)->world = world, (*out)->rank = rank, world->joined++;
    pthread_mutex_unlock(&lock);
    return 7;
}

/* Element i of what the ranks' numbers become. */
static double reduced(World *w, const Call *call, int64_t i) {
    double result = 0;
    for (int r = 0; r < w->ranks - WRONG; r++) {
        double x = get(w->rank[r]->calls[0].from, i, call->type);
        result = call->op == 2 ? (r && result > x ? result : x) : result + x;
    }
    return call->op == 4 ? result / w->ranks : result;
}
static void take(Rank *rank, int i) {
    rank->ended++;
    memmove(&rank->calls[i], &rank->calls[i + 1], (size_t)(--rank->queued - i) * sizeof(Call));
}
/* A collective that all ranks have come to. */
static int collective(World *w) {
    for (int r = 0; r < w->ranks; r++)
        if (!w->rank[r]->queued || w->rank[r]->calls[0].kind != w->rank[0]->calls[0].kind || w->rank[r]->calls[0].kind >= SEND) return 0;
    Call first = w->rank[0]->calls[0];
    size_t n = first.count, size = n * (size_t)bytes(first.type), all = first.kind == REDUCE_SCATTER ? n * (size_t)w->ranks : n;
    char *result = malloc(8 + (first.kind == ALL_GATHER ? size * (size_t)w->ranks : all * 4));
    for (int r = 0; first.kind == ALL_GATHER && r < w->ranks; r++) memcpy(result + (size_t)r * size, w->rank[r]->calls[0].from, size);
    if (first.kind == BROADCAST) memcpy(result, w->rank[first.peer]->calls[0].from, size);
    if (first.kind == ALL_REDUCE || first.kind == REDUCE_SCATTER)
        for (size_t i = 0; i < all; i++) put(result, (int64_t)i, first.type, reduced(w, &first, (int64_t)i));
    for (int r = 0; r < w->ranks; r++) {
        void *into = w->rank[r]->calls[0].into;
        if (first.kind == REDUCE_SCATTER) memcpy(into, result + (size_t)r * size, size);
        else memcpy(into, result, first.kind == ALL_GATHER ? size * (size_t)w->ranks : size);
        take(w->rank[r], 0);
    }
    return free(result), 1;
}
/* A send and its receive, neither behind a collective. */
static int pair(World *w) {
    for (int a = 0; a < w->ranks; a++)
        for (int i = 0; i < w->rank[a]->queued && w->rank[a]->calls[i].kind >= SEND; i++) {
            Call *send = &w->rank[a]->calls[i];
            Rank *other = w->rank[send->peer];
            for (int j = 0; send->kind == SEND && j < other->queued && other->calls[j].kind >= SEND; j++)
                if (other->calls[j].kind == RECEIVE && other->calls[j].peer == a) {
                    memcpy(other->calls[j].into, send->from, send->count * (size_t)bytes(send->type));
                    take(w->rank[a], i);
                    take(other, w->rank[a] == other && j > i ? j - 1 : j);
                    return 1;
                }
        }
    return 0;
}
static int finish_group(void) {
    cuCtxSetCurrent(0); /* NCCL goes from context to context and promises nothing */
    pthread_mutex_lock(&lock);
    for (int i = 0; i < waiting; i++) {
        Rank *rank = group[i].rank;
        if (rank->queued == MOST_CALLS) abort();
        rank->calls[rank->queued++] = group[i].call, rank->asked++;
        if (number("ON_DEVICE", 0)) device_waits(&rank->ended, rank->asked);
    }
    for (int i = 0; i < waiting; i++) {
        World *world = group[i].rank->world;
        cuEventQuery(0); /* everything queued before */
        while (world->joined == world->ranks && (collective(world) || pair(world))) {}
        group[i].rank->failed = (int)number("FAILS", 0);
    }
    int any = waiting;
    waiting = 0;
    return pthread_mutex_unlock(&lock), any ? 7 : 0;
}
int ncclGroupStart(void) { return depth++, 0; }
int ncclGroupEnd(void) { return --depth ? 0 : finish_group(); }
static int ask(Rank *rank, Call call) {
    group[waiting].rank = rank, group[waiting++].call = call;
    return depth ? 0 : finish_group();
}
int ncclAllReduce(const void *from, void *into, size_t n, int type, int op, Rank *r, void *s) {
    (void)s;
    return ask(r, (Call){ALL_REDUCE, from, into, n, type_of(type), op, 0});
}
int ncclAllGather(const void *from, void *into, size_t n, int type, Rank *r, void *s) {
    (void)s;
    return ask(r, (Call){ALL_GATHER, from, into, n, type_of(type), 0, 0});
}
int ncclReduceScatter(const void *from, void *into, size_t n, int type, int op, Rank *r, void *s) {
    (void)s;
    return ask(r, (Call){REDUCE_SCATTER, from, into, n, type_of(type), op, 0});
}
int ncclBroadcast(const void *from, void *into, size_t n, int type, int root, Rank *r, void *s) {
    (void)s;
    return ask(r, (Call){BROADCAST, from, into, n, type_of(type), 0, root});
}
int ncclSend(const void *from, size_t n, int type, int peer, Rank *r, void *s) {
    (void)s;
    return ask(r, (Call){SEND, from, 0, n, type_of(type), 0, peer});
}
int ncclRecv(void *into, size_t n, int type, int peer, Rank *r, void *s) {
    (void)s;
    return ask(r, (Call){RECEIVE, 0, into, n, type_of(type), 0, peer});
}
int ncclCommGetAsyncError(Rank *r, int *code) {
    pthread_mutex_lock(&lock);
    *code = r->failed ? r->failed : r->world->joined < r->world->ranks || (r->queued && !number("ON_DEVICE", 0)) ? 7 : 0;
    return pthread_mutex_unlock(&lock), 0;
}
#ifndef OLD_NCCL
int ncclCommFinalize(Rank *r) { return (void)r, cuCtxSetCurrent(0); }
#endif
int ncclCommDestroy(Rank *r) { return (void)r, usleep((unsigned)number("DESTROY_MS", 0) * 1000), cuCtxSetCurrent(0); }
int ncclCommAbort(Rank *r) {
    usleep((unsigned)number("ABORT_MS", 0) * 1000);
    pthread_mutex_lock(&lock);
    r->queued = 0, r->ended = (size_t)-1;
    return pthread_mutex_unlock(&lock), cuCtxSetCurrent(0);
}
