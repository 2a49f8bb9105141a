/* Waiting for MPI requests without the interpreter, and asleep between two looks.
 *
 * MPI is known here by one address, that of MPI_Test: no header, and so one library for all MPIs.
 * A handle stays where it lies; MPI itself makes it MPI_REQUEST_NULL when its request is complete.
 */
#define _GNU_SOURCE
#include <poll.h>
#include <stdalign.h>
#include <stddef.h>
#include <string.h>
#include <time.h>

typedef int (*mpi_test)(void *request, int *done, void *status);

#define STATUS_BYTES 256 /* more than any MPI_Status has */

static double seconds_now(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (double)now.tv_sec + 1e-9 * (double)now.tv_nsec;
}

/* Until `need` of the n requests are complete, `fd` (-1: none) can be read, a signal came, or
 * `limit` seconds are over. Looks again at once for `spin` seconds, then after sleeps from
 * `shortest` to `longest`. Returns MPI's error code, 0 where there was none. */
int mpigossip_wait(mpi_test test, void *const *requests, int n, int need, int fd, double spin,
                   double shortest, double longest, double limit) {
    alignas(16) char status[STATUS_BYTES];
    char complete[n + 1];
    struct pollfd watched = {fd, POLLIN, 0};
    const double begin = seconds_now();
    double pause = shortest;
    memset(complete, 0, sizeof complete);
    for (;;) {
        for (int i = 0; i < n; i++) {
            int done = 0;
            if (complete[i]) continue;
            const int error = test(requests[i], &done, status);
            if (error) return error;
            if (done) complete[i] = 1, need--;
        }
        const double waited = seconds_now() - begin;
        if (need <= 0 || waited >= limit) return 0;
        if (waited < spin) continue;
        const struct timespec nap = {0, (long)(1e9 * pause)};
        if (ppoll(&watched, 1, &nap, NULL)) return 0;
        pause = pause * 1.2 < longest ? pause * 1.2 : longest;
    }
}
