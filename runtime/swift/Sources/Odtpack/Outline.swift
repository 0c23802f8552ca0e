// What the digest of a whole checkpoint is made from (docs/formats/checkpoint.md).
import Foundation

/// A digest as a checkpoint holds it.
func digestText(_ data: Data) -> String { "sha256:" + sha256(data) }

/// Piece by piece, in the order of the file.
struct Outline {
  private var bytes = Data("odtpack.checkpoint.1".utf8)

  init(nominal: Bool) { bytes.append(nominal ? 1 : 0) }

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
  /// A tensor; in a nominal state its type alone counts. Returns the digest of its elements.
  mutating func tensor(_ name: String, _ value: ORTValue, nominal: Bool) -> String {
    let shape = nominal ? [] : value.shape
    let elements = Data(bytesNoCopy: value.bytes, count: value.byteCount, deallocator: .none)
    let digest = sha256(nominal ? Data() : elements)
    text(name)
    number(Int32(value.elementType.rawValue))
    count(shape.count)
    for size in shape { number(Int64(size)) }
    for at in stride(from: 0, to: 64, by: 2) {
      let start = digest.index(digest.startIndex, offsetBy: at)
      bytes.append(UInt8(digest[start...digest.index(after: start)], radix: 16)!)
    }
    return "sha256:" + digest
  }
  var whole: String { digestText(bytes) }
}
