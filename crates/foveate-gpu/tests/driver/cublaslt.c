/* cuBLASLt for tests, without a GPU: products in double, at once, of what the driver for tests
 * calls device memory. It takes what the real one takes and no more, so a wrong descriptor is a
 * wrong result or a refusal. BLAS: its version. KERNELS: how many it has for any problem, of which
 * number FASTEST takes a third of the others' time. Compiled
 * with -DWRONG it leaves out the last term of long sums, with -DOLD_BLAS it has no cublasLtMatmul. */
#include <stdlib.h>
#include "numbers.h"

#ifndef WRONG
#define WRONG 0
#endif

typedef struct { int64_t number[64]; } Descriptor; /* attributes by their numbers in the header */
typedef struct { uint64_t algorithm[8]; size_t workspace; int status; float waves; int reserved[4]; } Heuristic;
enum { TYPE = 0, ROWS = 2, COLUMNS = 3, LEADING = 4, BATCH = 5, STRIDE = 6 };
enum { TRANSPOSE_A = 3, TRANSPOSE_B = 4, EPILOGUE = 7, BIAS = 8, BIAS_TYPE = 26 };

int cuEventQuery(void *);
int record_call(void (*)(void *), const void *, size_t);
extern float device_ms;
static size_t number(const char *name, size_t otherwise) {
    const char *text = getenv(name);
    return text ? strtoull(text, 0, 10) : otherwise;
}

size_t cublasLtGetVersion(void) { return number("BLAS", 130102); }
const char *cublasLtGetStatusName(int e) {
    return e == 15 ? "CUBLAS_STATUS_NOT_SUPPORTED" : e == 7 ? "CUBLAS_STATUS_INVALID_VALUE" : "CUBLAS_STATUS";
}
const char *cublasLtGetStatusString(int e) { (void)e; return "a failure of tests"; }
int cublasLtCreate(void **h) { return *h = malloc(1), 0; }

static int create(void **d) { return *d = calloc(1, sizeof(Descriptor)), 0; }
static int set(Descriptor *d, int which, const void *p, size_t n, size_t expected) {
    if (n != expected) return 7;
    d->number[which] = 0;
    return memcpy(&d->number[which], p, n), 0;
}
int cublasLtMatmulDescCreate(void **d, int compute, int scale) {
    if ((compute != 68 && compute != 77) || scale) return 7;
    return create(d);
}
int cublasLtMatmulDescSetAttribute(void *d, int a, const void *p, size_t n) { return set(d, a, p, n, a == BIAS ? 8 : 4); }
int cublasLtMatmulDescDestroy(void *d) { return free(d), 0; }
int cublasLtMatrixLayoutCreate(void **d, int type, uint64_t rows, uint64_t columns, int64_t leading) {
    create(d);
    int64_t *number = ((Descriptor *)*d)->number;
    number[TYPE] = type, number[ROWS] = rows, number[COLUMNS] = columns, number[LEADING] = leading;
    return number[BATCH] = 1, leading < (int64_t)rows ? 7 : 0;
}
int cublasLtMatrixLayoutSetAttribute(void *d, int a, const void *p, size_t n) { return set(d, a, p, n, a == STRIDE ? 8 : 4); }
int cublasLtMatrixLayoutDestroy(void *d) { return free(d), 0; }
int cublasLtMatmulPreferenceCreate(void **d) { return create(d); }
int cublasLtMatmulPreferenceSetAttribute(void *d, int a, const void *p, size_t n) { return set(d, a, p, n, a == 1 ? 8 : 4); }
int cublasLtMatmulPreferenceDestroy(void *d) { return free(d), 0; }

/* The sizes of op(a) · op(b), or a refusal. */
static int sizes(int64_t *o, int64_t *a, int64_t *b, int64_t *c, int64_t *size) {
    int ta = (int)o[TRANSPOSE_A], tb = (int)o[TRANSPOSE_B];
    size[0] = a[ta ? COLUMNS : ROWS], size[1] = b[tb ? ROWS : COLUMNS], size[2] = a[ta ? ROWS : COLUMNS];
    if (b[tb ? COLUMNS : ROWS] != size[2] || c[ROWS] != size[0] || c[COLUMNS] != size[1]) return 7;
    return a[BATCH] == c[BATCH] && b[BATCH] == c[BATCH] && a[TYPE] == b[TYPE] ? 0 : 7;
}
int cublasLtMatmulAlgoGetHeuristic(void *h, Descriptor *o, Descriptor *a, Descriptor *b, Descriptor *c, Descriptor *d,
                                   Descriptor *wish, int most, Heuristic *found, int *count) {
    int64_t size[3];
    (void)h, (void)d, (void)wish;
    if (most < 1 || sizes(o->number, a->number, b->number, c->number, size)) return 7;
    *count = (int)number("KERNELS", 1);
    if (*count > most) *count = most;
    memset(found, 0, most * sizeof *found);
    for (int i = 0; i < *count; i++) found[i].workspace = 1000, found[i].algorithm[0] = i;
    return 0;
}

#ifndef OLD_BLAS
/* A product with all that it is given: descriptors may be changed once it is queued. */
struct product { Descriptor op, a, b, c, d; float alpha, beta; const void *A, *B, *C; void *D; };
static void multiply(void *of) {
    struct product *p = of;
    int64_t *o = p->op.number, *a = p->a.number, *b = p->b.number, *added = p->c.number, *c = p->d.number, size[3];
    sizes(o, a, b, c, size);
    cuEventQuery(0); /* everything queued before */
    int64_t rows = size[0], terms = size[2] - WRONG * (size[2] > 500);
    /* op(a), of which the rows lie side by side: sums of all rows are added to at once, each in the order of its terms. */
    double *factors = malloc((terms + 1) * rows * sizeof(double)), *sums = factors + terms * rows;
    for (int64_t n = 0; n < c[BATCH]; n++) {
        for (int64_t l = 0; l < terms; l++)
            for (int64_t i = 0; i < rows; i++)
                factors[l * rows + i] = get(p->A, n * a[STRIDE] + (o[TRANSPOSE_A] ? i * a[LEADING] + l : l * a[LEADING] + i), a[TYPE]);
        for (int64_t j = 0; j < size[1]; j++) {
            memset(sums, 0, rows * sizeof(double));
            for (int64_t l = 0; l < terms; l++) {
                double y = get(p->B, n * b[STRIDE] + (o[TRANSPOSE_B] ? l * b[LEADING] + j : j * b[LEADING] + l), b[TYPE]);
                for (int64_t i = 0; i < rows; i++) sums[i] += factors[l * rows + i] * y;
            }
            for (int64_t i = 0; i < rows; i++) {
                int64_t at = n * c[STRIDE] + j * c[LEADING] + i, from = n * added[STRIDE] + j * added[LEADING] + i;
                double value = p->alpha * sums[i] + (p->beta == 0 ? 0 : p->beta * get(p->C, from, added[TYPE]));
                if (o[EPILOGUE] & 4) value += get((void *)o[BIAS], i, o[BIAS_TYPE]);
                put(p->D, at, c[TYPE], value);
            }
        }
    }
    free(factors);
}
int cublasLtMatmul(void *h, Descriptor *op, const float *alpha, const void *A, Descriptor *da, const void *B, Descriptor *db,
                   const float *beta, const void *C, Descriptor *dc, void *D, Descriptor *dd, const uint64_t *algorithm,
                   void *workspace, size_t bytes, void *stream) {
    int64_t *o = op->number, *a = da->number, *b = db->number, size[3];
    struct product all = {*op, *da, *db, *dc, *dd, *alpha, *beta, A, B, C, D};
    (void)h, (void)stream;
    device_ms += *algorithm == number("FASTEST", 0) ? 1 : 3;
    if (!workspace || bytes < 1000 || sizes(o, a, b, dd->number, size) || sizes(o, a, b, dc->number, size)) return 7;
    if (!record_call(multiply, &all, sizeof all)) multiply(&all);
    return 0;
}
#endif
