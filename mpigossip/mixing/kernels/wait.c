/* Wait for MPI requests without the Python interpreter, and sleep between two tests.
 *
 * The caller passes the address of MPI_Test. No header of MPI is included, so one library works with
 * every MPI. Handles are not moved; MPI sets a handle to MPI_REQUEST_NULL when its request is
 * complete.
 */
#define _GNU_SOURCE
#include <poll.h>
#include <stdalign.h>
#include <stddef.h>
#include <string.h>
#include <time.h>

typedef int (*mpi_test)(void *request, int *done, void *status);

#define STATUS_BYTES 256 /* larger than the MPI_Status of any MPI */

static double seconds_now(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (double)now.tv_sec + 1e-9 * (double)now.tv_nsec;
}

/* Wait until `need` of the n requests are complete, `fd` can be read (-1: none), a signal arrives,
 * or `limit` seconds have passed. Test without sleeping for `spin` seconds, then sleep between tests
 * for times that grow from `shortest` to `longest`. Return MPI's error code, or 0. */
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
