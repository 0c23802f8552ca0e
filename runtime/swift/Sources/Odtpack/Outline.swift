// What the digest of a whole checkpoint is made from (docs/formats/checkpoint.md).
import Foundation

/// A digest as a checkpoint holds it.
func digestText(_ digest: [UInt8]) -> String { "sha256:" + hex(digest) }
let digestTextBytes = 7 + 64

func hex(_ bytes: [UInt8]) -> String { bytes.map { String(format: "%02x", $0) }.joined() }

/// Piece by piece, in the order of the file.
struct Outline {
  private var bytes = Data("odtpack.checkpoint.1".utf8)
  private var tensors: [(at: Int, value: ORTValue)] = []  // and where their digests stand
  private let isNominal: Bool

  init(nominal: Bool) {
    isNominal = nominal
    bytes.append(nominal ? 1 : 0)
  }

  mutating func number<T: FixedWidthInteger>(_ value: T) {
    withUnsafeBytes(of: value.littleEndian) { bytes.append(contentsOf: $0) }
  }
  mutating func float(_ value: Float) {
    number((value == 0 ? 0 : value).bitPattern)  // a negative zero counts as zero
  }
  mutating func count(_ entries: Int) { number(UInt32(entries)) }
  mutating func text(_ text: String) {
    count(text.utf8.count)
    bytes.append(contentsOf: text.utf8)
  }
  mutating func property(_ name: String, _ value: Property) {
    text(name)
    switch value {
    case .int(let value): number(value)
    case .float(let value): float(value)
    case .string(let value): text(value)
    }
  }
  /// A tensor, whose elements are hashed later; in a nominal state it has none.
  mutating func tensor(_ name: String, _ value: ORTValue) {
    let shape = isNominal ? [] : value.shape
    text(name)
    number(Int32(value.elementType.rawValue))
    count(shape.count)
    for size in shape { number(Int64(size)) }
    tensors.append((bytes.count, value))
    bytes.append(contentsOf: repeatElement(0, count: 32))
  }
  /// The digests as a file holds them: of each tensor that has a value, then of the whole.
  func digests() -> [String] {
    var all = bytes, texts: [String] = []
    for (at, value) in tensors {
      let elements = Data(
        bytesNoCopy: value.bytes, count: isNominal ? 0 : value.byteCount, deallocator: .none)
      let digest = sha256(elements)
      all.replaceSubrange(at..<at + 32, with: digest)
      if !isNominal { texts.append(digestText(digest)) }
    }
    return texts + [digestText(sha256(all))]
  }
}
