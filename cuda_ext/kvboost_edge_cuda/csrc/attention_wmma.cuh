// FlashAttention-2 forward pass for sm_70 and sm_75 in f16, built around wmma 16x16x16. Its
// fragments are opaque, so scores pass through shared memory for the softmax. A fragment of row
// numbers gives the row of each element of a sum. Keys and values of a tile alternate in one
// buffer, because sm_75 has only 64 KiB of shared memory.
#pragma once

#include "work.cuh"

#if !defined(KVBOOST_EDGE_CUDA_ON_CPU)
#include <mma.h>
#endif

namespace kvboost_edge_cuda {

// Layout of shared memory: queries [kRows], then one tile of keys or values [kKeys]. A row has
// kTileStride elements. Then each warp has 16 rows of kScoreStride floats and 32 floats of factors.
template <int kHeadDim, int kWarpsM>
struct WmmaShape {
    static constexpr int kWarps = kThreads / 32;
    static constexpr int kWarpsN = kWarps / kWarpsM;
    static constexpr int kRows = 16 * kWarpsM;
    static constexpr int kKeys = kHeadDim > 128 && kWarpsM > 1 ? 32 : 64;
    static constexpr int kWarpKeys = kKeys / kWarpsN;
    static constexpr int kScoreStride = kWarpKeys + 8;
    static constexpr int kWarpFloats = 16 * kScoreStride + 32;
    static constexpr int kTileBytes = (kRows + kKeys) * kTileStride<kHeadDim> * 2;
    static constexpr int kSharedBytes = kTileBytes + kWarps * kWarpFloats * 4;
};

#if KVBOOST_EDGE_HAS_WMMA

namespace wmma = nvcuda::wmma;
using RowFragment = wmma::fragment<wmma::matrix_a, 16, 16, 16, half, wmma::row_major>;
using KeyFragment = wmma::fragment<wmma::matrix_b, 16, 16, 16, half, wmma::col_major>;
using ValueFragment = wmma::fragment<wmma::matrix_b, 16, 16, 16, half, wmma::row_major>;
using SumFragment = wmma::fragment<wmma::accumulator, 16, 16, 16, float>;
constexpr int kSums = SumFragment::num_elements;

// A lane's part of the warp's 16 rows: the maximum and sum (base 2) of row lane / 2, which are
// equal in both lanes of a pair, and elements of the weighted values. Element t of any `out` is in
// row (element_rows >> 4 t) & 15.
template <int kHeadDim>
struct WarpRows {
    float largest, sum;
    unsigned element_rows;
    SumFragment out[kHeadDim / 16];
};

template <int kHeadDim, class Shape>
__device__ __forceinline__ void start_rows(WarpRows<kHeadDim> &rows, float *scores, int lane) {
    rows.largest = negative_infinity();
    rows.sum = 0;
    for (int i = lane; i < 256; i += 32) scores[i / 16 * Shape::kScoreStride + i % 16] = static_cast<float>(i / 16);
    __syncwarp();
    SumFragment numbers;
    wmma::load_matrix_sync(numbers, scores, Shape::kScoreStride, wmma::mem_row_major);
    rows.element_rows = 0;
#pragma unroll
    for (int t = 0; t < kSums; ++t) rows.element_rows |= static_cast<unsigned>(numbers.x[t]) << (4 * t);
#pragma unroll
    for (int n = 0; n < kHeadDim / 16; ++n) wmma::fill_fragment(rows.out[n], 0.0f);
}

// Multiply row r of the weighted values by factors[r], which this warp has just written.
template <int kHeadDim>
__device__ __forceinline__ void scale_rows(WarpRows<kHeadDim> &rows, const float *factors) {
    __syncwarp();
#pragma unroll
    for (int t = 0; t < kSums; ++t) {
        const float factor = factors[rows.element_rows >> (4 * t) & 15];
#pragma unroll
        for (int n = 0; n < kHeadDim / 16; ++n) rows.out[n].x[t] *= factor;
    }
    __syncwarp();
}

// scores[r][n] = queries[r] . keys[n] for the warp's rows and keys.
template <int kHeadDim, class Shape>
__device__ __forceinline__ void multiply_keys_wmma(float *scores, const half *queries, const half *keys) {
    SumFragment products[Shape::kWarpKeys / 16];
#pragma unroll
    for (int n = 0; n < Shape::kWarpKeys / 16; ++n) wmma::fill_fragment(products[n], 0.0f);
#pragma unroll
    for (int step = 0; step < kHeadDim / 16; ++step) {
        RowFragment a;
        wmma::load_matrix_sync(a, queries + step * 16, kTileStride<kHeadDim>);
#pragma unroll
        for (int n = 0; n < Shape::kWarpKeys / 16; ++n) {
            KeyFragment b;
            wmma::load_matrix_sync(b, keys + n * 16 * kTileStride<kHeadDim> + step * 16, kTileStride<kHeadDim>);
            wmma::mma_sync(products[n], a, b, products[n]);
        }
    }
#pragma unroll
    for (int n = 0; n < Shape::kWarpKeys / 16; ++n)
        wmma::store_matrix_sync(scores + n * 16, products[n], Shape::kScoreStride, wmma::mem_row_major);
}

// Online softmax: replace the products in shared memory by the weights exp2(score - largest). The
// weights are f16 in the same rows, which makes the row stride 2 * kScoreStride.
template <int kHeadDim, class Shape>
__device__ __forceinline__ void soften_wmma(float *scores, float *factors, WarpRows<kHeadDim> &rows, Span sees, ScoreScale scale,
                                            int first_key, int lane) {
    constexpr int kOwn = Shape::kWarpKeys / 2;  // two lanes share a row
    const int start = lane % 2 * kOwn;
    float *row = scores + lane / 2 * Shape::kScoreStride;
    float own[kOwn];
    float largest = rows.largest;
#pragma unroll
    for (int c = 0; c < kOwn; ++c) {
        const float score = scale(row[start + c]);
        own[c] = sees.holds(first_key + start + c) ? score : negative_infinity();
        largest = fmaxf(largest, own[c]);
    }
    largest = fmaxf(largest, __shfl_xor_sync(0xffffffffu, largest, 1));
    const float base = largest == negative_infinity() ? 0 : largest;
    const float shrink = exp2_fast(rows.largest - base);
    float sum = 0;
#pragma unroll
    for (int c = 0; c < kOwn; ++c) {
        own[c] = exp2_fast(own[c] - base);
        sum += own[c];
    }
    sum += __shfl_xor_sync(0xffffffffu, sum, 1);
    rows.largest = largest;
    rows.sum = rows.sum * shrink + sum;
    if (lane % 2 == 0) factors[lane / 2] = shrink;
    __syncwarp();  // both lanes have read their row; the shuffles above imply it
    unsigned *weights = reinterpret_cast<unsigned *>(row) + start / 2;
#pragma unroll
    for (int c = 0; c < kOwn; c += 2) weights[c / 2] = pack<F16>(own[c], own[c + 1]);
    scale_rows(rows, factors);
}

template <int kHeadDim, class Shape>
__device__ __forceinline__ void add_values_wmma(WarpRows<kHeadDim> &rows, const float *scores, const half *values) {
    const half *weights = reinterpret_cast<const half *>(scores);
#pragma unroll(kHeadDim > 96 ? 1 : 4)  // otherwise sm_75 runs out of registers
    for (int k = 0; k < Shape::kWarpKeys / 16; ++k) {
        RowFragment a;
        wmma::load_matrix_sync(a, weights + k * 16, 2 * Shape::kScoreStride);
#pragma unroll
        for (int n = 0; n < kHeadDim / 16; ++n) {
            ValueFragment b;
            wmma::load_matrix_sync(b, values + k * 16 * kTileStride<kHeadDim> + n * 16, kTileStride<kHeadDim>);
            wmma::mma_sync(rows.out[n], a, b, rows.out[n]);
        }
    }
}

template <int kHeadDim>
__device__ __forceinline__ void put_rows_wmma(float *area, const WarpRows<kHeadDim> &rows, int lane) {
    area[lane] = rows.largest;
    area[32 + lane] = rows.sum;
#pragma unroll
    for (int n = 0; n < kHeadDim / 16; ++n)
#pragma unroll
        for (int t = 0; t < kSums; ++t) area[64 + (n * kSums + t) * 32 + lane] = rows.out[n].x[t];
}

template <int kHeadDim>
__device__ __forceinline__ void merge_rows_wmma(WarpRows<kHeadDim> &rows, const float *area, float *factors, int lane) {
    const float other = area[lane];
    const float largest = fmaxf(rows.largest, other);
    const float base = largest == negative_infinity() ? 0 : largest;
    const float shrink = exp2_fast(rows.largest - base), shrink_other = exp2_fast(other - base);
    rows.largest = largest;
    rows.sum = rows.sum * shrink + area[32 + lane] * shrink_other;
    if (lane % 2 == 0) {
        factors[lane / 2] = shrink;
        factors[16 + lane / 2] = shrink_other;
    }
    scale_rows(rows, factors);
#pragma unroll
    for (int t = 0; t < kSums; ++t) {
        const float factor = factors[16 + (rows.element_rows >> (4 * t) & 15)];
#pragma unroll
        for (int n = 0; n < kHeadDim / 16; ++n) rows.out[n].x[t] += area[64 + (n * kSums + t) * 32 + lane] * factor;
    }
}

// Merge the states of four warps that shared the keys of 16 rows into warp 0, in the order (0 + 2)
// + (1 + 3).
template <int kHeadDim>
__device__ __forceinline__ void merge_warps_wmma(WarpRows<kHeadDim> &rows, float *area, float *factors, int warp, int lane) {
    constexpr int kFloats = 64 + kHeadDim / 16 * kSums * 32;
    __syncthreads();
    if (warp >= 2) put_rows_wmma(area + (warp - 2) * kFloats, rows, lane);
    __syncthreads();
    if (warp < 2) merge_rows_wmma(rows, area + warp * kFloats, factors, lane);
    if (warp == 1) put_rows_wmma(area + kFloats, rows, lane);
    __syncthreads();
    if (warp == 0) merge_rows_wmma(rows, area + kFloats, factors, lane);
}

template <int kHeadDim, class Shape>
__device__ __forceinline__ void store_rows_wmma(const AttentionParams &p, const Work &work, WarpRows<kHeadDim> &rows, float *scores,
                                                float *factors, int first_row, int lane) {
    const int row = first_row + lane / 2;
    const bool is_row = row < work.num_rows;
    if (is_row) {
        const RowEnd end(rows.largest, rows.sum, sink_of(p, work, row));
        if (lane % 2 == 0) {
            factors[lane / 2] = end.factor;
            store_lse(p, work, row, end.lse);
        }
    } else if (lane % 2 == 0) {
        factors[lane / 2] = 0;
    }
    scale_rows(rows, factors);
    const float *own = scores + lane / 2 * Shape::kScoreStride + lane % 2 * 8;
#pragma unroll
    for (int n = 0; n < kHeadDim / 16; ++n) {
        wmma::store_matrix_sync(scores, rows.out[n], Shape::kScoreStride, wmma::mem_row_major);
        __syncwarp();
        const int channel = n * 16 + lane % 2 * 8;
        if (is_row && channel < p.head_dim) {
            if (p.num_splits > 1) {
                float *out = partial_row(p, work, row) + channel;
                for (int c = 0; c < 8; ++c) out[c] = own[c];
            } else {
                const long long offset = row_offset(p, work, row, p.out_batch_stride, p.out_row_stride, p.out_head_stride);
                unsigned *out = reinterpret_cast<unsigned *>(static_cast<unsigned short *>(p.out) + offset + channel);
                for (int c = 0; c < 8; c += 2) out[c / 2] = pack<F16>(own[c], own[c + 1]);
            }
        }
        __syncwarp();
    }
}

#endif  // KVBOOST_EDGE_HAS_WMMA

template <int kHeadDim, int kWarpsM>
__global__ void __launch_bounds__(kThreads) attention_wmma(AttentionParams p) {
#if KVBOOST_EDGE_HAS_WMMA
    using Shape = WmmaShape<kHeadDim, kWarpsM>;
    Work work;
    if (!find_work<Shape::kRows, Shape::kKeys>(p, work)) return;
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const int warp_m = warp % kWarpsM, warp_n = warp / kWarpsM;
    unsigned short *queries = reinterpret_cast<unsigned short *>(shared_arena());
    unsigned short *tile = queries + Shape::kRows * kTileStride<kHeadDim>;
    float *scores = reinterpret_cast<float *>(shared_arena() + Shape::kTileBytes) + warp * Shape::kWarpFloats;
    float *factors = scores + 16 * Shape::kScoreStride;
    const half *warp_queries = reinterpret_cast<const half *>(queries + warp_m * 16 * kTileStride<kHeadDim>);
    const half *warp_tile = reinterpret_cast<const half *>(tile + warp_n * Shape::kWarpKeys * kTileStride<kHeadDim>);
    const KeyRows key_rows(p, work, p.k, p.k_batch_stride, p.k_row_stride, p.k_head_stride);
    const KeyRows value_rows(p, work, p.v, p.v_batch_stride, p.v_row_stride, p.v_head_stride);

    load_queries<kHeadDim, Shape::kRows, false>(queries, p, work);
    const int first_row = work.first_row + warp_m * 16;
    const Span sees = visible_keys(p, work.len_q, work.len_k, (first_row + lane / 2) / work.group);
    const ScoreScale scale(p);
    WarpRows<kHeadDim> rows;
    start_rows<kHeadDim, Shape>(rows, scores, lane);

    for (int first = work.keys.begin; first < work.keys.end; first += Shape::kKeys) {
        __syncthreads();  // the previous values are no longer read
        load_keys<kHeadDim, Shape::kKeys, false>(tile, key_rows, first, work.keys, p.head_dim);
        __syncthreads();
        multiply_keys_wmma<kHeadDim, Shape>(scores, warp_queries, warp_tile);
        __syncthreads();  // the keys are no longer read
        load_keys<kHeadDim, Shape::kKeys, false>(tile, value_rows, first, work.keys, p.head_dim);
        soften_wmma<kHeadDim, Shape>(scores, factors, rows, sees, scale, first + warp_n * Shape::kWarpKeys, lane);
        __syncthreads();
        add_values_wmma<kHeadDim, Shape>(rows, scores, warp_tile);
    }

    if constexpr (Shape::kWarpsN > 1) {
        merge_warps_wmma(rows, reinterpret_cast<float *>(tile), factors, warp, lane);
        if (warp > 0) return;
    }
    store_rows_wmma<kHeadDim, Shape>(p, work, rows, scores, factors, first_row, lane);
#endif
}

}  // namespace kvboost_edge_cuda
