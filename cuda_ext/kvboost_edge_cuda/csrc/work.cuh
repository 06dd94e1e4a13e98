// The rows and keys of a CTA: their visibility, their addresses, and loading tiles into shared
// memory.
#pragma once

#include "device.cuh"

namespace kvboost_edge_cuda {

constexpr float kLog2e = 1.4426950408889634f;
constexpr float kLn2 = 0.6931471805599453f;

// Keys [begin, end); empty if end <= begin.
struct Span {
    int begin, end;

    __device__ __forceinline__ bool holds(int key) const { return key >= begin && key < end; }
};

// Return the keys that query i sees. The sums cannot overflow, whatever the window.
__device__ __forceinline__ Span visible_keys(const AttentionParams &p, int len_q, int len_k, int i) {
    const int center = i + len_k - len_q;
    Span keys;
    keys.begin = p.window_left < 0 || p.window_left >= center ? 0 : center - p.window_left;
    keys.end = p.window_right < 0 || p.window_right >= len_k - 1 - center ? len_k : center + p.window_right + 1;
    return keys;
}

// The work of one CTA.
//   rows   packed rows [first_row, first_row + kRows) of a sequence with num_rows packed rows
//   keys   keys of this split that some row of the CTA sees. They form whole tiles from keys.begin on, except for the last
//          tile. Other keys are never read.
//   clear  keys that every row sees, so a tile inside this span needs no mask
struct Work {
    int sequence, kv_head, split, group;
    int len_q, len_k;
    int first_row, num_rows;
    long long flat_row;  // the sequence's first row among all rows of q
    Span keys, clear;
};

// Return false if there is nothing to compute. The result is equal for all threads of the CTA.
template <int kRows, int kKeys>
__device__ __forceinline__ bool find_work(const AttentionParams &p, Work &work) {
    work.sequence = blockIdx.z;
    work.kv_head = blockIdx.y / p.num_splits;
    work.split = blockIdx.y % p.num_splits;
    work.group = p.num_q_heads / p.num_kv_heads;
    const int b = work.sequence;
    work.flat_row = p.cu_seqlens_q ? p.cu_seqlens_q[b] : static_cast<long long>(b) * p.seqlen_q;
    work.len_q = p.cu_seqlens_q ? p.cu_seqlens_q[b + 1] - p.cu_seqlens_q[b] : p.seqlen_q;
    work.len_k = p.seqused_k ? p.seqused_k[b] : p.cu_seqlens_k ? p.cu_seqlens_k[b + 1] - p.cu_seqlens_k[b] : p.seqlen_k;
    work.first_row = (gridDim.x - 1 - blockIdx.x) * kRows;  // with a causal mask the last rows take longest, so they start first
    work.num_rows = work.len_q * work.group;
    if (work.first_row >= work.num_rows) return false;

    const int last_row = min(work.first_row + kRows, work.num_rows) - 1;
    const Span first = visible_keys(p, work.len_q, work.len_k, work.first_row / work.group);
    const Span last = visible_keys(p, work.len_q, work.len_k, last_row / work.group);
    work.clear = {last.begin, first.end};
    const int num_tiles = (max(last.end - first.begin, 0) + kKeys - 1) / kKeys;
    const int share = (num_tiles + p.num_splits - 1) / p.num_splits * kKeys;
    work.keys.begin = first.begin + work.split * share;
    work.keys.end = min(work.keys.begin + share, last.end);
    return true;
}

// The 16-bit elements of one KV head's keys or values.
struct KeyRows {
    const unsigned short *base;
    const int *table;  // null if the cache is not paged
    long long block_stride, row_stride;
    int block_size, shift;  // shift: log2 of block_size, or -1 if it is not a power of 2

    __device__ __forceinline__ KeyRows(const AttentionParams &p, const Work &work, const void *data, long long batch_stride,
                                       long long row_stride, long long head_stride)
        : base(static_cast<const unsigned short *>(data) + work.kv_head * head_stride),
          table(p.block_table ? p.block_table + work.sequence * p.block_table_stride : nullptr),
          block_stride(batch_stride),
          row_stride(row_stride),
          block_size(p.block_size),
          shift((p.block_size & (p.block_size - 1)) == 0 ? __ffs(p.block_size) - 1 : -1) {
        if (table) return;
        if (p.cu_seqlens_k) {
            base += p.cu_seqlens_k[work.sequence] * row_stride;
        } else {
            base += (p.cache_batch_idx ? p.cache_batch_idx[work.sequence] : work.sequence) * batch_stride;
        }
    }

    __device__ __forceinline__ const unsigned short *at(int key) const {
        if (!table) return base + key * row_stride;
        const int index = shift >= 0 ? key >> shift : key / block_size;
        return base + table[index] * block_stride + (key - index * block_size) * row_stride;
    }
};

// Rows of a tile in shared memory are kHeadDim + 8 elements apart. This puts the 16-byte chunks of
// eight rows into different banks.
template <int kHeadDim>
constexpr int kTileStride = kHeadDim + 8;

template <bool kIsAsync>
__device__ __forceinline__ void copy_chunk(unsigned short *target, const unsigned short *source, bool is_read) {
    if constexpr (kIsAsync) {
#if KVBOOST_EDGE_HAS_MMA
        copy16_async(target, source, is_read);
#endif
    } else {
        copy16(target, source, is_read);
    }
}

// Load rows [first, first + kRows) of the CTA's keys or values; write zeros outside `keys` and
// after head_dim.
template <int kHeadDim, int kRows, bool kIsAsync>
__device__ __forceinline__ void load_keys(unsigned short *tile, const KeyRows &rows, int first, Span keys, int head_dim) {
    constexpr int kChunks = kHeadDim / 8;
#pragma unroll 4
    for (int start = 0; start < kRows * kChunks; start += kThreads) {
        const int i = start + static_cast<int>(threadIdx.x);
        if (kRows * kChunks % kThreads != 0 && i >= kRows * kChunks) break;
        const int row = i / kChunks, channel = i % kChunks * 8;
        const bool is_read = keys.holds(first + row) && channel < head_dim;
        copy_chunk<kIsAsync>(tile + row * kTileStride<kHeadDim> + channel, is_read ? rows.at(first + row) + channel : rows.base, is_read);
    }
}

// Return the offset of packed row `row` in a tensor shaped like q.
__device__ __forceinline__ long long row_offset(const AttentionParams &p, const Work &work, int row, long long batch_stride, long long row_stride,
                                                long long head_stride) {
    const long long start = p.cu_seqlens_q ? work.flat_row * row_stride : work.sequence * batch_stride;
    const int head = work.kv_head * work.group + row % work.group;
    return start + row / work.group * row_stride + head * head_stride;
}

template <int kHeadDim, int kRows, bool kIsAsync>
__device__ __forceinline__ void load_queries(unsigned short *tile, const AttentionParams &p, const Work &work) {
    constexpr int kChunks = kHeadDim / 8;
    const unsigned short *q = static_cast<const unsigned short *>(p.q);
    for (int i = threadIdx.x; i < kRows * kChunks; i += kThreads) {
        const int row = work.first_row + i / kChunks, channel = i % kChunks * 8;
        const bool is_read = row < work.num_rows && channel < p.head_dim;
        const long long offset = is_read ? row_offset(p, work, row, p.q_batch_stride, p.q_row_stride, p.q_head_stride) + channel : 0;
        copy_chunk<kIsAsync>(tile + i / kChunks * kTileStride<kHeadDim> + channel, q + offset, is_read);
    }
}

// Converts products of a query and keys to scores in base 2.
struct ScoreScale {
    float scale;        // softmax_scale * log2(e), used without softcap
    float cap, inverse; // with softcap: cap * tanh(product * inverse), cap in base 2; otherwise cap is 0

    __device__ __forceinline__ explicit ScoreScale(const AttentionParams &p)
        : scale(p.softmax_scale * kLog2e), cap(p.softcap * kLog2e), inverse(p.softcap > 0 ? p.softmax_scale / p.softcap * (2 * kLog2e) : 0) {}

    __device__ __forceinline__ float operator()(float product) const {
        if (cap == 0) return product * scale;
        return cap - 2 * cap / (exp2_fast(product * inverse) + 1);  // tanh(x) = 1 - 2 / (exp(2 x) + 1)
    }
};

// Final factor and lse of a row, whose sums are in base 2.
struct RowEnd {
    float factor;  // multiplies the row's weighted sum of values
    float lse;  // natural log

    // `largest` and `sum` are those of the row's exp2(score - largest). `sink` is in natural units,
    // or -inf for no sink.
    __device__ __forceinline__ RowEnd(float largest, float sum, float sink) {
        const float sink2 = sink * kLog2e;
        const float top = fmaxf(largest, sink2);
        if (top == negative_infinity()) {
            factor = 0;
            lse = negative_infinity();
            return;
        }
        const float shrink = exp2_fast(largest - top);
        const float total = sum * shrink + exp2_fast(sink2 - top);
        factor = shrink / total;
        lse = (top + log2f(total)) * kLn2;
    }
};

// Return the sink that a CTA adds to a row; -inf if there is none, or if merge_splits will add it.
__device__ __forceinline__ float sink_of(const AttentionParams &p, const Work &work, int row) {
    if (!p.sinks || p.num_splits > 1) return negative_infinity();
    return p.sinks[work.kv_head * work.group + row % work.group];
}

__device__ __forceinline__ void store_lse(const AttentionParams &p, const Work &work, int row, float lse) {
    const int head = work.kv_head * work.group + row % work.group;
    if (p.num_splits > 1) {
        p.partial_lse[(work.split * p.total_q + work.flat_row + row / work.group) * p.num_q_heads + head] = lse;
    } else if (p.lse) {
        p.lse[row_offset(p, work, row, p.lse_batch_stride, p.lse_row_stride, p.lse_head_stride)] = lse;
    }
}

// Return the address of packed row `row` of this split in partial_out.
__device__ __forceinline__ float *partial_row(const AttentionParams &p, const Work &work, int row) {
    const int head = work.kv_head * work.group + row % work.group;
    return p.partial_out + ((work.split * p.total_q + work.flat_row + row / work.group) * p.num_q_heads + head) * p.head_dim;
}

}  // namespace kvboost_edge_cuda
