// Launchers of the attention kernels for one head dim. Each head dim has its own .cu file, so the
// files compile in parallel. This is host code that NVRTC and g++ do not read.
#pragma once

#include <cuda_runtime.h>

// nvcc passes initializers of device constructors to the host compiler, which lacks this function.
#if !defined(__CUDA_ARCH__) && defined(__GNUC__)
#define __ffs __builtin_ffs
#endif
#include "attention_mma.cuh"
#include "attention_wmma.cuh"
#undef __ffs

namespace kvboost_edge_cuda {

// Up to this many rows, the decode variant runs. It has 16 packed rows per CTA, and the CTA's warps
// share the keys.
constexpr int kDecodeRows = 16;
constexpr int kFreeSharedBytes = 48 * 1024;  // larger dynamic shared memory must be requested

template <class Kernel>
cudaError_t launch_kernel(Kernel kernel, int shared_bytes, int rows_per_cta, const AttentionParams &params, cudaStream_t stream) {
    if (shared_bytes > kFreeSharedBytes) {
        const cudaError_t error = cudaFuncSetAttribute(
            reinterpret_cast<const void *>(kernel), cudaFuncAttributeMaxDynamicSharedMemorySize, shared_bytes);
        if (error != cudaSuccess) return error;
    }
    const int rows = params.seqlen_q * (params.num_q_heads / params.num_kv_heads);
    const dim3 grid((rows + rows_per_cta - 1) / rows_per_cta, params.num_kv_heads * params.num_splits, params.batch);
    kernel<<<grid, kThreads, shared_bytes, stream>>>(params);
    return cudaGetLastError();
}

template <class Element, int kHeadDim, int kWarpsM>
cudaError_t launch_mma(const AttentionParams &params, cudaStream_t stream) {
    using Shape = MmaShape<kHeadDim, kWarpsM>;
    return launch_kernel(attention_mma<Element, kHeadDim, kWarpsM>, Shape::kSharedBytes, 16 * kWarpsM, params, stream);
}

template <int kHeadDim, int kWarpsM>
cudaError_t launch_wmma(const AttentionParams &params, cudaStream_t stream) {
    using Shape = WmmaShape<kHeadDim, kWarpsM>;
    return launch_kernel(attention_wmma<kHeadDim, kWarpsM>, Shape::kSharedBytes, 16 * kWarpsM, params, stream);
}

template <int kHeadDim, int kWarpsM>
cudaError_t launch_form(const AttentionParams &params, int dtype, int major, cudaStream_t stream) {
    if (major < 8) return dtype == kF16 ? launch_wmma<kHeadDim, kWarpsM>(params, stream) : cudaErrorNotSupported;
    return dtype == kF16 ? launch_mma<F16, kHeadDim, kWarpsM>(params, stream)
                         : launch_mma<BF16, kHeadDim, kWarpsM>(params, stream);
}

// `major`: major compute capability of the current device.
template <int kHeadDim>
cudaError_t launch_attention(const AttentionParams &params, int dtype, int major, cudaStream_t stream) {
    const long long rows = static_cast<long long>(params.seqlen_q) * (params.num_q_heads / params.num_kv_heads);
    return rows <= kDecodeRows ? launch_form<kHeadDim, 1>(params, dtype, major, stream)
                               : launch_form<kHeadDim, 4>(params, dtype, major, stream);
}

extern template cudaError_t launch_attention<64>(const AttentionParams &, int, int, cudaStream_t);
extern template cudaError_t launch_attention<96>(const AttentionParams &, int, int, cudaStream_t);
extern template cudaError_t launch_attention<128>(const AttentionParams &, int, int, cudaStream_t);
extern template cudaError_t launch_attention<256>(const AttentionParams &, int, int, cudaStream_t);

}  // namespace kvboost_edge_cuda
