/* A process that preloads this has its wall clock shifted by the seconds in SHIFTED_CLOCK, a file of one native int64 that may change at any time.
   Only what tells the time of day is shifted: monotonic clocks, the times of files and the waits within the C library are the kernel's. */
#define _GNU_SOURCE
#include <fcntl.h>
#include <stdint.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

static volatile int64_t *shift;

__attribute__((constructor)) static void begin(void) {
    int fd = open(getenv("SHIFTED_CLOCK"), O_RDONLY | O_CLOEXEC);
    void *at = fd < 0 ? MAP_FAILED : mmap(NULL, sizeof *shift, PROT_READ, MAP_SHARED, fd, 0);
    if (at == MAP_FAILED) abort();
    close(fd);
    shift = at;
}

int clock_gettime(clockid_t clock, struct timespec *to) {
    int failed = syscall(SYS_clock_gettime, clock, to);
    if (!failed && (clock == CLOCK_REALTIME || clock == CLOCK_REALTIME_COARSE)) to->tv_sec += shift ? *shift : 0;
    return failed;
}

int gettimeofday(struct timeval *to, void *zone) {
    struct timespec now;
    (void)zone;
    clock_gettime(CLOCK_REALTIME, &now);
    to->tv_sec = now.tv_sec;
    to->tv_usec = now.tv_nsec / 1000;
    return 0;
}

time_t time(time_t *to) {
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    if (to) *to = now.tv_sec;
    return now.tv_sec;
}
