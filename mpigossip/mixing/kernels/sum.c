/* Weighted sum of float32 arrays in one pass over memory, written to any number of targets.
 *
 * It rounds like combine.weighted_sum: with equal weights it computes w * (a0 + a1 + ...), otherwise
 * each product is rounded before it is added. It is compiled with -ffp-contract=off, so that no two
 * operations are fused. Large results are written past the cache by streaming stores, so that the
 * memory that they overwrite is not read first.
 */
#include <stddef.h>
#include <stdint.h>
#include <string.h>
#ifdef __SSE2__
#include <emmintrin.h>
#endif

#define BLOCK 2048

#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__) && defined(__gnu_linux__)
#define WIDE __attribute__((target_clones("avx512f", "avx2", "default")))
#else
#define WIDE
#endif

WIDE static void uniform(float *restrict s, const float *const *in, size_t at, int terms, float w,
                         size_t n) {
    const float *restrict a = in[0] + at, *restrict b = in[terms > 1] + at;
    if (terms == 1)
        for (size_t i = 0; i < n; i++) s[i] = a[i] * w;
    else if (terms == 2)
        for (size_t i = 0; i < n; i++) s[i] = (a[i] + b[i]) * w;
    else {
        for (size_t i = 0; i < n; i++) s[i] = a[i] + b[i];
        for (int k = 2; k < terms - 1; k++) {
            const float *restrict c = in[k] + at;
            for (size_t i = 0; i < n; i++) s[i] += c[i];
        }
        const float *restrict c = in[terms - 1] + at;
        for (size_t i = 0; i < n; i++) s[i] = (s[i] + c[i]) * w;
    }
}

WIDE static void weighted(float *restrict s, const float *const *in, size_t at, int terms,
                          const float *w, size_t n) {
    const float *restrict a = in[0] + at, *restrict b = in[1] + at;
    const float u = w[0], v = w[1];
    for (size_t i = 0; i < n; i++) s[i] = a[i] * u + b[i] * v;
    for (int k = 2; k < terms; k++) {
        const float *restrict c = in[k] + at;
        const float x = w[k];
        for (size_t i = 0; i < n; i++) s[i] += c[i] * x;
    }
}

static void write_past_cache(float *to, const float *from, size_t n) {
#ifdef __SSE2__
    for (; n && (uintptr_t)to % 16; n--) *to++ = *from++;
    for (; n >= 16; n -= 16, to += 16, from += 16)
        for (int k = 0; k < 16; k += 4) _mm_stream_ps(to + k, _mm_loadu_ps(from + k));
#endif
    memcpy(to, from, n * sizeof *to);
}

/* out[m] = sum over k of w[k] * in[k], n floats each. If equal is set, all weights are w[0]. */
void mpigossip_sum(const float *const *in, const float *w, int terms, int equal,
                   float *const *out, int targets, size_t n, int stream) {
    float s[BLOCK] __attribute__((aligned(64)));
    for (size_t at = 0; at < n; at += BLOCK) {
        const size_t part = n - at < BLOCK ? n - at : BLOCK;
        if (equal)
            uniform(s, in, at, terms, w[0], part);
        else
            weighted(s, in, at, terms, w, part);
        for (int m = 0; m < targets; m++) {
            if (stream)
                write_past_cache(out[m] + at, s, part);
            else
                memcpy(out[m] + at, s, part * sizeof *s);
        }
    }
#ifdef __SSE2__
    if (stream) _mm_sfence();
#endif
}
