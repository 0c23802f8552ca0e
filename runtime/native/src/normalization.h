// Batch normalization in training mode with its activation, and its gradient.
#ifndef ODTPACK_NATIVE_NORMALIZATION_H_
#define ODTPACK_NATIVE_NORMALIZATION_H_

#include <cstdint>
#include <memory>
#include <vector>

#include "kernel.h"

namespace odtpack::native {

enum class Activation { kNone, kClip, kRelu };

// What follows a normalization; the bounds of a clip.
struct Bounds {
  Activation activation = Activation::kNone;
  float low = 0.f, high = 0.f;
};

// Planes of some consecutive channels: those of a sample lie one after the other.
struct Planes {
  int64_t samples, step, channels, size;  // step: elements from a sample to the next
  float* spare;                           // kSpare times the elements of a sample

  static constexpr int64_t kSpare = 3;
  static constexpr int64_t kShort = 64;  // planes below this are passed through together
  bool together() const { return size < kShort; }
};

// The loops for one instruction set. What they write may lie where they read the first planes.
struct NormalizationLoops {
  // sums[c]: of x.
  void (*sum)(const Planes& planes, const float* x, double* sums);
  // centered = x - mean[c]; squares[c]: sums of its squares.
  void (*center)(const Planes& planes, const float* x, const float* mean, float* centered,
                 double* squares);
  // y = activation(slope[c] centered + shift[c])
  void (*activate)(const Planes& planes, const float* centered, const float* slope,
                   const float* shift, const Bounds& bounds, float* y);
  // sums[c]: of g, which is dy where the activation y let it pass; products[c]: of g centered.
  void (*moments)(const Planes& planes, const float* dy, const float* centered, const float* y,
                  const Bounds& bounds, double* sums, double* products);
  // dx = gain[c] g - (slope[c] centered + shift[c])
  void (*gradient)(const Planes& planes, const float* dy, const float* centered, const float* y,
                   const Bounds& bounds, const float* gain, const float* slope, const float* shift,
                   float* dx);
};

std::unique_ptr<Kernel> MakeNormalization(const std::vector<int64_t>& program);

}  // namespace odtpack::native

#endif  // ODTPACK_NATIVE_NORMALIZATION_H_
