/* A process that is killed where it would rename a file to a path that ends with DIES_AT, when other processes have
   had the time to rename theirs. To be preloaded. */
#define _GNU_SOURCE
#include <fcntl.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>

int rename(const char *from, const char *to) {
    const char *end = getenv("DIES_AT");
    size_t length = end ? strlen(end) : 0;
    if (length && strlen(to) >= length && strcmp(to + strlen(to) - length, end) == 0) {
        usleep(500000);
        kill(getpid(), SIGKILL);
    }
    return (int)syscall(SYS_renameat2, AT_FDCWD, from, AT_FDCWD, to, 0);
}
