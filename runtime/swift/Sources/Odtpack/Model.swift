// Models of a package on ONNX Runtime, run on memory that stays where it is.
import COnnxRuntime
import Foundation

/// A loaded model, and arguments of its runs at fixed addresses: nothing is copied.
final class Model {
  let handle: OpaquePointer
  private let env: ORTEnv

  init(_ env: ORTEnv, _ path: String, _ options: ORTSessionOptions) throws {
    guard isRegularFile(path) else {
      throw OdtpackError("model-not-found", "There is no model \(path).")
    }
    self.env = env
    let hint = "build the package for this ONNX Runtime"
    handle = try make("model-not-loadable", hint: hint) {
      api.CreateSession(env.handle, path, options.handle, $0)
    }
  }
  init(_ env: ORTEnv, _ bytes: [UInt8], _ options: ORTSessionOptions) throws {
    self.env = env
    handle = try make("model-not-loadable") {
      api.CreateSessionFromArray(env.handle, bytes, bytes.count, options.handle, $0)
    }
  }
  deinit { api.ReleaseSession(handle) }

  struct Value {
    let name: String
    let type: ElementType?, shape: [Int]  // -1 for what may vary
    let symbols: [String]  // the names of such sizes

    /// Whether a tensor has this shape, as far as it is fixed.
    func hasShape(of tensor: ORTValue) -> Bool {
      shape.count == tensor.shape.count
        && zip(shape, tensor.shape).allSatisfy { $0 < 0 || $0 == $1 }
    }
  }

  /// Its inputs, or its outputs, in the model's order.
  func values(inputs: Bool) throws -> [Value] {
    var count = 0
    var allocator: UnsafeMutablePointer<OrtAllocator>?
    try check(api.GetAllocatorWithDefaultOptions(&allocator))
    try check((inputs ? api.SessionGetInputCount : api.SessionGetOutputCount)!(handle, &count))
    return try (0..<count).map { index in
      var text: UnsafeMutablePointer<CChar>?
      let getName = inputs ? api.SessionGetInputName : api.SessionGetOutputName
      try check(getName!(handle, index, allocator, &text))
      let name = String(cString: text!)
      try check(api.AllocatorFree(allocator, text))
      let getType = inputs ? api.SessionGetInputTypeInfo : api.SessionGetOutputTypeInfo
      let type = try make { getType!(handle, index, $0) }
      defer { api.ReleaseTypeInfo(type) }
      var info: OpaquePointer?
      try check(api.CastTypeInfoToTensorInfo(type, &info))
      guard let info else { throw mismatch("'\(name)' is not a tensor") }
      let (number, shape) = try ORTValue.describe(info)
      var symbols = [UnsafePointer<CChar>?](repeating: nil, count: shape.count)
      try check(api.GetSymbolicDimensions(info, &symbols, symbols.count))
      return Value(
        name: name, type: ElementType(rawValue: number), shape: shape,
        symbols: symbols.map { $0.map(String.init(cString:)) ?? "" })
    }
  }
}

/// Arguments of a run that are prepared once.
final class Arguments {
  private let names: [UnsafeMutablePointer<CChar>?]
  private var inputNames: [UnsafePointer<CChar>?], outputNames: [UnsafePointer<CChar>?]
  private let kept: [ORTValue]
  var inputs: [OpaquePointer?], outputs: [OpaquePointer?]

  /// Those that are nil are set before a run; an output that is nil then is made by the run.
  init(_ inputs: [(String, ORTValue?)], _ outputs: [(String, ORTValue?)]) {
    names = (inputs + outputs).map { strdup($0.0) }
    inputNames = names.prefix(inputs.count).map { UnsafePointer($0) }
    outputNames = names.suffix(outputs.count).map { UnsafePointer($0) }
    kept = (inputs + outputs).compactMap(\.1)
    self.inputs = inputs.map { $0.1?.handle }
    self.outputs = outputs.map { $0.1?.handle }
  }
  deinit { names.forEach { free($0) } }

  func run(_ model: Model, hint: String = "") throws {
    try check(
      api.Run(
        model.handle, nil, inputNames, inputs, inputs.count, outputNames, outputs.count, &outputs),
      hint: hint)
  }
}

/// A training, step or evaluation model.
protocol BatchModel {
  /// Compute a batch; returns the user's outputs, the loss first.
  func run(_ values: [ORTValue]) throws -> [ORTValue]
}

/// A model whose parameters, gradients and state stand in bound memory.
final class Graph: BatchModel {
  private let model: Model, specs: [Spec], arguments: Arguments
  private var inputPlaces: [Int] = [], outputPlaces: [Int] = []
  private let loss: ORTValue?, hint: String

  init(
    _ model: Model, _ inputs: [Spec], _ outputs: [Spec], _ bound: [String: ORTValue],
    hint: String = "call lazyResetGrad(): gradients may hold part of the step"
  ) throws {
    (self.model, specs, self.hint) = (model, inputs, hint)
    let first = outputs[0]
    loss = first.sizes.isEmpty ? try ORTValue(first.type, []) : nil
    func bind(_ values: [Model.Value], _ specs: [Spec], _ places: inout [Int]) throws
      -> [(String, ORTValue?)]
    {
      let byName = Dictionary(specs.map { ($0.name, $0) }) { one, _ in one }
      let result: [(String, ORTValue?)] = try values.map { value in
        if let spec = byName[value.name] {
          if value.type != spec.type { throw mismatch("the type of '\(value.name)'") }
          return (value.name, nil)
        }
        guard let own = bound[value.name] else {
          throw mismatch("'\(value.name)' belongs to no parameter")
        }
        if value.type != own.elementType || !(value.shape.isEmpty || value.hasShape(of: own)) {
          throw mismatch("'\(value.name)' is \(own.description) in the checkpoint")
        }
        return (value.name, own)
      }
      places = try specs.map { spec in
        guard let place = values.firstIndex(where: { $0.name == spec.name }) else {
          throw mismatch("a model lacks '\(spec.name)' of the manifest")
        }
        return place
      }
      if Set(places).count < places.count { throw invalid("a name occurs twice") }
      return result
    }
    let made = try model.values(inputs: false).filter {
      !$0.name.hasPrefix("update.order.")  // it only orders the nodes
    }
    arguments = Arguments(
      try bind(model.values(inputs: true), inputs, &inputPlaces),
      try bind(made, outputs, &outputPlaces))
  }

  func run(_ values: [ORTValue]) throws -> [ORTValue] {
    try checkBatch(specs, values)
    for (place, value) in zip(inputPlaces, values) { arguments.inputs[place] = value.handle }
    for place in outputPlaces { arguments.outputs[place] = nil }
    if let loss { arguments.outputs[outputPlaces[0]] = loss.handle }
    try withExtendedLifetime(values) { try arguments.run(model, hint: hint) }
    return try outputPlaces.enumerated().map { index, place in
      guard index == 0, let loss else {
        return try ORTValue(owning: arguments.outputs[place]!)
      }
      let copy = try ORTValue(loss.elementType, [])  // it stays while the next step runs
      copy.copy(from: loss)
      return copy
    }
  }
}

/// Check that a batch is what the manifest says of the inputs.
func checkBatch(_ specs: [Spec], _ values: [ORTValue]) throws {
  guard values.count == specs.count else {
    let wanted = specs.map { "\($0.name): \($0.description)" }.joined(separator: ", ")
    throw OdtpackError(
      "input-count", "\(values.count) inputs were given.", hint: "pass, in this order, \(wanted)")
  }
  var known: [String: Int] = [:]
  for (spec, value) in zip(specs, values) {
    func require(_ good: Bool, _ code: String, _ problem: @autoclosure () -> String) throws {
      if good { return }
      throw OdtpackError(
        code, "Input '\(spec.name)' must be \(spec.description), and \(problem()).")
    }
    try require(
      value.elementType == spec.type, "input-type", "its elements are \(value.elementType)")
    if spec.sizes.isEmpty { continue }  // it promises nothing
    try require(
      value.shape.count == spec.sizes.count
        && zip(value.shape, spec.sizes).allSatisfy { $1 == nil || $0 == $1 },
      "input-shape", "its shape is \(value.shape)")
    for (axis, size) in value.shape.enumerated() where spec.sizes[axis] == nil {
      try require(size > 0, "empty-batch", "it is empty")
      let symbol = spec.symbols[axis]
      if symbol.isEmpty { continue }
      try require(
        known[symbol, default: size] == size, "input-sizes-differ",
        "'\(symbol)' is another in an input before")
      known[symbol] = size
    }
  }
  for (spec, value) in zip(specs, values)
  where spec.name == "labels" && spec.type == .int64 && spec.classCount > 0 {
    let isWrong = { (label: Int64) in
      (label < 0 || label >= Int64(spec.classCount)) && spec.ignored.map(Int64.init) != label
    }
    let labels = value.elements(Int64.self)
    guard let index = labels.firstIndex(where: isWrong) else { continue }
    throw OdtpackError(
      "label-out-of-range",
      "Element \(index) of 'labels' is \(labels[index]), and the classes are numbered 0 to "
        + "\(spec.classCount - 1).")
  }
}
