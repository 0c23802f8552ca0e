// Products with a frozen matrix of few bits, which is unpacked a panel at a time, and products whose
// first operand is transposed.
#ifndef ODTPACK_NATIVE_PRODUCT_H_
#define ODTPACK_NATIVE_PRODUCT_H_

#include <cstdint>
#include <memory>
#include <vector>

#include "kernel.h"

namespace odtpack::native {

// A matrix [rows, columns]. Its elements are scale (code - zero): codes lie row by row, two in a byte
// where they have 4 bits, the first in the lower half. A scale is that of `high` rows and `wide`
// columns, of which one is 1; scales lie row by row, too.
struct Codes {
  const uint8_t* codes;
  const float* scales;
  int64_t rows, columns, high, wide, across, bits;  // `across` scales for a row
  uint8_t flipped;  // bits that differ from those of a code from 0 on: the sign of 8 bits
  float zero;

  const float* scales_of(int64_t row) const {
    return scales + (high == 1 ? row : row / high) * across;
  }
};

// The loops for one instruction set. A panel is some columns of a product's second operand: the
// numbers of each row lie together, `width` of them. So do those of `high` columns of a first operand
// that is transposed.
struct ProductLoops {
  int64_t width, high;
  // panel[k][j] = W[from + j, start + k] for j < count and k < depth, where W is not transposed
  // W[start + k, from + j]; 0 for the other j.
  void (*unpack)(const Codes& w, bool transposed, int64_t from, int64_t count, int64_t start,
                 int64_t depth, float* panel);
  // out[i][j] = or += the sum over k of in[i][k] * panel[k][j], for i < rows and j < count; rows of
  // `in` and `out` are so many floats apart.
  void (*multiply)(const float* in, int64_t in_row, const float* panel, int64_t depth, float* out,
                   int64_t out_row, int64_t rows, int64_t count, bool add);
  // The same where `in` has been packed: for each `high` rows of the result, those columns.
  void (*multiply_packed)(const float* in, int64_t in_row, const float* panel, int64_t depth,
                          float* out, int64_t out_row, int64_t rows, int64_t count, bool add);
  // Packs `depth` rows of `count` numbers, so many floats apart: `width` columns after the other, or
  // `high` of them, the last ones filled up with 0.
  void (*pack_panels)(const float* from, int64_t row, int64_t depth, int64_t count, float* to);
  void (*pack_high)(const float* from, int64_t row, int64_t depth, int64_t count, float* to);
};

std::unique_ptr<Kernel> MakeProduct(const std::vector<int64_t>& program);
std::unique_ptr<Kernel> MakeTransposed(const std::vector<int64_t>& program);

}  // namespace odtpack::native

#endif  // ODTPACK_NATIVE_PRODUCT_H_
