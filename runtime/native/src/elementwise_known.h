// Runs of instructions that have loops of their own: the usual updates, as packages have them, and
// what normalizations, activations and softmax have between their reductions.
//
// Each is written as the attribute "program" of a node. Its first `full` inputs have the shape of the
// result, the others are scalars, or one number for each row. What is not among them runs operator by
// operator: the same results, in up to twice the time.
#ifndef ODTPACK_NATIVE_ELEMENTWISE_KNOWN_H_
#define ODTPACK_NATIVE_ELEMENTWISE_KNOWN_H_

#include <array>
#include <cstddef>
#include <cstdint>

namespace odtpack::native {

constexpr int kKnownValues = 24, kKnownOutputs = 3, kKnownNumbers = 64, kKnownCount = 18;

struct KnownStep {
  Op op = Op::kIdentity;
  int a = 0, b = 0, c = 0;
};

struct KnownProgram {
  int full = 0, inputs = 0, outputs = 0, size = 0;
  int results[kKnownOutputs] = {};
  KnownStep code[kKnownValues] = {};
  int64_t numbers[kKnownNumbers] = {};

  size_t length = 0;
};

template <size_t size>
constexpr KnownProgram Known(int full, const int64_t (&numbers)[size]) {
  static_assert(size <= kKnownNumbers);
  KnownProgram found;
  found.full = full;
  found.inputs = static_cast<int>(numbers[0]);
  found.outputs = static_cast<int>(numbers[1]);
  found.size = static_cast<int>(size);
  for (size_t i = 0; i < size; ++i) found.numbers[i] = numbers[i];
  for (int i = 0; i < found.outputs; ++i) found.results[i] = static_cast<int>(numbers[2 + i]);
  found.length = (size - 2 - found.outputs) / 4;
  for (size_t i = 0; i < found.length; ++i) {
    const int64_t* const field = numbers + 2 + found.outputs + 4 * i;
    found.code[i] = {static_cast<Op>(field[0]), static_cast<int>(field[1]),
                     static_cast<int>(field[2]), static_cast<int>(field[3])};
  }
  return found;
}

// AdamW and Adam: in the optimizer model, in the step model joined, and there by themselves, where
// sums are products of a row.
constexpr KnownProgram kAdam = Known(
    4, {10, 3, 12, 16, 21, 2, 0, 4, 0, 2, 1, 5, 0, 0, 10, 11, 0, 2, 1, 1, 0, 2, 2, 6, 0, 2, 13, 7,
        0, 0, 14, 15, 0, 4, 16, 0, 0, 0, 17, 8, 0, 3, 12, 18, 0, 2, 19, 9, 0, 1, 3, 20, 0});
constexpr KnownProgram kAdamJoined = Known(
    4, {10, 3, 13, 18, 21, 2, 0, 0, 0, 2, 10, 4, 0, 2, 1, 5, 0, 0, 12, 11, 0, 4, 13, 0, 0, 0, 14, 6,
        0, 2, 0, 7, 0, 2, 2, 8, 0, 0, 17, 16, 0, 3, 18, 15, 0, 2, 19, 9, 0, 1, 3, 20, 0});
constexpr KnownProgram kAdamAlone = Known(
    4, {10, 3, 11, 14, 18, 2, 0, 4, 0, 22, 5, 1, 10, 2, 1, 1, 0, 2, 2, 6, 0, 22, 7, 12, 13, 4, 14, 0,
        0, 0, 15, 8, 0, 3, 11, 16, 0, 22, 9, 17, 3});
// With decay after the step, as transformers has it.
constexpr KnownProgram kAdamW = Known(
    4, {11, 3, 13, 17, 23, 2, 0, 4, 0, 2, 1, 5, 0, 0, 11, 12, 0, 2, 1, 1, 0, 2, 2, 6, 0, 2, 14, 7,
        0, 0, 15, 16, 0, 4, 17, 0, 0, 0, 18, 8, 0, 3, 13, 19, 0, 2, 20, 9, 0, 1, 3, 21, 0, 2, 22, 10,
        0});
constexpr KnownProgram kAdamWJoined = Known(
    4, {11, 3, 14, 19, 23, 2, 0, 0, 0, 2, 11, 4, 0, 2, 1, 5, 0, 0, 13, 12, 0, 4, 14, 0, 0, 0, 15, 6,
        0, 2, 0, 7, 0, 2, 2, 8, 0, 0, 18, 17, 0, 3, 19, 16, 0, 2, 20, 9, 0, 1, 3, 21, 0, 2, 22, 10,
        0});
constexpr KnownProgram kAdamWAlone = Known(
    4, {11, 3, 12, 15, 20, 2, 0, 4, 0, 22, 5, 1, 11, 2, 1, 1, 0, 2, 2, 6, 0, 22, 7, 13, 14, 4, 15,
        0, 0, 0, 16, 8, 0, 3, 12, 17, 0, 22, 9, 18, 3, 2, 19, 10, 0});
// With decay before the step, as PyTorch has it.
constexpr KnownProgram kTorchAdamW = Known(
    4, {11, 3, 13, 17, 23, 2, 0, 4, 0, 2, 1, 5, 0, 0, 11, 12, 0, 2, 1, 1, 0, 2, 2, 6, 0, 2, 14, 7,
        0, 0, 15, 16, 0, 2, 3, 8, 0, 4, 17, 0, 0, 0, 19, 9, 0, 3, 13, 20, 0, 2, 21, 10, 0, 1, 18, 22,
        0});
constexpr KnownProgram kTorchAdamWJoined = Known(
    4, {11, 3, 14, 19, 23, 2, 0, 0, 0, 2, 11, 4, 0, 2, 1, 5, 0, 0, 13, 12, 0, 4, 14, 0, 0, 0, 15, 6,
        0, 2, 0, 7, 0, 2, 2, 8, 0, 0, 18, 17, 0, 3, 19, 16, 0, 2, 20, 9, 0, 2, 3, 10, 0, 1, 22, 21,
        0});
constexpr KnownProgram kTorchAdamWAlone = Known(
    4, {11, 3, 12, 15, 20, 2, 0, 4, 0, 22, 5, 1, 11, 2, 1, 1, 0, 2, 2, 6, 0, 22, 7, 13, 14, 2, 3, 8,
        0, 4, 15, 0, 0, 0, 17, 9, 0, 3, 12, 18, 0, 22, 10, 19, 16});
// SGD with momentum.
constexpr KnownProgram kMomentum =
    Known(3, {5, 2, 6, 8, 2, 0, 3, 0, 0, 5, 1, 0, 2, 6, 4, 0, 1, 2, 7, 0});
constexpr KnownProgram kMomentumAlone =
    Known(3, {5, 2, 6, 7, 2, 0, 3, 0, 0, 5, 1, 0, 22, 4, 6, 2});
// SGD.
constexpr KnownProgram kSgd = Known(2, {3, 1, 4, 2, 0, 2, 0, 1, 1, 3, 0});

// The gradient of GELU, as odtpack's rule writes it: x, that of the result, then two scalars.
constexpr KnownProgram kGeluGradient =
    Known(2, {4, 1, 12, 2, 0, 2, 0, 27, 4, 0, 0, 23, 5, 0, 0, 2, 4, 4, 0, 1, 3, 7, 0, 26, 8, 0, 0,
              2, 4, 9, 0, 0, 6, 10, 0, 2, 1, 11, 0});
// The same before that of the result is there, in both orders that graphs have.
constexpr KnownProgram kGeluSlope = Known(
    1, {3, 1, 10, 2, 0, 1, 0, 27, 3, 0, 0, 23, 4, 0, 0, 2, 3, 3, 0, 1, 2, 6, 0, 26, 7, 0, 0, 2, 3, 8,
        0, 0, 5, 9, 0});
constexpr KnownProgram kGeluSlopeLater = Known(
    1, {3, 1, 10, 2, 0, 1, 0, 2, 3, 3, 0, 1, 2, 4, 0, 26, 5, 0, 0, 27, 3, 0, 0, 23, 7, 0, 0, 2, 3, 6,
        0, 0, 8, 9, 0});
// Of the gradient of softmax.
constexpr KnownProgram kSoftmaxGradient = Known(2, {3, 1, 4, 1, 0, 2, 0, 2, 1, 3, 0});
// Twice of the gradient of layer normalization.
constexpr KnownProgram kNormalized = Known(1, {3, 1, 4, 1, 0, 1, 0, 2, 3, 2, 0});
constexpr KnownProgram kNormalizationGradient =
    Known(2, {4, 1, 6, 2, 0, 2, 0, 1, 1, 4, 0, 2, 5, 3, 0});

#define ODTPACK_KNOWN(what)                                                                       \
  what<kAdam>, what<kAdamJoined>, what<kAdamAlone>, what<kAdamW>, what<kAdamWJoined>,             \
      what<kAdamWAlone>, what<kTorchAdamW>, what<kTorchAdamWJoined>, what<kTorchAdamWAlone>,      \
      what<kMomentum>, what<kMomentumAlone>, what<kGeluGradient>, what<kGeluSlope>,               \
      what<kGeluSlopeLater>, what<kNormalized>, what<kNormalizationGradient>,                     \
      what<kSoftmaxGradient>, what<kSgd>

template <const KnownProgram& program>
constexpr const KnownProgram* Address = &program;

constexpr std::array<const KnownProgram*, kKnownCount> kKnown = {ODTPACK_KNOWN(Address)};

}  // namespace odtpack::native

#endif  // ODTPACK_NATIVE_ELEMENTWISE_KNOWN_H_
