// A network that is trained segment by segment (docs/formats/package.md). The segments run one
// after the other and, in training, back. All that are alike share a model, so that neither memory
// nor the time of loading grows with depth.
import Foundation

private let cotangent = ".cotangent"
private let ofValues = [cotangent, "_grad.accumulation.buffer", "_grad.accumulation.out"]

/// A model as one segment sees it.
struct Part {
  /// An input or output: what the model says of it, and its name in the network.
  typealias End = (value: Model.Value, name: String)

  let model: Model, inputs: [End], outputs: [End]

  init(_ model: Model, _ names: [String: String]) throws {
    self.model = model
    // What belongs to a value goes with it.
    func end(_ value: Model.Value) -> End {
      let own = value.name, suffix = ofValues.first { own.hasSuffix($0) } ?? ""
      let stem = String(own.dropLast(suffix.count))
      return (value, (names[stem] ?? stem) + suffix)
    }
    inputs = try model.values(inputs: true).map(end)
    outputs = try model.values(inputs: false).map(end)
  }
}

/// The models of a package's segments.
final class Segments {
  let weights: MappedWeights, forward: [Part], backward: [Part?], last: Part, lastEvaluated: Part?
  /// Memory of values between segments by name, which training and evaluation share.
  fileprivate var kept: [String: ORTValue] = [:]

  /// Open the models of a package; `training` and `evaluation` end the network.
  init(
    _ env: ORTEnv, _ options: ORTSessionOptions, _ package: TrainingPackage, training: String,
    evaluation: String?
  ) throws {
    let info = try package.manifest["segments"]
    let extra = try package.manifest["files"]["extra"].list([])
    let files = try Set(extra.map { try $0["path"].text() })  // those that were checked
    func path(_ json: Json) throws -> String {
      let name = try json.text()
      if files.contains(name) { return "\(package.folder)/\(name)" }
      throw invalidSegments("'\(name)' is not a file of the package")
    }
    weights = try MappedWeights(info["weights"].isPresent ? path(info["weights"]) : nil, info)
    var models: [String: Model] = [:]
    func open(_ path: String) throws -> Model {
      if let model = models[path] { return model }
      let model = try Model(env, path, options)
      models[path] = model
      return model
    }
    var parts: [(forward: Part, backward: Part?)] = []
    for json in try info["segments"].list() {
      let given = try json["names"], backward = try json["backward"]
      let names = try given.isPresent ? given.object().mapValues { try $0.text() } : [:]
      parts.append(
        (
          try Part(open(path(json["forward"])), names),
          try backward.isPresent ? Part(open(path(backward)), names) : nil
        ))
    }
    (forward, backward) = (parts.map(\.forward), parts.map(\.backward))
    // Of those only the next run reads a value: others take its memory.
    let made = forward.flatMap(\.outputs).map(\.name)
    if let odd = made.first(where: { $0.hasSuffix(cotangent) }) {
      throw invalidSegments("'\(odd)' is a name of a gradient")
    }
    last = try Part(open(training), [:])
    lastEvaluated = try evaluation.map { try Part(open($0), [:]) }
  }
}

/// Segments as one training or evaluation model.
final class SegmentedGraph: BatchModel {
  /// One run of a model: what never changes stands in its arguments.
  private struct Run {
    let part: Part, arguments: Arguments, pages: MappedWeights.Pages
    let taken: [Int]  // inputs that are given anew
    let made: [Int], returned: Set<Int>  // outputs, and those of them that are the user's
  }
  private let segments: Segments, inputs: [Spec], outputs: [Spec], loss: ORTValue
  private var runs: [Run] = []
  private var given: [String: ORTValue] = [:]  // what the runs of a step have made so far
  private var turn = false

  init(
    _ segments: Segments, _ package: TrainingPackage, _ bound: [String: ORTValue], training: Bool
  ) throws {
    (self.segments, inputs) = (segments, package.inputs)
    outputs = training ? package.outputs : package.evaluationOutputs
    loss = try ORTValue(outputs[0].type, [])
    var made = Set(inputs.map(\.name))
    for part in segments.forward { try add(part, bound, &made) }
    try add(training ? segments.last : segments.lastEvaluated!, bound, &made, isLast: true)
    for part in segments.backward.reversed() where training && part != nil {
      try add(part!, bound, &made)
    }
  }

  func run(_ values: [ORTValue]) throws -> [ORTValue] {
    try checkBatch(inputs, values)
    defer { given = [:] }
    for (spec, value) in zip(inputs, values) { given[spec.name] = value }
    let copy = try ORTValue(loss.elementType, [])  // it stays while the next step runs
    var results = [copy]
    for run in runs { results += try make(run) }
    copy.copy(from: loss)
    return results
  }

  private func add(
    _ part: Part, _ bound: [String: ORTValue], _ made: inout Set<String>, isLast: Bool = false
  ) throws {
    /// A parameter, its gradient, or what else is bound under that name.
    func own(_ end: Part.End) throws -> ORTValue {
      guard let own = bound[end.name] else {
        throw invalidSegments("nothing gives '\(end.name)' to a segment")
      }
      guard end.value.type == own.elementType, end.value.hasShape(of: own) else {
        throw mismatch("'\(end.name)' is \(own.description) in the checkpoint")
      }
      return own
    }
    var weights: [(index: Int, name: String)] = [], taken: [Int] = [], anew: [Int] = []
    var returned: [Int] = []
    let arguments = try Arguments(
      part.inputs.enumerated().map { index, end in
        if segments.weights.has(end.name) {
          weights.append((index, end.name))
        } else if made.contains(end.name) {
          taken.append(index)
        } else {
          return (end.value.name, try own(end))
        }
        return (end.value.name, nil)
      },
      part.outputs.enumerated().map { index, end in
        if isLast, returned.count < outputs.count, end.name == outputs[returned.count].name {
          let spec = outputs[returned.count]
          if end.value.type != spec.type { throw mismatch("the type of '\(end.name)'") }
          returned.append(index)
          if returned.count == 1 { return (end.value.name, loss) }
        } else if end.name.hasSuffix(ofValues[2]) {
          return (end.value.name, try own(end))
        } else if segments.weights.has(end.name) || !made.insert(end.name).inserted {
          throw invalidSegments("'\(end.name)' is made twice")
        }
        anew.append(index)
        return (end.value.name, nil)
      })
    if isLast, returned.count != outputs.count {
      throw mismatch("a model lacks an output of the manifest")
    }
    for (index, name) in weights {
      arguments.inputs[index] = try segments.weights.find(name, as: part.inputs[index].value)
    }
    runs.append(
      Run(
        part: part, arguments: arguments, pages: segments.weights.pages(of: weights.map(\.name)),
        taken: taken, made: anew, returned: Set(returned)))
  }

  /// Run a model; returns what of its outputs is the user's and is not the loss.
  private func make(_ run: Run) throws -> [ORTValue] {
    let arguments = run.arguments
    var sizes: [String: Int] = [:]
    for index in run.taken {
      let end = run.part.inputs[index], value = given[end.name]!
      arguments.inputs[index] = value.handle
      for (symbol, size) in zip(end.value.symbols, value.shape) where !symbol.isEmpty {
        sizes[symbol] = size
      }
    }
    for index in run.made {
      let end = run.part.outputs[index]
      let shape = run.returned.contains(index) ? nil : shape(of: end, sizes)
      arguments.outputs[index] = try shape.map { try place(end, $0).handle }
    }
    try segments.weights.read(run.pages) {
      try arguments.run(
        run.part.model, hint: "call lazyResetGrad(): gradients may hold part of the step")
    }
    var results: [ORTValue] = []
    for index in run.made {
      let end = run.part.outputs[index], handle = arguments.outputs[index]!
      arguments.outputs[index] = nil
      if given[end.name]?.handle == handle { continue }
      let found = try ORTValue(owning: handle)  // ONNX Runtime found memory for it
      if run.returned.contains(index) {
        results.append(found)
      } else {
        try place(end, found.shape).copy(from: found)
      }
    }
    return results
  }

  /// The shape of what a run makes, as far as it follows from those of its inputs.
  private func shape(of end: Part.End, _ sizes: [String: Int]) -> [Int]? {
    if end.name.hasSuffix(cotangent), let like = given[String(end.name.dropLast(cotangent.count))] {
      return like.shape
    }
    let shape = zip(end.value.shape, end.value.symbols).map { $0 < 0 ? sizes[$1] : $0 }
    let known = shape.compactMap { $0 }
    return known.isEmpty || known.count < shape.count ? nil : known
  }

  /// Give a value between segments its memory: that of the last time, if it fits.
  private func place(_ end: Part.End, _ shape: [Int]) throws -> ORTValue {
    var key = end.name
    if key.hasSuffix(cotangent) {  // the next run reads one, and makes the next: two take turns
      turn.toggle()
      key = "\(cotangent)\(turn)"
    }
    guard let type = end.value.type, shape.reduce(1.0, { $0 * Double(max($1, 1)) }) <= 0x1p48
    else {
      throw invalidSegments("nothing can hold '\(end.name)'")
    }
    if let kept = segments.kept[key], kept.shape != shape || kept.elementType != type {
      segments.kept[key] = nil  // before there is another
    }
    let value = try segments.kept[key] ?? ORTValue(type, shape)
    segments.kept[key] = value
    given[end.name] = value
    return value
  }
}
