// The widest instruction set of this processor for which loops were compiled.
#ifndef ODTPACK_NATIVE_WIDEST_H_
#define ODTPACK_NATIVE_WIDEST_H_

namespace odtpack::native {

#if defined(ODTPACK_X86)
template <typename Loops>
const Loops& Widest(const Loops& baseline, const Loops& avx2, const Loops& avx512) {
  __builtin_cpu_init();
  if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512vl") &&
      __builtin_cpu_supports("avx512dq")) {
    return avx512;
  }
  return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") ? avx2 : baseline;
}
#define ODTPACK_WIDEST(name) Widest(name##_baseline, name##_avx2, name##_avx512)
#define ODTPACK_DECLARE(type, name) extern const type name##_baseline, name##_avx2, name##_avx512
#else
#define ODTPACK_WIDEST(name) name##_baseline
#define ODTPACK_DECLARE(type, name) extern const type name##_baseline
#endif

}  // namespace odtpack::native

#endif  // ODTPACK_NATIVE_WIDEST_H_
