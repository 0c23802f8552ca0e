// SHA-256 (FIPS 180-4), with the processor's own instructions where it has them, and the digest of
// a checkpoint (docs/formats/checkpoint.md).
#pragma once

#include <array>

#include "odtpack/base.hpp"

#if defined(__x86_64__) && defined(__GNUC__)
#include <cpuid.h>
#include <immintrin.h>
#elif defined(__aarch64__) && defined(__GNUC__)
#include <arm_neon.h>
#if defined(__linux__)
#include <sys/auxv.h>
#endif
#endif

namespace odtpack::detail {

using Digest = std::array<uint8_t, 32>;

/// The fractions of the cube roots of the first 64 primes, and of the square roots of eight.
struct Sha256Constants {
  alignas(16) uint32_t k[64];
  uint32_t start[8];
  Sha256Constants() {
    int found = 0;
    for (int n = 2; found < 64; ++n) {
      bool prime = true;
      for (int d = 2; d * d <= n; ++d) prime = prime && n % d != 0;
      if (!prime) continue;
      const auto fraction = [](long double root) {
        return static_cast<uint32_t>((root - std::floor(root)) * 4294967296.0L);
      };
      k[found] = fraction(std::cbrt(static_cast<long double>(n)));
      if (found < 8) start[found] = fraction(std::sqrt(static_cast<long double>(n)));
      ++found;
    }
  }
  static const Sha256Constants& Get() {
    static const Sha256Constants constants;
    return constants;
  }
};

inline void Sha256Blocks(uint32_t* state, const uint8_t* bytes, size_t count, const uint32_t* k) {
  const auto turn = [](uint32_t x, int n) { return x >> n | x << (32 - n); };
  for (; count > 0; --count) {
    uint32_t w[64], v[8];
    for (int i = 0; i < 64; ++i) {
      if (i < 16) {
        w[i] = uint32_t{bytes[0]} << 24 | bytes[1] << 16 | bytes[2] << 8 | bytes[3];
        bytes += 4;
      } else {
        const uint32_t a = w[i - 15], b = w[i - 2];
        w[i] = w[i - 16] + (turn(a, 7) ^ turn(a, 18) ^ a >> 3) + w[i - 7] +
               (turn(b, 17) ^ turn(b, 19) ^ b >> 10);
      }
    }
    std::copy_n(state, 8, v);
    for (int i = 0; i < 64; ++i) {
      const uint32_t one = v[7] + (turn(v[4], 6) ^ turn(v[4], 11) ^ turn(v[4], 25)) +
                           ((v[4] & v[5]) ^ (~v[4] & v[6])) + k[i] + w[i];
      const uint32_t two = (turn(v[0], 2) ^ turn(v[0], 13) ^ turn(v[0], 22)) +
                           ((v[0] & v[1]) ^ (v[0] & v[2]) ^ (v[1] & v[2]));
      std::copy_backward(v, v + 7, v + 8);
      v[4] += one;
      v[0] = one + two;
    }
    for (int i = 0; i < 8; ++i) state[i] += v[i];
  }
}

#if defined(__x86_64__) && defined(__GNUC__)
inline bool HasSha256Instructions() {
  unsigned a = 0, b = 0, c = 0, d = 0;
  return __get_cpuid_count(7, 0, &a, &b, &c, &d) != 0 && (b >> 29 & 1) != 0;
}

/// Four rounds at a time; Intel's "SHA Extensions" say what each instruction computes.
__attribute__((target("sha,sse4.1"))) inline void Sha256FastBlocks(uint32_t* state,
                                                                   const uint8_t* bytes,
                                                                   size_t count,
                                                                   const uint32_t* k) {
  const auto order = _mm_set_epi64x(0x0c0d0e0f08090a0bLL, 0x0405060700010203LL);
  auto* place = reinterpret_cast<__m128i*>(state);
  const auto dcba = _mm_shuffle_epi32(_mm_loadu_si128(place), 0xB1);
  const auto hgfe = _mm_shuffle_epi32(_mm_loadu_si128(place + 1), 0x1B);
  __m128i abef = _mm_alignr_epi8(dcba, hgfe, 8), cdgh = _mm_blend_epi16(hgfe, dcba, 0xF0);
  for (; count > 0; --count, bytes += 64) {
    const __m128i abef_before = abef, cdgh_before = cdgh;
    __m128i m[4];
    for (int i = 0; i < 16; ++i) {
      __m128i& w = m[i & 3];
      const __m128i last = m[(i + 3) & 3];
      if (i < 4) {
        w = _mm_shuffle_epi8(_mm_loadu_si128(reinterpret_cast<const __m128i*>(bytes) + i), order);
      } else {
        const __m128i seventh = _mm_alignr_epi8(last, m[(i + 2) & 3], 4);
        w = _mm_add_epi32(_mm_sha256msg1_epu32(w, m[(i + 1) & 3]), seventh);
        w = _mm_sha256msg2_epu32(w, last);
      }
      const __m128i wk = _mm_add_epi32(w, _mm_load_si128(reinterpret_cast<const __m128i*>(k) + i));
      cdgh = _mm_sha256rnds2_epu32(cdgh, abef, wk);
      abef = _mm_sha256rnds2_epu32(abef, cdgh, _mm_shuffle_epi32(wk, 0x0E));
    }
    abef = _mm_add_epi32(abef, abef_before);
    cdgh = _mm_add_epi32(cdgh, cdgh_before);
  }
  const auto feba = _mm_shuffle_epi32(abef, 0x1B), dchg = _mm_shuffle_epi32(cdgh, 0xB1);
  _mm_storeu_si128(place, _mm_blend_epi16(feba, dchg, 0xF0));
  _mm_storeu_si128(place + 1, _mm_alignr_epi8(dchg, feba, 8));
}
#elif defined(__aarch64__) && defined(__GNUC__)
inline bool HasSha256Instructions() {
#if defined(__linux__)
  return (::getauxval(AT_HWCAP) >> 6 & 1) != 0;  // HWCAP_SHA2
#else
  return true;  // every processor of Apple's with 64 bits
#endif
}

#if defined(__clang__)
__attribute__((target("sha2")))
#else
__attribute__((target("+crypto")))
#endif
inline void Sha256FastBlocks(uint32_t* state, const uint8_t* bytes, size_t count,
                             const uint32_t* k) {
  uint32x4_t abcd = vld1q_u32(state), efgh = vld1q_u32(state + 4);
  for (; count > 0; --count, bytes += 64) {
    const uint32x4_t abcd_before = abcd, efgh_before = efgh;
    uint32x4_t m[4];
    for (int i = 0; i < 16; ++i) {
      uint32x4_t& w = m[i & 3];
      w = i < 4
              ? vreinterpretq_u32_u8(vrev32q_u8(vld1q_u8(bytes + 16 * i)))
              : vsha256su1q_u32(vsha256su0q_u32(w, m[(i + 1) & 3]), m[(i + 2) & 3], m[(i + 3) & 3]);
      const uint32x4_t wk = vaddq_u32(w, vld1q_u32(k + 4 * i)), before = abcd;
      abcd = vsha256hq_u32(abcd, efgh, wk);
      efgh = vsha256h2q_u32(efgh, before, wk);
    }
    abcd = vaddq_u32(abcd, abcd_before);
    efgh = vaddq_u32(efgh, efgh_before);
  }
  vst1q_u32(state, abcd);
  vst1q_u32(state + 4, efgh);
}
#else
inline bool HasSha256Instructions() { return false; }
inline void Sha256FastBlocks(uint32_t*, const uint8_t*, size_t, const uint32_t*) {}
#endif

/// The 32 bytes of the SHA-256; `fast` only for tests. `read` is called with the start and the size
/// of each part that was read.
inline Digest Sha256Bytes(const void* data, size_t size, bool fast = HasSha256Instructions(),
                          const std::function<void(size_t, size_t)>& read = nullptr) {
  const auto& constants = Sha256Constants::Get();
  uint32_t state[8];
  std::copy_n(constants.start, 8, state);
  const auto blocks = fast ? Sha256FastBlocks : Sha256Blocks;
  const auto* bytes = static_cast<const uint8_t*>(data);
  const size_t whole = size / 64;
  constexpr size_t part = 1 << 16;  // blocks: 4 MiB
  for (size_t at = 0; at < whole; at += part) {
    const size_t count = std::min(part, whole - at);
    blocks(state, bytes + at * 64, count, constants.k);
    if (read) read(at * 64, count * 64);
  }
  uint8_t tail[128] = {};
  const size_t rest = size % 64, padded = rest < 56 ? 64 : 128;
  if (rest > 0) std::copy_n(bytes + whole * 64, rest, tail);
  tail[rest] = 0x80;
  for (size_t i = 0; i < 8; ++i)
    tail[padded - 1 - i] = static_cast<uint8_t>(uint64_t{size} * 8 >> 8 * i);
  blocks(state, tail, padded / 64, constants.k);
  Digest digest;
  for (size_t i = 0; i < 32; ++i)
    digest[i] = static_cast<uint8_t>(state[i / 4] >> (24 - 8 * (i % 4)));
  return digest;
}

inline std::string Hex(const Digest& digest) {
  std::string hex;
  for (const uint8_t byte : digest) {
    hex += "0123456789abcdef"[byte >> 4];
    hex += "0123456789abcdef"[byte & 15];
  }
  return hex;
}

/// SHA-256 in hex of a mapped file, whose pages are given back as they are read: a file of weights
/// may be larger than what the process may have. Takes what `Map` returns and nothing else: pages of
/// other memory would be lost.
inline std::string Sha256Mapped(const std::shared_ptr<const std::string_view>& file) {
  auto* data = const_cast<char*>(file->data());
  return Hex(
      Sha256Bytes(data, file->size(), HasSha256Instructions(),
                  [data](size_t at, size_t size) { ::madvise(data + at, size, MADV_DONTNEED); }));
}

/// A digest as a checkpoint holds it.
inline std::string DigestText(const Digest& digest) { return "sha256:" + Hex(digest); }
constexpr size_t kDigestTextBytes = 7 + 64;

/// What the digest of a whole checkpoint is made from, piece by piece, in the order of the file.
class Outline {
 public:
  explicit Outline(bool nominal) : nominal_(nominal), bytes_("odtpack.checkpoint.1") {
    Number<uint8_t>(nominal);
  }

  template <class T>
  void Number(T value) {
    if (value == 0) value = 0;  // a negative zero counts as zero
    bytes_.append(reinterpret_cast<const char*>(&value), sizeof value);
  }
  void Count(size_t entries) { Number(static_cast<uint32_t>(entries)); }
  void Text(std::string_view text) {
    Count(text.size());
    bytes_ += text;
  }
  /// A tensor, whose elements are hashed later; in a nominal state it has none.
  void AddTensor(std::string_view name, const Tensor& tensor) {
    const Shape dims = nominal_ ? Shape{} : tensor.shape;
    Text(name);
    Number<int32_t>(tensor.type);
    Count(dims.size());
    for (const int64_t size : dims) Number(size);
    tensors_.emplace_back(bytes_.size(), tensor);
    bytes_.append(sizeof(Digest), '\0');
  }
  /// The digests as a file holds them: of each tensor that has a value, then of the whole.
  std::vector<std::string> Digests() {
    std::vector<std::string> texts;
    for (const auto& [at, tensor] : tensors_) {
      const Digest digest = Sha256Bytes(tensor.data.get(), nominal_ ? 0 : tensor.Bytes());
      std::copy(digest.begin(), digest.end(), bytes_.begin() + static_cast<ptrdiff_t>(at));
      if (!nominal_) texts.push_back(DigestText(digest));
    }
    texts.push_back(DigestText(Sha256Bytes(bytes_.data(), bytes_.size())));
    return texts;
  }

 private:
  bool nominal_;
  std::string bytes_;
  std::vector<std::pair<size_t, Tensor>> tensors_;  // and where their digests stand
};

}  // namespace odtpack::detail
