// FlashAttention-2 forward pass for sm_80 and later (Dao, 2023), built around mma.m16n8k16,
// ldmatrix and cp.async. A warp holds the sums of 16 rows in registers. Keys and values pass
// through shared memory by asynchronous copies. The V of a tile is copied while its scores are
// computed, and the K of the next tile while P V is computed.
#pragma once

#include "work.cuh"

namespace kvboost_edge_cuda {

// Layout of shared memory: queries [kRows], values [kKeys], keys [kKeys]. A row has kTileStride
// elements. If queries are kept in registers, the values use the space of the queries.
template <int kHeadDim, int kWarpsM>
struct MmaShape {
    static constexpr int kWarpsN = kThreads / 32 / kWarpsM;
    static constexpr int kRows = 16 * kWarpsM;
    static constexpr int kKeys = kHeadDim > 128 && kWarpsM > 1 ? 32 : 64;  // more keys do not fit next to 128 sums per lane
    static constexpr int kWarpKeys = kKeys / kWarpsN;
    static constexpr bool kKeepsQueries = kHeadDim <= 128;  // in registers; otherwise each tile reads them again
    static constexpr int kSharedRows = kKeepsQueries ? 2 * kKeys : kRows + 2 * kKeys;
    static constexpr int kSharedBytes = kSharedRows * kTileStride<kHeadDim> * 2;
    static_assert(!kKeepsQueries || kRows <= kKeys, "the queries must fit where the values will be");
    static_assert(kWarpKeys % 16 == 0, "a warp multiplies 16 keys at a time");
};

#if KVBOOST_EDGE_HAS_MMA

// A lane's part of rows lane / 4 and lane / 4 + 8 of its warp: the maximum of the scores, the
// lane's part of their sum (base 2), and weighted values in the layout of multiply_add.
template <int kHeadDim>
struct LaneRows {
    float largest[2];
    float sum[2];
    float out[kHeadDim / 8][4];
};

__device__ __forceinline__ float quad_max(float x) {
    x = fmaxf(x, __shfl_xor_sync(0xffffffffu, x, 1));
    return fmaxf(x, __shfl_xor_sync(0xffffffffu, x, 2));
}

__device__ __forceinline__ float quad_sum(float x) {
    x += __shfl_xor_sync(0xffffffffu, x, 1);
    return x + __shfl_xor_sync(0xffffffffu, x, 2);
}

// Load the fragment with channels [16 step, 16 step + 16) of the warp's query rows.
template <int kHeadDim>
__device__ __forceinline__ void load_query(unsigned (&a)[4], const unsigned short *tile, int lane, int step) {
    load_matrices(a, tile + lane % 16 * kTileStride<kHeadDim> + step * 16 + lane / 16 * 8);
}

// products[n] = queries . keys [8 n, 8 n + 8), where keys are the warp's keys.
template <class Element, int kHeadDim, class Shape>
__device__ __forceinline__ void multiply_keys(float (&products)[Shape::kWarpKeys / 8][4], const unsigned (&kept)[kHeadDim / 16][4],
                                              const unsigned short *queries, const unsigned short *keys, int lane) {
#pragma unroll
    for (int n = 0; n < Shape::kWarpKeys / 8; ++n)
#pragma unroll
        for (int j = 0; j < 4; ++j) products[n][j] = 0;
    const unsigned short *row = keys + (lane % 8 + lane / 16 * 8) * kTileStride<kHeadDim> + lane / 8 % 2 * 8;
#pragma unroll
    for (int step = 0; step < kHeadDim / 16; ++step) {
        unsigned a[4];
        if constexpr (Shape::kKeepsQueries) {
#pragma unroll
            for (int j = 0; j < 4; ++j) a[j] = kept[step][j];
        } else {
            load_query<kHeadDim>(a, queries, lane, step);
        }
#pragma unroll
        for (int n = 0; n < Shape::kWarpKeys / 16; ++n) {
            unsigned b[4];
            load_matrices(b, row + n * 16 * kTileStride<kHeadDim> + step * 16);
            multiply_add<Element>(products[2 * n], a, b[0], b[1]);
            multiply_add<Element>(products[2 * n + 1], a, b[2], b[3]);
        }
    }
}

// Online softmax: replace products by exp2(score - largest), and update the rows' maxima, sums and
// weighted values.
template <int kHeadDim, int kNumKeys>
__device__ __forceinline__ void soften(float (&scores)[kNumKeys / 8][4], LaneRows<kHeadDim> &rows, const Span (&sees)[2], ScoreScale scale,
                                       int first_key, bool is_clear, int lane) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        float largest = rows.largest[half];
#pragma unroll
        for (int n = 0; n < kNumKeys / 8; ++n)
#pragma unroll
            for (int j = 2 * half; j < 2 * half + 2; ++j) {
                const int key = first_key + 8 * n + lane % 4 * 2 + j % 2;
                const float score = scale(scores[n][j]);
                scores[n][j] = is_clear || sees[half].holds(key) ? score : negative_infinity();
                largest = fmaxf(largest, scores[n][j]);
            }
        largest = quad_max(largest);
        const float base = largest == negative_infinity() ? 0 : largest;
        const float shrink = exp2_fast(rows.largest[half] - base);
        rows.largest[half] = largest;
        float sum = 0;
#pragma unroll
        for (int n = 0; n < kNumKeys / 8; ++n)
#pragma unroll
            for (int j = 2 * half; j < 2 * half + 2; ++j) {
                scores[n][j] = exp2_fast(scores[n][j] - base);
                sum += scores[n][j];
            }
        rows.sum[half] = rows.sum[half] * shrink + sum;
#pragma unroll
        for (int n = 0; n < kHeadDim / 8; ++n)
#pragma unroll
            for (int j = 2 * half; j < 2 * half + 2; ++j) rows.out[n][j] *= shrink;
    }
}

// rows.out += weights . values of the warp's keys.
template <class Element, int kHeadDim, int kNumKeys>
__device__ __forceinline__ void add_values(LaneRows<kHeadDim> &rows, const float (&weights)[kNumKeys / 8][4], const unsigned short *values,
                                           int lane) {
    const unsigned short *row = values + lane % 16 * kTileStride<kHeadDim> + lane / 16 * 8;
#pragma unroll
    for (int k = 0; k < kNumKeys / 16; ++k) {
        const unsigned a[4] = {
            pack<Element>(weights[2 * k][0], weights[2 * k][1]),
            pack<Element>(weights[2 * k][2], weights[2 * k][3]),
            pack<Element>(weights[2 * k + 1][0], weights[2 * k + 1][1]),
            pack<Element>(weights[2 * k + 1][2], weights[2 * k + 1][3]),
        };
#pragma unroll
        for (int n = 0; n < kHeadDim / 16; ++n) {
            unsigned b[4];
            load_matrices_transposed(b, row + k * 16 * kTileStride<kHeadDim> + n * 16);
            multiply_add<Element>(rows.out[2 * n], a, b[0], b[1]);
            multiply_add<Element>(rows.out[2 * n + 1], a, b[2], b[3]);
        }
    }
}

// Store a warp's state in shared memory, one number after another for all 32 lanes.
template <int kHeadDim>
__device__ __forceinline__ void put_rows(float *area, const LaneRows<kHeadDim> &rows, int lane) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        area[half * 32 + lane] = rows.largest[half];
        area[(2 + half) * 32 + lane] = rows.sum[half];
    }
#pragma unroll
    for (int n = 0; n < kHeadDim / 8; ++n)
#pragma unroll
        for (int j = 0; j < 4; ++j) area[(4 + n * 4 + j) * 32 + lane] = rows.out[n][j];
}

template <int kHeadDim>
__device__ __forceinline__ void merge_rows(LaneRows<kHeadDim> &rows, const float *area, int lane) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        const float other = area[half * 32 + lane];
        const float largest = fmaxf(rows.largest[half], other);
        const float base = largest == negative_infinity() ? 0 : largest;
        const float shrink = exp2_fast(rows.largest[half] - base), shrink_other = exp2_fast(other - base);
        rows.largest[half] = largest;
        rows.sum[half] = rows.sum[half] * shrink + area[(2 + half) * 32 + lane] * shrink_other;
#pragma unroll
        for (int n = 0; n < kHeadDim / 8; ++n)
#pragma unroll
            for (int j = 2 * half; j < 2 * half + 2; ++j)
                rows.out[n][j] = rows.out[n][j] * shrink + area[(4 + n * 4 + j) * 32 + lane] * shrink_other;
    }
}

// Merge the states of four warps that shared the keys of 16 rows into warp 0. The order of sums is
// fixed: (0 + 2) + (1 + 3). The tiles may be overwritten, because a barrier follows the last tile.
template <int kHeadDim>
__device__ __forceinline__ void merge_warps(LaneRows<kHeadDim> &rows, float *area, int warp, int lane) {
    constexpr int kFloats = (4 + kHeadDim / 2) * 32;
    if (warp >= 2) put_rows(area + (warp - 2) * kFloats, rows, lane);
    __syncthreads();
    if (warp < 2) merge_rows(rows, area + warp * kFloats, lane);
    if (warp == 1) put_rows(area + kFloats, rows, lane);
    __syncthreads();
    if (warp == 0) merge_rows(rows, area + kFloats, lane);
}

template <class Element, int kHeadDim>
__device__ __forceinline__ void store_rows(const AttentionParams &p, const Work &work, const LaneRows<kHeadDim> &rows, int first_row, int lane) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        const float sum = quad_sum(rows.sum[half]);
        const int row = first_row + lane / 4 + 8 * half;
        if (row >= work.num_rows) continue;
        const RowEnd end(rows.largest[half], sum, sink_of(p, work, row));
        if (lane % 4 == 0) store_lse(p, work, row, end.lse);
        const int channel = lane % 4 * 2;
        if (p.num_splits > 1) {
            float *out = partial_row(p, work, row);
#pragma unroll
            for (int n = 0; n < kHeadDim / 8; ++n)
                if (n * 8 < p.head_dim)
                    *reinterpret_cast<float2 *>(out + n * 8 + channel) =
                        make_float2(rows.out[n][2 * half] * end.factor, rows.out[n][2 * half + 1] * end.factor);
        } else {
            unsigned short *out =
                static_cast<unsigned short *>(p.out) + row_offset(p, work, row, p.out_batch_stride, p.out_row_stride, p.out_head_stride);
#pragma unroll
            for (int n = 0; n < kHeadDim / 8; ++n)
                if (n * 8 < p.head_dim)
                    *reinterpret_cast<unsigned *>(out + n * 8 + channel) =
                        pack<Element>(rows.out[n][2 * half] * end.factor, rows.out[n][2 * half + 1] * end.factor);
        }
    }
}

#endif  // KVBOOST_EDGE_HAS_MMA

template <class Element, int kHeadDim, int kWarpsM>
__global__ void __launch_bounds__(kThreads) attention_mma(AttentionParams p) {
#if KVBOOST_EDGE_HAS_MMA
    using Shape = MmaShape<kHeadDim, kWarpsM>;
    Work work;
    if (!find_work<Shape::kRows, Shape::kKeys>(p, work)) return;
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const int warp_m = warp % kWarpsM, warp_n = warp / kWarpsM;
    unsigned short *queries = reinterpret_cast<unsigned short *>(shared_arena());
    unsigned short *values = Shape::kKeepsQueries ? queries : queries + Shape::kRows * kTileStride<kHeadDim>;
    unsigned short *keys = values + Shape::kKeys * kTileStride<kHeadDim>;
    const unsigned short *warp_queries = queries + warp_m * 16 * kTileStride<kHeadDim>;
    const KeyRows key_rows(p, work, p.k, p.k_batch_stride, p.k_row_stride, p.k_head_stride);
    const KeyRows value_rows(p, work, p.v, p.v_batch_stride, p.v_row_stride, p.v_head_stride);

    load_queries<kHeadDim, Shape::kRows, true>(queries, p, work);
    load_keys<kHeadDim, Shape::kKeys, true>(keys, key_rows, work.keys.begin, work.keys, p.head_dim);
    wait_copies();
    __syncthreads();
    unsigned kept[kHeadDim / 16][4];
    if constexpr (Shape::kKeepsQueries) {
#pragma unroll
        for (int step = 0; step < kHeadDim / 16; ++step) load_query<kHeadDim>(kept[step], warp_queries, lane, step);
        __syncthreads();  // all queries are read before the values overwrite them
    }

    const int first_row = work.first_row + warp_m * 16;
    Span sees[2];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        const int row = first_row + lane / 4 + 8 * half;
        sees[half] = visible_keys(p, work.len_q, work.len_k, row / work.group);
    }
    const ScoreScale scale(p);
    LaneRows<kHeadDim> rows = {{negative_infinity(), negative_infinity()}, {0, 0}, {}};

    for (int first = work.keys.begin; first < work.keys.end; first += Shape::kKeys) {
        load_keys<kHeadDim, Shape::kKeys, true>(values, value_rows, first, work.keys, p.head_dim);
        float scores[Shape::kWarpKeys / 8][4];
        const int warp_key = warp_n * Shape::kWarpKeys;
        multiply_keys<Element, kHeadDim, Shape>(scores, kept, warp_queries, keys + warp_key * kTileStride<kHeadDim>, lane);
        wait_copies();
        __syncthreads();  // the values have arrived, and the keys are no longer read
        const int next = first + Shape::kKeys;
        if (next < work.keys.end) load_keys<kHeadDim, Shape::kKeys, true>(keys, key_rows, next, work.keys, p.head_dim);
        const bool is_clear = first >= work.clear.begin && next <= work.clear.end;
        soften<kHeadDim, Shape::kWarpKeys>(scores, rows, sees, scale, first + warp_key, is_clear, lane);
        add_values<Element, kHeadDim, Shape::kWarpKeys>(rows, scores, values + warp_key * kTileStride<kHeadDim>, lane);
        wait_copies();
        __syncthreads();  // the next keys have arrived, and the values are no longer read
    }

    if constexpr (Shape::kWarpsN > 1) {
        merge_warps(rows, reinterpret_cast<float *>(values), warp, lane);
        if (warp > 0) return;
    }
    store_rows<Element>(p, work, rows, first_row, lane);
#endif
}

}  // namespace kvboost_edge_cuda
