// Training on stock ONNX Runtime, under the names of its former training API.
import Foundation

/// Trains a package: `ORTTrainingSession` of ONNX Runtime 1.19 on a stock library. Parameters live
/// in the checkpoint, as flat vectors on which all models work in place. Not safe for concurrent
/// calls.
public final class ORTTrainingSession {
  public let checkpoint: ORTCheckpoint
  public let package: TrainingPackage
  private let env: ORTEnv, state: TrainingState, options: ORTSessionOptions, trainModelPath: String
  private let reset: ORTValue
  private var bound: [String: ORTValue] = [:], trainable: [Spec] = []
  private var training: BatchModel?, step: Graph?, evaluation: BatchModel?
  private var optimizer: Optimizer?
  private var schedule: (schedule: Schedule, rate: Double)?
  private var batches = 0
  /// Batches per optimizer step: the gradient of each is divided by this number.
  public let accumulationSteps: Int

  /// Train a package with its models and session options; with its step model, where it has one.
  public convenience init(
    env: ORTEnv, package: TrainingPackage, checkpoint: ORTCheckpoint, threads: Int = 0
  ) throws {
    try self.init(
      env: env, sessionOptions: package.sessionOptions(threads: threads), package: package,
      checkpoint: checkpoint, trainModelPath: package.path("training_model"),
      evalModelPath: package.path("eval_model"),
      optimizerModelPath: package.path("optimizer_model"), stepModelPath: package.stepModel())
  }
  /// The former initializer. The models lie in the folder of their package.
  public convenience init(
    env: ORTEnv, sessionOptions: ORTSessionOptions, checkPoint checkpoint: ORTCheckpoint,
    trainModelPath: String, evalModelPath: String? = nil, optimizerModelPath: String? = nil
  ) throws {
    let folder = (trainModelPath as NSString).deletingLastPathComponent
    try self.init(
      env: env, sessionOptions: sessionOptions,
      package: TrainingPackage(path: folder.isEmpty ? "." : folder), checkpoint: checkpoint,
      trainModelPath: trainModelPath, evalModelPath: evalModelPath,
      optimizerModelPath: optimizerModelPath)
  }
  /// With options and models of the caller's choice: those in ORT format, for example. A step model
  /// needs the optimizer model beside it; the training model is then opened once a step asks for
  /// gradients.
  public init(
    env: ORTEnv, sessionOptions: ORTSessionOptions, package: TrainingPackage,
    checkpoint: ORTCheckpoint, trainModelPath: String, evalModelPath: String?,
    optimizerModelPath: String?, stepModelPath: String? = nil
  ) throws {
    (self.env, self.package, self.checkpoint) = (env, package, checkpoint)
    (options, self.trainModelPath) = (sessionOptions, trainModelPath)
    state = checkpoint.state
    accumulationSteps = max(try package.manifest["accumulation_steps"].whole(1), 1)
    reset = try ORTValue(.bool, [1])
    let isSegmented = try package.manifest["segments"].isPresent
    func open() throws -> (Segments?, Model?, Model?, Model?) {
      func model(_ path: String) throws -> Model { try Model(env, path, sessionOptions) }
      if isSegmented {
        let segments = try Segments(
          env, sessionOptions, package, training: trainModelPath, evaluation: evalModelPath)
        return (segments, nil, nil, try optimizerModelPath.map(model))
      }
      return (
        nil, try model(stepModelPath ?? trainModelPath), try evalModelPath.map(model),
        try optimizerModelPath.map(model)
      )
    }
    let (segments, firstModel, evalModel, optimizerModel) =
      try package.sharedArena().map { try env.sharingArena(of: $0, open) } ?? open()
    let layout = try package.manifest["layout"]
    try place(
      ElementType(name: layout["dtype"].text("float32")), elements: layout["elements"].whole())
    bound["lazy_reset_grad"] = reset
    try lazyResetGrad()
    evaluation = try evalModel.map {
      try Graph($0, package.inputs, package.evaluationOutputs, bound)
    }
    optimizer = try optimizerModel.map { try Optimizer($0, package.manifest, state, trainable) }
    if let segments {
      training = try SegmentedGraph(segments, package, bound, training: true)
      if evalModelPath != nil {
        evaluation = try SegmentedGraph(segments, package, bound, training: false)
      }
      bound = [:]
    } else if stepModelPath == nil {
      training = try Graph(firstModel!, package.inputs, package.outputs, bound)
      bound = [:]
    } else {
      let trained = trainable.map { ($0.name, state.parameters[$0.name]!.value) }
      step = try makeStepGraph(
        firstModel!, package, Dictionary(uniqueKeysWithValues: trained), requireOptimizer(), bound)
    }
    giveBackFreed()  // what sessions needed to load, and what was moved
  }

  /// Whether stepOn and trainBatch make steps in the package's step model.
  public var hasStepModel: Bool { step != nil }

  /// Make an optimizer step on one batch: what trainStep, optimizerStep and lazyResetGrad do, and
  /// with less memory where the session has a step model. Returns the user's outputs, the loss
  /// before the step first.
  public func stepOn(_ inputs: [ORTValue]) throws -> [ORTValue] {
    try state.requireValues()
    if let step { return try requireOptimizer().makeStep(step, inputs) }
    let results = try trainStep(withInputValues: inputs)
    try optimizerStep()
    try lazyResetGrad()
    return results
  }

  /// Compute loss and gradients of a batch, which are added to those that are accumulated.
  /// Returns the user's outputs, the loss first. The first call closes the step model, if there is
  /// one, and opens the training model: from then on all steps are made with that.
  public func trainStep(withInputValues inputs: [ORTValue]) throws -> [ORTValue] {
    try state.requireValues()
    if training == nil {
      step = nil
      training = try Graph(
        Model(env, trainModelPath, options), package.inputs, package.outputs, bound)
      bound = [:]
    }
    let results = try training!.run(inputs)
    reset.elements(UInt8.self)[0] = 0
    return results
  }
  /// Compute the loss of a batch with the evaluation model.
  public func evalStep(withInputValues inputs: [ORTValue]) throws -> [ORTValue] {
    try state.requireValues()
    if let evaluation { return try evaluation.run(inputs) }
    throw OdtpackError("no-eval-model", "Evaluation needs an evaluation model; none was given.")
  }
  /// Let the next training step replace the gradients, not add to them.
  public func lazyResetGrad() throws { reset.elements(UInt8.self)[0] = 1 }
  /// Change the parameters by the accumulated gradients, which remain as they are.
  public func optimizerStep() throws {
    try state.requireValues()
    try requireOptimizer().makeStep()
  }

  /// A training step and, where they are due, the optimizer's step, the schedule's and the reset.
  /// Returns the loss of the batch.
  @discardableResult
  public func trainBatch(_ inputs: [ORTValue]) throws -> Double {
    let isWhole = accumulationSteps == 1
    let loss = try (isWhole ? stepOn(inputs) : trainStep(withInputValues: inputs))[0].scalar
    batches += 1
    if batches % accumulationSteps != 0 { return loss }
    if !isWhole { try optimizerStep() }
    if schedule != nil { try schedulerStep() }
    if !isWhole { try lazyResetGrad() }
    return loss
  }
  /// The mean loss over batches, where each sample counts alike, and the share of labels whose
  /// score is the highest; that is nil where the model has no labels or no scores for them.
  public func evaluate<Batches: Sequence<[ORTValue]>>(
    _ batches: Batches
  ) throws -> (loss: Double, accuracy: Double?) {
    var loss = 0.0, samples = 0, right = 0, labels = 0
    let place = package.inputs.firstIndex { $0.name == "labels" && $0.classCount > 0 }
    for batch in batches {
      let results = try evalStep(withInputValues: batch)
      let size = batch.first?.shape.first ?? 1
      (loss, samples) = (loss + results[0].scalar * Double(size), samples + size)
      guard let place, batch[place].elementType == .int64 else { continue }
      let spec = package.inputs[place], shape = batch[place].shape + [spec.classCount]
      guard let scores = results.dropFirst().first(where: { $0.shape == shape }),
        scores.elementType.isFloating
      else { continue }
      for (i, label) in batch[place].array(of: Int64.self).enumerated()
      where spec.ignored.map(Int64.init) != label {
        let own = (0..<spec.classCount).map { scores.real(i * spec.classCount + $0) }
        right += own[Int(label)] == own.max() ? 1 : 0
        labels += 1
      }
    }
    return (loss / Double(samples), labels == 0 ? nil : Double(right) / Double(labels))
  }

  public func setLearningRate(_ rate: Float) throws { try requireOptimizer().setRate(rate) }
  public func getLearningRate() throws -> Float {
    _ = try requireOptimizer()
    return state.optimizer!.rate
  }
  /// Number of optimizer steps made, those before a resumed checkpoint included.
  public var stepCount: Int { state.optimizer?.step ?? 0 }

  /// Let the rate follow a schedule, which is saved with the checkpoint.
  public func setSchedule(_ schedule: Schedule, initialRate: Double) throws {
    self.schedule = (schedule, initialRate)
    try schedulerStep()
    state.properties[Self.scheduleProperty] = .string(schedule.json(initialRate: initialRate))
  }
  /// Go on with the schedule that the checkpoint was saved with; false if there is none.
  public func restoreSchedule() throws -> Bool {
    guard let property = state.properties[Self.scheduleProperty] else { return false }
    guard case .string(let text) = property, let json = try? Json(data: Data(text.utf8)),
      let kind = try? json["kind"].text(), let schedule = try? Schedule(kind, json, total: 0),
      let rate = try? json["initial_lr"].real()
    else {
      throw OdtpackError(
        "bad-schedule", "The checkpoint's property \(Self.scheduleProperty) is no schedule.",
        hint: "call setSchedule, which replaces it")
    }
    try setSchedule(schedule, initialRate: rate)
    return true
  }
  /// The schedule that the package proposes, over so many steps if it does not say; with its rate.
  public func proposedSchedule(totalSteps: Int) throws -> (schedule: Schedule, rate: Double)? {
    let json = try package.manifest["schedule"]
    if !json.isPresent { return nil }
    let settings = try json["settings"]
    let schedule = try Schedule(
      json["kind"].text(), settings.isPresent ? settings : Json([String: Any](), name: "settings"),
      total: totalSteps)
    return (schedule, try json["learning_rate"].real(0.001))
  }
  /// Linear warm-up from 0 to the rate, then linear decay to 0.
  public func registerLinearLRScheduler(
    withWarmupStepCount warmup: Int64, totalStepCount total: Int64, initialLr rate: Float
  ) throws {
    let schedule = try Schedule(kind: "linear", warmupSteps: Int(warmup), totalSteps: Int(total))
    try setSchedule(schedule, initialRate: Double(rate))
  }
  /// Set the rate of the next optimizer step.
  public func schedulerStep() throws {
    guard let schedule else {
      throw OdtpackError("bad-schedule", "No schedule was set.", hint: "call setSchedule")
    }
    try setLearningRate(Float(schedule.rate * schedule.schedule.factor(stepCount)))
  }

  public func inputNames(withTraining: Bool) -> [String] { package.inputs.map(\.name) }
  public func outputNames(withTraining isTraining: Bool) -> [String] {
    (isTraining ? package.outputs : package.evaluationOutputs).map(\.name)
  }

  /// All parameters, or the trainable ones, one after the other in the order of the manifest.
  public func toBuffer(withTrainable onlyTrainable: Bool) throws -> ORTValue {
    try state.requireValues()
    let buffer = try ORTValue(state.flat!.elementType, [bufferSize(onlyTrainable)])
    var at = 0
    for spec in package.parameters where !onlyTrainable || spec.role == "trainable" {
      let own = try state.parameters[spec.name]!.value.converted(to: buffer.elementType)
      try buffer.part(at, own.shape).copy(from: own)
      at += own.count
    }
    return buffer
  }
  /// Set the parameters from such a vector.
  public func fromBuffer(withValue buffer: ORTValue, onlyTrainable: Bool = true) throws {
    if onlyTrainable { try state.requireValues() }
    if buffer.elementType != state.flat!.elementType {
      throw OdtpackError("buffer-type", "The buffer is \(buffer.description).")
    }
    let size = try bufferSize(onlyTrainable)
    if buffer.count != size {
      throw OdtpackError(
        "buffer-size", "The buffer holds \(buffer.count) elements, and the parameters \(size).")
    }
    let flat = try buffer.part(0, [size])
    var at = 0
    for spec in package.parameters where !onlyTrainable || spec.role == "trainable" {
      let given = try flat.part(at, spec.shape!)
      at += given.count
      state.parameters[spec.name]!.value.copy(from: try given.converted(to: spec.type))
    }
    state.isNominal = false
  }

  /// Write an inference model with the current parameters inside, whole or not at all.
  public func exportModelForInference(
    withOutputPath path: String, graphOutputNames names: [String]
  ) throws {
    try writeAtomically(path) { file in
      try writeInference(package, state, names) { try file.write($0, $1) }
    }
  }
  /// Predicts with a copy of the current parameters.
  public func predictor(outputNames: [String]) throws -> Predictor {
    try Predictor(env, package, state, outputNames)
  }

  private static let scheduleProperty = "odtpack.schedule"

  private func requireOptimizer() throws -> Optimizer {
    if let optimizer { return optimizer }
    throw OdtpackError(
      "model-not-found", "No optimizer model was given.", hint: "pass optimizer_model.onnx")
  }

  /// Move the trainable parameters into one flat vector, at the manifest's offsets.
  private func place(_ type: ElementType, elements: Int) throws {
    let specs = package.parameters, isFresh = state.flat == nil
    if type != .float32 && type != .float64 { throw invalid("the dtype of 'layout'") }
    for spec in specs {
      let isTrainable = spec.role == "trainable"
      guard let own = state.parameters[spec.name], own.trainable == isTrainable,
        own.value.elementType == spec.type, !isTrainable || spec.type == type,
        let shape = spec.shape, own.value.shape == shape || state.isNominal && isFresh
      else { throw mismatch("the package has '\(spec.name)' as \(spec.description)") }
      if isTrainable { trainable.append(spec) }
    }
    guard state.parameters.count == specs.count, Set(specs.map(\.name)).count == specs.count else {
      throw mismatch("one has parameters that the other does not know")
    }
    trainable.sort { $0.offset < $1.offset }
    let line = 64 / type.size
    var end = 0
    for spec in trainable {
      if spec.offset != end { throw invalid("the offset of '\(spec.name)'") }
      end += (spec.shape!.reduce(1, *) + line - 1) / line * line
      if end > 1 << 48 { throw invalid("the size of '\(spec.name)'") }
    }
    if elements != end { throw invalid("the elements of 'layout'") }
    if isFresh {
      state.flat = try ORTValue(type, [elements])
      state.gradients = try ORTValue(type, [elements])
    }
    let flat = state.flat!, gradients = state.gradients!
    if !isFresh { memset(gradients.bytes, 0, gradients.byteCount) }
    for spec in specs {
      var value = state.parameters[spec.name]!.value
      if spec.role == "trainable" {
        let placed = try flat.part(spec.offset, spec.shape!)
        if !isFresh && placed.bytes != value.bytes { throw mismatch("the order in memory") }
        if isFresh && !state.isNominal { placed.copy(from: value) }
        value = placed  // what was moved is freed
        let gradient = try gradients.part(spec.offset, spec.shape!)
        bound[spec.name + "_grad.accumulation.buffer"] = gradient
        bound[spec.name + "_grad.accumulation.out"] = gradient
      } else if state.isNominal && isFresh {
        value = try ORTValue(spec.type, spec.shape!)
      }
      state.parameters[spec.name]!.value = value
      bound[spec.name] = value
      if spec.role == "state" { bound[spec.name + ".update.out"] = value }
    }
  }

  private func bufferSize(_ onlyTrainable: Bool) throws -> Int {
    let type = state.flat!.elementType
    let chosen = package.parameters.filter { !onlyTrainable || $0.role == "trainable" }
    for spec in chosen where !spec.type.isFloating || spec.type.size > type.size {
      throw OdtpackError(
        "parameter-type", "'\(spec.name)' is \(spec.description), which no \(type) holds.",
        hint: "pass onlyTrainable: true")
    }
    return chosen.reduce(0) { $0 + $1.shape!.reduce(1, *) }
  }
}
