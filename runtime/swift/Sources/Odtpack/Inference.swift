// An inference model with the parameters of a state: the template's bytes, then a fragment of
// protobuf for each parameter (docs/formats/package.md).
import Foundation

func varint(_ number: Int) -> [UInt8] {
  var bytes: [UInt8] = [], rest = UInt64(number)
  while rest >= 0x80 {
    bytes.append(UInt8(rest & 0x7F | 0x80))
    rest >>= 7
  }
  return bytes + [UInt8(rest)]
}

/// A field of a protobuf message: its tag, all of its bytes, and its content.
private typealias Field = (tag: UInt64, whole: Range<Int>, content: Range<Int>)

private func fields(_ bytes: [UInt8], _ range: Range<Int>) throws -> [Field] {
  var at = range.lowerBound
  func number() throws -> UInt64 {
    var number: UInt64 = 0
    for shift in stride(from: 0, to: 64, by: 7) where at < range.upperBound {
      number |= UInt64(bytes[at] & 0x7F) << UInt64(shift)
      at += 1
      if bytes[at - 1] < 0x80 { return number }
    }
    throw OdtpackError("model-not-loadable", "The inference template is no model.")
  }
  var found: [Field] = []
  while at < range.upperBound {
    let start = at, tag = try number()
    if tag % 8 == 0 { _ = try number() }
    let length = tag % 8 == 2 ? try number() : tag % 8 == 1 ? 8 : tag % 8 == 5 ? 4 : 0
    guard length <= UInt64(range.upperBound - at) else {
      throw OdtpackError("model-not-loadable", "The inference template is no model.")
    }
    let content = at..<at + Int(length)
    at = content.upperBound
    found.append((tag, start..<at, content))
  }
  return found
}

/// The template with only the wanted ones of its outputs.
private func template(_ model: [UInt8], outputs: [String]) throws -> [UInt8] {
  var result: [UInt8] = [], wanted = Set(outputs)
  for field in try fields(model, model.indices) {
    if field.tag != 0x3A {
      result += model[field.whole]
      continue
    }
    var graph: [UInt8] = []
    for inner in try fields(model, field.content) {
      var name = ""
      for value in inner.tag == 0x62 ? try fields(model, inner.content) : [] where value.tag == 0x0A
      {
        name = String(decoding: model[value.content], as: UTF8.self)
      }
      if inner.tag != 0x62 || wanted.remove(name) != nil { graph += model[inner.whole] }
    }
    result += [0x3A] + varint(graph.count) + graph
  }
  guard let unknown = wanted.first else { return result }
  throw OdtpackError("unknown-output", "The inference model has no output '\(unknown)'.")
}

/// A parameter as the model computes with it.
private func inModelType(_ spec: Spec, _ state: TrainingState) throws -> ORTValue {
  let value = state.parameters[spec.name]!.value
  if spec.scale.isEmpty {
    guard let type = spec.modelType else { return value }
    guard type.isFloating && value.elementType.isFloating else { throw invalid("a model_dtype") }
    return try value.converted(to: type)
  }
  guard let scale = state.parameters[spec.scale]?.value, scale.elementType == .float32,
    value.elementType == .int8, scale.count > 0, scale.shape.count == value.shape.count,
    zip(scale.shape, value.shape).allSatisfy({ $0 == 1 || $0 == $1 })
  else { throw invalid("the scale of '\(spec.name)'") }
  let result = try ORTValue(.float32, value.shape)
  let axis = scale.shape.firstIndex { $0 != 1 } ?? 0
  let inner = value.shape.dropFirst(axis + 1).reduce(1, *)  // elements that share a scale
  let (from, by) = (value.elements(Int8.self), scale.elements(Float.self))
  for (i, number) in from.enumerated() {
    result.elements(Float.self)[i] = Float(number) * by[i / inner % by.count]
  }
  return result
}

/// Hand the bytes of the inference model to `write`, part by part.
func writeInference(
  _ package: TrainingPackage, _ state: TrainingState, _ outputs: [String],
  _ write: (UnsafeRawPointer, Int) throws -> Void
) throws {
  try state.requireValues()
  if try package.manifest["segments"].isPresent {
    throw OdtpackError(
      "segments-unsupported", "A package of segments holds no model for inference.",
      hint: "use odtpack adapter export PACKAGE --checkpoint FILE")
  }
  if outputs.isEmpty || Set(outputs).count != outputs.count {
    throw OdtpackError("no-outputs", "An exported model needs outputs, and each only once.")
  }
  var total = 0
  func put(_ bytes: UnsafeRawPointer, _ count: Int) throws {
    total += count
    if total > 1 << 31 - 1 << 20 {
      throw OdtpackError("model-too-large", "The model exceeds what one ONNX file holds.")
    }
    try write(bytes, count)
  }
  let path = try package.path("inference_template")
  guard let bytes = try? map(path) else {
    throw OdtpackError("model-not-found", "There is no model \(path).")
  }
  let model = try template([UInt8](bytes), outputs: outputs)
  try put(model, model.count)
  for name in try package.manifest["inference"]["parameters"].texts() {
    guard let spec = package.parameters.first(where: { $0.name == name }) else {
      throw invalid("'inference' names the parameter '\(name)'")
    }
    let value = try inModelType(spec, state)
    var head: [UInt8] = value.shape.flatMap { [0x08] + varint($0) }
    head += [0x10] + varint(value.elementType.rawValue)
    head += [0x42] + varint(name.utf8.count) + name.utf8 + [0x4A] + varint(value.byteCount)
    let outer = [0x2A] + varint(head.count + value.byteCount)
    head = [0x3A] + varint(outer.count + head.count + value.byteCount) + outer + head
    try put(head, head.count)
    try withExtendedLifetime(value) { try put(value.bytes, value.byteCount) }
  }
}

/// Predicts with a copy of a state's parameters.
public final class Predictor {
  private let model: Model, arguments: Arguments
  public let inputNames: [String], outputNames: [String]

  init(
    _ env: ORTEnv, _ package: TrainingPackage, _ state: TrainingState, _ outputs: [String]
  ) throws {
    var bytes: [UInt8] = []
    try writeInference(package, state, outputs) {
      bytes += UnsafeRawBufferPointer(start: $0, count: $1)
    }
    model = try Model(env, bytes, ORTSessionOptions())
    inputNames = try model.values(inputs: true).map(\.name)
    outputNames = outputs
    arguments = Arguments(inputNames.map { ($0, nil) }, outputs.map { ($0, nil) })
  }

  /// The outputs for inputs in the order of `inputNames`.
  public func predict(_ inputs: [ORTValue]) throws -> [ORTValue] {
    guard inputs.count == inputNames.count else {
      throw OdtpackError("input-count", "\(inputs.count) inputs were given for \(inputNames).")
    }
    arguments.inputs = inputs.map(\.handle)
    arguments.outputs = outputNames.map { _ in nil }
    try withExtendedLifetime(inputs) { try arguments.run(model) }
    return try arguments.outputs.map { try ORTValue(owning: $0!) }
  }
}
