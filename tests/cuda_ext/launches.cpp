// The kernels of cuda_ext/ with the launches that params.cuh describes, for ctypes. A function returns null, or what went wrong.
// HEAD_DIMS, a list, chooses what is compiled.
#include "attention_mma.cuh"
#include "attention_wmma.cuh"
#include "cache.cuh"
#include "merge.cuh"

using namespace kvboost_edge_cuda;

namespace {

// How the fibers run, see fibers.h.
struct Schedule {
    int order, timing;
};

template <class Shape>
const char *launch_attention(void (*kernel)(AttentionParams), const AttentionParams &p, Schedule schedule) {
    const int rows = p.seqlen_q * (p.num_q_heads / p.num_kv_heads);
    const Index3 grid = {static_cast<unsigned>((rows + Shape::kRows - 1) / Shape::kRows), static_cast<unsigned>(p.num_kv_heads * p.num_splits),
                         static_cast<unsigned>(p.batch)};
    return on_cpu::launch(kernel, grid, kThreads, Shape::kSharedBytes, p, schedule.order, schedule.timing);
}

template <int kHeadDim, int kWarpsM>
const char *launch_form(const AttentionParams &p, bool is_wmma, int dtype, Schedule schedule) {
    using Mma = MmaShape<kHeadDim, kWarpsM>;
    if (is_wmma) return launch_attention<WmmaShape<kHeadDim, kWarpsM>>(attention_wmma<kHeadDim, kWarpsM>, p, schedule);
    if (dtype == kBF16) return launch_attention<Mma>(attention_mma<BF16, kHeadDim, kWarpsM>, p, schedule);
    return launch_attention<Mma>(attention_mma<F16, kHeadDim, kWarpsM>, p, schedule);
}

template <int kHeadDim>
const char *launch_head_dim(const AttentionParams &p, bool is_wmma, int dtype, int warps_m, Schedule schedule) {
    if (warps_m == 1) return launch_form<kHeadDim, 1>(p, is_wmma, dtype, schedule);
    return launch_form<kHeadDim, 4>(p, is_wmma, dtype, schedule);
}

template <int... kHeadDims>
const char *choose(int head_dim, const AttentionParams &p, bool is_wmma, int dtype, int warps_m, Schedule schedule) {
    const char *result = "this head_dim is not compiled";
    ((head_dim == kHeadDims ? void(result = launch_head_dim<kHeadDims>(p, is_wmma, dtype, warps_m, schedule)) : void()), ...);
    return result;
}

}  // namespace

extern "C" {

const char *attention(const AttentionParams *p, int is_wmma, int dtype, int head_dim, int warps_m, Schedule schedule) {
    return choose<HEAD_DIMS>(head_dim, *p, is_wmma, dtype, warps_m, schedule);
}

const char *merge(const AttentionParams *p, int dtype, Schedule schedule) {
    const Index3 grid = {static_cast<unsigned>((p->total_q * p->num_q_heads + 3) / 4), 1, 1};
    auto *kernel = dtype == kBF16 ? merge_splits<BF16> : merge_splits<F16>;
    return on_cpu::launch(kernel, grid, kThreads, 0, *p, schedule.order, schedule.timing);
}

const char *write_slots(const WriteKVParams *p, Schedule schedule) {
    return on_cpu::launch(write_kv, {static_cast<unsigned>(p->num_tokens), 1, 1}, kThreads, 0, *p, schedule.order, schedule.timing);
}

const char *copy(const CopyBlocksParams *p, long long most_bytes, Schedule schedule) {
    const Index3 grid = {static_cast<unsigned>((most_bytes + 2047) / 2048), static_cast<unsigned>(p->num_pools), 1};
    return on_cpu::launch(copy_blocks, grid, kThreads, 0, *p, schedule.order, schedule.timing);
}

// sizeof of the structs, so that their mirror in Python can be compared.
long long size_of(int which) {
    const long long sizes[] = {sizeof(AttentionParams), sizeof(WriteKVParams), sizeof(CopyBlocksParams)};
    return sizes[which];
}
}
