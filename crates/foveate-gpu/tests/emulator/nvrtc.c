/* NVRTC for tests that run kernels on the host: this machine's own, named by the variable REAL_NVRTC, which compiles as
 * ever; and the source of each cubin is kept beside it, in the folder CUBINS, by a hash of the cubin. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

struct program { void *real; char *source; };

static void *real(const char *name) {
    static void *library;
    if (!library) library = dlopen(getenv("REAL_NVRTC"), RTLD_NOW | RTLD_LOCAL);
    void *function = library ? dlsym(library, name) : 0;
    if (!function) fprintf(stderr, "NVRTC for tests: %s\n", dlerror()), abort();
    return function;
}
#define REAL(name, ...) ((int (*)(__VA_ARGS__))real(name))

int nvrtcVersion(int *major, int *minor) { return REAL("nvrtcVersion", int *, int *)(major, minor); }
typedef const char *const *Texts;
int nvrtcCreateProgram(struct program **p, const char *source, const char *name, int n, Texts h, Texts i) {
    *p = calloc(1, sizeof **p), (*p)->source = strdup(source);
    int (*create)(void **, const char *, const char *, int, Texts, Texts) = real("nvrtcCreateProgram");
    return create(&(*p)->real, source, name, n, h, i);
}
int nvrtcDestroyProgram(struct program **p) {
    int code = REAL("nvrtcDestroyProgram", void **)(&(*p)->real);
    return free((*p)->source), free(*p), *p = 0, code;
}
int nvrtcCompileProgram(struct program *p, int n, const char *const *options) {
    return REAL("nvrtcCompileProgram", void *, int, const char *const *)(p->real, n, options);
}
int nvrtcGetProgramLogSize(struct program *p, size_t *n) {
    return REAL("nvrtcGetProgramLogSize", void *, size_t *)(p->real, n);
}
int nvrtcGetProgramLog(struct program *p, char *log) {
    return REAL("nvrtcGetProgramLog", void *, char *)(p->real, log);
}
int nvrtcGetCUBINSize(struct program *p, size_t *n) {
    return REAL("nvrtcGetCUBINSize", void *, size_t *)(p->real, n);
}
int nvrtcGetCUBIN(struct program *p, char *cubin) {
    size_t n = 0;
    char path[4096], own[4200];
    int code = REAL("nvrtcGetCUBIN", void *, char *)(p->real, cubin);
    unsigned long long hash = 14695981039346656037u;
    if (code || nvrtcGetCUBINSize(p, &n)) return code;
    for (size_t i = 0; i < n; i++) hash = (hash ^ (unsigned char)cubin[i]) * 1099511628211u;
    snprintf(path, sizeof path, "%s/%016llx.cu", getenv("CUBINS"), hash);
    snprintf(own, sizeof own, "%s.%d", path, (int)getpid());
    FILE *file = fopen(own, "w");
    if (!file) return 11;
    fputs(p->source, file);
    return fclose(file) || rename(own, path) ? 11 : 0;
}
