// Kernels for the KV pool, which write keys and values to slots and copy blocks. They move bytes,
// whatever the dtype.
#pragma once

#include "device.cuh"

namespace kvboost_edge_cuda {

// One CTA per token; each thread copies 16 bytes of a key and 16 bytes of a value.
__global__ void __launch_bounds__(kThreads) write_kv(WriteKVParams p) {
    const long long token = blockIdx.x;
    const long long slot = p.slot_mapping[token];
    if (slot < 0) return;
    const long long block = slot / p.block_size, row = slot % p.block_size;
    const int chunks = p.head_dim / 8;
    const unsigned short *keys = static_cast<const unsigned short *>(p.keys) + token * p.keys_row_stride;
    const unsigned short *values = static_cast<const unsigned short *>(p.values) + token * p.values_row_stride;
    unsigned short *k_row = static_cast<unsigned short *>(p.k_cache) + block * p.k_block_stride + row * p.k_row_stride;
    unsigned short *v_row = static_cast<unsigned short *>(p.v_cache) + block * p.v_block_stride + row * p.v_row_stride;
    for (int i = threadIdx.x; i < p.num_kv_heads * chunks; i += kThreads) {
        const int head = i / chunks, channel = i % chunks * 8;
        copy16(k_row + head * p.k_head_stride + channel, keys + head * p.keys_head_stride + channel, true);
        copy16(v_row + head * p.v_head_stride + channel, values + head * p.values_head_stride + channel, true);
    }
}

// Each thread owns the same 16 bytes of every block of a pool and processes the pairs in order, so
// no two threads write the same bytes.
__global__ void __launch_bounds__(kThreads) copy_blocks(CopyBlocksParams p) {
    unsigned char *pool = static_cast<unsigned char *>(p.pools[blockIdx.y]);
    const long long block_bytes = p.block_bytes[blockIdx.y];
    const long long offset = (static_cast<long long>(blockIdx.x) * kThreads + threadIdx.x) * 16;
    if (offset >= block_bytes) return;
    for (int i = 0; i < p.num_pairs; ++i)
        copy16(reinterpret_cast<unsigned short *>(pool + p.pairs[2 * i + 1] * block_bytes + offset),
               reinterpret_cast<const unsigned short *>(pool + p.pairs[2 * i] * block_bytes + offset), true);
}

}  // namespace kvboost_edge_cuda
