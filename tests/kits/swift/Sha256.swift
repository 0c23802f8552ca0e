// A digest that is not that of the kit under test.
import Foundation

private let primes = (2...311).filter { n in (2..<n).allSatisfy { n % $0 != 0 || $0 * $0 > n } }

/// The first 32 bits of the fraction of a root; a Double has 49 of them.
private func fraction(_ root: Double) -> UInt32 { UInt32((root - root.rounded(.down)) * 0x1p32) }

private let keys = primes.prefix(64).map { fraction(cbrt(Double($0))) }
private let initial = primes.prefix(8).map { fraction(sqrt(Double($0))) }

/// SHA-256 (FIPS 180-4), in hex.
func sha256(_ data: Data) -> String {
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
      digest(UnsafeRawBufferPointer(rebasing: $0[..<($0.count / 64 * 64)]))
    }
    tail.withUnsafeBytes { digest($0) }
  }
  return state.map { String(format: "%08x", $0) }.joined()
}
