// Launchers, which the binding calls and launch.cu defines. C linkage and plain types keep files
// that include torch's headers separate from files with device code. Each launcher returns 0, or an
// error code that `kvboost_edge_cuda_error` turns into a message.
#pragma once

#include "params.cuh"

extern "C" {

// Attention on the current device; `dtype` is a DType. If params.num_splits > 1, the launcher also
// merges the parts.
int kvboost_edge_cuda_attention(const kvboost_edge_cuda::AttentionParams *params, int dtype, void *stream);

int kvboost_edge_cuda_write_kv(const kvboost_edge_cuda::WriteKVParams *params, void *stream);

// `most_bytes` is the largest of params.block_bytes, which are in device memory.
int kvboost_edge_cuda_copy_blocks(
    const kvboost_edge_cuda::CopyBlocksParams *params, long long most_bytes, void *stream);

const char *kvboost_edge_cuda_error(int error);

}  // extern "C"
