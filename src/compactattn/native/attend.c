/* Attention on a CPU in fp32, a few rows of scores at a time: the twin of rows.py (scores → weights, and back) and of reference.py
 * (weights → estimate, and back), which say what is computed and why. A row never waits for memory: its scores stay in the cache from
 * the product that makes them to the product that uses them, and tiles of keys that weigh nothing are left out of every product.
 *
 * The estimate of a row hangs on that row alone, to the last bit: on no other row, on nothing that a key holds which it may not see, on
 * no number of threads. Numbers are finite; where they are not, launch.py leaves the call to the reference.
 *
 * Shapes: B batch, H heads (G of keys), Q queries, K keys, D head dim, E width of the values. Q, K, D and E are multiples of ROWS, TILE,
 * LANES and LANES, padded with zeros; `queries` says how many queries are real. build.py defines MOST_TURNS of Newton and what
 * dropout hashes with: FIRST, SECOND, STRIDE.
 */
#include <float.h>
#include <math.h>
#include <omp.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#if defined(__AVX512F__)
#define LANES 16
#elif defined(__AVX__)
#define LANES 8
#else
#define LANES 4
#endif
#define ROWS 4             /* queries that share what is read of keys and values */
#define TILE (2 * LANES)   /* keys that are computed or left out together */
#define RUN 64             /* queries of a piece of work */
#define LONG_RUN 128       /* the same backward, where what a piece gives to dk and dv has to join the rest */
#define STRIPES 8          /* of the keys, which join each by itself */
#define CHUNK (16 * LANES) /* numbers that are summed in fp32, 16 a lane, since equal ones err alike; their sums are added in fp64 */
#define FLUSH 16           /* tiles that are summed before they join the rest */
#define INLINE static inline __attribute__((always_inline))

typedef float vec __attribute__((vector_size(4 * LANES), aligned(4), may_alias));

enum Rule { FIXED, ANCHORED, NORMALISING, NEAREST };
enum Kind { STEP, ONE, TWO, THREE, ANY, EXP }; /* of r: 0, 1, 2, 3, between, ∞ */

typedef struct {
    int32_t rule, kind;
    float r, value; /* value: b or k of the rule */
} Kernel;

typedef struct {
    const float *q, *k, *v, *scale;      /* (B, H, Q, D), (B, G, K, D), (B, G, K, E), (H) */
    const float *k_tiles, *v_tiles;      /* (B, G, K / TILE, D | E, TILE): the same, a tile's keys side by side */
    const int64_t *at, *lo, *hi;         /* (1 | B, queries) as in a View */
    const float *slopes, *bias;          /* (H); broadcasts to (B, H, queries, K) by its strides */
    const uint8_t *allowed;              /* likewise */
    const int32_t *before, *between;     /* (B, H, queries): the Fates of dropout */
    const float *dout;                   /* (B, H, Q, E) */
    float *out, *reach, *threshold;      /* (B, H, Q, E), (B, H, queries) twice; what is not wanted is NULL */
    int32_t *support;                    /* (B, H, queries) */
    float *dq, *dk, *dv;                 /* (B, H, Q, D), (B, G, K, D | E) of zeros */
    float *piece_dk, *piece_dv;          /* (buffers, K, D | E) of zeros */
    double *dscale;                      /* (B, H) of zeros */
    int64_t bias_strides[4], allowed_strides[4];
    int64_t batch, heads, key_heads, queries, rows, keys, dim, width, samples_seen; /* rows = Q; samples_seen = 1 | B of a View */
    int64_t parts, threads;              /* parts: pieces of a sample and head of keys that are made at once, backward */
    Kernel kernel;
    float boost;                         /* 1 / (1 − p) of dropout */
    uint32_t limit;                      /* of the hash, under which a weight is dropped */
} Call;

typedef struct {
    float *w, *dw;         /* (N, K) scores → weights; what they receive → what the scores receive */
    const float *perfect;  /* (N) for FIXED */
    float *norm, *dtheta;  /* (N), as in rows.Row; what θ receives */
    int64_t *edge;         /* (N) for NEAREST */
    int64_t rows, keys, threads;
    Kernel kernel;
} RowsCall;

typedef struct {
    float peak, reach, norm; /* as in rows.Row */
    int64_t edge;
} Row;

/* -- profiles ------------------------------------------------------------------------------------ */

INLINE float from_bits(int32_t i) { union { int32_t i; float f; } u = {i}; return u.f; }
INLINE int32_t to_bits(float f) { union { float f; int32_t i; } u = {f}; return u.i; }

/* e^f 2^n, also where it is no normal number; |f| ≤ ln(2) / 2 */
INLINE float exp_part(float f, float n) {
    float p = 1.0f / 5040;
    p = p * f + 1.0f / 720; p = p * f + 1.0f / 120; p = p * f + 1.0f / 24;
    p = p * f + 1.0f / 6; p = p * f + 0.5f; p = p * f + 1.0f; p = p * f + 1.0f;
    int32_t whole = (int32_t)n, half = whole >> 1;
    return p * from_bits((half + 127) << 23) * from_bits((whole - half + 127) << 23);
}

/* e^x for x ≤ 0 */
INLINE float exp_of(float x) {
    x = x < -104.0f ? -104.0f : x; /* e^−104 is 0 in fp32 */
    float n = rintf(x * 1.44269504f);
    return exp_part((x - n * 0.693359375f) + n * 2.12194440e-4f, n);
}

/* 2^x for x ≤ 127 */
INLINE float exp2_of(float x) {
    x = x < -151.0f ? -151.0f : x;
    float n = rintf(x);
    return exp_part((x - n) * 0.693147181f, n);
}

/* log2 of a normal number, with all its digits near 1 */
INLINE float log2_of(float u) {
    int32_t bits = to_bits(u) + (0x3f800000 - 0x3f3504f3); /* the mantissa between √½ and √2 */
    float e = (float)((bits >> 23) - 127), m = from_bits((bits & 0x007fffff) + 0x3f3504f3);
    float t = (m - 1.0f) / (m + 1.0f), t2 = t * t;
    float p = 1.0f / 9;
    p = p * t2 + 1.0f / 7; p = p * t2 + 0.2f; p = p * t2 + 1.0f / 3; p = p * t2 + 1.0f;
    return e + 2.88539008f * t * p;
}

/* log2(1 + z) for −1 ≤ z ≤ 0, also where 1 + z rounds to 1 */
INLINE float log2_1p(float z) {
    float u = 1.0f + z, rounded = u - 1.0f;
    float fine = rounded == 0.0f ? z * 1.44269504f : log2_of(u) * (z / (rounded == 0.0f ? 1.0f : rounded));
    return u <= 0.0f ? -1e30f : fine;
}

/* y^r and its slope y^(r−1), where y = (ρ + x)₊ in units of 1 if `free`, else of ρ; for EXP e^x, for STEP whether x > −∞ */
INLINE float power(float x, float reach, float r, const int kind, const int free, float *slope) {
    if (kind == STEP) { *slope = 0.0f; return x > -INFINITY ? 1.0f : 0.0f; }
    if (kind == EXP) return *slope = exp_of(x);
    if (kind == ANY) {
        float z = x / reach;
        z = z > -1.0f ? z : -1.0f;
        *slope = exp2_of((r - 1.0f) * log2_1p(z));
        return *slope + z * *slope;
    }
    float t = free ? x + reach : 1.0f + x / reach;
    float y = t > 0.0f ? t : 0.0f;
    *slope = kind == ONE ? (t > 0.0f ? 1.0f : 0.0f) : kind == TWO ? y : y * y;
    return kind == ONE ? y : *slope * y;
}

/* -- one row ------------------------------------------------------------------------------------- */

/* calls `f` with the kind, and whether powers are free of a unit, as compile-time numbers */
#define BY_KIND(kind, free, f, ...) \
    switch (kind) { \
    case STEP: f(__VA_ARGS__, STEP, 0); break; \
    case ONE: if (free) f(__VA_ARGS__, ONE, 1); else f(__VA_ARGS__, ONE, 0); break; \
    case TWO: if (free) f(__VA_ARGS__, TWO, 1); else f(__VA_ARGS__, TWO, 0); break; \
    case THREE: if (free) f(__VA_ARGS__, THREE, 1); else f(__VA_ARGS__, THREE, 0); break; \
    case ANY: f(__VA_ARGS__, ANY, 0); break; \
    default: f(__VA_ARGS__, EXP, 0); \
    }

INLINE void sum_of(const float *x, int64_t n, float reach, float r, double *mass, double *slopes, const int kind, const int free) {
    *mass = *slopes = 0.0;
    for (int64_t start = 0; start < n; start += CHUNK) {
        int64_t end = start + CHUNK < n ? start + CHUNK : n;
        float m = 0.0f, g = 0.0f;
#pragma omp simd reduction(+ : m, g)
        for (int64_t j = start; j < end; j++) {
            float slope;
            m += power(x[j], reach, r, kind, free, &slope);
            g += slope;
        }
        *mass += m, *slopes += g;
    }
}

INLINE void fill_of(float *x, int64_t n, float reach, float r, float last, double *mass, const int kind, const int free) {
    *mass = 0.0;
    for (int64_t start = 0; start < n; start += CHUNK) {
        int64_t end = start + CHUNK < n ? start + CHUNK : n;
        float m = 0.0f;
#pragma omp simd reduction(+ : m)
        for (int64_t j = start; j < end; j++) {
            float slope, w = power(x[j], reach, r, kind, free, &slope);
            w += slope * last;
            w = w > 0.0f ? w : 0.0f;
            m += w;
            x[j] = w;
        }
        *mass += m;
    }
}

static void sums(const float *x, int64_t n, float reach, float r, int kind, double *mass, double *slopes) {
    BY_KIND(kind, 1, sum_of, x, n, reach, r, mass, slopes)
}

static void fill(float *x, int64_t n, float reach, float r, float last, int kind, int free, double *mass) {
    BY_KIND(kind, free, fill_of, x, n, reach, r, last, mass)
}

/* mass^(−1/r) */
static double root(double mass, double r) { return r == 1.0 ? 1.0 / mass : r == 2.0 ? 1.0 / sqrt(mass) : pow(mass, -1.0 / r); }

/* ρ before the last step of Newton, which is `step`: as rows._normalising. ρ only falls, but for rounding. */
static float solve(const float *x, float *spare, int64_t n, float r, int kind, float start, double *step) {
    float reach = start > 0.0f ? start : r;
    if (kind == ANY) { /* whose powers are dear: only of the keys that are within reach */
        int64_t near = 0;
        for (int64_t j = 0; j < n; j++) {
            spare[near] = x[j];
            near += x[j] > -1.001f * reach;
        }
        x = spare, n = near;
    }
    for (int turn = 1;; turn++) {
        double mass, slopes;
        sums(x, n, reach, r, kind, &mass, &slopes);
        *step = mass * ((kind == ANY ? reach : 1.0) - r * root(mass, r)) / slopes;
        if (turn == MOST_TURNS || !(fabs(*step) > 4 * FLT_EPSILON * reach)) return reach;
        float shorter = (float)(reach - *step), least = reach * FLT_EPSILON;
        reach = shorter > least ? shorter : least;
    }
}

/* the largest of n numbers, −∞ included (with which OpenMP's own maximum need not begin), and whether one is no number */
static float find_peak(const float *x, int64_t n, int *bad) {
    float best[LANES], peak = -INFINITY;
    int32_t wrong = 0;
    for (int i = 0; i < LANES; i++) best[i] = -INFINITY;
    int64_t j = 0;
    for (; j + LANES <= n; j += LANES)
        for (int i = 0; i < LANES; i++) {
            best[i] = x[j + i] > best[i] ? x[j + i] : best[i];
            wrong |= x[j + i] != x[j + i];
        }
    for (; j < n; j++) {
        peak = x[j] > peak ? x[j] : peak;
        wrong |= x[j] != x[j];
    }
    for (int i = 0; i < LANES; i++) peak = best[i] > peak ? best[i] : peak;
    *bad = wrong;
    return peak;
}

/* the k-th largest of n numbers, by halves of the range of their bits in order; fills `order` with these */
static float find_kth(const float *x, int32_t *order, int64_t n, int64_t k) {
    int32_t least = INT32_MAX, most = INT32_MIN;
#pragma omp simd reduction(min : least) reduction(max : most)
    for (int64_t j = 0; j < n; j++) {
        int32_t bits = to_bits(x[j]), place = bits ^ ((bits >> 31) & INT32_MAX);
        order[j] = place;
        least = place < least ? place : least;
        most = place > most ? place : most;
    }
    int64_t low = least, high = most;
    while (low < high) {
        int64_t middle = low + (high - low + 1) / 2;
        int32_t probe = (int32_t)middle, count = 0;
#pragma omp simd reduction(+ : count)
        for (int64_t j = 0; j < n; j++) count += order[j] >= probe;
        if (count >= k) low = middle;
        else high = middle - 1;
        if (count == k) break; /* the least of these k is the one */
    }
    int32_t floor = (int32_t)low, found = INT32_MAX;
#pragma omp simd reduction(min : found)
    for (int64_t j = 0; j < n; j++) {
        int32_t above = order[j] >= floor ? order[j] : INT32_MAX;
        found = above < found ? above : found;
    }
    return from_bits(found ^ ((found >> 31) & INT32_MAX));
}

/* θ = s_(k); hides the keys beyond, and finds the last of those that set it: as rows._nearest */
static float find_nearest(float *s, float *spare, int64_t n, int64_t k, int64_t *edge) {
    int32_t legal = 0, above = 0, ties = 0;
    float theta = -INFINITY;
#pragma omp simd reduction(+ : legal)
    for (int64_t j = 0; j < n; j++) legal += s[j] > -INFINITY;
    k = k < legal ? k : legal;
    theta = find_kth(s, (int32_t *)spare, n, k);
#pragma omp simd reduction(+ : above, ties)
    for (int64_t j = 0; j < n; j++) above += s[j] > theta, ties += s[j] == theta;
    int64_t end = n; /* a tie counts before it; the earlier key wins */
    for (int64_t beyond = ties - (k - above); beyond > 0;) beyond -= s[--end] == theta;
#pragma omp simd
    for (int64_t j = 0; j < n; j++) s[j] = s[j] > theta || (s[j] == theta && j < end) ? s[j] : -INFINITY;
    for (*edge = end - 1; s[*edge] != theta;) --*edge;
    return theta;
}

/* Turns n scores into weights: as rows.weigh. `spare` is overwritten; `start` is a reach that was found before, or 0. */
static Row weigh(const Kernel *k, float *s, float *spare, int64_t n, float perfect, float start) {
    Row row = {-INFINITY, k->r, INFINITY, -1};
    int bad;
    float peak = find_peak(s, n, &bad);
    row.peak = bad ? NAN : peak;
    if (bad || peak == -INFINITY) {
        for (int64_t j = 0; j < n; j++) s[j] = bad ? NAN : 0.0f;
        return row;
    }
    int kind = k->kind, free = k->rule == NORMALISING && kind != ANY;
    float cut = -INFINITY; /* what is not above it weighs nothing */
    if (k->rule == ANCHORED) {
        row.reach = k->value;
    } else if (k->rule == FIXED) {
        float theta = perfect - k->value;
        row.reach = peak - theta < FLT_MAX ? peak - theta : FLT_MAX;
        if (!(row.reach > 0.0f)) kind = STEP; /* nothing in reach: uniform */
        else if (kind == STEP) cut = theta;
    } else if (k->rule == NEAREST) {
        float theta = find_nearest(s, spare, n, k->value < (float)n ? (int64_t)k->value : n, &row.edge);
        row.reach = peak == theta ? 0.0f : peak - theta < FLT_MAX ? peak - theta : FLT_MAX;
    }
#pragma omp simd
    for (int64_t j = 0; j < n; j++) {
        float x = s[j] - peak;
        x = x > -FLT_MAX ? x : -FLT_MAX; /* −∞ is for keys that are hidden */
        s[j] = s[j] == peak ? 0.0f : s[j] > cut ? x : -INFINITY;
    }
    if (k->rule == ANCHORED && (kind == STEP || kind == EXP)) {
#pragma omp simd
        for (int64_t j = 0; j < n; j++) s[j] = s[j] > -row.reach ? s[j] : -INFINITY;
    }
    double mass, step = 0.0;
    float reach = row.reach > 0.0f ? row.reach : 1.0f, last = 0.0f;
    if (k->rule == NORMALISING && kind != EXP) {
        reach = solve(s, spare, n, k->r, kind, start, &step);
        double most = step * (-k->r / (kind == ANY ? reach : 1.0));
        last = (float)(most > 0.5 ? 0.5 : most < -0.5 ? -0.5 : most);
        row.reach = (float)(reach - step);
    } else if (k->rule == NORMALISING) {
        row.reach = INFINITY;
    }
    fill(s, n, reach, k->r, last, kind, free, &mass);
    float whole = (float)mass;
#pragma omp simd
    for (int64_t j = 0; j < n; j++) s[j] = s[j] / whole;
    if (k->rule == NORMALISING) row.norm = k->r;
    else if (kind == EXP) row.norm = row.reach;
    else if (kind != STEP && row.reach > 0.0f) row.norm = (float)(row.reach / root(mass, k->r));
    return row;
}

/* ∂w/∂s at fixed θ and Z, from the weights: as rows._slope */
static void find_slopes(const Kernel *k, const float *w, float *a, int64_t n, float norm) {
    float gain = k->rule == NORMALISING ? 1.0f : k->r / norm, power = -1.0f / k->r;
    switch (k->kind) {
    case EXP: memcpy(a, w, sizeof(float) * n); break;
    case ONE:
#pragma omp simd
        for (int64_t j = 0; j < n; j++) a[j] = w[j] > 0.0f ? gain : w[j];
        break;
    case TWO:
#pragma omp simd
        for (int64_t j = 0; j < n; j++) a[j] = sqrtf(w[j]) * gain;
        break;
    default:
#pragma omp simd
        for (int64_t j = 0; j < n; j++) a[j] = w[j] * exp2_of(log2_of(w[j] > FLT_MIN ? w[j] : FLT_MIN) * power) * gain;
    }
}

/* Turns ∂L/∂w into ∂L/∂s, and returns what θ receives: as rows.pull. Fills a with the slopes. */
static double pull(const Kernel *k, const float *w, float *a, float *dw, int64_t n, const Row *row) {
    if (k->kind == STEP) { /* has no slope */
        memset(dw, 0, sizeof(float) * n);
        return 0.0;
    }
    find_slopes(k, w, a, n, row->norm);
    double top = 0.0, total = 0.0, moved = 0.0;
    float best = 0.0f;
    const float *by = k->rule == NORMALISING ? a : w;
    for (int64_t start = 0; start < n; start += CHUNK) {
        int64_t end = start + CHUNK < n ? start + CHUNK : n;
        float t = 0.0f, g = 0.0f;
#pragma omp simd reduction(+ : t, g) reduction(max : best)
        for (int64_t j = start; j < end; j++) {
            t += by[j] * dw[j];
            g += by[j];
            best = w[j] > best ? w[j] : best;
        }
        top += t, total += g;
    }
    float centre = (float)(k->rule == NORMALISING ? top / (total > FLT_MIN ? total : FLT_MIN) : top);
    for (int64_t start = 0; start < n; start += CHUNK) {
        int64_t end = start + CHUNK < n ? start + CHUNK : n;
        float m = 0.0f;
#pragma omp simd reduction(+ : m)
        for (int64_t j = start; j < end; j++) {
            dw[j] = a[j] * (dw[j] - centre);
            m += dw[j];
        }
        moved += m;
    }
    if (k->rule == NEAREST && row->edge >= 0) dw[row->edge] -= (float)moved;
    if (k->rule == ANCHORED) {
        int64_t ties = 0;
        for (int64_t j = 0; j < n; j++) ties += w[j] == best && best > 0.0f;
        float share = ties ? (float)(moved / ties) : 0.0f;
        for (int64_t j = 0; j < n; j++) dw[j] -= w[j] == best ? share : 0.0f;
    }
    return -moved;
}

/* Dropout of the weights of keys `first` on, or of what they receive: as dropout.survives. */
static void thin(const Call *c, float *x, int64_t n, int64_t row, int64_t first) {
    if (!c->before) return;
    uint32_t before = (uint32_t)c->before[row], between = (uint32_t)c->between[row], limit = c->limit;
    float boost = c->boost;
#pragma omp simd
    for (int64_t j = 0; j < n; j++) {
        uint32_t h = before + (uint32_t)(first + j) * STRIDE;
        h = (h ^ h >> 16) * FIRST ^ between;
        h = (h ^ h >> 15) * SECOND;
        x[j] *= (h ^ h >> 16) >= limit ? boost : 0.0f;
    }
}

/* -- ROWS rows at a time ------------------------------------------------------------------------- */

typedef struct {
    float *w, *d, *spare;      /* (ROWS, K) twice, and (K) */
    int32_t *tiles;            /* those that hold a weight */
    int64_t held;              /* how many */
    int64_t first, last;       /* the tiles that some row can see */
    int64_t lo[ROWS], hi[ROWS];
    Row rows[ROWS];
} Block;

/* s = x · keys of a tile */
INLINE void dot_tile(const float *x, const float *tile, int64_t dim, float *s, int64_t stride) {
    vec sum[ROWS][2] = {0};
    for (int64_t d = 0; d < dim; d++) {
        vec left = *(const vec *)(tile + d * TILE), right = *(const vec *)(tile + d * TILE + LANES);
        for (int i = 0; i < ROWS; i++) sum[i][0] += x[i * dim + d] * left, sum[i][1] += x[i * dim + d] * right;
    }
    for (int i = 0; i < ROWS; i++) {
        *(vec *)(s + i * stride) = sum[i][0];
        *(vec *)(s + i * stride + LANES) = sum[i][1];
    }
}

/* out = Σ_j w_j rows_j over the tiles that hold a weight, of `wide` vectors of the columns from `col` on */
INLINE void mix_columns(const Block *b, const float *w, int64_t keys, const float *rows, int64_t dim, int64_t col, float *out, const int wide) {
    vec total[ROWS][2] = {0}, sum[ROWS][2] = {0};
    for (int64_t t = 0; t < b->held; t++) {
        const float *x = rows + b->tiles[t] * TILE * dim + col, *weight = w + b->tiles[t] * TILE;
        for (int64_t j = 0; j < TILE; j++, x += dim, weight++)
            for (int n = 0; n < wide; n++)
                for (int i = 0; i < ROWS; i++) sum[i][n] += weight[i * keys] * *(const vec *)(x + n * LANES);
        if (t + 1 == b->held || b->tiles[t] / FLUSH != b->tiles[t + 1] / FLUSH)
            for (int i = 0; i < ROWS; i++)
                for (int n = 0; n < wide; n++) total[i][n] += sum[i][n], sum[i][n] = (vec){0};
    }
    for (int i = 0; i < ROWS; i++)
        for (int n = 0; n < wide; n++) *(vec *)(out + i * dim + col + n * LANES) = total[i][n];
}

static void mix(const Block *b, const float *w, int64_t keys, const float *rows, int64_t dim, float *out) {
    int64_t col = 0;
    for (; col + 2 * LANES <= dim; col += 2 * LANES) mix_columns(b, w, keys, rows, dim, col, out, 2);
    if (col < dim) mix_columns(b, w, keys, rows, dim, col, out, 1);
}

/* into_j += Σ_i w_ij x_i */
INLINE void spread_columns(const Block *b, const float *w, int64_t keys, const float *x, int64_t dim, int64_t col, float *into, const int wide) {
    vec rows[ROWS][2];
    for (int i = 0; i < ROWS; i++)
        for (int n = 0; n < wide; n++) rows[i][n] = *(const vec *)(x + i * dim + col + n * LANES);
    for (int64_t t = 0; t < b->held; t++) {
        float *y = into + b->tiles[t] * TILE * dim + col;
        const float *weight = w + b->tiles[t] * TILE;
        for (int64_t j = 0; j < TILE; j++, y += dim, weight++)
            for (int n = 0; n < wide; n++) {
                vec sum = *(vec *)(y + n * LANES);
                for (int i = 0; i < ROWS; i++) sum += weight[i * keys] * rows[i][n];
                *(vec *)(y + n * LANES) = sum;
            }
    }
}

static void spread(const Block *b, const float *w, int64_t keys, const float *x, int64_t dim, float *into) {
    int64_t col = 0;
    for (; col + 2 * LANES <= dim; col += 2 * LANES) spread_columns(b, w, keys, x, dim, col, into, 2);
    if (col < dim) spread_columns(b, w, keys, x, dim, col, into, 1);
}

/* what the rows from q on may see */
static void look(const Call *c, Block *b, int64_t sample, int64_t q) {
    b->first = c->keys, b->last = 0;
    for (int i = 0; i < ROWS; i++) {
        int64_t place = (c->samples_seen > 1 ? sample * c->queries : 0) + q + i, real = q + i < c->queries;
        int64_t lo = real ? c->lo[place] : 0, hi = real ? c->hi[place] : 0;
        b->lo[i] = lo, b->hi[i] = hi > lo ? hi : lo;
        if (hi > lo) {
            b->first = lo / TILE < b->first ? lo / TILE : b->first;
            b->last = (hi + TILE - 1) / TILE > b->last ? (hi + TILE - 1) / TILE : b->last;
        }
    }
}

static void clear(float *x, int64_t from, int64_t to) {
    if (to > from) memset(x + from, 0, sizeof(float) * (to - from));
}

/* zeros where a product has left numbers beyond the keys that row i may see */
static void clear_unseen(const Block *b, int i, float *x) {
    int64_t start = b->first * TILE, end = b->last * TILE;
    if (b->lo[i] == b->hi[i]) {
        clear(x, start, end);
    } else {
        clear(x, start, b->lo[i]);
        clear(x, b->hi[i], end);
    }
}

/* The weights of the rows from q on of a sample and head, and the tiles that hold any. */
static void weigh_block(const Call *c, Block *b, int64_t sample, int64_t head, int64_t q, int for_gradient) {
    int64_t group = head / (c->heads / c->key_heads), keys = c->keys, dim = c->dim;
    const float *x = c->q + ((sample * c->heads + head) * c->rows + q) * dim;
    const float *tiles = c->k_tiles + (sample * c->key_heads + group) * keys * dim;
    look(c, b, sample, q);
    for (int64_t t = b->first; t < b->last; t++) dot_tile(x, tiles + t * TILE * dim, dim, b->w + t * TILE, keys);
    for (int i = 0; i < ROWS; i++) {
        float *s = b->w + i * keys, scale = c->scale[head];
        int64_t lo = b->lo[i], hi = b->hi[i], row = (sample * c->heads + head) * c->queries + q + i;
#pragma omp simd
        for (int64_t j = lo; j < hi; j++) s[j] *= scale;
        if (c->bias && hi > lo) {
            const int64_t *by = c->bias_strides;
            const float *bias = c->bias + sample * by[0] + head * by[1] + (q + i) * by[2];
            for (int64_t j = lo; j < hi; j++) s[j] += bias[j * by[3]];
        }
        if (c->slopes && hi > lo) {
            int64_t at = c->at[(c->samples_seen > 1 ? sample * c->queries : 0) + q + i];
            for (int64_t j = lo; j < hi; j++) s[j] -= c->slopes[head] * (float)(at > j ? at - j : j - at);
        }
        if (c->allowed && hi > lo) {
            const int64_t *by = c->allowed_strides;
            const uint8_t *allowed = c->allowed + sample * by[0] + head * by[1] + (q + i) * by[2];
            for (int64_t j = lo; j < hi; j++) s[j] = allowed[j * by[3]] ? s[j] : -INFINITY;
        }
        float start = for_gradient && c->reach && hi > lo ? c->reach[row] : 0.0f;
        b->rows[i] = weigh(&c->kernel, s + lo, b->spare, hi - lo, scale, start);
        clear_unseen(b, i, s);
    }
    b->held = 0;
    for (int64_t t = b->first; t < b->last; t++) {
        vec any = {0};
        for (int i = 0; i < ROWS; i++)
            for (int n = 0; n < 2; n++)
                any += *(const vec *)(b->w + i * keys + t * TILE + n * LANES);
        float sum = 0.0f;
        for (int n = 0; n < LANES; n++) sum += any[n];
        if (sum != 0.0f || c->kernel.rule == NEAREST) b->tiles[b->held++] = (int32_t)t; /* a key that sets θ may weigh nothing */
    }
}

static Block make_block(const Call *c) {
    Block b = {0};
    b.w = malloc(sizeof(float) * (2 * ROWS + 1) * c->keys);
    b.d = b.w + ROWS * c->keys, b.spare = b.d + ROWS * c->keys;
    b.tiles = malloc(sizeof(int32_t) * (c->keys / TILE + 1));
    return b;
}

static void free_block(Block *b) { free(b->w), free(b->tiles); }

/* -- whole calls --------------------------------------------------------------------------------- */

int lanes(void) { return LANES; }
int rows_at_once(void) { return ROWS; }
int long_run(void) { return LONG_RUN; }

void weigh_rows(const RowsCall *c) {
#pragma omp parallel num_threads(c->threads)
    {
        float *spare = malloc(sizeof(float) * c->keys);
#pragma omp for schedule(static)
        for (int64_t i = 0; i < c->rows; i++) {
            Row row = weigh(&c->kernel, c->w + i * c->keys, spare, c->keys, c->perfect ? c->perfect[i] : 0.0f, 0.0f);
            c->norm[i] = row.norm;
            if (c->edge) c->edge[i] = row.edge > 0 ? row.edge : 0;
        }
        free(spare);
    }
}

void pull_rows(const RowsCall *c) {
#pragma omp parallel num_threads(c->threads)
    {
        float *spare = malloc(sizeof(float) * c->keys);
#pragma omp for schedule(static)
        for (int64_t i = 0; i < c->rows; i++) {
            Row row = {0.0f, 0.0f, c->norm[i], c->edge ? c->edge[i] : -1};
            double dtheta = pull(&c->kernel, c->w + i * c->keys, spare, c->dw + i * c->keys, c->keys, &row);
            if (c->dtheta) c->dtheta[i] = (float)dtheta;
        }
        free(spare);
    }
}

void attend(const Call *c) {
    int64_t runs = (c->rows + RUN - 1) / RUN, pieces = c->batch * c->heads * runs;
#pragma omp parallel num_threads(c->threads)
    {
        Block b = make_block(c);
#pragma omp for schedule(dynamic, 1)
        for (int64_t piece = 0; piece < pieces; piece++) {
            int64_t sample = piece / runs / c->heads, head = piece / runs % c->heads, group = head / (c->heads / c->key_heads);
            int64_t start = piece % runs * RUN, end = start + RUN < c->rows ? start + RUN : c->rows;
            const float *values = c->v + (sample * c->key_heads + group) * c->keys * c->width;
            for (int64_t q = start; q < end; q += ROWS) {
                weigh_block(c, &b, sample, head, q, 0);
                for (int i = 0; i < ROWS && q + i < c->queries; i++) {
                    int64_t row = (sample * c->heads + head) * c->queries + q + i, n = b.hi[i] - b.lo[i];
                    const Row *found = &b.rows[i];
                    float *w = b.w + i * c->keys + b.lo[i];
                    if (c->reach) c->reach[row] = found->reach;
                    if (c->threshold) c->threshold[row] = found->peak == -INFINITY ? INFINITY : found->peak - found->reach;
                    if (c->support) {
                        int32_t held = 0;
                        for (int64_t j = 0; j < n; j++) held += w[j] > 0.0f;
                        c->support[row] = held;
                    }
                    thin(c, w, n, row, b.lo[i]);
                }
                mix(&b, b.w, c->keys, values, c->width, c->out + ((sample * c->heads + head) * c->rows + q) * c->width);
            }
        }
        free_block(&b);
    }
}

/* A piece is LONG_RUN queries of a head. What it gives to dk and dv is summed apart, in buffers of zeros, and joins the rest in
   the order of the pieces: long sums keep their digits, and neither the threads nor the batch decide their bits. */
typedef struct {
    int64_t first, last; /* tiles that it gives to */
    double dscale;
} Gift;

static Gift pull_piece(const Call *c, Block *b, float *scaled, int64_t place, int64_t piece, float *dk, float *dv) {
    int64_t share = c->heads / c->key_heads, sample = place / c->key_heads, head = place % c->key_heads * share + piece % share;
    int64_t start = piece / share * LONG_RUN, end = start + LONG_RUN < c->rows ? start + LONG_RUN : c->rows;
    const float *keys = c->k + place * c->keys * c->dim, *v_tiles = c->v_tiles + place * c->keys * c->width;
    Gift gift = {c->keys / TILE, 0, 0.0};
    for (int64_t q = start; q < end; q += ROWS) {
        int64_t row = (sample * c->heads + head) * c->rows + q;
        const float *x = c->q + row * c->dim, *dout = c->dout + row * c->width;
        float *dq = c->dq + row * c->dim;
        weigh_block(c, b, sample, head, q, 1);
        for (int i = 0; i < ROWS; i++) clear(b->d + i * c->keys, b->first * TILE, b->last * TILE);
        for (int64_t t = 0; t < b->held; t++)
            dot_tile(dout, v_tiles + b->tiles[t] * TILE * c->width, c->width, b->d + b->tiles[t] * TILE, c->keys);
        for (int i = 0; i < ROWS && q + i < c->queries; i++) {
            int64_t lo = b->lo[i], n = b->hi[i] - lo, fate = (sample * c->heads + head) * c->queries + q + i;
            float *w = b->w + i * c->keys + lo, *d = b->d + i * c->keys + lo;
            thin(c, d, n, fate, lo);
            double dtheta = pull(&c->kernel, w, b->spare, d, n, &b->rows[i]);
            if (c->kernel.rule == FIXED) gift.dscale += dtheta; /* θ is measured from a perfect match, whose score is the scale */
            thin(c, w, n, fate, lo);
        }
        for (int i = 0; i < ROWS; i++) clear_unseen(b, i, b->d + i * c->keys);
        mix(b, b->d, c->keys, keys, c->dim, dq);
        for (int64_t n = 0; n < ROWS * c->dim; n++) {
            gift.dscale += (double)dq[n] * x[n];
            dq[n] *= c->scale[head];
            scaled[n] = x[n] * c->scale[head];
        }
        spread(b, b->d, c->keys, scaled, c->dim, dk);
        spread(b, b->w, c->keys, dout, c->width, dv);
        if (b->held) {
            gift.first = b->tiles[0] < gift.first ? b->tiles[0] : gift.first;
            gift.last = b->tiles[b->held - 1] + 1 > gift.last ? b->tiles[b->held - 1] + 1 : gift.last;
        }
    }
    return gift;
}

/* x += y, and y becomes 0 again */
static void join(float *x, float *y, int64_t n) {
#pragma omp simd
    for (int64_t i = 0; i < n; i++) x[i] += y[i], y[i] = 0.0f;
}

/* Hands over what a piece gives to the tiles from `start` to `end`, dscale with the first of them. */
static void join_piece(const Call *c, int64_t place, int64_t piece, const Gift *gift, float *dk, float *dv, int64_t start, int64_t end) {
    int64_t share = c->heads / c->key_heads, first = gift->first > start ? gift->first : start, last = gift->last < end ? gift->last : end;
    if (start == 0 && end > 0) c->dscale[place * share + piece % share] += gift->dscale;
    if (first >= last) return;
    int64_t at = place * c->keys + first * TILE, keys = (last - first) * TILE;
    join(c->dk + at * c->dim, dk + first * TILE * c->dim, keys * c->dim);
    join(c->dv + at * c->width, dv + first * TILE * c->width, keys * c->width);
}

/* Where `parts` is 1 a thread takes all pieces of a sample and head of keys, one after another, in its own buffer. Else so many
   pieces of each are made at once, each in a buffer of its own. */
void attend_backward(const Call *c) {
    int64_t places = c->batch * c->key_heads, share = c->heads / c->key_heads, tiles = c->keys / TILE;
    int64_t pieces = (c->rows + LONG_RUN - 1) / LONG_RUN * share, k_size = c->keys * c->dim, v_size = c->keys * c->width;
    Gift *gifts = malloc(sizeof(Gift) * c->parts * places);
#pragma omp parallel num_threads(c->parts == 1 && places < c->threads ? places : c->threads)
    {
        Block b = make_block(c);
        float *scaled = malloc(sizeof(float) * ROWS * c->dim);
        if (c->parts == 1) {
            float *dk = c->piece_dk + omp_get_thread_num() * k_size, *dv = c->piece_dv + omp_get_thread_num() * v_size;
#pragma omp for schedule(dynamic, 1)
            for (int64_t place = 0; place < places; place++)
                for (int64_t piece = 0; piece < pieces; piece++) {
                    Gift gift = pull_piece(c, &b, scaled, place, piece, dk, dv);
                    join_piece(c, place, piece, &gift, dk, dv, 0, tiles);
                }
        }
        for (int64_t wave = 0; wave < pieces && c->parts > 1; wave += c->parts) {
            int64_t count = pieces - wave < c->parts ? pieces - wave : c->parts;
#pragma omp for schedule(dynamic, 1)
            for (int64_t i = 0; i < count * places; i++)
                gifts[i] = pull_piece(c, &b, scaled, i % places, wave + i / places, c->piece_dk + i * k_size, c->piece_dv + i * v_size);
#pragma omp for schedule(static)
            for (int64_t j = 0; j < places * STRIPES; j++)
                for (int64_t i = j / STRIPES; i < count * places; i += places)
                    join_piece(c, i % places, wave + i / places, gifts + i, c->piece_dk + i * k_size, c->piece_dv + i * v_size,
                               tiles * (j % STRIPES) / STRIPES, tiles * (j % STRIPES + 1) / STRIPES);
        }
        free(scaled);
        free_block(&b);
    }
    free(gifts);
}
