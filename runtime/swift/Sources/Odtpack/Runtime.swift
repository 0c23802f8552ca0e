// ONNX Runtime's C API: what the kit needs of it, under the names of its Objective-C API.
import COdtpack
import Foundation

let api: UnsafePointer<OrtApi> = {
  let base = OrtGetApiBase()!
  if let error = odtpack_init(base) { fatalError(String(cString: odtpack_error_message(error))) }
  return base.pointee.GetApi(17)!  // came with 1.17; later libraries serve it as well
}()

public let onnxRuntimeVersion = String(cString: OrtGetApiBase().pointee.GetVersionString()!)

/// Throw what a call of the C API reports.
func check(_ status: OpaquePointer?, _ code: String = "run-failed", hint: String = "") throws {
  guard let status else { return }
  defer { api.pointee.ReleaseStatus(status) }
  let message = String(cString: api.pointee.GetErrorMessage(status)!)
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
    odtpack_disable_telemetry()
    handle = try make { api.pointee.CreateEnv(ORT_LOGGING_LEVEL_ERROR, "odtpack", $0) }
  }
  deinit { api.pointee.ReleaseEnv(handle) }
}

public enum ORTGraphOptimizationLevel: String {
  case none = "disabled", basic, extended, all
}

public final class ORTSessionOptions {
  let handle: OpaquePointer

  public init() throws { handle = try make { api.pointee.CreateSessionOptions($0) } }
  init(owning handle: OpaquePointer) { self.handle = handle }
  deinit { api.pointee.ReleaseSessionOptions(handle) }

  public func setIntraOpNumThreads(_ count: Int) throws {
    try check(api.pointee.SetIntraOpNumThreads(handle, Int32(min(max(count, 0), 1024))))
  }
  public func setGraphOptimizationLevel(_ level: ORTGraphOptimizationLevel) throws {
    let levels: [ORTGraphOptimizationLevel: GraphOptimizationLevel] = [
      .none: ORT_DISABLE_ALL, .basic: ORT_ENABLE_BASIC, .extended: ORT_ENABLE_EXTENDED,
      .all: ORT_ENABLE_ALL,
    ]
    try check(api.pointee.SetSessionGraphOptimizationLevel(handle, levels[level]!))
  }
  /// Run on a plug-in of ONNX Runtime 1.23 or newer, a WebGPU library for example: its path, and the
  /// number of the device among those that it finds. Parameters, gradients and moments then live in
  /// the device's memory.
  public func addDevice(_ env: ORTEnv, library: String, index: Int = 0) throws {
    try call(odtpack_add_device(env.handle, handle, plain(library), index))
  }
  public func addConfigEntry(withKey key: String, value: String) throws {
    let (key, value) = (try plain(key), try plain(value))
    try check(api.pointee.AddSessionConfigEntry(handle, key, value), "manifest-invalid")
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
    api.pointee.CreateCpuMemoryInfo(OrtDeviceAllocator, OrtMemTypeDefault, $0)
  }

  private init(
    _ type: ElementType, _ shape: [Int], _ bytes: UnsafeMutableRawPointer, owner: AnyObject
  ) throws {
    (elementType, self.shape, self.bytes, self.owner) = (type, shape, bytes, owner)
    let size = try Self.size(type, shape)
    handle = try make {
      api.pointee.CreateTensorWithDataAsOrtValue(
        Self.cpu, bytes, size, shape.map(Int64.init), shape.count,
        ONNXTensorElementDataType(UInt32(type.rawValue)), $0)
    }
  }
  /// Zeros that start at a multiple of 64 bytes; pages that are never touched are never resident.
  public convenience init(_ type: ElementType, _ shape: [Int]) throws {
    guard let memory = calloc(try Self.size(type, shape) + 64, 1) else {
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
    guard try tensorData.length == Self.size(elementType, shape) else {
      throw OdtpackError("buffer-size", "\(tensorData.length) bytes do not make up \(shape).")
    }
    try self.init(elementType, shape, tensorData.mutableBytes, owner: tensorData)
  }
  /// A copy of an array, whose elements must be of the type.
  public convenience init<T>(_ elements: [T], _ type: ElementType, shape: [Int]) throws {
    try Self.require(T.self, type)
    guard try elements.count * type.size == Self.size(type, shape) else {
      throw OdtpackError("buffer-size", "\(elements.count) elements do not make up \(shape).")
    }
    try self.init(type, shape)
    elements.withUnsafeBytes { copy(from: $0.baseAddress) }
  }
  /// What ONNX Runtime made; the value owns it, and holds on to the owner of its memory.
  init(owning handle: OpaquePointer, owner: AnyObject? = nil) throws {
    let info = try make { api.pointee.GetTensorTypeAndShape(handle, $0) }
    defer { api.pointee.ReleaseTensorTypeAndShapeInfo(info) }
    var type = ONNX_TENSOR_ELEMENT_DATA_TYPE_UNDEFINED
    var rank = 0
    var data: UnsafeMutableRawPointer?
    try check(api.pointee.GetTensorElementType(info, &type))
    try check(api.pointee.GetDimensionsCount(info, &rank))
    var shape = [Int64](repeating: 0, count: rank)
    try check(api.pointee.GetDimensions(info, &shape, rank))
    try check(api.pointee.GetTensorMutableData(handle, &data))
    guard let known = ElementType(rawValue: Int(type.rawValue)) else {
      throw OdtpackError("model-mismatch", "A tensor has elements of an unknown type.")
    }
    (elementType, self.shape, self.handle) = (known, shape.map(Int.init), handle)
    (bytes, self.owner) = (data ?? UnsafeMutableRawPointer(bitPattern: 64)!, owner)
  }
  deinit { api.pointee.ReleaseValue(handle) }

  public var count: Int { shape.reduce(1, *) }
  public var byteCount: Int { count * elementType.size }
  var description: String { "\(elementType)\(shape)" }

  private static func size(_ type: ElementType, _ shape: [Int]) throws -> Int {
    let size = shape.reduce(Double(type.size)) { $1 < 0 ? .nan : $0 * Double($1) }
    if size < 0x1p53 { return Int(size) }
    throw OdtpackError("buffer-size", "\(shape) is no shape that memory has room for.")
  }
  private static let types: [ElementType: [Any.Type]] = [
    .float32: [Float.self], .float64: [Double.self], .float16: [UInt16.self], .int8: [Int8.self],
    .int16: [Int16.self], .int32: [Int32.self], .int64: [Int64.self, Int.self], .uint8: [UInt8.self],
    .uint16: [UInt16.self], .uint32: [UInt32.self], .uint64: [UInt64.self, UInt.self],
    .bool: [Bool.self, UInt8.self],
  ]

  private static func require<T>(_: T.Type, _ type: ElementType) throws {
    let isHalf = type == .float16 && "\(T.self)" == "Float16"  // not all of Apple's have it
    guard isHalf || types[type]!.contains(where: { $0 == T.self }) else {
      throw OdtpackError("buffer-type", "Elements of type \(type) are not \(T.self).")
    }
  }

  /// The elements where they are, for as long as `body` runs; what it writes stays.
  public func withElements<T, Result>(
    _: T.Type, _ body: (UnsafeMutableBufferPointer<T>) throws -> Result
  ) throws -> Result {
    try Self.require(T.self, elementType)
    return try withExtendedLifetime(self) { try body(elements(T.self)) }
  }
  /// A copy of the elements.
  public func array<T>(of _: T.Type) throws -> [T] { try withElements(T.self) { Array($0) } }

  /// The elements where they are. Swift frees a value after its last use: hold on to it.
  func elements<T>(_: T.Type) -> UnsafeMutableBufferPointer<T> {
    let count = byteCount / MemoryLayout<T>.stride
    return UnsafeMutableBufferPointer(start: bytes.assumingMemoryBound(to: T.self), count: count)
  }
  /// A scalar of a floating type, such as a loss.
  public var scalar: Double {
    get throws {
      if elementType.isFloating && count > 0 { return real(0) }
      throw OdtpackError("buffer-type", "\(description) holds no number of a floating type.")
    }
  }

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
    guard try offset >= 0 && offset <= count
      && Self.size(elementType, shape) <= (count - offset) * elementType.size
    else {
      throw OdtpackError("buffer-size", "\(shape) from \(offset) on is no part of \(description).")
    }
    return try ORTValue(elementType, shape, bytes + offset * elementType.size, owner: self)
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
}
