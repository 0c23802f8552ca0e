// Functions of numbers whose branches are selections, so that loops over them become vectors. How far
// they are from the exact ones, with fused multiply and add and without, is in docs/native.md.
//
// Polynomials are weighted least squares that approach minimax; each stands beside its interval.
namespace {

inline int32_t BitsOf(float x) {
  int32_t bits;
  std::memcpy(&bits, &x, sizeof bits);
  return bits;
}

inline float FloatOf(int32_t bits) {
  float x;
  std::memcpy(&x, &bits, sizeof x);
  return x;
}

inline float MulAdd(float a, float b, float c) {
#if defined(__FMA__) || defined(__aarch64__)
  return std::fma(a, b, c);
#else
  return a * b + c;
#endif
}

// The coefficient of the highest power is first.
inline float Polynomial(float, float p) { return p; }

template <typename... Lower>
inline float Polynomial(float x, float p, float next, Lower... lower) {
  return Polynomial(x, MulAdd(p, x, next), lower...);
}

// For x in [-87.3, 88.7].
inline float ExpWithin(float x) {
  constexpr float kRound = 12582912.f;  // 1.5 * 2^23: adding it rounds to a whole number
  const float shifted = MulAdd(x, 1.44269504f, kRound);
  const float n = shifted - kRound;
  const float r = MulAdd(n, -1.42860677e-6f, MulAdd(n, -0.693145752f, x));  // the first has 16 bits
  const float p = Polynomial(r, 0.001395080704241991f, 0.008369073271751404f,  // |r| <= ln 2 / 2
                             0.04166620224714279f, 0.16666516661643982f, 0.5f);
  const float power = 1.f + MulAdd(p * r, r, r);
  // The lowest bits of the shifted number are n; times 2^n is n more in the exponent.
  return FloatOf(static_cast<int32_t>(static_cast<uint32_t>(BitsOf(power)) +
                                      (static_cast<uint32_t>(BitsOf(shifted)) << 23)));
}

// What would be subnormal is 0.
inline float Exp(float x) {
  const float found = x < -87.336544f ? 0.f : ExpWithin(x);
  return x <= 88.722839f ? found : x + HUGE_VALF;  // infinity, or NaN
}

inline float Erf(float x) {
  const float t = std::fabs(x), s = x * x;
  const float p = Polynomial(s, -0.0005976893589831889f, 0.00499098002910614f,  // |x| <= 0.93
                             -0.02676556631922722f, 0.11281802505254745f, -0.37612494826316833f,
                             0.12837915122509003f);
  const float small = MulAdd(x, p, x);
  const float u = t > 3.95f ? 3.95f : t;  // beyond, the result is 1
  const float q = Polynomial(u, 1.0433119314257056e-5f, -0.000314858159981668f,  // 0.9 <= u
                             0.0036103420425206423f, -0.023694565519690514f, 0.10615904629230499f,
                             0.6351980566978455f, 0.12863707542419434f);
  const float big = std::copysign(1.f - ExpWithin(-MulAdd(u, q, u)), x);
  return t <= 0.921875f ? small : big;
}

inline float Tanh(float x) {
  const float t = std::fabs(x), s = x * x;
  const float p = Polynomial(s, -0.005679303780198097f, 0.020618122071027756f,  // |x| <= 0.63
                             -0.05373400077223778f, 0.1333138346672058f, -0.3333328068256378f);
  const float small = MulAdd(x * s, p, x);
  const float u = t > 10.f ? 10.f : t;  // beyond, the result is 1
  const float big = std::copysign(1.f - 2.f / (ExpWithin(u + u) + 1.f), x);
  return t <= 0.625f ? small : big;
}

// As 1 / (1 + e^-x) and not by a difference from 1: small results keep their digits.
inline float Sigmoid(float x) { return 1.f / (1.f + Exp(-x)); }

inline float Log(float x) {
  const bool tiny = x < 1.17549435e-38f;  // subnormal, zero or negative
  const float scaled = tiny ? x * 8388608.f : x;
  const int32_t bits = BitsOf(scaled);
  const int32_t exponent = (bits - 0x3f3504f3) >> 23;  // of a mantissa in [sqrt(1/2), sqrt(2))
  const float n = static_cast<float>(tiny ? exponent - 23 : exponent);
  const float f = FloatOf(static_cast<int32_t>(static_cast<uint32_t>(bits) -
                                               (static_cast<uint32_t>(exponent) << 23))) - 1.f;
  const float p = Polynomial(f, 0.06915368139743805f, -0.11789807677268982f, 0.11872976273298264f,
                             -0.1238434836268425f, 0.14218658208847046f, -0.16669251024723053f,
                             0.20002226531505585f, -0.24999986588954926f, 0.3333331048488617f);
  const float s = f * f;
  const float rest = MulAdd(f * s, p, MulAdd(-0.5f, s, n * 1.42860677e-6f));
  const float found = MulAdd(n, 0.693145752f, f + rest);
  const float special = x == 0.f ? -HUGE_VALF : x > 0.f ? x : NAN;  // 0, infinity, negative and NaN
  return x > 0.f && x <= 3.4028234e38f ? found : special;
}

}  // namespace
