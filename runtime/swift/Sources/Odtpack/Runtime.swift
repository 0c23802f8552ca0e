// ONNX Runtime's C API: what the kit needs of it, under the names of its Objective-C API.
import COnnxRuntime
import Foundation

let api: OrtApi = {
  // 17 came with ONNX Runtime 1.17; later libraries serve it as well.
  guard let api = OrtGetApiBase().pointee.GetApi(17) else {
    fatalError("ONNX Runtime is older than 1.17")
  }
  return api.pointee
}()

public let onnxRuntimeVersion = String(cString: OrtGetApiBase().pointee.GetVersionString()!)

/// Throw what a call of the C API reports.
func check(_ status: OpaquePointer?, _ code: String = "run-failed", hint: String = "") throws {
  guard let status else { return }
  defer { api.ReleaseStatus(status) }
  let message = String(cString: api.GetErrorMessage(status)!)
  throw OdtpackError(code, "ONNX Runtime \(onnxRuntimeVersion): \(message)", hint: hint)
}

/// Set the pointer that a call returns through its argument.
func make(
  _ code: String = "run-failed", hint: String = "",
  _ call: (UnsafeMutablePointer<OpaquePointer?>) -> OpaquePointer?
) throws -> OpaquePointer {
  var made: OpaquePointer?
  try check(call(&made), code, hint: hint)
  return made!
}

/// The environment, which is the process's. Keeps ONNX Runtime from sending telemetry, as its
/// official builds do from 1.29 on: an app that wants that sets ORT_DISABLE_TELEMETRY to 0.
public final class ORTEnv {
  let handle: OpaquePointer

  public init() throws {
    setenv("ORT_DISABLE_TELEMETRY", "1", 0)
    handle = try make { api.CreateEnv(ORT_LOGGING_LEVEL_ERROR, "odtpack", $0) }
  }
  deinit { api.ReleaseEnv(handle) }

  /// Opens sessions. Those that ask for the environment's allocator get one arena together, which
  /// they own and which goes with the last of them. An arena that the app has registered is
  /// replaced from ONNX Runtime 1.24 on: the app registers its own after the package is open.
  func sharingArena<Opened>(
    of sizes: [String: Int], _ open: () throws -> Opened
  ) throws -> Opened {
    let memory = try make { api.CreateCpuMemoryInfo(OrtArenaAllocator, OrtMemTypeDefault, $0) }
    defer { api.ReleaseMemoryInfo(memory) }
    let keys = sizes.keys.map { UnsafePointer(strdup($0)) }
    defer { keys.forEach { free(UnsafeMutableRawPointer(mutating: $0)) } }
    let arena = try make {
      api.CreateArenaCfgV2(keys, sizes.values.map { $0 }, sizes.count, $0)
    }
    defer { api.ReleaseArenaCfg(arena) }
    let isOurs = (try? check(api.CreateAndRegisterAllocator(handle, memory, arena))) != nil
    defer { if isOurs { try? check(api.UnregisterAllocator(handle, memory)) } }
    return try open()
  }
}

public enum ORTGraphOptimizationLevel: String {
  case none = "disabled", basic, extended, all
}

public final class ORTSessionOptions {
  let handle: OpaquePointer

  public init() throws { handle = try make { api.CreateSessionOptions($0) } }
  deinit { api.ReleaseSessionOptions(handle) }

  public func setIntraOpNumThreads(_ count: Int) throws {
    try check(api.SetIntraOpNumThreads(handle, Int32(min(max(count, 0), 1024))))
  }
  public func setGraphOptimizationLevel(_ level: ORTGraphOptimizationLevel) throws {
    let levels: [ORTGraphOptimizationLevel: GraphOptimizationLevel] = [
      .none: ORT_DISABLE_ALL, .basic: ORT_ENABLE_BASIC, .extended: ORT_ENABLE_EXTENDED,
      .all: ORT_ENABLE_ALL,
    ]
    try check(api.SetSessionGraphOptimizationLevel(handle, levels[level]!))
  }
  public func addConfigEntry(withKey key: String, value: String) throws {
    try check(api.AddSessionConfigEntry(handle, key, value), "manifest-invalid")
  }
}

/// The element types, with the numbers of ONNX.
public enum ElementType: Int, CaseIterable {
  case float32 = 1, uint8, int8, uint16, int16, int32, int64
  case bool = 9, float16, float64, uint32, uint64

  public var size: Int {
    switch self {
    case .uint8, .int8, .bool: return 1
    case .uint16, .int16, .float16: return 2
    case .float32, .int32, .uint32: return 4
    case .int64, .float64, .uint64: return 8
    }
  }
  var isFloating: Bool { self == .float32 || self == .float64 || self == .float16 }
  init(name: String) throws {
    guard let type = Self.allCases.first(where: { "\($0)" == name }) else {
      throw invalid("there is no type '\(name)'")
    }
    self = type
  }
}

private final class Memory {
  private let start: UnsafeMutableRawPointer

  init(_ start: UnsafeMutableRawPointer) { self.start = start }
  deinit { free(start) }
}

/// An array in row-major order, and the same memory as ONNX Runtime sees it.
public final class ORTValue {
  public let elementType: ElementType
  public let shape: [Int]
  public let bytes: UnsafeMutableRawPointer
  let handle: OpaquePointer
  private let owner: AnyObject?  // of the memory
  private static let cpu = try! make {
    api.CreateCpuMemoryInfo(OrtDeviceAllocator, OrtMemTypeCPU, $0)
  }
  /// A tensor over memory that outlives it, of a type with this number in ONNX.
  static func over(
    _ bytes: UnsafeMutableRawPointer, _ byteCount: Int, _ type: Int, _ shape: [Int]
  ) throws -> OpaquePointer {
    try make {
      api.CreateTensorWithDataAsOrtValue(
        cpu, bytes, byteCount, shape.map(Int64.init), shape.count,
        ONNXTensorElementDataType(UInt32(type)), $0)
    }
  }

  private init(
    _ type: ElementType, _ shape: [Int], _ bytes: UnsafeMutableRawPointer, owner: AnyObject
  ) throws {
    (elementType, self.shape, self.bytes, self.owner) = (type, shape, bytes, owner)
    handle = try Self.over(bytes, shape.reduce(type.size, *), type.rawValue, shape)
  }
  /// Zeros that start at a multiple of 64 bytes; pages that are never touched are never resident.
  public convenience init(_ type: ElementType, _ shape: [Int]) throws {
    guard let memory = calloc(shape.reduce(type.size, *) + 64, 1) else {
      throw OdtpackError("out-of-memory", "There is no memory for an array of shape \(shape).")
    }
    let start = (UInt(bitPattern: memory) + 63) & ~63
    let bytes = UnsafeMutableRawPointer(bitPattern: start)!
    try self.init(type, shape, bytes, owner: Memory(memory))
  }
  /// A view of memory that the caller goes on to own: nothing is copied.
  public convenience init(
    tensorData: NSMutableData, elementType: ElementType, shape: [NSNumber]
  ) throws {
    let shape = shape.map(\.intValue)
    guard tensorData.length == shape.reduce(elementType.size, *) else {
      throw OdtpackError("buffer-size", "\(tensorData.length) bytes do not make up \(shape).")
    }
    try self.init(elementType, shape, tensorData.mutableBytes, owner: tensorData)
  }
  /// A copy of an array, whose elements must be of the type.
  public convenience init<T>(_ elements: [T], _ type: ElementType, shape: [Int]) throws {
    guard MemoryLayout<T>.size == type.size, elements.count == shape.reduce(1, *) else {
      throw OdtpackError("buffer-size", "\(elements.count) elements do not make up \(shape).")
    }
    try self.init(type, shape)
    elements.withUnsafeBytes { copy(from: $0.baseAddress) }
  }
  /// What ONNX Runtime made; the value owns it.
  init(owning handle: OpaquePointer) throws {
    var isTensor: Int32 = 0
    var data: UnsafeMutableRawPointer?
    try check(api.IsTensor(handle, &isTensor))
    guard isTensor == 1 else { throw mismatch("an output is not a tensor") }
    let info = try make { api.GetTensorTypeAndShape(handle, $0) }
    defer { api.ReleaseTensorTypeAndShapeInfo(info) }
    let (number, shape) = try Self.describe(info)
    guard let type = ElementType(rawValue: number) else {
      throw mismatch("an output has an unknown type")
    }
    try check(api.GetTensorMutableData(handle, &data))
    (elementType, self.shape, self.handle, owner) = (type, shape, handle, nil)
    bytes = data ?? UnsafeMutableRawPointer(bitPattern: 64)!
  }
  deinit { api.ReleaseValue(handle) }

  static func describe(_ info: OpaquePointer) throws -> (type: Int, shape: [Int]) {
    var type = ONNX_TENSOR_ELEMENT_DATA_TYPE_UNDEFINED
    var rank = 0
    try check(api.GetTensorElementType(info, &type))
    try check(api.GetDimensionsCount(info, &rank))
    var shape = [Int64](repeating: 0, count: rank)
    try check(api.GetDimensions(info, &shape, rank))
    return (Int(type.rawValue), shape.map(Int.init))
  }

  public var count: Int { shape.reduce(1, *) }
  public var byteCount: Int { count * elementType.size }
  var description: String { "\(elementType)\(shape)" }

  /// The elements where they are, for as long as `body` runs; what it writes stays.
  public func withElements<T, Result>(
    _: T.Type, _ body: (UnsafeMutableBufferPointer<T>) throws -> Result
  ) rethrows -> Result {
    try withExtendedLifetime(self) { try body(elements(T.self)) }
  }
  /// A copy of the elements.
  public func array<T>(of _: T.Type) -> [T] { withElements(T.self) { Array($0) } }

  /// The elements where they are. Swift frees a value after its last use: hold on to it.
  func elements<T>(_: T.Type) -> UnsafeMutableBufferPointer<T> {
    let count = byteCount / MemoryLayout<T>.stride
    return UnsafeMutableBufferPointer(start: bytes.assumingMemoryBound(to: T.self), count: count)
  }
  /// A scalar of a floating type, such as a loss.
  public var scalar: Double { real(0) }

  func real(_ index: Int) -> Double {
    switch elementType {
    case .float64: return elements(Double.self)[index]
    case .float16: return Double(Half.decode(elements(UInt16.self)[index]))
    default: return Double(elements(Float.self)[index])
    }
  }
  func copy(from source: UnsafeRawPointer?) {
    if let source, byteCount > 0 { memcpy(bytes, source, byteCount) }
  }
  func copy(from value: ORTValue) {
    withExtendedLifetime(value) { copy(from: UnsafeRawPointer(value.bytes)) }
  }
  /// A part of the same memory, from an element on: a batch of all samples, for example.
  public func part(_ offset: Int, _ shape: [Int]) throws -> ORTValue {
    guard offset >= 0, offset + shape.reduce(1, *) <= count else {
      throw OdtpackError("buffer-size", "\(shape) from \(offset) on is no part of \(description).")
    }
    return try ORTValue(elementType, shape, bytes + offset * elementType.size, owner: self)
  }
  /// The same values in another floating type.
  func converted(to type: ElementType) throws -> ORTValue {
    if type == elementType { return self }
    let result = try ORTValue(type, shape)
    for i in 0..<count {
      let value = real(i)
      switch type {
      case .float64: result.elements(Double.self)[i] = value
      case .float16:
        if value.isFinite && abs(value) >= 65520 {
          throw OdtpackError(
            "value-out-of-range", "A parameter has grown beyond float16.",
            hint: "train with a lower learning rate, or from a float32 model")
        }
        result.elements(UInt16.self)[i] = Half.encode(Float(value))
      default: result.elements(Float.self)[i] = Float(value)
      }
    }
    return result
  }
}

/// float16 in integer arithmetic: Swift's own Float16 is missing on Intel Macs.
enum Half {
  static func decode(_ bits: UInt16) -> Float {
    let sign: Float = bits >> 15 == 1 ? -1 : 1
    let exponent = Int(bits >> 10 & 31), fraction = Float(bits & 1023)
    if exponent == 31 { return fraction == 0 ? sign * .infinity : .nan }
    if exponent == 0 { return sign * fraction * 0x1p-24 }
    return sign * (1024 + fraction) * Float(sign: .plus, exponent: exponent - 25, significand: 1)
  }
  /// Rounds to nearest, ties to even.
  static func encode(_ value: Float) -> UInt16 {
    let sign = UInt16(value.bitPattern >> 16 & 0x8000), size = value.magnitude
    if size.isNaN { return sign | 0x7E00 }
    if size >= 65520 { return sign | 0x7C00 }
    if size < 0x1p-14 { return sign | UInt16((size * 0x1p24).rounded(.toNearestOrEven)) }
    let bits = size.bitPattern - 112 << 23  // another bias of the exponent
    let even = bits >> 13 & 1
    return sign | UInt16((bits + 0xFFF + even) >> 13)
  }
}
