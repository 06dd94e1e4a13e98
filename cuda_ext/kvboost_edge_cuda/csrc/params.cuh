// Launch parameters, and the list of kernels. This file has no includes and no host or device code,
// because the binding, NVRTC, nvcc and g++ (tests/cuda_ext, over fibers) all read it.
// tests/cuda_ext/launches.py mirrors the structs with ctypes.
//
// A block is a block of the KV pool (`block_size` tokens, elsewhere called a page). A CTA is a block
// of threads. Elements are 16 bits wide, f16 or bf16. Strides count elements, and the last dimension
// is contiguous. The binding checks that pointers to elements are aligned to 16 bytes and that
// strides of q, k, v and the caches are multiples of 8.
//
// All kernels run 128 threads in one dimension. `group` is num_q_heads / num_kv_heads. The rows of a
// CTA are "packed" queries of all query heads of one KV head: packed row r is query r / group of
// query head kv_head * group + r % group.
//
//   template <class Element, int kHeadDim, int kWarpsM> __global__ attention_mma(AttentionParams)      sm_80 and later
//   template <int kHeadDim, int kWarpsM>                __global__ attention_wmma(AttentionParams)     sm_70, sm_75; f16 only
//       Element   F16 or BF16
//       kHeadDim  64, 96, 128 or 256: the smallest one >= head_dim (a multiple of 8); channels after head_dim count as 0
//       kWarpsM   4: 64 packed rows per CTA, for prefill. 1: 16 packed rows whose keys the four warps share, for decode.
//                 Both are correct for any length; 1 is optimized for max_seqlen_q * group <= 16.
//       grid      (ceil(max_seqlen_q * group / (16 * kWarpsM)), num_kv_heads * num_splits, batch). CUDA limits the last two
//                 to 65535, so the binding rejects larger grids.
//       shared    MmaShape<kHeadDim, kWarpsM>::kSharedBytes or WmmaShape<...>::kSharedBytes (attention_mma.cuh,
//                 attention_wmma.cuh), dynamic; above 48 KiB the launcher requests it with cudaFuncSetAttribute.
//   template <class Element> __global__ merge_splits(AttentionParams)                                  all
//       runs after attention_* if num_splits > 1; grid (ceil(total_q * num_q_heads / 4)), no shared memory; total_q * num_q_heads < 2^31.
//   __global__ write_kv(WriteKVParams)       grid (num_tokens), no shared memory                        all, both dtypes
//   __global__ copy_blocks(CopyBlocksParams) grid (ceil(max block_bytes / 2048), num_pools), no shared memory
//
// If a translation unit is compiled for several architectures, the mma kernels are empty below sm_80
// and the wmma kernels are empty from sm_80 on. The launcher selects by the device's major version.
#pragma once

namespace kvboost_edge_cuda {

enum DType : int { kF16 = 0, kBF16 = 1 };
struct F16 {};
struct BF16 {};

constexpr int kThreads = 128;

// Query i of sequence b sees the keys j with center - window_left <= j <= center + window_right,
// where center = i + len_k - len_q (the mask is aligned to the bottom right). A negative window is
// unbounded, and window_right = 0 is causal attention. A row that sees no key returns 0 and lse
// -inf, or its sink as lse if there are sinks.
//
// Lengths: len_q = cu_seqlens_q[b + 1] - cu_seqlens_q[b], or seqlen_q if that is null.
//          len_k = seqused_k[b], else cu_seqlens_k[b + 1] - cu_seqlens_k[b], else seqlen_k.
// Rows:    query i of sequence b is row cu_seqlens_q[b] + i of a flat q (q_batch_stride is then unused), else row i of
//          batch b. out and lse are addressed like q.
//          key j is in block block_table[b * block_table_stride + j / block_size], row j % block_size (k_batch_stride is
//          then the stride of blocks); else row cu_seqlens_k[b] + j of a flat k; else row j of batch cache_batch_idx[b]
//          (b if that is null). Block-table entries and rows that no query sees are never read.
struct AttentionParams {
    const void *q;                     // [batch, seqlen_q, num_q_heads, head_dim] or [total_q, num_q_heads, head_dim]
    const void *k;                     // [batch, seqlen_k, num_kv_heads, head_dim], [total_k, ...], [num_blocks, block_size, ...]
    const void *v;                     // like k
    void *out;                         // like q
    float *lse;                        // natural log of the sum of exp(scores), sinks included; may be null
    const int *cu_seqlens_q;           // int32 [batch + 1] or null
    const int *cu_seqlens_k;           // int32 [batch + 1] or null
    const int *seqused_k;              // int32 [batch] or null; cache_seqlens of flash_attn_with_kvcache
    const int *block_table;            // int32 [batch, block_table_stride] or null
    const int *cache_batch_idx;        // int32 [batch] or null
    const float *sinks;                // f32 [num_q_heads] or null: an additional logit in each row's denominator, without a value
    float *partial_out;                // f32 [num_splits, total_q, num_q_heads, head_dim]; null if num_splits is 1
    float *partial_lse;                // f32 [num_splits, total_q, num_q_heads], natural log, without sinks; null if num_splits is 1
    long long q_batch_stride, q_row_stride, q_head_stride;
    long long k_batch_stride, k_row_stride, k_head_stride;
    long long v_batch_stride, v_row_stride, v_head_stride;
    long long out_batch_stride, out_row_stride, out_head_stride;
    long long lse_batch_stride, lse_row_stride, lse_head_stride;  // lse_batch_stride is unused with cu_seqlens_q
    long long block_table_stride;
    long long total_q;                 // rows of q over all sequences: batch * seqlen_q or cu_seqlens_q[batch]
    int batch;
    int seqlen_q;                      // with cu_seqlens_q, the longest query length
    int seqlen_k;                      // number of keys of every sequence without seqused_k and cu_seqlens_k
    int num_q_heads;
    int num_kv_heads;                  // divides num_q_heads
    int head_dim;                      // a multiple of 8, at most kHeadDim
    int block_size;                    // a multiple of 16; unused if block_table is null
    int window_left;                   // -1 is unbounded
    int window_right;                  // -1 is unbounded, 0 is causal
    int num_splits;                    // >= 1; the key tiles that a row block sees are divided evenly among the splits
    float softmax_scale;
    float softcap;                     // 0 for none; otherwise scores become softcap * tanh(score * softmax_scale / softcap)
};

// Store keys and values [num_tokens, num_kv_heads, head_dim] in the slots of a pool [num_blocks,
// block_size, num_kv_heads, head_dim] (any strides). The block is slot / block_size,
// and the row is slot % block_size. Tokens with a negative slot are skipped.
struct WriteKVParams {
    const void *keys;
    const void *values;
    void *k_cache;
    void *v_cache;
    const long long *slot_mapping;     // int64 [num_tokens]
    long long keys_row_stride, keys_head_stride;
    long long values_row_stride, values_head_stride;
    long long k_block_stride, k_row_stride, k_head_stride;
    long long v_block_stride, v_row_stride, v_head_stride;
    int num_tokens;
    int num_kv_heads;
    int head_dim;                      // a multiple of 8
    int block_size;
};

// Copy pairs in order, so a block may be the source of a later pair. Pools (one per layer for keys and
// one for values) have contiguous blocks, whose size is a multiple of 16 bytes.
struct CopyBlocksParams {
    void *const *pools;                // [num_pools] in device memory
    const long long *block_bytes;      // int64 [num_pools] in device memory
    const long long *pairs;            // int64 [num_pairs, 2]: source, destination
    int num_pools;
    int num_pairs;
};

// Attention over this project's quantized blocks (kv_cache_bits 8 and 4) is not supported. Their
// codes are in quads (4 channels of a token, or 4 tokens of a channel), a layout for the byte
// products of CPUs. Neither asynchronous row copies nor matrix loads can read that layout, and open
// blocks are stored elsewhere. The backend rejects "kv_cache_bits" by name.

}  // namespace kvboost_edge_cuda
