/* A driver for tests, without a GPU: device memory is host memory, and queued copies are carried
 * out when an event behind them is asked about or memory is freed, so that whoever reuses memory too
 * early is found out. Threads may use it at once.
 * What a device would fault on fails with 700 when it is queued, with a line that says why: a copy whose
 * ends are not in memory that the driver has given, of the device or pinned; a launch with an address among
 * its parameters, tensor maps included, that is not in memory of a device. A copy that is carried out when
 * its memory is gone ends the process.
 * RUNS, when it is compiled with LOADS: launches run, by the emulator beside this folder, when they are queued. Memory is
 * of its own pages then, with pages that nobody may touch before and behind, and holds 0xff bytes: NaN in every format.
 * LOADS, when it is compiled: kernels load, and their launches are listed; of a thread whose name begins
 * with `rank-` in a file of its own, with the number of the stream among those of the thread, copies on
 * the device and waits for events.
 * The file `busy` in the home folder: no event is done that was recorded while it was there; the file `frees` there: a line for each call
 * that frees, the file `allocations` one for each that allocates memory of the device, and `maps` one for each tensor map.
 * OVERRUN, when it is compiled: bytes that every copy writes beyond its end, for AddressSanitizer to
 * find.
 * WITHOUT_OPTIONAL, when it is compiled: it has no cuLaunchKernelEx and no cuTensorMapEncodeTiled.
 * The file `fault` there: every event and every launch says 700. The file `full` there: no memory of the device is
 * left to allocate.
 * What is queued while a graph is recorded is listed, becomes a node of the graph and is not done; so is a call of
 * the libraries beside this one. Launching the graph does all of it in order, with the addresses it had, and is
 * listed as one line. To allocate memory, or to ask about an event, fails with 900 then and spoils the graph.
 * PIN_MS: how long it takes to pin memory of the host; each call is a line in the file `pins` there. PIN_FAILS: which of them
 * fails. HANGS: no event is ever done. TOTAL: bytes of each of the two devices. INIT: what cuInit says.
 * MAP_ROWS: of so many entries of its second axis no tensor map is encoded. SMS: how many there are. NAME: that of the devices. CUDA: its version.
 * CAPABILITY: that of the devices, times 10. */
#define _GNU_SOURCE
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

typedef unsigned long long Address;
static struct { char *to; const char *from; size_t bytes; unsigned word; } queue[4096];
static struct { Address start; size_t bytes; int device; } blocks[8192]; /* PINNED: of the host */
enum { BLOCKS = 8192, PINNED = -1 };
static size_t queued, carried, pins, taken[2], used_blocks; /* no block is behind the last used one */
static _Thread_local int now = -1; /* the device of the current context */
int contexts_set; /* calls that set one */
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;

static size_t number(const char *name, size_t otherwise) {
    const char *text = getenv(name);
    return text ? strtoull(text, 0, 10) : otherwise;
}
static const char *at_home(const char *name) {
    static _Thread_local char path[4096];
    snprintf(path, sizeof path, "%s/%s", getenv("HOME"), name);
    return path;
}
/* The list of launches of this thread, with the stream before the line where it is a rank's. */
static int rank_name(char name[16]) {
    return pthread_getname_np(pthread_self(), name, 16), !strncmp(name, "rank-", 5);
}
static FILE *launches(void *stream) {
    char name[16] = "", file[32] = "launches";
    int rank = rank_name(name);
    if (rank) snprintf(file, sizeof file, "launches-%s", name);
    FILE *log = fopen(at_home(file), "a");
    if (log && rank) fprintf(log, "%zu: ", (size_t)stream);
    return log;
}
static int is_rank(void) { char name[16] = ""; return rank_name(name); }
static void note(const char *file) {
    FILE *log = fopen(at_home(file), "a");
    if (log) fputs("once\n", log), fclose(log);
}
#define IN_CONTEXT if (now < 0) return 201
static size_t total(void) { return number("TOTAL", 64 << 20); }

int cuInit(unsigned flags) { return flags + (int)number("INIT", 0); }
int cuDriverGetVersion(int *v) { return *v = (int)number("CUDA", 13000), 0; }
int cuGetErrorName(int e, const char **s) { return *s = e == 803 ? "CUDA_ERROR_SYSTEM_DRIVER_MISMATCH" : e == 700 ? "CUDA_ERROR_ILLEGAL_ADDRESS" : "CUDA_ERROR", 0; }
int cuGetErrorString(int e, const char **s) { (void)e; return *s = "a failure of tests", 0; }
int cuDeviceGetCount(int *n) { return *n = 2, 0; }
int cuDeviceGet(int *d, int i) { return *d = i, 0; }
int cuDeviceGetName(char *s, int n, int d) { (void)n; (void)d; const char *named = getenv("NAME"); strcpy(s, named ? named : "Test GPU"); return 0; }
int cuDeviceGetPCIBusId(char *s, int n, int d) { return snprintf(s, n, "0000:%02x:00.0", 16 + d), 0; }
int cuDeviceTotalMem_v2(size_t *n, int d) { (void)d; return *n = total(), 0; }
int cuDeviceGetAttribute(int *v, int a, int d) {
    (void)d;
    switch (a) { /* those of an H200; numbers of CUdevice_attribute in cuda.h */
    case 16: *v = (int)number("SMS", 132); break;
    case 38: *v = 60 << 20; break;
    case 75: *v = (int)number("CAPABILITY", 90) / 10; break;
    case 76: *v = (int)number("CAPABILITY", 90) % 10; break;
    case 81: *v = 233472; break;
    case 82: *v = 65536; break;
    case 97: *v = 232448; break;
    case 111: *v = 1024; break;
    default: return 1;
    }
    return 0;
}
int cuDevicePrimaryCtxRetain(void **c, int d) { return *c = (void *)(size_t)(d + 1), 0; }
int cuDevicePrimaryCtxRelease_v2(int d) { (void)d; return 0; }
int cuCtxGetCurrent(void **c) { return *c = (void *)(size_t)(now + 1), 0; }
int cuCtxSetCurrent(void *c) { return now = (int)(size_t)c - 1, contexts_set++, 0; }
int cuMemGetInfo_v2(size_t *f, size_t *t) { IN_CONTEXT; return *t = total(), *f = *t - taken[now], 0; }
#ifdef RUNS
enum { PAGE = 4096 };
/* The bytes between the pages that nobody may touch; the last of them, but for the alignment, are given out. */
static size_t own_pages(size_t n) { return (n + PAGE - 1) / PAGE * PAGE; }
static void *new_memory(size_t n) {
    char *at = mmap(0, own_pages(n) + 2 * PAGE, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (at == MAP_FAILED || mprotect(at + PAGE, own_pages(n), PROT_READ | PROT_WRITE)) return 0;
    return memset(at + PAGE + own_pages(n) - (n + 15) / 16 * 16, 0xff, n);
}
static void delete_memory(void *p, size_t n) {
    munmap((char *)p + (n + 15) / 16 * 16 - own_pages(n) - PAGE, own_pages(n) + 2 * PAGE);
}
#else
static void *new_memory(size_t n) {
#ifdef ZEROS /* what is read before it was written */
    return calloc(1, n);
#else
    return malloc(n);
#endif
}
static void delete_memory(void *p, size_t n) { (void)n, free(p); }
#endif
static int alloc(Address *a, size_t n, int device) {
    size_t i = 0;
    if (device != PINNED && n > total() - taken[device]) return 2;
    while (i < BLOCKS && blocks[i].start) i++;
    if (i == BLOCKS) return 999;
    if (!(*a = (Address)(size_t)new_memory(n))) return 2;
    if (i >= used_blocks) used_blocks = i + 1;
    blocks[i].start = *a, blocks[i].bytes = n, blocks[i].device = device;
    if (device != PINNED) taken[device] += n;
    return 0;
}
/* The block that an address is in; BLOCKS where it is in none. */
static size_t block_of(Address a) {
    for (size_t i = 0; i < used_blocks; i++)
        if (blocks[i].start && a >= blocks[i].start && a - blocks[i].start < blocks[i].bytes) return i;
    return BLOCKS;
}
/* Whether the driver has given these bytes, of a device or, where `pinned`, of the host. */
static int is_given(const void *p, size_t n, int pinned) {
    size_t i = block_of((Address)(size_t)p);
    if (!n) return 1;
    return i < BLOCKS && pinned == (blocks[i].device == PINNED) && n <= blocks[i].start + blocks[i].bytes - (Address)(size_t)p;
}
#ifndef OVERRUN
#define OVERRUN 0
#endif
static void carry_out(size_t first) {
    for (size_t i = 0; i < first; i++) {
        const void *to = queue[i].to, *from = queue[i].from;
        size_t n = queue[i].bytes;
        if ((!is_given(to, n, 0) && !is_given(to, n, 1)) || (from && !is_given(from, n, 0) && !is_given(from, n, 1))) {
            fprintf(stderr, "memory of a queued copy of %zu B was freed before the copy was done\n", n);
            abort();
        }
        if (queue[i].from) memcpy(queue[i].to, queue[i].from, queue[i].bytes + OVERRUN);
        else for (size_t at = 0; at < queue[i].bytes; at++) queue[i].to[at] = (char)(queue[i].word >> 8 * (at % 4));
    }
    carried += first, queued -= first;
    memmove(queue, queue + first, queued * sizeof *queue);
}
static int release(Address a, int pinned) {
    if (!pinned) carry_out(queued); /* freeing waits for the device */
    size_t i = block_of(a);
    if (i == BLOCKS || blocks[i].start != a || pinned != (blocks[i].device == PINNED)) return 1;
    if (!pinned) taken[blocks[i].device] -= blocks[i].bytes;
    blocks[i].start = 0;
    return delete_memory((void *)(size_t)a, blocks[i].bytes), 0;
}
#ifdef RUNS
/* Says where the nearest memory before an address ends or begins, for a kernel that touched the address. */
void tell_of_memory(Address a) {
    size_t near = BLOCKS;
    for (size_t i = 0; i < used_blocks; i++)
        if (blocks[i].start && blocks[i].start <= a + PAGE && (near == BLOCKS || blocks[i].start > blocks[near].start)) near = i;
    if (near == BLOCKS) return;
    long long at = (long long)(a - blocks[near].start);
    fprintf(stderr, "emulated GPU: that is byte %lld of memory of %zu B\n", at, blocks[near].bytes);
}
#endif
/* A graph, and what it does when it is launched. */
struct node {
    char *to; const char *from; size_t bytes; unsigned word; /* a copy or a fill; of a call its data are `to` */
    void (*call)(void *);
    void *function; char *parameters; /* of a kernel, each as aligned as tensor maps are */
    unsigned grid[3], threads, shared;
};
#define ALIGNED(bytes) (((bytes) + 63) / 64 * 64)
struct graph { int users, spoilt; size_t count, kernels, room; struct node *nodes; };
static _Thread_local struct graph *recorded; /* while this thread records one */
static int spoils(void) { return recorded ? recorded->spoilt = 1 : 0; }
static struct node *new_node(void) {
    if (recorded->count == recorded->room)
        recorded->nodes = realloc(recorded->nodes, (recorded->room = 2 * recorded->room + 64) * sizeof(struct node));
    struct node *node = &recorded->nodes[recorded->count++];
    return memset(node, 0, sizeof *node);
}
/* Whether a call with so many bytes of data becomes part of a graph, instead of being made. */
int record_call(void (*call)(void *), const void *data, size_t bytes) {
    if (!recorded) return 0;
    struct node *node = new_node();
    node->call = call, node->to = memcpy(malloc(bytes), data, bytes);
    return 1;
}
int cuMemAlloc_v2(Address *a, size_t n) {
    IN_CONTEXT;
    if (spoils()) return 900;
    if (!access(at_home("full"), F_OK)) return 2;
    note("allocations");
    pthread_mutex_lock(&lock);
    int code = alloc(a, n, now);
    return pthread_mutex_unlock(&lock), code;
}
int cuMemFree_v2(Address a) {
    note("frees");
    pthread_mutex_lock(&lock);
    int code = release(a, 0);
    return pthread_mutex_unlock(&lock), code;
}
int cuMemHostAlloc(void **p, size_t n, unsigned f) {
    Address a = 0;
    IN_CONTEXT;
    usleep((unsigned)number("PIN_MS", 0) * 1000);
    pthread_mutex_lock(&lock);
    int code = ((void)f, ++pins == number("PIN_FAILS", 0)) ? 2 : alloc(&a, n, PINNED);
    note("pins");
    return pthread_mutex_unlock(&lock), *p = (void *)(size_t)a, code;
}
int cuMemFreeHost(void *p) {
    note("frees");
    pthread_mutex_lock(&lock);
    int code = release((Address)(size_t)p, 1);
    return pthread_mutex_unlock(&lock), code;
}
/* A copy, or with nothing to copy `from` a fill with the bytes of a word; whether either end is pinned. */
static int later(void *to, int to_pinned, const void *from, int from_pinned, size_t n, unsigned word) {
    pthread_mutex_lock(&lock);
    int code = queued == 4096 ? 999 : 0;
    if (!is_given(to, n, to_pinned) || (from && !is_given(from, n, from_pinned))) {
        fprintf(stderr, "a copy of %zu B from %p to %p is not within memory that the driver has given\n", n, from, to);
        code = 700;
    }
    if (!code && recorded) {
        struct node *node = new_node();
        node->to = to, node->from = from, node->bytes = n, node->word = word;
    } else if (!code) {
        queue[queued].to = to, queue[queued].from = from, queue[queued].bytes = n;
        queue[queued++].word = word;
    }
    return pthread_mutex_unlock(&lock), code;
}
int cuMemcpyHtoDAsync_v2(Address a, const void *p, size_t n, void *s) { (void)s; return later((void *)(size_t)a, 0, p, 1, n, 0); }
int cuMemcpyDtoHAsync_v2(void *p, Address a, size_t n, void *s) { (void)s; return later(p, 1, (void *)(size_t)a, 0, n, 0); }
int cuMemsetD8Async(Address a, unsigned char b, size_t n, void *s) { (void)s; return later((void *)(size_t)a, 0, 0, 0, n, b * 0x01010101u); }
int cuMemsetD32Async(Address a, unsigned w, size_t n, void *s) { (void)s; return a % 4 ? 1 : later((void *)(size_t)a, 0, 0, 0, 4 * n, w); }
int cuMemcpyDtoDAsync_v2(Address to, Address from, size_t n, void *s) {
    FILE *log = is_rank() ? launches(s) : 0;
    if (log) fprintf(log, "copy %zu B\n", n), fclose(log);
    return later((void *)(size_t)to, 0, (void *)(size_t)from, 0, n, 0);
}
int cuMemcpyPeerAsync(Address to, void *c, Address from, void *d, size_t n, void *s) { (void)c; (void)d; return cuMemcpyDtoDAsync_v2(to, from, n, s); }
int cuDeviceCanAccessPeer(int *yes, int a, int b) { return *yes = a != b, 0; }
int cuCtxEnablePeerAccess(void *c, unsigned f) {
    static int enabled[3][3];
    IN_CONTEXT;
    return f || enabled[now + 1][(size_t)c]++ ? 704 : 0;
}
static int attribute(void *v, int which, Address a) {
    size_t i = block_of(a);
    if (i == BLOCKS) return 1;
    if (which == 2) *(unsigned *)v = blocks[i].device == PINNED ? 1 : 2;
    if (which == 9) *(int *)v = blocks[i].device;
    if (which == 11) *(Address *)v = blocks[i].start;
    if (which == 12) *(size_t *)v = blocks[i].bytes;
    return 0;
}
int cuPointerGetAttribute(void *v, int which, Address a) {
    pthread_mutex_lock(&lock);
    int code = attribute(v, which, a);
    return pthread_mutex_unlock(&lock), code;
}
static _Thread_local size_t streams;
int cuStreamCreate(void **s, unsigned f) { IN_CONTEXT; (void)f; return *s = is_rank() ? (void *)++streams : (void *)1, 0; }
int cuStreamDestroy_v2(void *s) { (void)s; return 0; }
int cuStreamWaitEvent(void *s, void *e, unsigned f) {
    FILE *log = is_rank() ? launches(s) : 0;
    if (log) fprintf(log, "wait\n"), fclose(log);
    return (void)e, (void)f, 0;
}
int cuStreamBeginCapture_v2(void *s, unsigned mode) {
    (void)s; (void)mode;
    if (recorded) return 1;
    return recorded = calloc(1, sizeof *recorded), recorded->users = 1, 0;
}
int cuStreamEndCapture(void *s, void **g) {
    int spoilt = recorded->spoilt;
    (void)s;
    *g = spoilt ? 0 : recorded;
    return recorded = 0, spoilt ? 901 : 0;
}
int cuStreamIsCapturing(void *s, int *yes) { (void)s; return *yes = recorded != 0, 0; }
int cuGraphInstantiateWithFlags(void **r, void *g, unsigned long long f) { (void)f; return *r = g, ((struct graph *)g)->users++, 0; }
int cuGraphDestroy(void *g) {
    struct graph *of = g;
    if (!of || --of->users) return 0;
    for (size_t i = 0; i < of->count; i++) {
        if (of->nodes[i].call) free(of->nodes[i].to);
        free(of->nodes[i].parameters);
    }
    return free(of->nodes), free(of), 0;
}
int cuGraphExecDestroy(void *r) { return cuGraphDestroy(r); }
#ifdef LOADS
static int launches_again(const struct node *kernel);
#endif
int cuGraphLaunch(void *r, void *s) {
    struct graph *of = r;
    FILE *log = launches(s);
    if (!log) return 999;
    if (recorded) return fclose(log), 900;
    fprintf(log, "graph of %zu kernels\n", of->kernels), fclose(log);
    for (size_t i = 0; i < of->count; i++) {
        const struct node *node = &of->nodes[i];
        if (node->call) node->call(node->to);
#ifdef LOADS
        else if (node->function && !launches_again(node)) return 700;
#endif
        else if (!node->function) {
            int code = later(node->to, is_given(node->to, node->bytes, 1), node->from, is_given(node->from, node->bytes, 1), node->bytes, node->word);
            if (code) return code;
        }
    }
    return 0;
}
float device_ms; /* of work that takes time, which libraries beside this one add to */
enum { WAITS = 16 };
/* What the device waits for: that so many have ended. */
struct wait { const _Atomic size_t *ended; size_t count; };
/* Of the work that this thread has queued. */
static _Thread_local struct wait waits[WAITS];
struct event { size_t end; int behind_work; float ms; struct wait waits[WAITS]; };
/* What this thread queues from here on is done when `count` have ended, which a library beside this one counts. */
void device_waits(const _Atomic size_t *ended, size_t count) {
    int i = 0;
    while (waits[i].ended && waits[i].ended != ended) if (++i == WAITS) abort();
    waits[i].ended = ended, waits[i].count = count;
}
static int is_waiting(const struct event *of) {
    for (int i = 0; i < WAITS && of->waits[i].ended; i++) if (*of->waits[i].ended < of->waits[i].count) return 1;
    return 0;
}
static int busy(void) { return !access(at_home("busy"), F_OK); }
static int faults(void) { return !access(at_home("fault"), F_OK); }
int cuEventCreate(void **e, unsigned f) { IN_CONTEXT; (void)f; return *e = calloc(1, sizeof(struct event)), 0; }
int cuEventDestroy_v2(void *e) { return free(e), 0; }
int cuEventRecord(void *e, void *s) {
    struct event *of = e;
    (void)s;
    if (spoils()) return 900;
    pthread_mutex_lock(&lock);
    of->end = carried + queued, of->behind_work = busy(), of->ms = device_ms;
    memcpy(of->waits, waits, sizeof waits);
    return pthread_mutex_unlock(&lock), 0;
}
/* The libraries beside this one ask about no event: about all work. */
int cuEventQuery(void *e) {
    if (spoils()) return 900;
    pthread_mutex_lock(&lock);
    struct event all = {.end = carried + queued, .behind_work = 1}, *of = e ? e : &all;
    int code = number("HANGS", 0) || (of->behind_work && busy()) || is_waiting(of) ? 600 : faults() ? 700 : 0;
    if (!code && of->end > carried) carry_out(of->end - carried);
    return pthread_mutex_unlock(&lock), code;
}
int cuCtxSynchronize(void) { return cuEventQuery(0); }
int cuEventElapsedTime(float *ms, void *a, void *b) {
    return *ms = 1 + ((struct event *)b)->ms - ((struct event *)a)->ms, 0;
}
int cuModuleUnload(void *m) { (void)m; return 0; }
int cuFuncSetAttribute(void *f, int a, int v) { (void)f; (void)a; (void)v; return 0; }
#ifdef LOADS
/* A module is its cubin, which its owner keeps; a function the sizes of its parameters, read out of
 * the cubin's section `.nv.info.NAME`. A launch is a line in the file `launches` of the home folder. */
int cuGetExportTable(const void **t, const void *id) { (void)id; return *t = 0, 1; } /* NVRTC asks */
struct function { char name[64]; size_t count, bytes[16]; const void *cubin; };
static size_t at(const char *p, int width) {
    size_t n = 0;
    return memcpy(&n, p, width), n;
}
int cuModuleLoadData(void **m, const void *p) { IN_CONTEXT; return *m = (void *)p, 0; }
int cuModuleGetFunction(void **f, void *m, const char *name) {
    const char *file = m, *sections = file + at(file + 40, 8);
    size_t each = at(file + 58, 2), count = at(file + 60, 2), named = at(file + 62, 2);
    const char *names = file + at(sections + named * each + 24, 8);
    for (size_t i = 0; i < count; i++) {
        const char *section = sections + i * each, *is = names + at(section, 4);
        if (strncmp(is, ".nv.info.", 9) || strcmp(is + 9, name)) continue;
        struct function *found = calloc(1, sizeof *found);
        strcpy(found->name, name), found->cubin = m;
        const char *p = file + at(section + 24, 8), *end = p + at(section + 32, 8);
        while (p < end) { /* format, attribute, length or value, what a format of 4 has more */
            size_t more = p[0] == 4 ? at(p + 2, 2) : 0;
            if (p[1] == 0x17) { /* index, ordinal, offset; the size is above 18 bits of flags */
                size_t ordinal = at(p + 8, 2);
                found->bytes[ordinal] = at(p + 12, 4) >> 18;
                if (found->count <= ordinal) found->count = ordinal + 1;
            }
            p += 4 + more;
        }
        return *f = found, 0;
    }
    return 500;
}
int cuFuncGetParamInfo(void *f, size_t i, size_t *offset, size_t *bytes) {
    struct function *of = f;
    if (i >= of->count) return 1;
    return *offset = 0, *bytes = of->bytes[i], 0;
}
/* Whether a kernel would find memory of a device at every address among its parameters. A word of them is
 * an address where it is as large as the machine's own are, which two counts or strides side by side are not. */
static int finds_memory(struct function *f, void **p) {
    int found = 1;
    pthread_mutex_lock(&lock);
    for (size_t i = 0; i < f->count; i++)
        for (size_t byte = 0; byte + 8 <= f->bytes[i]; byte += 8) {
            Address word = at((char *)p[i] + byte, 8);
            if (word < 0x500000000000 || word > 0x7fffffffffff || is_given((void *)(size_t)word, 1, 0)) continue;
            fprintf(stderr, "%s: byte %zu of parameter %zu is the address %#llx, where no device has memory\n", f->name, byte, i, word);
            found = 0;
        }
    return pthread_mutex_unlock(&lock), found;
}
/* Makes a launch part of a graph where one is recorded. */
static void record_kernel(struct function *f, const unsigned *grid, unsigned threads, unsigned shared, void **p) {
    struct node *node = new_node();
    size_t bytes = 64;
    for (size_t i = 0; i < f->count; i++) bytes += ALIGNED(f->bytes[i]);
    node->function = f, node->parameters = aligned_alloc(64, bytes), recorded->kernels++;
    memcpy(node->grid, grid, sizeof node->grid), node->threads = threads, node->shared = shared;
    for (size_t i = 0, at = 0; i < f->count; at += ALIGNED(f->bytes[i++])) memcpy(node->parameters + at, p[i], f->bytes[i]);
}
#ifdef RUNS
void run_kernel(const void *cubin, const char *name, const unsigned *grid, unsigned threads, unsigned shared, void **p);
#endif
static void run(struct function *f, const unsigned *grid, unsigned threads, unsigned shared, void **p) {
#ifdef RUNS
    pthread_mutex_lock(&lock);
    carry_out(queued); /* copies queued before */
    run_kernel(f->cubin, f->name, grid, threads, shared, p);
    pthread_mutex_unlock(&lock);
#else
    (void)f, (void)grid, (void)threads, (void)shared, (void)p;
#endif
}
static int launches_again(const struct node *kernel) {
    struct function *f = kernel->function;
    void *p[16];
    for (size_t i = 0, at = 0; i < f->count; at += ALIGNED(f->bytes[i++])) p[i] = kernel->parameters + at;
    if (!finds_memory(f, p)) return 0;
    return run(f, kernel->grid, kernel->threads, kernel->shared, p), 1;
}
int cuLaunchKernel(void *f, unsigned x, unsigned y, unsigned z, unsigned threads, unsigned e,
                   unsigned g, unsigned shared, void *s, void **p, void **more) {
    FILE *log = launches(s);
    if (!log) return 999;
    if (faults() || !finds_memory(f, p)) return fclose(log), 700;
    const unsigned grid[] = {x, y, z};
    if (recorded) record_kernel(f, grid, threads, shared, p);
    else run(f, grid, threads, shared, p);
    fprintf(log, "%s [%u, %u, %u] x %u\n", ((struct function *)f)->name, x, y, z, threads);
    return (void)e, (void)g, (void)more, fclose(log);
}
#ifndef WITHOUT_OPTIONAL
/* Attributes by their numbers in CUlaunchAttributeID. */
struct attribute { int id, pad; unsigned value[16]; };
struct config { unsigned grid[3], block[3], shared; void *stream; const struct attribute *attributes; unsigned count; };
int cuLaunchKernelEx(const struct config *c, void *f, void **p, void **more) {
    FILE *log = launches(c->stream);
    if (!log) return 999;
    if (faults() || !finds_memory(f, p)) return fclose(log), 700;
    if (recorded) record_kernel(f, c->grid, c->block[0], c->shared, p);
    else run(f, c->grid, c->block[0], c->shared, p);
    fprintf(log, "%s [%u, %u, %u] x %u", ((struct function *)f)->name, c->grid[0], c->grid[1], c->grid[2], c->block[0]);
    for (unsigned i = 0; i < c->count; i++) {
        const unsigned *v = c->attributes[i].value;
        if (c->attributes[i].id == 4) fprintf(log, ", cluster [%u, %u, %u]", v[0], v[1], v[2]);
        else if (c->attributes[i].id == 6 && v[0] == 1) fprintf(log, ", programmatic");
        else return fclose(log), 1;
    }
    return (void)more, fputs("\n", log), fclose(log);
}
#endif
#else
int cuModuleLoadData(void **m, const void *p) { (void)m; (void)p; return 209; }
int cuModuleGetFunction(void **f, void *m, const char *n) { (void)f; (void)m; (void)n; return 500; }
#ifndef OLD
int cuFuncGetParamInfo(void *f, size_t i, size_t *o, size_t *n) { (void)f; (void)i; (void)o; (void)n; return 1; }
#endif
int cuLaunchKernel(void *f, unsigned a, unsigned b, unsigned c, unsigned d, unsigned e, unsigned g,
                   unsigned h, void *s, void **p, void **x) {
    (void)f, (void)a, (void)b, (void)c, (void)d, (void)e, (void)g, (void)h, (void)s, (void)p, (void)x;
    return 0;
}
#endif
#ifndef WITHOUT_OPTIONAL
/* A map of 16 words holds what it was made of: numbers of the enumerations by bytes; the address; 5
 * dims; 4 strides; 5 and 5 halves of words for tile and element strides. What a driver refuses it
 * refuses, as "CUDA Driver API, Tensor Map Object Management" says. */
int cuTensorMapEncodeTiled(unsigned long long *map, int type, unsigned rank, void *address, const unsigned long long *dims,
                           const unsigned long long *strides, const unsigned *tile, const unsigned *steps, int interleave,
                           int swizzle, int promotion, int fill) {
    unsigned *halves = (unsigned *)(map + 11);
    note("maps");
    if (number("MAP_ROWS", 0) == dims[1]) return 1;
    static const unsigned bytes[] = {1, 2, 4, 4, 8, 8, 2, 4, 8, 2}; /* by CUtensorMapDataType */
    if ((size_t)map % 64 || rank < 1 || rank > 5 || type < 0 || type > 9) return 1;
    if (!address || (size_t)address % 16 || interleave || swizzle < 0 || swizzle > 3) return 1;
    unsigned row = tile[0] * bytes[type];
    if (row % 16 || (swizzle && row > 16u << swizzle) || (fill && type < 6)) return 1;
    for (unsigned i = 0; i < rank; i++) {
        if (dims[i] < 1 || dims[i] > 1ull << 32 || tile[i] < 1 || tile[i] > 256) return 1;
        if (steps[i] < 1 || steps[i] > 8) return 1;
        if (i + 1 < rank && (!strides[i] || strides[i] % 16 || strides[i] >> 40)) return 1;
    }
    memset(map, 0, 128);
    map[0] = (unsigned)type | rank << 8 | (unsigned)interleave << 16 | (unsigned)swizzle << 24;
    map[0] |= (unsigned long long)promotion << 32 | (unsigned long long)fill << 40;
    map[1] = (size_t)address;
    for (unsigned i = 0; i < rank; i++) {
        map[2 + i] = dims[i], halves[i] = tile[i], halves[5 + i] = steps[i];
        if (i + 1 < rank) map[7 + i] = strides[i];
    }
    return 0;
}
#endif
