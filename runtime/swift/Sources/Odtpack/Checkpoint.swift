// The checkpoint under the name of ONNX Runtime's former training API.
import Foundation

/// The state of a training: parameters, properties, and what the optimizer carries. Sessions that
/// are made of it change it.
public final class ORTCheckpoint {
  let state: TrainingState

  /// Load a checkpoint of odtpack or of ONNX Runtime training 1.17 to 1.19. If it is damaged or
  /// missing and the save before it was kept, that one is loaded; `recovered` then says so.
  public init(path: String) throws { state = try CheckpointReader.readLastGood(path) }

  /// Save to one file, whole or not at all. With the optimizer's state, training goes on from it
  /// bit by bit; accumulated gradients are not in it: save after optimizerStep. The file that is
  /// replaced is kept as `<path>.previous` if that is asked for.
  public func saveCheckpoint(
    toPath path: String, withOptimizerState: Bool, keepPrevious: Bool = false
  ) throws {
    // What the state was recovered from is not lost to a damaged file.
    let isDamaged = state.damaged == path
    try CheckpointWriter.write(
      path, state, withOptimizer: withOptimizerState,
      previous: isDamaged ? .kept : keepPrevious ? .replaced : .none)
    if isDamaged { state.damaged = nil }
  }

  /// What is wrong with the file that was to be loaded, and what was lost, if the save before it
  /// was loaded instead.
  public var recovered: String? { state.recovered }

  /// Properties by name; names are not empty.
  public subscript(property name: String) -> Property? {
    get { state.properties[name] }
    set { if !name.isEmpty { state.properties[name] = newValue } }
  }
  public func addIntProperty(withName name: String, value: Int64) throws {
    try add(name, .int(value))
  }
  public func addFloatProperty(withName name: String, value: Float) throws {
    try add(name, .float(value))
  }
  public func addStringProperty(withName name: String, value: String) throws {
    try add(name, .string(value))
  }
  public func getIntProperty(withName name: String) throws -> Int64 {
    if case .int(let value) = try property(name) { return value }
    throw OdtpackError("property-type", "The property '\(name)' is no whole number.")
  }
  public func getFloatProperty(withName name: String) throws -> Float {
    if case .float(let value) = try property(name) { return value }
    throw OdtpackError("property-type", "The property '\(name)' is no float.")
  }
  public func getStringProperty(withName name: String) throws -> String {
    if case .string(let value) = try property(name) { return value }
    throw OdtpackError("property-type", "The property '\(name)' is no text.")
  }

  /// True if the file carried a digest of all that it holds, which was right. Those of ONNX
  /// Runtime's own training carry none, and load unchecked.
  public var isChecked: Bool { state.isChecked }

  /// True as long as the parameters have names and no values.
  public var isNominal: Bool { state.isNominal }
  public var parameterNames: [String] { state.parameters.keys.sorted() }

  /// The parameter itself, not a copy: it shows the training's progress, and what is written into
  /// its elements counts in the next step.
  public func parameter(_ name: String) throws -> ORTValue {
    try state.requireValues()
    if let parameter = state.parameters[name] { return parameter.value }
    throw OdtpackError("unknown-parameter", "The state has no parameter '\(name)'.")
  }

  /// Set all parameters to those of a complete checkpoint of the same model. Properties and the
  /// optimizer's state remain as they are.
  public func loadParameters(path: String) throws {
    let other = try CheckpointReader.read(path)
    try other.requireValues()
    let isFree = state.isNominal && state.flat == nil  // shapes are not known yet
    let isSame =
      state.parameters.count == other.parameters.count
      && state.parameters.allSatisfy { name, own in
        guard let value = other.parameters[name]?.value else { return false }
        return value.elementType == own.value.elementType
          && (isFree || value.shape == own.value.shape)
      }
    guard isSame else {
      throw OdtpackError(
        "checkpoint-mismatch", "The checkpoint has other parameters than this state.", place: path,
        hint: "load a checkpoint of the same model")
    }
    for (name, parameter) in other.parameters {
      if isFree {
        state.parameters[name]!.value = parameter.value
      } else {
        state.parameters[name]!.value.copy(from: parameter.value)
      }
    }
    state.isNominal = false
  }

  /// Bring trained parameters into the state of a newer package's checkpoint, before a session is
  /// made of it; everything else comes from the newer one. By default those that were trained.
  public func carryOver(
    from trained: ORTCheckpoint, names: [String]? = nil, optimizerState: Bool = true
  ) throws {
    let from = trained.state
    try from.requireValues()
    try state.requireValues()
    func fits(_ name: String) -> Bool {
      guard let one = from.parameters[name]?.value, let two = state.parameters[name]?.value else {
        return false
      }
      return one.elementType == two.elementType && one.shape == two.shape
    }
    let names = names ?? from.parameters.filter(\.value.trainable).map(\.key)
    for name in names where !fits(name) {
      throw OdtpackError(
        "carry-over-parameter",
        "'\(name)' does not go over: it is missing, or has another shape or type.",
        hint: "see odtpack diff OLD NEW")
    }
    var carried: OptimizerState?
    if optimizerState, let optimizer = from.optimizer {
      carried = OptimizerState(step: optimizer.step, rate: optimizer.rate, groups: [[]])
      let old = Dictionary(uniqueKeysWithValues: optimizer.moments.map { ($0.name, $0.values) })
      let trainable = state.parameters.filter(\.value.trainable).keys.sorted()
      for name in old.isEmpty ? [] : trainable {
        guard let moments = old[name], fits(name) else {
          throw OdtpackError(
            "carry-over-optimizer",
            "There is no optimizer state for '\(name)', which the new package trains.",
            hint: "pass optimizerState: false")
        }
        let copies = try moments.map { moment in
          let copy = try ORTValue(moment.elementType, moment.shape)
          copy.copy(from: moment)
          return copy
        }
        carried!.moments.append((name, copies))
        carried!.groups[0].append(name)
      }
    }
    for name in names {
      state.parameters[name]!.value.copy(from: from.parameters[name]!.value)
    }
    state.properties.merge(from.properties) { $1 }
    state.optimizer = carried
  }

  private func add(_ name: String, _ value: Property) throws {
    if name.isEmpty { throw OdtpackError("property-type", "A property needs a name.") }
    state.properties[name] = value
  }
  private func property(_ name: String) throws -> Property {
    if let value = state.properties[name] { return value }
    throw OdtpackError("unknown-property", "The state has no property '\(name)'.")
  }
}
