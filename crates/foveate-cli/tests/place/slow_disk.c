/* A disk that is slow: a file is on it SLOW_MS milliseconds after its writer asks for that. To be preloaded. */
#define _GNU_SOURCE
#include <errno.h>
#include <stdlib.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

int fsync(int file) {
    const char *text = getenv("SLOW_MS");
    long ms = text ? atol(text) : 0;
    struct timespec left = {ms / 1000, ms % 1000 * 1000000};
    while (nanosleep(&left, &left) && errno == EINTR) { }
    return (int)syscall(SYS_fsync, file);
}
