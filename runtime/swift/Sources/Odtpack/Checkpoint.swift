// The checkpoint under the name of ONNX Runtime's former training API.
import COdtpack
import Foundation

/// A value that the user attaches to a state: saved with it.
public enum Property: Equatable {
  case int(Int64), float(Float), string(String)

  init(_ property: odtpack_property) {
    switch property.kind {
    case ODTPACK_INT: self = .int(property.whole)
    case ODTPACK_FLOAT: self = .float(property.real)
    default: self = .string(property.text.take() ?? "")
    }
  }
}

/// Keeps the memory of a tensor of a state.
final class StateMemory {
  private let handle: OpaquePointer

  init(_ handle: OpaquePointer) { self.handle = handle }
  deinit { odtpack_memory_release(handle) }
}

/// The state of a training: parameters, properties, and what the optimizer carries. Sessions that
/// are made of it change it.
public final class ORTCheckpoint {
  let handle: OpaquePointer
  public let parameterNames: [String]
  private let places: [String: Int]
  let trainable: [Bool], types: [ElementType?]

  /// Load a checkpoint of odtpack or of ONNX Runtime training 1.17 to 1.19. If it is damaged or
  /// missing and the save before it was kept, that one is loaded; `recovered` then says so.
  public init(path: String) throws {
    let handle = try made { try odtpack_state_load(plain(path), $0) }
    self.handle = handle
    var names: [String] = [], trainable: [Bool] = [], types: [ElementType?] = []
    for index in 0..<odtpack_state_parameter_count(handle) {
      var isTrainable = false, type = ONNX_TENSOR_ELEMENT_DATA_TYPE_UNDEFINED
      names.append(
        try text { odtpack_state_parameter_info(handle, index, $0, &isTrainable, &type) }!)
      trainable.append(isTrainable)
      types.append(ElementType(rawValue: Int(type.rawValue)))
    }
    (parameterNames, self.trainable, self.types) = (names, trainable, types)
    // Names that differ only in how Unicode writes them are one to Swift.
    places = Dictionary(names.enumerated().map { ($1, $0) }) { first, _ in first }
  }
  deinit { odtpack_state_release(handle) }

  /// Save to one file, whole or not at all. With the optimizer's state, training goes on from it
  /// bit by bit; accumulated gradients are not in it: save after optimizerStep. The file that is
  /// replaced is kept as `<path>.previous` if that is asked for.
  public func saveCheckpoint(
    toPath path: String, withOptimizerState: Bool, keepPrevious: Bool = false
  ) throws {
    try call(odtpack_state_save(handle, plain(path), withOptimizerState, keepPrevious))
  }

  /// What is wrong with the file that was to be loaded, and what was lost, if the save before it
  /// was loaded instead.
  public var recovered: String? { try? text { odtpack_state_recovered(handle, $0) } }

  /// A property; nil if there is none of that name.
  public func property(_ name: String) throws -> Property? {
    do { return try known(name) } catch let error as OdtpackError
      where error.code == "unknown-property" { return nil }
  }
  public func addIntProperty(withName name: String, value: Int64) throws {
    try setProperty(name, .int(value))
  }
  public func addFloatProperty(withName name: String, value: Float) throws {
    try setProperty(name, .float(value))
  }
  public func addStringProperty(withName name: String, value: String) throws {
    try setProperty(name, .string(value))
  }
  public func getIntProperty(withName name: String) throws -> Int64 {
    if case .int(let value) = try known(name) { return value }
    throw OdtpackError("property-type", "The property '\(name)' is not a whole number.")
  }
  public func getFloatProperty(withName name: String) throws -> Float {
    if case .float(let value) = try known(name) { return value }
    throw OdtpackError("property-type", "The property '\(name)' is not a float.")
  }
  public func getStringProperty(withName name: String) throws -> String {
    if case .string(let value) = try known(name) { return value }
    throw OdtpackError("property-type", "The property '\(name)' is not text.")
  }

  /// True if the file carried a digest of all that it holds, which was right. Those of ONNX
  /// Runtime's own training carry none, and load unchecked.
  public var isChecked: Bool { odtpack_state_is_checked(handle) }

  /// True as long as the parameters have names and no values.
  public var isNominal: Bool { odtpack_state_is_nominal(handle) }

  /// The parameter itself, not a copy: it shows the training's progress, and what is written into
  /// its elements counts in the next step.
  public func parameter(_ name: String) throws -> ORTValue {
    if let index = places[name] { return try tensor { odtpack_state_parameter(handle, index, $0, $1) } }
    throw OdtpackError("unknown-parameter", "The state has no parameter '\(name)'.")
  }

  /// Set all parameters to those of a complete checkpoint of the same model. Properties and the
  /// optimizer's state remain as they are.
  public func loadParameters(path: String) throws {
    try call(odtpack_state_load_parameters(handle, plain(path)))
  }

  /// Bring trained parameters into the state of a newer package's checkpoint, before a session is
  /// made of it; everything else comes from the newer one. By default those that were trained; an
  /// empty list carries none.
  public func carryOver(
    from trained: ORTCheckpoint, names: [String]? = nil, optimizerState: Bool = true
  ) throws {
    try withNames(names ?? []) { list in
      try call(
        odtpack_state_carry_over(
          handle, trained.handle, names == nil ? nil : list, names?.count ?? 0, optimizerState))
    }
  }

  /// Write the adapter that was trained: to a file whose name ends in `.onnx_adapter`, which ONNX
  /// Runtime's own adapters read, or to a folder, made if needed, with PEFT's two files.
  public func saveAdapter(of package: TrainingPackage, toPath path: String) throws {
    try call(odtpack_adapter_save(package.handle, handle, plain(path)))
  }

  /// Set the trained parameters to those of such a file or folder, all of them or none.
  public func loadAdapter(of package: TrainingPackage, fromPath path: String) throws {
    try call(odtpack_adapter_load(package.handle, handle, plain(path)))
  }

  /// A tensor of the state that a call hands out.
  func tensor(
    _ get: (UnsafeMutablePointer<OpaquePointer?>, UnsafeMutablePointer<OpaquePointer?>) ->
      OpaquePointer?
  ) throws -> ORTValue {
    var value: OpaquePointer?
    var memory: OpaquePointer?
    try call(get(&value, &memory))
    return try ORTValue(owning: value!, owner: StateMemory(memory!))
  }

  /// Attach a property, whose name is not empty; nil takes it off.
  public func setProperty(_ name: String, _ value: Property?) throws {
    let name = try plain(name)
    guard let value else { return try call(odtpack_state_set_property(handle, name, nil)) }
    var property = odtpack_property()
    switch value {
    case .int(let whole): (property.kind, property.whole) = (ODTPACK_INT, whole)
    case .float(let real): (property.kind, property.real) = (ODTPACK_FLOAT, real)
    case .string(var string):
      try string.withUTF8 { bytes in
        try bytes.withMemoryRebound(to: CChar.self) {
          property.kind = ODTPACK_STRING
          property.text.bytes = UnsafeMutablePointer(mutating: $0.baseAddress)
          property.text.size = $0.count
          try call(odtpack_state_set_property(handle, name, &property))
        }
      }
      return
    }
    try call(odtpack_state_set_property(handle, name, &property))
  }
  private func known(_ name: String) throws -> Property {
    var property = odtpack_property()
    try call(odtpack_state_get_property(handle, plain(name), &property))
    return Property(property)
  }
}
