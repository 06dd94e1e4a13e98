// Kernels with one fault each, of the kinds that a GPU punishes late or never: what the fibers must notice.
#include "device.cuh"

using namespace kvboost_edge_cuda;

namespace {

struct Params {
    const unsigned short *in;  // 32 * kThreads elements
    unsigned *out;             // one for each thread
};

using Arena = unsigned *;

void no_fault(Params p) {
    Arena arena = reinterpret_cast<Arena>(shared_arena());
    arena[threadIdx.x] = threadIdx.x;
    __syncthreads();
    p.out[threadIdx.x] = arena[(threadIdx.x + 1) % kThreads];
}

void no_block_barrier(Params p) {
    Arena arena = reinterpret_cast<Arena>(shared_arena());
    arena[threadIdx.x] = threadIdx.x;
    __syncwarp();
    p.out[threadIdx.x] = arena[(threadIdx.x + 32) % kThreads];
}

void no_warp_barrier(Params p) {
    Arena arena = reinterpret_cast<Arena>(shared_arena());
    arena[threadIdx.x] = threadIdx.x;
    p.out[threadIdx.x] = arena[threadIdx.x ^ 1];
}

void barriers_of_two_branches(Params p) {
    if (threadIdx.x < 32)
        __syncthreads();
    else
        __syncthreads();
    p.out[threadIdx.x] = 0;
}

void barrier_that_some_miss(Params p) {
    p.out[threadIdx.x] = 0;
    if (threadIdx.x >= 96) return;
    __syncthreads();
}

void shuffle_of_half_a_warp(Params p) {
    if (threadIdx.x % 32 < 16) p.out[threadIdx.x] = __shfl_xor_sync(0xffffffffu, threadIdx.x, 1);
}

void shuffles_of_two_branches(Params p) {
    if (threadIdx.x % 2)
        p.out[threadIdx.x] = __shfl_xor_sync(0xffffffffu, threadIdx.x, 2);
    else
        p.out[threadIdx.x] = __shfl_xor_sync(0xffffffffu, threadIdx.x, 4);
}

unsigned short *own_row() { return reinterpret_cast<unsigned short *>(shared_arena()) + threadIdx.x * 8; }

void copy_read_too_early(Params p) {
    copy16_async(own_row(), p.in + threadIdx.x * 8, true);
    p.out[threadIdx.x] = *own_row();
    wait_copies();
}

void copy_over_what_others_read(Params p) {
    unsigned sum = 0;
    for (int i = 0; i < 2; ++i) {
        copy16_async(own_row(), p.in + (i * kThreads + threadIdx.x) * 8, true);
        wait_copies();
        __syncthreads();
        sum = sum * 3 + reinterpret_cast<unsigned short *>(shared_arena())[(threadIdx.x + 1) % kThreads * 8];
    }
    p.out[threadIdx.x] = sum;
}

void unawaited_copy(Params p) {
    copy16_async(own_row(), p.in, true);
    p.out[threadIdx.x] = 0;
}

void copy_off_by_two_bytes(Params p) {
    copy16_async(own_row(), p.in + 1, true);
    wait_copies();
    p.out[threadIdx.x] = 0;
}

void matrix_after_the_end(Params p) {
    unsigned r[4];
    load_matrices(r, own_row() + 8 * kThreads);
    p.out[threadIdx.x] = r[0];
}

void read_after_the_end(Params p) {
    p.out[threadIdx.x] = reinterpret_cast<Arena>(shared_arena())[4 * kThreads + threadIdx.x];
}

void read_before_the_input(Params p) { p.out[threadIdx.x] = p.in[static_cast<int>(threadIdx.x) - 1]; }

const struct {
    const char *name;
    void (*kernel)(Params);
} kKernels[] = {
    {"no_fault", no_fault},
    {"no_block_barrier", no_block_barrier},
    {"no_warp_barrier", no_warp_barrier},
    {"barriers_of_two_branches", barriers_of_two_branches},
    {"barrier_that_some_miss", barrier_that_some_miss},
    {"shuffle_of_half_a_warp", shuffle_of_half_a_warp},
    {"shuffles_of_two_branches", shuffles_of_two_branches},
    {"copy_read_too_early", copy_read_too_early},
    {"copy_over_what_others_read", copy_over_what_others_read},
    {"unawaited_copy", unawaited_copy},
    {"copy_off_by_two_bytes", copy_off_by_two_bytes},
    {"matrix_after_the_end", matrix_after_the_end},
    {"read_after_the_end", read_after_the_end},
    {"read_before_the_input", read_before_the_input},
};

}  // namespace

// One CTA of kThreads with 16 bytes of shared memory for each; null, or what went wrong.
extern "C" const char *run_faulty(const char *name, const unsigned short *in, unsigned *out, int order, int timing) {
    for (const auto &entry : kKernels)
        if (strcmp(entry.name, name) == 0) return on_cpu::launch(entry.kernel, {1, 1, 1}, kThreads, 16 * kThreads, Params{in, out}, order, timing);
    return "no such kernel";
}

extern "C" float convert_half(unsigned short bits) { return on_cpu::half_to_float(bits); }
extern "C" float convert_brain(unsigned short bits) { return on_cpu::brain_to_float(bits); }
extern "C" unsigned pack_half(float low, float high) { return pack<F16>(low, high); }
extern "C" unsigned pack_brain(float low, float high) { return pack<BF16>(low, high); }
