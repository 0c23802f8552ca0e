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
  kHardSigmoid, kIdentity, kSign,
  kCount,
};

constexpr int kBlock = 512;  // elements of a register: a few of them fit a core's first cache

struct Instruction {
  Op op;
  int a, b, c;         // what it reads: registers
  int result;          // register
  float alpha, beta;   // of HardSigmoid
};

// The loops for one instruction set. Registers are those of all values; `count` elements are computed.
struct Loops {
  void (*step)(const Instruction& each, float* const* registers, int count);
  void (*known[12])(float* const* registers, int count);  // in the order of kKnown
};

// The widest that this processor has.
const Loops& ChooseLoops();

std::unique_ptr<Kernel> MakeElementwise(const std::vector<int64_t>& program);

}  // namespace odtpack::native

#include "elementwise_known.h"

#endif  // ODTPACK_NATIVE_ELEMENTWISE_H_
