// Instructions without a C++ equivalent: asynchronous copies, matrix loads, tensor-core products
// and conversions. For g++ (KVBOOST_EDGE_CUDA_ON_CPU), tests/cuda_ext/cuda_on_cpu.h defines the
// same names.
#pragma once

#include "params.cuh"

#if defined(KVBOOST_EDGE_CUDA_ON_CPU)
#include "cuda_on_cpu.h"
#define KVBOOST_EDGE_HAS_MMA 1
#define KVBOOST_EDGE_HAS_WMMA 1
#else
#define KVBOOST_EDGE_HAS_MMA (__CUDA_ARCH__ >= 800)
#define KVBOOST_EDGE_HAS_WMMA (__CUDA_ARCH__ >= 700 && __CUDA_ARCH__ < 800)

namespace kvboost_edge_cuda {

// The CTA's dynamic shared memory.
__device__ __forceinline__ unsigned char *shared_arena() {
    extern __shared__ __align__(128) unsigned char kvboost_edge_arena[];
    return kvboost_edge_arena;
}

// Copy 16 bytes from global to shared memory, or write 16 zero bytes without reading `source`.
__device__ __forceinline__ void copy16(unsigned short *target, const unsigned short *source, bool is_read) {
    *reinterpret_cast<uint4 *>(target) = is_read ? *reinterpret_cast<const uint4 *>(source) : make_uint4(0, 0, 0, 0);
}

__device__ __forceinline__ float negative_infinity() { return __int_as_float(0xff800000); }

__device__ __forceinline__ float exp2_fast(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

#if KVBOOST_EDGE_HAS_MMA

__device__ __forceinline__ unsigned shared_address(const void *pointer) {
    return static_cast<unsigned>(__cvta_generic_to_shared(pointer));
}

// Asynchronous copy16. The result is visible to the issuing thread after wait_copies, and to other
// threads after the barrier that follows it.
__device__ __forceinline__ void copy16_async(unsigned short *target, const unsigned short *source, bool is_read) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared_address(target)), "l"(source), "r"(is_read ? 16 : 0)
                 : "memory");
}

// Wait for all asynchronous copies of this thread.
__device__ __forceinline__ void wait_copies() { asm volatile("cp.async.wait_all;" ::: "memory"); }

// Load four 8 x 8 matrices of 16-bit elements. Lane 8 i + j passes the address of row j of matrix
// i. For matrix i, r[i] of a lane holds columns 2 (lane % 4) and 2 (lane % 4) + 1 of row lane / 4.
__device__ __forceinline__ void load_matrices(unsigned (&r)[4], const unsigned short *row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(shared_address(row))
                 : "memory");
}

// Like load_matrices, with each matrix transposed.
__device__ __forceinline__ void load_matrices_transposed(unsigned (&r)[4], const unsigned short *row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(shared_address(row))
                 : "memory");
}

// c[16 x 8] += a[16 x 16] b[16 x 8]. With g = lane / 4 and t = lane % 4, a lane holds
//   c[0, 1] = C[g][2t, 2t+1], c[2, 3] = C[g+8][2t, 2t+1]; b[0] = B[2t, 2t+1][g], b[1] = B[2t+8, 2t+9][g];
//   a[0] = A[g][2t, 2t+1], a[1] = A[g+8][2t, 2t+1], a[2] = A[g][2t+8, 2t+9], a[3] = A[g+8][2t+8, 2t+9].
template <class Element>
__device__ __forceinline__ void multiply_add(float (&c)[4], const unsigned (&a)[4], unsigned b0, unsigned b1);

template <>
__device__ __forceinline__ void multiply_add<F16>(float (&c)[4], const unsigned (&a)[4], unsigned b0, unsigned b1) {
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
                 : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

template <>
__device__ __forceinline__ void multiply_add<BF16>(float (&c)[4], const unsigned (&a)[4], unsigned b0, unsigned b1) {
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
                 : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

#endif  // KVBOOST_EDGE_HAS_MMA

// Pack two numbers, rounded to nearest; `low` is first in memory.
template <class Element>
__device__ __forceinline__ unsigned pack(float low, float high);

template <>
__device__ __forceinline__ unsigned pack<F16>(float low, float high) {
    unsigned packed;
    asm("{ .reg .f16 l, h; cvt.rn.f16.f32 l, %1; cvt.rn.f16.f32 h, %2; mov.b32 %0, {l, h}; }" : "=r"(packed) : "f"(low), "f"(high));
    return packed;
}

#if KVBOOST_EDGE_HAS_MMA
template <>
__device__ __forceinline__ unsigned pack<BF16>(float low, float high) {
    unsigned packed;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
    return packed;
}
#else
template <>
__device__ __forceinline__ unsigned pack<BF16>(float, float) {
    return 0;  // no kernel of these architectures uses bf16
}
#endif

}  // namespace kvboost_edge_cuda
#endif  // KVBOOST_EDGE_CUDA_ON_CPU
