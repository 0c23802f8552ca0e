// The step model: a training model that updates the parameters (docs/formats/package.md).

private let updated = ".update.out"

/// A step model on the memory of the parameters that it updates, `trained`, and of what their
/// optimizer keeps. New values are written over the old ones, in the shapes that the model has for
/// them: it may cut a matrix into parts.
func makeStepGraph(
  _ model: Model, _ package: TrainingPackage, _ trained: [String: ORTValue],
  _ optimizer: Optimizer, _ others: [String: ORTValue]
) throws -> Graph {
  var bound = others.merging(optimizer.scalars) { _, scalar in scalar }
  let kept = optimizer.kept
  func bind(_ value: Model.Value, _ own: ORTValue) throws {
    guard value.type == own.elementType, value.shape.allSatisfy({ $0 >= 0 }),
      value.shape.reduce(1.0, { $0 * Double($1) }) == Double(own.count)  // no Int may overflow
    else { throw mismatch("the step model has another '\(value.name)'") }
    bound[value.name] = try own.part(0, value.shape)
  }
  for value in try model.values(inputs: true) {
    if let own = kept[value.name] { try bind(value, own) }
  }
  var left = trained.merging(kept) { parameter, _ in parameter }
  for value in try model.values(inputs: false) where value.name.hasSuffix(updated) {
    let name = String(value.name.dropLast(updated.count))
    if let own = left.removeValue(forKey: name) { try bind(value, own) }
  }
  if let name = left.keys.min() { throw mismatch("the step model does not update '\(name)'") }
  return try Graph(
    model, package.inputs, package.outputs, bound,
    hint: "load the last checkpoint: parameters may hold part of the step")
}
