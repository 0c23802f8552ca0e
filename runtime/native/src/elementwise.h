// A program over registers of floats: what a group of elementwise nodes computes, in one pass.
#ifndef ODTPACK_NATIVE_ELEMENTWISE_H_
#define ODTPACK_NATIVE_ELEMENTWISE_H_

#include <array>
#include <cstdint>
#include <memory>
#include <vector>

#include "kernel.h"

namespace odtpack::native {

// In the order of OPERATORS in odtpack_runtime/package/native.py. A truth value is 1 or 0.
enum class Op : int64_t {
  kAdd, kSub, kMul, kDiv, kSqrt, kNeg, kAbs, kMin, kMax, kRelu, kLess, kLessOrEqual, kGreater,
  kGreaterOrEqual, kEqual, kNot, kAnd, kOr, kWhere, kCast, kClip, kReciprocal, kGemm,
  kHardSigmoid, kIdentity, kSign, kExp, kErf, kTanh, kSigmoid, kLog, kRowSum, kRowMean, kRowMax,
  kColumnSum,
  kCount,
};

constexpr int kBlock = 512;  // elements of a register: a few of them fit a core's first cache

struct Instruction {
  Op op;
  int a, b, c;         // what it reads: registers
  int result;          // register
  float alpha, beta;   // of HardSigmoid
  bool merged;         // a product that only the reduction behind it reads, which then has both factors
  int axis;            // a row's, from 1 on, where 0 is the last; the axes that a column is summed over
};

// A known program on the values that it numbers; alpha and beta are those of its HardSigmoid.
using KnownLoop = void (*)(float* const* registers, int count, float alpha, float beta);

}  // namespace odtpack::native

#include "elementwise_known.h"

namespace odtpack::native {

// The loops for one instruction set. Registers are those of all values; `count` elements are computed.
struct Loops {
  void (*step)(const Instruction& each, float* const* registers, int count);
  KnownLoop known[kKnownCount];  // in the order of kKnown
  // A number for each row, or adds rows to the sums of their columns; of products, if by is given.
  void (*reduce)(Op op, const float* in, const float* by, float* out, int rows, int width);
  void (*expand)(const float* in, float* out, int rows, int width);  // a row's number, repeated
};

// The widest that this processor has.
const Loops& ChooseLoops();

std::unique_ptr<Kernel> MakeElementwise(const std::vector<int64_t>& program);

}  // namespace odtpack::native

#endif  // ODTPACK_NATIVE_ELEMENTWISE_H_
