// The frozen weights of a network in segments, mapped from their file (docs/formats/package.md).
import Dispatch
import Foundation

func invalidSegments(_ problem: String) -> OdtpackError {
  OdtpackError(
    "segments-invalid", "The package's segments are not valid: \(problem).",
    hint: "build the package again")
}

/// Weights where they lie in a file, read-only.
final class MappedWeights {
  /// A part of the file in whole pages.
  typealias Pages = Range<Int>

  private struct Weight {
    let type: ElementType, shape: [Int], place: Range<Int>, handle: OpaquePointer
  }
  private static let alignment = 64, mostResident = 16 << 20

  private let file: UnsafeMutableRawBufferPointer
  private var weights: [String: Weight] = [:]
  private let releasing = DispatchQueue(label: "odtpack.weights", qos: .userInitiated)

  /// Map a file, if there is one, and find the tensors in it that `segments` of a manifest lists.
  init(_ path: String?, _ segments: Json) throws {
    do {
      file = try path.map(mapPages) ?? UnsafeMutableRawBufferPointer(start: nil, count: 0)
    } catch let error as SystemError {
      throw invalidSegments("\(path!) cannot be read: \(systemMessage(error.code))")
    }
    var end = 0
    for json in try segments["tensors"].list([]) {
      let name = try json["name"].text(), type = try? ElementType(name: json["dtype"].text())
      let shape = try json["shape"].wholes(), start = try json["offset"].whole()
      guard let base = file.baseAddress, let type else {
        throw invalidSegments("nothing can hold the weight '\(name)'")
      }
      guard start >= end, start % Self.alignment == 0 else {
        throw invalidSegments("the place of '\(name)'")
      }
      let bytes = shape.reduce(Double(type.size)) { $0 * Double($1) }  // no Int may overflow
      guard shape.allSatisfy({ $0 >= 0 }), Double(start) + bytes <= Double(file.count) else {
        throw invalidSegments("the weight '\(name)' ends after the file of weights")
      }
      end = start + Int(bytes)
      let handle = try ORTValue.over(base + start, Int(bytes), type.rawValue, shape)
      let weight = Weight(type: type, shape: shape, place: start..<end, handle: handle)
      if let other = weights.updateValue(weight, forKey: name) {
        api.ReleaseValue(other.handle)
        throw invalidSegments("two weights are called '\(name)'")
      }
    }
  }
  deinit {
    for weight in weights.values { api.ReleaseValue(weight.handle) }
    if let start = file.baseAddress { munmap(start, file.count) }
  }

  func has(_ name: String) -> Bool { weights[name] != nil }
  /// A weight as a model takes it.
  func find(_ name: String, as value: Model.Value) throws -> OpaquePointer {
    guard let weight = weights[name], weight.type == value.type, weight.shape == value.shape
    else {
      throw invalidSegments("a model takes another '\(name)' than the file of weights holds")
    }
    return weight.handle
  }
  /// The pages that weights take, with what lies between them.
  func pages(of names: [String]) -> Pages {
    let places = names.compactMap { weights[$0]?.place }
    guard let start = places.map(\.lowerBound).min(), let end = places.map(\.upperBound).max()
    else { return 0..<0 }
    return start / Int(getpagesize()) * Int(getpagesize())..<end
  }
  /// Do what reads pages, and give them back to the system. Of many, those that were read are given
  /// back meanwhile: the matrix of a large vocabulary is read from one end to the other.
  func read(_ pages: Pages, _ body: () throws -> Void) rethrows {
    defer { release(pages) }
    if pages.count <= Self.mostResident { return try body() }
    let timer = DispatchSource.makeTimerSource(queue: releasing)
    timer.schedule(deadline: .now() + .milliseconds(5), repeating: .milliseconds(5))
    timer.setEventHandler { self.release(pages) }
    timer.resume()
    defer {
      timer.cancel()
      releasing.sync {}  // one that has begun
    }
    try body()
  }

  private func release(_ pages: Pages) {
    if let start = file.baseAddress, !pages.isEmpty {
      madvise(start + pages.lowerBound, pages.count, MADV_DONTNEED)
    }
  }
}
