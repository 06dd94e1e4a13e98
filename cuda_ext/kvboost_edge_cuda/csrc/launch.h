// The launchers: what the binding calls, and launch.cu defines. C linkage and plain types, so that files with torch's headers
// and files with device code never meet. Each returns 0 or an error that `kvboost_edge_cuda_error` names.
#pragma once

#include "params.cuh"

extern "C" {

// Attention on the current device; `dtype` is a DType. Where params.num_splits is above 1 the parts are merged as well.
int kvboost_edge_cuda_attention(const kvboost_edge_cuda::AttentionParams *params, int dtype, void *stream);

int kvboost_edge_cuda_write_kv(const kvboost_edge_cuda::WriteKVParams *params, void *stream);

// `most_bytes`: the largest of params.block_bytes, which lie on the device.
int kvboost_edge_cuda_copy_blocks(
    const kvboost_edge_cuda::CopyBlocksParams *params, long long most_bytes, void *stream);

const char *kvboost_edge_cuda_error(int error);

}  // extern "C"
