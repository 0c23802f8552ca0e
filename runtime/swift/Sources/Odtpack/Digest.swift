// SHA-256 and Ed25519: CryptoKit's, and a SHA-256 of our own where there is none.
import Foundation

/// Whole pages, and blocks of SHA-256.
private let partSize = 4 << 20

private func parts(_ bytes: UnsafeRawBufferPointer) -> [UnsafeRawBufferPointer] {
  stride(from: 0, to: bytes.count, by: partSize).map {
    UnsafeRawBufferPointer(rebasing: bytes[$0..<min($0 + partSize, bytes.count)])
  }
}

/// SHA-256 of what `map` returned, whose pages are given back to the system once they are read.
func sha256Mapped(_ data: Data) -> [UInt8] {
  sha256(data) { part in
    guard part.count == partSize, let start = part.baseAddress else { return }
    madvise(UnsafeMutableRawPointer(mutating: start), part.count, MADV_DONTNEED)
  }
}

#if canImport(CryptoKit)
import CryptoKit

func sha256(_ data: Data, _ isRead: (UnsafeRawBufferPointer) -> Void = { _ in }) -> [UInt8] {
  var hash = SHA256()
  data.withUnsafeBytes {
    for part in parts($0) {
      hash.update(bufferPointer: part)
      isRead(part)
    }
  }
  return Array(hash.finalize())
}

func isSignature(_ signature: Data, of text: Data, by key: Data) throws -> Bool {
  guard let key = try? Curve25519.Signing.PublicKey(rawRepresentation: key) else { return false }
  return key.isValidSignature(signature, for: text)
}
#else
func isSignature(_ signature: Data, of text: Data, by key: Data) throws -> Bool {
  throw OdtpackError(
    "cryptography-missing", "The signature cannot be checked here: there is no CryptoKit.",
    hint: "check manifest.sig with a library of Ed25519, and open the package without a key")
}

private let primes = (2...311).filter { n in (2..<n).allSatisfy { n % $0 != 0 || $0 * $0 > n } }

/// The first 32 bits of the fraction of a root; a Double has 49 of them.
private func fraction(_ root: Double) -> UInt32 { UInt32((root - root.rounded(.down)) * 0x1p32) }

private let keys = primes.prefix(64).map { fraction(cbrt(Double($0))) }
private let initial = primes.prefix(8).map { fraction(sqrt(Double($0))) }

/// SHA-256 (FIPS 180-4); says of each part of the data when it has been read.
func sha256(_ data: Data, _ isRead: (UnsafeRawBufferPointer) -> Void = { _ in }) -> [UInt8] {
  var tail = Array(data.suffix(data.count % 64)) + [0x80]
  tail += [UInt8](repeating: 0, count: (119 - data.count % 64) % 64)
  tail += withUnsafeBytes(of: UInt64(data.count * 8).bigEndian, Array.init)
  var state = initial
  let keys = keys
  withUnsafeTemporaryAllocation(of: UInt32.self, capacity: 64) { w in
    func turn(_ x: UInt32, _ n: UInt32) -> UInt32 { x >> n | x << (32 - n) }
    func digest(_ blocks: UnsafeRawBufferPointer) {
      for start in stride(from: 0, to: blocks.count, by: 64) {
        for i in 0..<16 {
          let word = blocks.loadUnaligned(fromByteOffset: start + 4 * i, as: UInt32.self)
          w[i] = UInt32(bigEndian: word)
        }
        for i in 16..<64 {
          let a = w[i - 15], b = w[i - 2]
          let one = turn(a, 7) ^ turn(a, 18) ^ a >> 3, two = turn(b, 17) ^ turn(b, 19) ^ b >> 10
          w[i] = w[i - 16] &+ one &+ w[i - 7] &+ two
        }
        var (a, b, c, d) = (state[0], state[1], state[2], state[3])
        var (e, f, g, h) = (state[4], state[5], state[6], state[7])
        for i in 0..<64 {
          let one = h &+ (turn(e, 6) ^ turn(e, 11) ^ turn(e, 25)) &+ (e & f ^ ~e & g)
          let first = one &+ keys[i] &+ w[i]
          let second = (turn(a, 2) ^ turn(a, 13) ^ turn(a, 22)) &+ (a & b ^ a & c ^ b & c)
          (h, g, f, e, d, c, b, a) = (g, f, e, d &+ first, c, b, a, first &+ second)
        }
        for (i, value) in [a, b, c, d, e, f, g, h].enumerated() { state[i] &+= value }
      }
    }
    data.withUnsafeBytes {
      for part in parts(UnsafeRawBufferPointer(rebasing: $0[..<($0.count / 64 * 64)])) {
        digest(part)
        isRead(part)
      }
    }
    tail.withUnsafeBytes { digest($0) }
  }
  return state.flatMap { withUnsafeBytes(of: $0.bigEndian, Array.init) }
}
#endif
