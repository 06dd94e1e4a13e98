#include "attention_launch.cuh"

namespace kvboost_edge_cuda {
template cudaError_t launch_attention<64>(const AttentionParams &, int, int, cudaStream_t);
}
