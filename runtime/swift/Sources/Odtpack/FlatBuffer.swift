// As much of flatbuffers as docs/formats/checkpoint.fbs needs: strings, tables, vectors, scalars.
// Every position is checked before it is read.
import Foundation

struct Corrupt: Error {
  let reason: String
}

func require(_ good: Bool, _ reason: @autoclosure () -> String) throws {
  if !good { throw Corrupt(reason: reason()) }
}

/// The file, and how much of it texts may still take: one may be referred to many times.
final class FlatFile {
  let bytes: UnsafeRawBufferPointer
  private var textLeft: Int

  init(_ bytes: UnsafeRawBufferPointer) throws {
    (self.bytes, textLeft) = (bytes, bytes.count)
    try require(bytes.count >= 8 && bytes.count < 1 << 31, "its size")
    try require(bytes[4..<8].elementsEqual("ODTC".utf8), "it does not carry the identifier ODTC")
  }
  func scalar<T: FixedWidthInteger>(_ position: Int, _: T.Type) throws -> T {
    try require(
      position >= 0 && position <= bytes.count - MemoryLayout<T>.size,
      "its offsets lead out of the file")
    return T(littleEndian: bytes.loadUnaligned(fromByteOffset: position, as: T.self))
  }
  /// What a reference at a position refers to.
  func follow(_ position: Int) throws -> Int {
    position + Int(try scalar(position, UInt32.self))
  }
  /// The elements of a vector, whose length stands in front of them.
  func vector(_ position: Int, size: Int) throws -> Range<Int> {
    let count = Int(try scalar(position, UInt32.self)), start = position + 4
    try require(count <= (bytes.count - start) / size, "its offsets lead out of the file")
    return start..<start + count * size
  }
  func text(_ position: Int) throws -> String {
    let range = try vector(position, size: 1)
    try require(range.upperBound < bytes.count, "a text has no end")  // a zero byte ends it
    textLeft -= range.count
    try require(textLeft >= 0, "its strings overlap")
    // Not String(decoding:), which mends what is not UTF-8.
    guard let text = String(bytes: bytes[range], encoding: .utf8) else {
      throw Corrupt(reason: "it holds text that is not UTF-8")
    }
    return text
  }
}

struct FlatTable {
  let file: FlatFile
  private let start: Int, fields: Int, fieldsSize: Int, size: Int

  init(_ file: FlatFile, at start: Int) throws {
    (self.file, self.start) = (file, start)
    fields = start - Int(try file.scalar(start, Int32.self))
    fieldsSize = Int(try file.scalar(fields, UInt16.self))
    size = Int(try file.scalar(fields + 2, UInt16.self))
    try require(
      fieldsSize >= 4 && fieldsSize % 2 == 0 && fields + fieldsSize <= file.bytes.count
        && size >= 4 && start + size <= file.bytes.count, "its offsets lead out of the file")
  }
  /// Where a field of so many bytes stands, if it is there.
  private func position(_ field: Int, _ bytes: Int) throws -> Int? {
    let entry = 4 + 2 * field
    guard entry < fieldsSize else { return nil }
    let offset = Int(try file.scalar(fields + entry, UInt16.self))
    if offset == 0 { return nil }
    try require(offset >= 4 && offset + bytes <= size, "a field lies outside of its table")
    return start + offset
  }
  func scalar<T: FixedWidthInteger>(_ field: Int, _ otherwise: T) throws -> T {
    try position(field, MemoryLayout<T>.size).map { try file.scalar($0, T.self) } ?? otherwise
  }
  func float(_ field: Int) throws -> Float {
    Float(bitPattern: try scalar(field, UInt32(0)))
  }
  func has(_ field: Int) throws -> Bool { try position(field, 4) != nil }
  func text(_ field: Int) throws -> String {
    try position(field, 4).map { try file.text(file.follow($0)) } ?? ""
  }
  func table(_ field: Int) throws -> FlatTable? {
    try position(field, 4).map { try FlatTable(file, at: file.follow($0)) }
  }
  /// The elements of a vector of scalars, as a range of the file.
  func vector(_ field: Int, size: Int) throws -> Range<Int> {
    try position(field, 4).map { try file.vector(file.follow($0), size: size) } ?? 0..<0
  }
  func tables(_ field: Int) throws -> [FlatTable] {
    let range = try vector(field, size: 4)
    return try stride(from: range.lowerBound, to: range.upperBound, by: 4).map {
      try FlatTable(file, at: file.follow($0))
    }
  }
}

/// What a file is made of; nil is a field that is left out.
indirect enum FlatNode {
  case int32(Int32), int64(Int64), float(Float), bool(Bool)
  case text(String), longs([Int]), tables([FlatNode])
  case table([FlatNode?])
  case bytes(ORTValue?)  // elements that follow the head of the file
  case digest  // a text that is known later
}

/// Lays a tree out front to back: what is referred to follows what refers to it.
struct FlatWriter {
  private(set) var head: [UInt8] = []
  private(set) var payload: [(gap: Int, value: ORTValue)] = []
  private var references: [(slot: Int, value: ORTValue)] = []
  private var digests: [Int] = []  // where their texts stand

  init(root: FlatNode) {
    head = [0, 0, 0, 0] + "ODTC".utf8
    refer(0, to: root)
    var end = head.count
    for (slot, value) in references {  // each at a multiple of 16
      let position = (end + 4 + 15) / 16 * 16
      put(UInt32(position - 4 - slot), at: slot)
      payload.append((position - 4 - end, value))
      end = position + value.byteCount
    }
  }

  /// Put the digests in their places, in the order of the tree.
  mutating func fill(_ texts: [String]) {
    for (position, text) in zip(digests, texts) {
      head.replaceSubrange(position..<position + digestTextBytes, with: text.utf8)
    }
  }
  private mutating func put<T: FixedWidthInteger>(_ value: T, at position: Int) {
    withUnsafeBytes(of: value.littleEndian) {
      head.replaceSubrange(position..<position + $0.count, with: $0)
    }
  }
  /// Append zeros: so many bytes, from a position that is `past` a multiple of `unit` on.
  private mutating func reserve(_ count: Int, unit: Int, past: Int = 0) -> Int {
    let gap = (unit - (head.count - past) % unit) % unit
    head.append(contentsOf: repeatElement(0, count: gap + count))
    return head.count - count
  }
  private mutating func refer(_ slot: Int, to node: FlatNode) {
    if case .bytes(let value?) = node, value.byteCount > 0 {
      references.append((slot, value))
    } else {
      let position = add(node)
      put(UInt32(position - slot), at: slot)
    }
  }
  private mutating func add(_ node: FlatNode) -> Int {
    switch node {
    case .text(let text):
      let position = reserve(4 + text.utf8.count + 1, unit: 4)
      put(UInt32(text.utf8.count), at: position)
      head.replaceSubrange(position + 4..<head.count - 1, with: text.utf8)
      return position
    case .digest:
      let position = reserve(4 + digestTextBytes + 1, unit: 4)
      put(UInt32(digestTextBytes), at: position)
      digests.append(position + 4)
      return position
    case .longs(let values):
      let position = reserve(4 + 8 * values.count, unit: 8, past: 4)
      put(UInt32(values.count), at: position)
      for (i, value) in values.enumerated() { put(Int64(value), at: position + 4 + 8 * i) }
      return position
    case .tables(let nodes):
      let position = reserve(4 + 4 * nodes.count, unit: 4)
      put(UInt32(nodes.count), at: position)
      for (i, node) in nodes.enumerated() { refer(position + 4 + 4 * i, to: node) }
      return position
    case .table(let fields):
      // The table of the fields' places, then the fields, each in eight bytes.
      let places = reserve(4 + 2 * fields.count, unit: 2), size = 8 + 8 * fields.count
      let position = reserve(size, unit: 8)
      put(UInt16(4 + 2 * fields.count), at: places)
      put(UInt16(size), at: places + 2)
      put(Int32(position - places), at: position)
      for (i, field) in fields.enumerated() {
        guard let field else { continue }
        let slot = position + 8 + 8 * i
        put(UInt16(slot - position), at: places + 4 + 2 * i)
        switch field {
        case .int32(let value): put(value, at: slot)
        case .int64(let value): put(value, at: slot)
        case .float(let value): put(value.bitPattern, at: slot)
        case .bool(let value): put(UInt8(value ? 1 : 0), at: slot)
        default: refer(slot, to: field)
        }
      }
      return position
    default:  // an empty vector
      return reserve(4, unit: 4)
    }
  }
}
