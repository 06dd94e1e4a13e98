// The CUDA that the kernels use, for g++: keywords, barriers, shuffles, conversions, and the operations of device.cuh with the lanes'
// elements where the PTX manual (9.7, "Warp Level Matrix") has them. Every address is checked for the alignment that the hardware
// asks for, and to lie in the CTA's shared memory where it must.
#pragma once

#include <algorithm>
#include <bit>
#include <cmath>

#include "fibers.h"

#define __global__
#define __device__
#define __forceinline__ inline
#define __launch_bounds__(threads)

using std::max;
using std::min;

struct float2 {
    float x, y;
};
inline float2 make_float2(float x, float y) { return {x, y}; }
inline int __ffs(int x) { return __builtin_ffs(x); }

inline void __syncthreads(on_cpu::Site site = on_cpu::Site::current()) { on_cpu::block_barrier(site); }

inline void __syncwarp(on_cpu::Site site = on_cpu::Site::current()) {
    on_cpu::meet<char>(site, char{}, [](const char *, char *) {});
}

template <class T>
T __shfl_xor_sync(unsigned mask, T value, int flip, on_cpu::Site site = on_cpu::Site::current()) {
    if (mask != ~0u) on_cpu::fail(site, "a shuffle of part of a warp");
    return on_cpu::meet<T>(site, value, [flip](const T *in, T *out) {
        for (int lane = 0; lane < 32; ++lane) out[lane] = in[lane ^ flip];
    });
}

namespace on_cpu {

inline float half_to_float(uint16_t bits) {
    const uint32_t sign = static_cast<uint32_t>(bits & 0x8000) << 16, exponent = bits >> 10 & 31, fraction = bits & 1023;
    if (exponent == 31) return std::bit_cast<float>(sign | 0x7f800000 | fraction << 13);
    if (exponent == 0) return std::bit_cast<float>(sign) + (sign ? -1.0f : 1.0f) * std::ldexp(static_cast<float>(fraction), -24);
    return std::bit_cast<float>(sign | (exponent + 112) << 23 | fraction << 13);
}

// To nearest, ties to even.
inline uint16_t float_to_half(float x) {
    const uint32_t bits = std::bit_cast<uint32_t>(x), sign = bits >> 16 & 0x8000, magnitude = bits & 0x7fffffff;
    if (magnitude > 0x7f800000) return 0x7fff;
    if (magnitude >= 0x477ff000) return sign | 0x7c00;  // 65520 and more
    if (magnitude < 0x38800000)                         // below the smallest normal number: count units of 2^-24
        return sign | static_cast<uint16_t>(std::nearbyint(std::ldexp(std::bit_cast<float>(magnitude), 24)));
    return sign | (((magnitude + 0xfff + (magnitude >> 13 & 1)) >> 13) - (112 << 10));
}

inline float brain_to_float(uint16_t bits) { return std::bit_cast<float>(static_cast<uint32_t>(bits) << 16); }

inline uint16_t float_to_brain(float x) {
    const uint32_t bits = std::bit_cast<uint32_t>(x);
    if ((bits & 0x7fffffff) > 0x7f800000) return 0x7fff;
    return (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
}

// Conversion by table: products take thousands of them.
template <float (*kConvert)(uint16_t)>
inline float look_up(uint16_t bits) {
    static const std::vector<float> table = [] {
        std::vector<float> values(65536);
        for (int i = 0; i < 65536; ++i) values[i] = kConvert(i);
        return values;
    }();
    return table[bits];
}

inline void check_shared(Site site, const void *address, size_t bytes, size_t alignment) {
    const auto *first = static_cast<const unsigned char *>(address);
    if (first < machine.arena || first + bytes > machine.arena + machine.arena_bytes)
        fail(site, "address %td is outside of %zu bytes of shared memory", first - machine.arena, machine.arena_bytes);
    if ((first - machine.arena) % alignment) fail(site, "shared address %td must be a multiple of %zu", first - machine.arena, alignment);
}

inline void check_aligned(Site site, const void *address, size_t alignment) {
    if (reinterpret_cast<uintptr_t>(address) % alignment) fail(site, "address %p must be a multiple of %zu", address, alignment);
}

}  // namespace on_cpu

namespace kvboost_edge_cuda {

using on_cpu::Site;

inline unsigned char *shared_arena() { return on_cpu::machine.arena; }
inline float negative_infinity() { return -INFINITY; }
inline float exp2_fast(float x) { return std::exp2(x); }

inline void copy16(unsigned short *target, const unsigned short *source, bool is_read, Site site = Site::current()) {
    on_cpu::check_aligned(site, target, 16);
    on_cpu::check_aligned(site, source, 16);
    if (is_read)
        memmove(target, source, 16);
    else
        memset(target, 0, 16);
}

inline void copy16_async(unsigned short *target, const unsigned short *source, bool is_read, Site site = Site::current()) {
    on_cpu::check_shared(site, target, 16, 16);
    on_cpu::check_aligned(site, source, 16);
    on_cpu::machine.fibers[on_cpu::machine.current].copies.push_back({target, is_read ? source : nullptr});
    if (on_cpu::machine.timing == on_cpu::kEarly) on_cpu::do_copies();
}

inline void wait_copies() { on_cpu::do_copies(); }

struct MatrixRow {
    const unsigned short *address;
    unsigned short elements[8];
};

// Lane l of matrix i gets elements[l / 4][2 (l % 4) + {0, 1}], or transposed.
inline void load_matrices_as(unsigned (&r)[4], const unsigned short *row, bool is_transposed, Site site) {
    on_cpu::check_shared(site, row, 16, 16);
    MatrixRow in = {row, {}};
    if (on_cpu::machine.timing == on_cpu::kEarly) memcpy(in.elements, row, 16);
    struct Out {
        unsigned r[4];
    };
    const Out out = on_cpu::meet<Out>(site, in, [is_transposed](MatrixRow *rows, Out *outs) {
        for (int i = 0; i < 32 && on_cpu::machine.timing == on_cpu::kLate; ++i) memcpy(rows[i].elements, rows[i].address, 16);
        for (int lane = 0; lane < 32; ++lane)
            for (int i = 0; i < 4; ++i) {
                const MatrixRow *matrix = rows + 8 * i;
                const int g = lane / 4, t = 2 * (lane % 4);
                const unsigned low = is_transposed ? matrix[t].elements[g] : matrix[g].elements[t];
                const unsigned high = is_transposed ? matrix[t + 1].elements[g] : matrix[g].elements[t + 1];
                outs[lane].r[i] = low | high << 16;
            }
    });
    memcpy(r, out.r, sizeof r);
}

inline void load_matrices(unsigned (&r)[4], const unsigned short *row, Site site = Site::current()) { load_matrices_as(r, row, false, site); }

inline void load_matrices_transposed(unsigned (&r)[4], const unsigned short *row, Site site = Site::current()) {
    load_matrices_as(r, row, true, site);
}

template <class Element>
float to_float(unsigned short bits) {
    if constexpr (std::is_same_v<Element, F16>)
        return on_cpu::look_up<on_cpu::half_to_float>(bits);
    else
        return on_cpu::look_up<on_cpu::brain_to_float>(bits);
}

template <class Element>
unsigned pack(float low, float high) {
    if constexpr (std::is_same_v<Element, F16>)
        return on_cpu::float_to_half(low) | static_cast<unsigned>(on_cpu::float_to_half(high)) << 16;
    else
        return on_cpu::float_to_brain(low) | static_cast<unsigned>(on_cpu::float_to_brain(high)) << 16;
}

// Rows of a times columns of b, 16 deep; b is given by columns.
template <int kColumns>
void multiply_matrices(float (&c)[16][kColumns], const float (&a)[16][16], const float (&b)[16][kColumns]) {
    for (int i = 0; i < 16; ++i)
        for (int k = 0; k < 16; ++k)
            for (int j = 0; j < kColumns; ++j) c[i][j] += a[i][k] * b[k][j];
}

struct LaneOperands {
    float c[4];
    unsigned a[4], b[2];
};

template <class Element>
void multiply_lanes(const LaneOperands *in, LaneOperands *out) {
    float a[16][16], b[16][8], c[16][8];
    for (int lane = 0; lane < 32; ++lane) {
        const int g = lane / 4, t = 2 * (lane % 4);
        for (int h = 0; h < 2; ++h) {
            const int shift = 16 * h;
            for (int i = 0; i < 4; ++i) a[g + i % 2 * 8][t + i / 2 * 8 + h] = to_float<Element>(in[lane].a[i] >> shift);
            for (int i = 0; i < 2; ++i) b[t + i * 8 + h][g] = to_float<Element>(in[lane].b[i] >> shift);
            for (int i = 0; i < 2; ++i) c[g + i * 8][t + h] = in[lane].c[2 * i + h];
        }
    }
    multiply_matrices<8>(c, a, b);
    for (int lane = 0; lane < 32; ++lane)
        for (int i = 0; i < 4; ++i) out[lane].c[i] = c[lane / 4 + i / 2 * 8][2 * (lane % 4) + i % 2];
}

template <class Element>
void multiply_add(float (&c)[4], const unsigned (&a)[4], unsigned b0, unsigned b1, Site site = Site::current()) {
    LaneOperands in = {{c[0], c[1], c[2], c[3]}, {a[0], a[1], a[2], a[3]}, {b0, b1}};
    const LaneOperands out = on_cpu::meet<LaneOperands>(site, in, multiply_lanes<Element>);
    memcpy(c, out.c, sizeof c);
}

}  // namespace kvboost_edge_cuda

struct half {
    unsigned short bits;
};

// Fragments of 16 x 16. Where an element lies is nobody's business, so it is somewhere odd here, and elsewhere for each use.
namespace nvcuda::wmma {

struct matrix_a {
    static constexpr int kStep = 37;
};
struct matrix_b {
    static constexpr int kStep = 101;
};
struct accumulator {
    static constexpr int kStep = 149;
};
struct row_major {};
struct col_major {};
enum layout_t { mem_row_major, mem_col_major };

template <class Use, int kM, int kN, int kK, class T, class Layout = void>
struct fragment {
    static_assert(kM == 16 && kN == 16 && kK == 16);
    static constexpr int num_elements = 8;
    static constexpr bool kIsByColumns = std::is_same_v<Layout, col_major>;
    T x[num_elements];
    static int row(int lane, int t) { return (lane * num_elements + t) * Use::kStep % 256 / 16; }
    static int column(int lane, int t) { return (lane * num_elements + t) * Use::kStep % 256 % 16; }
};

template <class Use, class T, class Layout>
void fill_fragment(fragment<Use, 16, 16, 16, T, Layout> &f, T value) {
    for (T &x : f.x) x = value;
}

template <class Fragment, class T>
T *element(Fragment &, T *matrix, unsigned stride, bool is_by_columns, int lane, int t) {
    const int row = Fragment::row(lane, t), column = Fragment::column(lane, t);
    return matrix + (is_by_columns ? column * stride + row : row * stride + column);
}

inline void wait_for_warp(on_cpu::Site site, const void *matrix, unsigned stride) {
    struct In {
        const void *matrix;
        unsigned stride;
    };
    on_cpu::meet<char>(site, In{matrix, stride}, [site](const In *in, char *) {
        for (int lane = 1; lane < 32; ++lane)
            if (in[lane].matrix != in[0].matrix || in[lane].stride != in[0].stride) on_cpu::fail(site, "lanes name different matrices");
    });
}

template <class T>
void check_matrix(on_cpu::Site site, const T *matrix, unsigned stride) {
    on_cpu::check_shared(site, matrix, (15 * stride + 16) * sizeof(T), 32);
    if (stride * sizeof(T) % 16) on_cpu::fail(site, "rows %zu bytes apart: must be a multiple of 16", stride * sizeof(T));
}

template <class Use, class T, class Layout>
void load_as(fragment<Use, 16, 16, 16, T, Layout> &f, const T *matrix, unsigned stride, bool is_by_columns, on_cpu::Site site) {
    const int lane = threadIdx.x % 32;
    check_matrix(site, matrix, stride);
    if (on_cpu::machine.timing == on_cpu::kLate) wait_for_warp(site, matrix, stride);
    for (int t = 0; t < 8; ++t) f.x[t] = *element(f, matrix, stride, is_by_columns, lane, t);
    if (on_cpu::machine.timing == on_cpu::kEarly) wait_for_warp(site, matrix, stride);
}

template <class Use, class Layout>
void load_matrix_sync(fragment<Use, 16, 16, 16, half, Layout> &f, const half *matrix, unsigned stride,
                      on_cpu::Site site = on_cpu::Site::current()) {
    load_as(f, matrix, stride, f.kIsByColumns, site);
}

inline void load_matrix_sync(fragment<accumulator, 16, 16, 16, float> &f, const float *matrix, unsigned stride, layout_t layout,
                             on_cpu::Site site = on_cpu::Site::current()) {
    load_as(f, matrix, stride, layout == mem_col_major, site);
}

inline void store_matrix_sync(float *matrix, const fragment<accumulator, 16, 16, 16, float> &f, unsigned stride, layout_t layout,
                              on_cpu::Site site = on_cpu::Site::current()) {
    const int lane = threadIdx.x % 32;
    check_matrix(site, matrix, stride);
    if (on_cpu::machine.timing == on_cpu::kLate) wait_for_warp(site, matrix, stride);
    for (int t = 0; t < 8; ++t) *element(f, matrix, stride, layout == mem_col_major, lane, t) = f.x[t];
    if (on_cpu::machine.timing == on_cpu::kEarly) wait_for_warp(site, matrix, stride);
}

template <class A, class B, class C>
void mma_sync(C &d, const A &a, const B &b, const C &c, on_cpu::Site site = on_cpu::Site::current()) {
    struct In {
        A a;
        B b;
        C c;
    };
    d = on_cpu::meet<C>(site, In{a, b, c}, [](const In *in, C *out) {
        float a[16][16], b[16][16], c[16][16];
        for (int lane = 0; lane < 32; ++lane)
            for (int t = 0; t < 8; ++t) {
                a[A::row(lane, t)][A::column(lane, t)] = kvboost_edge_cuda::to_float<kvboost_edge_cuda::F16>(in[lane].a.x[t].bits);
                b[B::row(lane, t)][B::column(lane, t)] = kvboost_edge_cuda::to_float<kvboost_edge_cuda::F16>(in[lane].b.x[t].bits);
                c[C::row(lane, t)][C::column(lane, t)] = in[lane].c.x[t];
            }
        kvboost_edge_cuda::multiply_matrices<16>(c, a, b);
        for (int lane = 0; lane < 32; ++lane)
            for (int t = 0; t < 8; ++t) out[lane].x[t] = c[C::row(lane, t)][C::column(lane, t)];
    });
}

}  // namespace nvcuda::wmma
