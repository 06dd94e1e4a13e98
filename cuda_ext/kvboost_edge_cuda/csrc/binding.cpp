// torch operators for the launchers. Before every launch, this file checks the requirements of
// params.cuh on tensors. Values of index tensors (lengths, block ids, slots) are checked in Python,
// unless the caller disables that.
//
// For tests, KVBOOST_EDGE_CUDA_DEVICE=CPU builds this file with launchers that compute on the host.
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <c10/core/DeviceGuard.h>
#include <torch/library.h>

#include <algorithm>
#include <limits>

#include "launch.h"

#ifndef KVBOOST_EDGE_CUDA_DEVICE
#define KVBOOST_EDGE_CUDA_DEVICE CUDA
#endif

namespace kvboost_edge_cuda {
namespace {

using at::Tensor;
using Optional = std::optional<Tensor>;

constexpr int64_t kMostCtas = 65535;  // limit of the second and third grid dimension

// Strides in elements of the batches (or blocks), rows and heads of a tensor [batch, rows, heads,
// dim] or [rows, heads, dim].
struct Strides {
    int64_t batch, row, head;

    explicit Strides(const Tensor &tensor)
        : batch(tensor.dim() == 4 ? tensor.stride(0) : 0), row(tensor.stride(-3)), head(tensor.stride(-2)) {}
};

int narrow(int64_t value, const char *name) {
    TORCH_CHECK(value <= std::numeric_limits<int>::max(), name, "=", value, " does not fit into 32 bits");
    return static_cast<int>(value);
}

DType dtype_of(const Tensor &tensor) {
    const auto type = tensor.scalar_type();
    TORCH_CHECK(type == at::kHalf || type == at::kBFloat16, "kvboost_edge_cuda computes in float16 or bfloat16, not ", type);
    return type == at::kHalf ? kF16 : kBF16;
}

void check_device(const Tensor &tensor, const Tensor &like, const char *name) {
    TORCH_CHECK(tensor.device() == like.device(), name, " is on ", tensor.device(), ", but the other tensors are on ", like.device());
}

// Check a tensor of 16-bit elements, which kernels read in chunks of 16 bytes.
void check_elements(const Tensor &tensor, const Tensor &like, const char *name) {
    check_device(tensor, like, name);
    TORCH_CHECK(tensor.scalar_type() == like.scalar_type(), name, " is ", tensor.scalar_type(), ", but the other tensors are ", like.scalar_type());
    TORCH_CHECK(tensor.dim() == 3 || tensor.dim() == 4, name, " has ", tensor.dim(), " dimensions; it must have 3 or 4");
    const int64_t dim = tensor.size(-1);
    TORCH_CHECK(dim > 0 && dim % 8 == 0 && dim <= 256, name, " has head_dim ", dim, "; it must be a multiple of 8 up to 256");
    TORCH_CHECK(tensor.stride(-1) == 1, name, " must be contiguous in its last dimension, but its stride is ", tensor.stride(-1));
    for (int64_t axis = 0; axis + 1 < tensor.dim(); ++axis)
        TORCH_CHECK(tensor.size(axis) <= 1 || tensor.stride(axis) % 8 == 0,
                    name, " has a stride of ", tensor.stride(axis), " elements; it must be a multiple of 8");
    TORCH_CHECK(reinterpret_cast<uintptr_t>(tensor.const_data_ptr()) % 16 == 0, name, " must be aligned to 16 bytes");
}

template <class Number>
const Number *index(const Optional &tensor, const Tensor &like, c10::IntArrayRef sizes, const char *name) {
    if (!tensor) return nullptr;
    check_device(*tensor, like, name);
    TORCH_CHECK(tensor->scalar_type() == c10::CppTypeToScalarType<Number>::value, name, " is ", tensor->scalar_type(), "; it must be ", c10::CppTypeToScalarType<Number>::value);
    TORCH_CHECK(tensor->is_contiguous() && tensor->sizes() == sizes, name, " has shape ", tensor->sizes(),
                "; it must be contiguous and of shape ", sizes);
    return tensor->const_data_ptr<Number>();
}

void launched(int error) { TORCH_CHECK(error == 0, "kvboost_edge_cuda: ", kvboost_edge_cuda_error(error)); }

// Check q, k, v, out and lse, and return their sizes and strides.
AttentionParams tensors_of(const Tensor &q, const Tensor &k, const Tensor &v, Tensor &out, Tensor &lse) {
    check_elements(q, q, "q");
    check_elements(k, q, "k");
    check_elements(v, q, "v");
    check_elements(out, q, "out");
    check_device(lse, q, "lse");
    TORCH_CHECK(k.sizes() == v.sizes(), "k has shape ", k.sizes(), ", but v has shape ", v.sizes(), "; they must be equal");
    TORCH_CHECK(out.sizes() == q.sizes(), "out has shape ", out.sizes(), ", but q has shape ", q.sizes(), "; they must be equal");
    TORCH_CHECK(lse.scalar_type() == at::kFloat && lse.sizes() == q.sizes().slice(0, q.dim() - 1),
                "lse is ", lse.scalar_type(), " of shape ", lse.sizes(), "; it must be float32 of q's shape ", q.sizes(),
                " without the last dimension");
    const int64_t heads = q.size(-2), kv_heads = k.size(-2);
    TORCH_CHECK(kv_heads > 0 && heads % kv_heads == 0, heads, " query heads must be a multiple of ", kv_heads, " KV heads");
    TORCH_CHECK(q.size(-1) == k.size(-1), "q has head_dim ", q.size(-1), ", but k and v have ", k.size(-1), "; they must be equal");
    AttentionParams params{};
    params.q = q.const_data_ptr();
    params.k = k.const_data_ptr();
    params.v = v.const_data_ptr();
    params.out = out.mutable_data_ptr();
    params.lse = lse.mutable_data_ptr<float>();
    const Strides at_q(q), at_k(k), at_v(v), at_out(out);
    params.q_batch_stride = at_q.batch, params.q_row_stride = at_q.row, params.q_head_stride = at_q.head;
    params.k_batch_stride = at_k.batch, params.k_row_stride = at_k.row, params.k_head_stride = at_k.head;
    params.v_batch_stride = at_v.batch, params.v_row_stride = at_v.row, params.v_head_stride = at_v.head;
    params.out_batch_stride = at_out.batch, params.out_row_stride = at_out.row, params.out_head_stride = at_out.head;
    params.lse_batch_stride = lse.dim() == 3 ? lse.stride(0) : 0;
    params.lse_row_stride = lse.stride(-2), params.lse_head_stride = lse.stride(-1);
    params.num_q_heads = narrow(heads, "q heads");
    params.num_kv_heads = narrow(kv_heads, "kv heads");
    params.head_dim = narrow(q.size(-1), "head_dim");
    return params;
}

// q: [batch, seqlen_q, heads, dim], or flat [total_q, heads, dim] with cu_seqlens_q and
// max_seqlen_q. k and v: likewise, or [num_blocks, block_size, kv_heads, dim] with block_table.
// lse: [batch, seqlen_q, heads] or [total_q, heads], any strides.
void attention(const Tensor &q, const Tensor &k, const Tensor &v, Tensor out, Tensor lse, const Optional &cu_seqlens_q,
               const Optional &cu_seqlens_k, const Optional &seqused_k, const Optional &block_table,
               const Optional &cache_batch_idx, const Optional &sinks, int64_t max_seqlen_q, int64_t window_left,
               int64_t window_right, double softmax_scale, double softcap, int64_t num_splits, int64_t stream) {
    const DType dtype = dtype_of(q);
    AttentionParams params = tensors_of(q, k, v, out, lse);
    const bool flat_q = q.dim() == 3, flat_k = k.dim() == 3;
    TORCH_CHECK(flat_q == cu_seqlens_q.has_value(), "q must have 3 dimensions with cu_seqlens_q and 4 without it");
    TORCH_CHECK(flat_k ? cu_seqlens_k.has_value() && !block_table && !cache_batch_idx : true,
                "k with 3 dimensions requires cu_seqlens_k and excludes block_table and cache_batch_idx");
    TORCH_CHECK(flat_k || block_table || !cu_seqlens_k, "k with 4 dimensions accepts cu_seqlens_k only together with block_table");
    TORCH_CHECK(num_splits >= 1 && num_splits <= 256, "num_splits=", num_splits, " must be 1 to 256");
    const int64_t batch = flat_q ? cu_seqlens_q->numel() - 1 : q.size(0);
    TORCH_CHECK(batch >= 0, "cu_seqlens_q is empty; it must have one element more than there are sequences");
    TORCH_CHECK(flat_k || block_table || cache_batch_idx || k.size(0) == batch,
                "k has ", k.size(0), " sequences, but q has ", batch, "; they must be equal");
    params.cu_seqlens_q = index<int>(cu_seqlens_q, q, {batch + 1}, "cu_seqlens_q");
    params.cu_seqlens_k = index<int>(cu_seqlens_k, q, {batch + 1}, "cu_seqlens_k");
    params.seqused_k = index<int>(seqused_k, q, {batch}, "seqused_k");
    params.cache_batch_idx = index<int>(cache_batch_idx, q, {batch}, "cache_batch_idx");
    params.sinks = index<float>(sinks, q, {q.size(-2)}, "sinks");
    if (block_table) {
        TORCH_CHECK(block_table->dim() == 2, "block_table has ", block_table->dim(), " dimensions; it must have 2");
        TORCH_CHECK(k.size(1) % 16 == 0, "block_size=", k.size(1), " must be a multiple of 16");
        params.block_table = index<int>(block_table, q, {batch, block_table->size(1)}, "block_table");
        params.block_table_stride = block_table->size(1);
        params.block_size = narrow(k.size(1), "block_size");
    }
    TORCH_CHECK(batch <= kMostCtas, "a batch of ", batch, " sequences exceeds the ", kMostCtas, " CTAs of a launch");
    TORCH_CHECK(k.size(-2) * num_splits <= kMostCtas, k.size(-2), " KV heads in ", num_splits, " splits exceed the ",
                kMostCtas, " CTAs of a launch");
    params.total_q = flat_q ? q.size(0) : q.size(0) * q.size(1);
    params.batch = narrow(batch, "batch");
    params.seqlen_q = narrow(flat_q ? max_seqlen_q : q.size(1), "seqlen_q");
    params.seqlen_k = narrow(flat_k ? 0 : block_table ? block_table->size(1) * k.size(1) : k.size(1), "seqlen_k");
    params.window_left = narrow(window_left, "window_left");
    params.window_right = narrow(window_right, "window_right");
    narrow(static_cast<int64_t>(params.seqlen_q) * params.num_q_heads, "seqlen_q x heads");
    params.num_splits = static_cast<int>(num_splits);
    params.softmax_scale = static_cast<float>(softmax_scale);
    params.softcap = static_cast<float>(softcap);
    if (params.total_q == 0 || params.seqlen_q <= 0 || batch == 0) return;
    const c10::DeviceGuard guard(q.device());
    Tensor partial_out, partial_lse;
    if (num_splits > 1) {
        const auto options = q.options().dtype(at::kFloat);
        partial_out = at::empty({num_splits, params.total_q, q.size(-2), q.size(-1)}, options);
        partial_lse = at::empty({num_splits, params.total_q, q.size(-2)}, options);
        params.partial_out = partial_out.mutable_data_ptr<float>();
        params.partial_lse = partial_lse.mutable_data_ptr<float>();
    }
    launched(kvboost_edge_cuda_attention(&params, dtype, reinterpret_cast<void *>(stream)));
}

// keys, values: [num_tokens, kv_heads, dim]. Caches: [num_blocks, block_size, kv_heads, dim].
// slot_mapping: int64 [num_tokens].
void write_kv(const Tensor &keys, const Tensor &values, Tensor k_cache, Tensor v_cache, const Tensor &slot_mapping,
              int64_t stream) {
    dtype_of(keys);
    check_elements(keys, keys, "keys");
    check_elements(values, keys, "values");
    check_elements(k_cache, keys, "k_cache");
    check_elements(v_cache, keys, "v_cache");
    TORCH_CHECK(keys.dim() == 3 && keys.sizes() == values.sizes(), "keys have shape ", keys.sizes(), ", values have shape ",
                values.sizes(), "; both must be [num_tokens, kv_heads, dim]");
    TORCH_CHECK(k_cache.dim() == 4 && k_cache.sizes() == v_cache.sizes() &&
                    k_cache.sizes().slice(2) == keys.sizes().slice(1),
                "k_cache has shape ", k_cache.sizes(), ", v_cache has shape ", v_cache.sizes(),
                "; both must be [num_blocks, block_size, kv_heads, dim], keys have shape ", keys.sizes());
    WriteKVParams params{};
    params.keys = keys.const_data_ptr();
    params.values = values.const_data_ptr();
    params.k_cache = k_cache.mutable_data_ptr();
    params.v_cache = v_cache.mutable_data_ptr();
    const Optional slots(slot_mapping);
    params.slot_mapping = reinterpret_cast<const long long *>(index<int64_t>(slots, keys, {keys.size(0)}, "slot_mapping"));
    const Strides at_keys(keys), at_values(values), at_k(k_cache), at_v(v_cache);
    params.keys_row_stride = at_keys.row, params.keys_head_stride = at_keys.head;
    params.values_row_stride = at_values.row, params.values_head_stride = at_values.head;
    params.k_block_stride = at_k.batch, params.k_row_stride = at_k.row, params.k_head_stride = at_k.head;
    params.v_block_stride = at_v.batch, params.v_row_stride = at_v.row, params.v_head_stride = at_v.head;
    params.num_tokens = narrow(keys.size(0), "num_tokens");
    params.num_kv_heads = narrow(keys.size(1), "kv heads");
    params.head_dim = narrow(keys.size(2), "head_dim");
    params.block_size = narrow(k_cache.size(1), "block_size");
    if (params.num_tokens == 0) return;
    const c10::DeviceGuard guard(keys.device());
    launched(kvboost_edge_cuda_write_kv(&params, reinterpret_cast<void *>(stream)));
}

// pools: int64 [num_pools], addresses of contiguous pools. block_bytes: int64 [num_pools], and
// most_bytes their largest. pairs: int64 [num_pairs, 2]. All are on one device.
void copy_blocks(const Tensor &pools, const Tensor &block_bytes, int64_t most_bytes, const Tensor &pairs, int64_t stream) {
    CopyBlocksParams params{};
    const Optional at(pools), bytes(block_bytes), both(pairs);
    static_assert(sizeof(void *) == sizeof(int64_t), "addresses travel as int64");
    params.pools = reinterpret_cast<void *const *>(index<int64_t>(at, pools, {pools.numel()}, "pools"));
    params.block_bytes = reinterpret_cast<const long long *>(index<int64_t>(bytes, pools, {pools.numel()}, "block_bytes"));
    params.pairs = reinterpret_cast<const long long *>(index<int64_t>(both, pools, {pairs.size(0), 2}, "pairs"));
    params.num_pools = narrow(pools.numel(), "num_pools");
    TORCH_CHECK(pools.numel() <= kMostCtas, pools.numel(), " pools exceed the ", kMostCtas, " CTAs of a launch");
    params.num_pairs = narrow(pairs.size(0), "num_pairs");
    if (params.num_pools == 0 || params.num_pairs == 0) return;
    const c10::DeviceGuard guard(pools.device());
    launched(kvboost_edge_cuda_copy_blocks(&params, most_bytes, reinterpret_cast<void *>(stream)));
}

}  // namespace
}  // namespace kvboost_edge_cuda

TORCH_LIBRARY(kvboost_edge_cuda, library) {
    library.def(
        "attention(Tensor q, Tensor k, Tensor v, Tensor(a!) out, Tensor(b!) lse, Tensor? cu_seqlens_q, Tensor? cu_seqlens_k, "
        "Tensor? seqused_k, Tensor? block_table, Tensor? cache_batch_idx, Tensor? sinks, int max_seqlen_q, int window_left, "
        "int window_right, float softmax_scale, float softcap, int num_splits, int stream) -> ()");
    library.def(
        "write_kv(Tensor keys, Tensor values, Tensor(a!) k_cache, Tensor(b!) v_cache, Tensor slot_mapping, int stream) -> ()");
    library.def("copy_blocks(Tensor pools, Tensor block_bytes, int most_bytes, Tensor pairs, int stream) -> ()");
}

TORCH_LIBRARY_IMPL(kvboost_edge_cuda, KVBOOST_EDGE_CUDA_DEVICE, library) {
    library.impl("attention", &kvboost_edge_cuda::attention);
    library.impl("write_kv", &kvboost_edge_cuda::write_kv);
    library.impl("copy_blocks", &kvboost_edge_cuda::copy_blocks);
}
