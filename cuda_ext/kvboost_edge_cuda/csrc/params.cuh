// Parameters of launches, and the kernels. No includes, no host or device code: the binding, NVRTC,
// nvcc and g++ (tests/cuda_ext, over fibers) read this file. tests/cuda_ext/launches.py mirrors the
// structs with ctypes.
//
// A block is a block of the KV pool (`block_size` tokens, elsewhere called a page); a CTA is a
// block of threads. Elements are 16 bits wide, f16 or bf16. Strides count elements; the last
// dimension is contiguous. Pointers to elements are aligned to 16 bytes, and strides of q, k, v and
// of the caches are multiples of 8 (the binding checks it).
//
// All kernels run 128 threads in one dimension. `group` = num_q_heads / num_kv_heads. Rows of a CTA
// are the queries of all heads of one KV head, "packed": packed row r is query r / group of query
// head kv_head * group + r % group.
//
//   template <class Element, int kHeadDim, int kWarpsM> __global__ attention_mma(AttentionParams)      sm_80 and later
//   template <int kHeadDim, int kWarpsM>                __global__ attention_wmma(AttentionParams)     sm_70, sm_75; f16 only
//       Element   F16 or BF16
//       kHeadDim  64, 96, 128 or 256: the smallest one >= head_dim (a multiple of 8); channels after head_dim are taken as 0
//       kWarpsM   4: 64 packed rows per CTA, for prefill. 1: 16 packed rows, the four warps share the keys, for decode;
//                 correct for any length, made for max_seqlen_q * group <= 16.
//       grid      (ceil(max_seqlen_q * group / (16 * kWarpsM)), num_kv_heads * num_splits, batch); CUDA takes at most 65535 of
//                 the last two, so the launcher refuses more or launches in parts.
//       shared    MmaShape<kHeadDim, kWarpsM>::kSharedBytes or WmmaShape<...>::kSharedBytes (attention_mma.cuh,
//                 attention_wmma.cuh), dynamic; above 48 KiB the launcher requests it with cudaFuncSetAttribute.
//   template <class Element> __global__ merge_splits(AttentionParams)                                  all
//       after attention_* if num_splits > 1; grid (ceil(total_q * num_q_heads / 4)), no shared memory; total_q * num_q_heads < 2^31.
//   __global__ write_kv(WriteKVParams)       grid (num_tokens), no shared memory                        all, both dtypes
//   __global__ copy_blocks(CopyBlocksParams) grid (ceil(max block_bytes / 2048), num_pools), no shared memory
//
// In a translation unit for several architectures, the mma kernels are empty below sm_80 and the
// wmma kernels from sm_80 on. The launcher chooses by the device's major version.
#pragma once

namespace kvboost_edge_cuda {

enum DType : int { kF16 = 0, kBF16 = 1 };
struct F16 {};
struct BF16 {};

constexpr int kThreads = 128;

// Query i of sequence b sees the keys j with center - window_left <= j <= center + window_right,
// center = i + len_k - len_q (the mask is aligned bottom right). A negative window is unbounded;
// causal is window_right = 0. A row that sees no key returns 0 and lse -inf, or lse = its sink if
// there are sinks.
//
// Lengths: len_q = cu_seqlens_q[b + 1] - cu_seqlens_q[b], or seqlen_q if that is null.
//          len_k = seqused_k[b], else cu_seqlens_k[b + 1] - cu_seqlens_k[b], else seqlen_k.
// Rows:    query i of sequence b is row cu_seqlens_q[b] + i of a flat q (q_batch_stride is then unused), else row i of
//          batch b. out and lse are addressed like q.
//          key j is in block block_table[b * block_table_stride + j / block_size], row j % block_size (k_batch_stride is
//          then the stride of blocks); else row cu_seqlens_k[b] + j of a flat k; else row j of batch cache_batch_idx[b]
//          (b if that is null). Entries of a block table and rows that no query sees are never read.
struct AttentionParams {
    const void *q;                     // [batch, seqlen_q, num_q_heads, head_dim] or [total_q, num_q_heads, head_dim]
    const void *k;                     // [batch, seqlen_k, num_kv_heads, head_dim], [total_k, ...], [num_blocks, block_size, ...]
    const void *v;                     // like k
    void *out;                         // like q
    float *lse;                        // natural log of the sum of exp(scores), sinks included; may be null
    const int *cu_seqlens_q;           // int32 [batch + 1] or null
    const int *cu_seqlens_k;           // int32 [batch + 1] or null
    const int *seqused_k;              // int32 [batch] or null (flash_attn_with_kvcache: cache_seqlens)
    const int *block_table;            // int32 [batch, block_table_stride] or null
    const int *cache_batch_idx;        // int32 [batch] or null
    const float *sinks;                // f32 [num_q_heads] or null: one more logit in each row's denominator, without a value
    float *partial_out;                // f32 [num_splits, total_q, num_q_heads, head_dim]; null if num_splits is 1
    float *partial_lse;                // f32 [num_splits, total_q, num_q_heads], natural log, without sinks; likewise null
    long long q_batch_stride, q_row_stride, q_head_stride;
    long long k_batch_stride, k_row_stride, k_head_stride;
    long long v_batch_stride, v_row_stride, v_head_stride;
    long long out_batch_stride, out_row_stride, out_head_stride;
    long long lse_batch_stride, lse_row_stride, lse_head_stride;  // batch is unused with cu_seqlens_q
    long long block_table_stride;
    long long total_q;                 // rows of q over all sequences: batch * seqlen_q or cu_seqlens_q[batch]
    int batch;
    int seqlen_q;                      // with cu_seqlens_q: the longest one
    int seqlen_k;                      // without seqused_k and cu_seqlens_k: every sequence's
    int num_q_heads;
    int num_kv_heads;                  // divides num_q_heads
    int head_dim;                      // a multiple of 8, at most kHeadDim
    int block_size;                    // a multiple of 16; unused if block_table is null
    int window_left;                   // -1: no bound
    int window_right;                  // -1: no bound; causal: 0
    int num_splits;                    // >= 1; each CTA of a split takes an even share of the key tiles its rows see
    float softmax_scale;
    float softcap;                     // 0: none; else scores become softcap * tanh(score * softmax_scale / softcap)
};

// Store keys and values [num_tokens, num_kv_heads, head_dim] in the slots of a pool [num_blocks,
// block_size, num_kv_heads, head_dim] (any strides). slot / block_size is the block, slot %
// block_size the row. A negative slot is skipped.
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

// Copy pairs in order: a block may be the source of a later pair. Pools (one per layer for keys,
// one for values) are contiguous from block to block; bytes of a block are a multiple of 16.
struct CopyBlocksParams {
    void *const *pools;                // [num_pools] in device memory
    const long long *block_bytes;      // int64 [num_pools] in device memory
    const long long *pairs;            // int64 [num_pairs, 2]: source, destination
    int num_pools;
    int num_pairs;
};

// There is no attention over this project's quantized blocks (kv_cache_bits 8 and 4); the binding
// refuses it by the name "kv_cache_bits". Codes are in quads: 4 channels of a token, or 4 tokens of
// a channel, made for the byte products of CPUs. Neither asynchronous row copies nor matrix loads
// can read them, and open blocks are stored elsewhere.

}  // namespace kvboost_edge_cuda
