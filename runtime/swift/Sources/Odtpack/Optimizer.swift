// An optimizer model and what it carries from step to step.
import Foundation

/// The first axis of a parameter's columns, and its rows and columns: of all cuts between two
/// axes the one with the fewest of them together.
func matrix(of shape: [Int]) -> (cut: Int, rows: Int, columns: Int) {
  var best = (cut: 0, rows: 1, columns: shape.reduce(1, *))
  for i in 1..<max(shape.count, 1) {
    let rows = shape[..<i].reduce(1, *), columns = shape[i...].reduce(1, *)
    if i == 1 || rows + columns < best.rows + best.columns { best = (i, rows, columns) }
  }
  return best
}

/// Continues the state's optimizer if there is one.
final class Optimizer {
  private struct Vector {
    let name: String
    let axes: [Int]  // of a parameter as a matrix: those that are kept
    let whole: ORTValue?  // one flat vector, or
    var parts: [ORTValue] = []  // one for each parameter
  }

  private let model: Model, state: TrainingState, flat: ORTValue, gradients: ORTValue
  private let inputs: [String]
  private var vectors: [Vector]
  private let scaled: ORTValue  // the rate of each group
  private var rates: [(value: ORTValue, scale: Double)] = [], decays: [ORTValue] = []
  private let step: ORTValue, norm: ORTValue, usesNorm: Bool
  private var runs: [Arguments] = []

  init(_ model: Model, _ manifest: Json, _ state: TrainingState, _ trainable: [Spec]) throws {
    if trainable.isEmpty {
      throw OdtpackError("nothing-trainable", "The checkpoint has nothing to train.")
    }
    (self.model, self.state) = (model, state)
    (flat, gradients) = (state.flat!, state.gradients!)
    let layout = try manifest["layout"], run = try layout["run"].text("chunks")
    inputs = try layout["inputs"].texts()
    usesNorm = inputs.contains("gradient_norm")
    step = try ORTValue(.int64, [1])
    scaled = try ORTValue(.float32, [max(try manifest["groups"].list([]).count, 1)])
    norm = try ORTValue(flat.elementType, [1])
    vectors = [
      Vector(name: "params", axes: [0, 1], whole: flat),
      Vector(name: "gradients", axes: [0, 1], whole: gradients),
    ]
    for entry in try layout["state"].list([]) {
      let axes = try entry["axes"].isPresent ? entry["axes"].wholes() : [0, 1]
      let whole = run == "parameters" ? nil : try ORTValue(flat.elementType, flat.shape)
      vectors.append(Vector(name: try entry["name"].text(), axes: axes, whole: whole))
    }
    try placeState(trainable, try manifest["optimizer"]["kind"].text())
    var groups: [String: Int] = [:]
    for group in try manifest["groups"].list([]) {
      let names = try group["parameters"].texts()
      for name in names { groups[name] = rates.count }
      try addGroup(group["learning_rate_scale"].real(), group["weight_decay"].real(), names)
    }
    if rates.isEmpty {
      for spec in trainable { groups[spec.name] = 0 }
      try addGroup(1, 0, trainable.map(\.name))
    }
    for spec in trainable where groups[spec.name] == nil {
      throw invalid("'\(spec.name)' is in no group")
    }
    try setRate(state.optimizer!.rate)
    let chunk = max(try layout["chunk_elements"].whole(131072), 1)
    var next = 0
    while next < trainable.count {
      let first = trainable[next], group = groups[first.name]!
      next += 1
      if run == "parameters" {
        try addParameterRun(first, next - 1, group)
        continue
      }
      while next < trainable.count && groups[trainable[next].name] == group { next += 1 }
      let end = next < trainable.count ? trainable[next].offset : flat.count
      let length = run == "whole" ? max(end - first.offset, 1) : chunk
      for start in stride(from: first.offset, to: end, by: length) {
        let size = min(length, end - start)
        try addRun(vectors.map { ($0.name, try $0.whole!.part(start, [size])) }, group)
      }
    }
  }

  /// The learning rates and the number of the step, as a step model calls them.
  var scalars: [String: ORTValue] { ["update.learning_rate": scaled, "update.step": step] }
  /// What is kept of each parameter, by the names "<parameter>.<vector>".
  var kept: [String: ORTValue] {
    var found: [String: ORTValue] = [:]
    for (name, moments) in state.optimizer!.moments {
      for (vector, moment) in zip(vectors.dropFirst(2), moments) {
        found["\(name).\(vector.name)"] = moment
      }
    }
    return found
  }
  /// Make a step with a step model that is bound to these.
  func makeStep(_ model: Graph, _ batch: [ORTValue]) throws -> [ORTValue] {
    step.elements(Int64.self)[0] = Int64(state.optimizer!.step &+ 1)
    let results = try model.run(batch)
    state.optimizer!.step &+= 1
    return results
  }

  func makeStep() throws {
    step.elements(Int64.self)[0] = Int64(state.optimizer!.step &+ 1)
    if usesNorm {
      if norm.elementType == .float64 {
        norm.elements(Double.self)[0] = l2(SIMD8<Double>.self) { $0 }
      } else {
        norm.elements(Float.self)[0] = Float(l2(SIMD8<Float>.self) { SIMD8<Double>($0) })
      }
    }
    for run in runs {
      try run.run(model, hint: "load the last checkpoint: parameters may hold part of the step")
    }
    state.optimizer!.step &+= 1
  }

  /// The L2 norm of all gradients, squared and summed in float64.
  private func l2<T>(_: T.Type, _ double: (T) -> SIMD8<Double>) -> Double {
    var sums = SIMD8<Double>()
    for values in gradients.elements(T.self) {  // ends with a whole cache line
      let wide = double(values)
      sums += wide * wide
    }
    return sums.sum().squareRoot()
  }

  func setRate(_ rate: Float) throws {
    guard rate.isFinite else {
      throw OdtpackError("bad-learning-rate", "The learning rate is not finite.")
    }
    state.optimizer!.rate = rate
    for (value, scale) in rates { value.elements(Float.self)[0] = Float(Double(rate) * scale) }
  }

  /// Give every moment its place, and take over those of the loaded state.
  private func placeState(_ trainable: [Spec], _ kind: String) throws {
    let loaded = state.optimizer ?? OptimizerState()
    var placed = OptimizerState(step: loaded.step, rate: loaded.rate, kind: kind)
    let old = Dictionary(uniqueKeysWithValues: loaded.moments.map { ($0.name, $0.values) })
    let kept = vectors.count - 2, count = loaded.moments.first?.values.count ?? 0
    var isSame = count == kept && (loaded.kind.isEmpty || loaded.kind == kind)
    for spec in trainable {
      let shape = spec.shape!, cut = matrix(of: shape).cut
      for v in vectors.indices.dropFirst(2) {
        let kept = shape.enumerated().map { i, size in
          vectors[v].axes.contains(i >= cut ? 1 : 0) ? size : 1
        }
        let part =
          try vectors[v].whole?.part(spec.offset, kept) ?? ORTValue(flat.elementType, kept)
        vectors[v].parts.append(part)
        isSame = isSame && old[spec.name]?[v - 2].shape == kept
      }
      if kept > 0 {
        placed.moments.append((spec.name, vectors.dropFirst(2).map { $0.parts.last! }))
      }
    }
    if !isSame {
      let isIdle = loaded.moments.allSatisfy {
        $0.values.allSatisfy { $0.elements(UInt8.self).allSatisfy { $0 == 0 } }
      }
      // The reference saves one moment per parameter with SGD, and never uses it.
      guard isIdle && (loaded.step == 0 || count == 1 && kept == 0) else {
        throw OdtpackError(
          "optimizer-mismatch", "The checkpoint holds the state of another optimizer.",
          hint: "use the optimizer it was saved with, or a checkpoint without optimizer state")
      }
    }
    for (name, values) in placed.moments where isSame {
      for (value, source) in zip(values, old[name]!) { value.copy(from: source) }
    }
    state.optimizer = placed
  }

  private func addGroup(_ scale: Double, _ decay: Double, _ names: [String]) throws {
    state.optimizer!.groups.append(names)
    rates.append((try scaled.part(rates.count, [1]), scale))
    let value = try ORTValue(.float64, [1])
    value.elements(Double.self)[0] = decay
    decays.append(try value.converted(to: flat.elementType))
  }

  private func addParameterRun(_ spec: Spec, _ index: Int, _ group: Int) throws {
    let (_, rows, columns) = matrix(of: spec.shape!)
    if rows * columns == 0 { return }
    let factored = try ORTValue(.bool, [1])
    factored.elements(UInt8.self)[0] = spec.sizes.count > 1 ? 1 : 0
    let slices: [(String, ORTValue)] = try vectors.map {
      let shape = [$0.axes.contains(0) ? rows : 1, $0.axes.contains(1) ? columns : 1]
      let part = try $0.whole?.part(spec.offset, shape) ?? $0.parts[index].part(0, shape)
      return ($0.name, part)
    }
    try addRun(slices + [("factored", factored)], group)
  }

  private func addRun(_ slices: [(String, ORTValue)], _ group: Int) throws {
    var values: [String: ORTValue] = [
      "learning_rate": rates[group].value, "weight_decay": decays[group], "gradient_norm": norm,
      "step": step,
    ]
    for (name, value) in slices { values[name] = value }
    let inputs: [(String, ORTValue?)] = try inputs.map { name in
      guard let value = values[name] else { throw mismatch("the optimizer takes '\(name)'") }
      return (name, value)
    }
    let outputs: [(String, ORTValue?)] = vectors.filter { $0.name != "gradients" }
      .map { ($0.name + ".out", values[$0.name]) }
    runs.append(Arguments(inputs, outputs))
  }
}
