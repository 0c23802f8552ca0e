// Depthwise convolutions of planes, and their gradients.
#ifndef ODTPACK_NATIVE_DEPTHWISE_H_
#define ODTPACK_NATIVE_DEPTHWISE_H_

#include <cstdint>
#include <memory>
#include <vector>

#include "kernel.h"

namespace odtpack::native {

constexpr int64_t kLanes = 16;  // of the widest vectors: buffers end with as many spare elements

struct Piece {
  int64_t from, to, count;
};

// The loops for one instruction set.
struct DepthwiseLoops {
  // out[p] = start + the sum over taps t of w[t] * in[offsets[t] + p], for p below count; both are
  // read and written up to the next multiple of kLanes.
  void (*filter)(const float* in, const int64_t* offsets, const float* w, int64_t taps, float start,
                 int64_t count, float* out);
  // sums[t][l] += the sum over p of a[p] * in[offsets[t] + p] for each lane l = p % kLanes.
  void (*dots)(const float* in, const int64_t* offsets, int64_t taps, const float* a, int64_t count,
               float* sums);
  // to[piece.to + i * to_step] = from[piece.from + i * from_step], for each of the pieces.
  void (*move)(const Piece* pieces, int64_t count, const float* from, int64_t from_step, float* to,
               int64_t to_step);
  // to[piece.to + i] = (i even ? first : second)[piece.from + i / 2]
  void (*interleave)(const Piece* pieces, int64_t count, const float* first, const float* second,
                     float* to);
};

std::unique_ptr<Kernel> MakeDepthwise(const std::vector<int64_t>& program);

}  // namespace odtpack::native

#endif  // ODTPACK_NATIVE_DEPTHWISE_H_
