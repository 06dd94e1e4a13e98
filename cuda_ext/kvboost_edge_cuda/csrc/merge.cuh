// Merging of splits: combines results for the same rows over different keys.
#pragma once

#include "work.cuh"

namespace kvboost_edge_cuda {

// One warp per row and head: out = sum over splits of exp(lse_split - lse) out_split. The sink is
// added to the denominator here.
template <class Element>
__global__ void __launch_bounds__(kThreads) merge_splits(AttentionParams p) {
    const int lane = threadIdx.x % 32;
    const int index = blockIdx.x * (kThreads / 32) + threadIdx.x / 32;  // index of a row and head
    const long long num_rows = p.total_q * p.num_q_heads;
    if (index >= num_rows) return;
    const int row = index / p.num_q_heads, head = index % p.num_q_heads;

    float largest = p.sinks ? p.sinks[head] * kLog2e : negative_infinity();
    float total = p.sinks ? 1.0f : 0.0f;
    for (int split = 0; split < p.num_splits; ++split) {  // all lanes compute the same values
        const float score = p.partial_lse[split * num_rows + index] * kLog2e;
        const float top = fmaxf(largest, score);
        if (top == negative_infinity()) continue;
        total = total * exp2_fast(largest - top) + exp2_fast(score - top);
        largest = top;
    }

    const int sequence = p.cu_seqlens_q ? 0 : row / p.seqlen_q;
    const int i = p.cu_seqlens_q ? row : row % p.seqlen_q;
    if (lane == 0 && p.lse)
        p.lse[sequence * p.lse_batch_stride + i * p.lse_row_stride + head * p.lse_head_stride] =
            total > 0 ? (largest + log2f(total)) * kLn2 : negative_infinity();
    unsigned short *out =
        static_cast<unsigned short *>(p.out) + sequence * p.out_batch_stride + i * p.out_row_stride + head * p.out_head_stride;
    for (int channel = lane * 2; channel < p.head_dim; channel += 64) {
        float low = 0, high = 0;
        for (int split = 0; split < p.num_splits; ++split) {
            const float score = p.partial_lse[split * num_rows + index] * kLog2e;
            if (score == negative_infinity()) continue;
            const float2 part = *reinterpret_cast<const float2 *>(p.partial_out + (split * num_rows + index) * p.head_dim + channel);
            const float weight = exp2_fast(score - largest) / total;
            low += weight * part.x;
            high += weight * part.y;
        }
        *reinterpret_cast<unsigned *>(out + channel) = pack<Element>(low, high);
    }
}

}  // namespace kvboost_edge_cuda
