// Launchers: called by the binding, defined in launch.cu. C linkage and plain types separate files
// with torch's headers from files with device code. Each returns 0, or an error that
// `kvboost_edge_cuda_error` names.
#pragma once

#include "params.cuh"

extern "C" {

// Attention on the current device; `dtype` is a DType. If params.num_splits > 1, the parts are also
// merged.
int kvboost_edge_cuda_attention(const kvboost_edge_cuda::AttentionParams *params, int dtype, void *stream);

int kvboost_edge_cuda_write_kv(const kvboost_edge_cuda::WriteKVParams *params, void *stream);

// `most_bytes`: the largest of params.block_bytes, which are in device memory.
int kvboost_edge_cuda_copy_blocks(
    const kvboost_edge_cuda::CopyBlocksParams *params, long long most_bytes, void *stream);

const char *kvboost_edge_cuda_error(int error);

}  // extern "C"
