// Vectors of the compiler's. Included by a file that says how many floats a vector of it has, as
// ODTPACK_WIDTH: each such file is compiled for one instruction set.
#ifndef ODTPACK_NATIVE_VECTORS_H_
#define ODTPACK_NATIVE_VECTORS_H_

#include <cstdint>
#include <cstring>

namespace odtpack::native {
namespace {

#if defined(__GNUC__)
typedef float V __attribute__((vector_size(ODTPACK_WIDTH * sizeof(float))));
#define ODTPACK_INLINE inline __attribute__((always_inline))
#else
#define ODTPACK_INLINE inline
struct V {
  float lanes[ODTPACK_WIDTH];
};
inline V operator*(V a, V b) {
  for (int i = 0; i < ODTPACK_WIDTH; ++i) a.lanes[i] *= b.lanes[i];
  return a;
}
inline V operator+(V a, V b) {
  for (int i = 0; i < ODTPACK_WIDTH; ++i) a.lanes[i] += b.lanes[i];
  return a;
}
inline V operator-(V a, V b) {
  for (int i = 0; i < ODTPACK_WIDTH; ++i) a.lanes[i] -= b.lanes[i];
  return a;
}
#endif

constexpr int64_t kWidth = ODTPACK_WIDTH;

inline V Load(const float* from) {
  V value;
  std::memcpy(&value, from, sizeof value);
  return value;
}

inline void Store(V value, float* to) { std::memcpy(to, &value, sizeof value); }

inline V All(float number) {
  float lanes[kWidth];
  for (float& lane : lanes) lane = number;
  return Load(lanes);
}

}  // namespace
}  // namespace odtpack::native

#endif  // ODTPACK_NATIVE_VECTORS_H_
