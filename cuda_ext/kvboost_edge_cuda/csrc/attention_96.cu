#include "attention_launch.cuh"

namespace kvboost_edge_cuda {
template cudaError_t launch_attention<96>(const AttentionParams &, int, int, cudaStream_t);
}
