// Launchers declared in launch.h.
#include "launch.h"

#include "attention_launch.cuh"
#include "cache.cuh"
#include "merge.cuh"

namespace kvboost_edge_cuda {
namespace {

constexpr int kCopiedByCta = 16 * kThreads;  // bytes

unsigned parts(long long whole, int part) { return static_cast<unsigned>((whole + part - 1) / part); }

cudaError_t current_major(int *major) {
    int device = 0;
    const cudaError_t error = cudaGetDevice(&device);
    return error != cudaSuccess ? error : cudaDeviceGetAttribute(major, cudaDevAttrComputeCapabilityMajor, device);
}

cudaError_t attend(const AttentionParams &params, int dtype, cudaStream_t stream) {
    int major = 0;
    const cudaError_t error = current_major(&major);
    if (error != cudaSuccess) return error;
    if (params.head_dim <= 64) return launch_attention<64>(params, dtype, major, stream);
    if (params.head_dim <= 96) return launch_attention<96>(params, dtype, major, stream);
    if (params.head_dim <= 128) return launch_attention<128>(params, dtype, major, stream);
    return launch_attention<256>(params, dtype, major, stream);
}

}  // namespace
}  // namespace kvboost_edge_cuda

using namespace kvboost_edge_cuda;

int kvboost_edge_cuda_attention(const AttentionParams *params, int dtype, void *stream_) {
    const cudaStream_t stream = static_cast<cudaStream_t>(stream_);
    const cudaError_t error = attend(*params, dtype, stream);
    if (error != cudaSuccess || params->num_splits == 1) return error;
    const unsigned ctas = parts(params->total_q * params->num_q_heads, kThreads / 32);
    if (dtype == kF16)
        merge_splits<F16><<<ctas, kThreads, 0, stream>>>(*params);
    else
        merge_splits<BF16><<<ctas, kThreads, 0, stream>>>(*params);
    return cudaGetLastError();
}

int kvboost_edge_cuda_write_kv(const WriteKVParams *params, void *stream) {
    write_kv<<<params->num_tokens, kThreads, 0, static_cast<cudaStream_t>(stream)>>>(*params);
    return cudaGetLastError();
}

int kvboost_edge_cuda_copy_blocks(const CopyBlocksParams *params, long long most_bytes, void *stream) {
    const dim3 grid(parts(most_bytes, kCopiedByCta), params->num_pools);
    copy_blocks<<<grid, kThreads, 0, static_cast<cudaStream_t>(stream)>>>(*params);
    return cudaGetLastError();
}

const char *kvboost_edge_cuda_error(int error) { return cudaGetErrorString(static_cast<cudaError_t>(error)); }
