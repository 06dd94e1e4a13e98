// The launchers of launch.h over the fibers of launches.cpp: the extension's binding, linked with this, runs on tensors of the
// host. `kvboost_edge_cuda_on_cpu_major` is the compute capability that the launcher finds.
#include <string>

#include "launch.h"

using namespace kvboost_edge_cuda;

struct Schedule {
    int order, timing;
};

extern "C" {
const char *attention(const AttentionParams *p, int is_wmma, int dtype, int head_dim, int warps_m, Schedule schedule);
const char *merge(const AttentionParams *p, int dtype, Schedule schedule);
const char *write_slots(const WriteKVParams *p, Schedule schedule);
const char *copy(const CopyBlocksParams *p, long long most_bytes, Schedule schedule);

int kvboost_edge_cuda_on_cpu_major = 8;
int kvboost_edge_cuda_on_cpu_launches = 0;
}

namespace {

constexpr Schedule kShuffledLate = {2, 1};
std::string said;

int finish(const char *error) {
    ++kvboost_edge_cuda_on_cpu_launches;
    said = error ? error : "";
    return error != nullptr;
}

int form_of(int head_dim) { return head_dim <= 64 ? 64 : head_dim <= 96 ? 96 : head_dim <= 128 ? 128 : 256; }

}  // namespace

int kvboost_edge_cuda_attention(const AttentionParams *params, int dtype, void *) {
    const bool is_wmma = kvboost_edge_cuda_on_cpu_major < 8;
    const int warps_m = params->seqlen_q * (params->num_q_heads / params->num_kv_heads) <= 16 ? 1 : 4;
    const int error = finish(attention(params, is_wmma, dtype, form_of(params->head_dim), warps_m, kShuffledLate));
    return error || params->num_splits == 1 ? error : finish(merge(params, dtype, kShuffledLate));
}

int kvboost_edge_cuda_write_kv(const WriteKVParams *params, void *) { return finish(write_slots(params, kShuffledLate)); }

int kvboost_edge_cuda_copy_blocks(const CopyBlocksParams *params, long long most_bytes, void *) {
    return finish(copy(params, most_bytes, kShuffledLate));
}

const char *kvboost_edge_cuda_error(int) { return said.c_str(); }
