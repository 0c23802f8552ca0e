// Training on stock ONNX Runtime, under the names of its former training API.
import COdtpack
import Foundation

/// What a session does after a step whose loss or gradient is not finite.
public enum OnNotFinite {
  case skip  // it counts the step and goes on
  case stop  // it throws `loss-not-finite` or `gradient-not-finite`
}

/// A step whose loss or gradient was not finite.
public struct NotFinite: Equatable {
  /// "loss-not-finite" or "gradient-not-finite".
  public let code: String
  /// The optimizer step that it would have been a part of, from 1 on.
  public let step: Int
  /// The first ten whose gradients are not finite.
  public let parameters: [String]
}

/// Trains a package: `ORTTrainingSession` of ONNX Runtime 1.19 on a stock library. Parameters live
/// in the checkpoint, as flat vectors on which all models work in place. One session takes one call at
/// a time: a second one, from any thread, throws `busy`.
public final class ORTTrainingSession {
  public let checkpoint: ORTCheckpoint
  public let package: TrainingPackage
  private let env: ORTEnv, handle: OpaquePointer
  /// Batches per optimizer step: the gradient of each is divided by this number.
  public let accumulationSteps: Int

  /// Train a package with its models and session options; with its step model, where it has one.
  public convenience init(
    env: ORTEnv, package: TrainingPackage, checkpoint: ORTCheckpoint, threads: Int = 0
  ) throws {
    try self.init(env, package, checkpoint, nil, threads: threads, nil)
  }
  /// The same with options of the caller's choice, such as those of a device.
  public convenience init(
    env: ORTEnv, sessionOptions: ORTSessionOptions, package: TrainingPackage,
    checkpoint: ORTCheckpoint
  ) throws {
    try self.init(env, package, checkpoint, sessionOptions, threads: 0, nil)
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
  public convenience init(
    env: ORTEnv, sessionOptions: ORTSessionOptions, package: TrainingPackage,
    checkpoint: ORTCheckpoint, trainModelPath: String, evalModelPath: String?,
    optimizerModelPath: String?, stepModelPath: String? = nil
  ) throws {
    let paths = try [trainModelPath, evalModelPath, optimizerModelPath, stepModelPath]
      .map { try $0.map(plain) }.map { $0.map { UnsafePointer(strdup($0)) } ?? nil }
    defer { paths.forEach { free(UnsafeMutablePointer(mutating: $0)) } }
    var models = odtpack_models(
      training: paths[0], evaluation: paths[1], optimizer: paths[2], step: paths[3])
    try self.init(env, package, checkpoint, sessionOptions, threads: 0, &models)
  }
  private init(
    _ env: ORTEnv, _ package: TrainingPackage, _ checkpoint: ORTCheckpoint,
    _ options: ORTSessionOptions?, threads: Int, _ models: UnsafePointer<odtpack_models>?
  ) throws {
    (self.env, self.package, self.checkpoint) = (env, package, checkpoint)
    handle = try made {
      odtpack_session_create(
        env.handle, options?.handle, Int32(clamping: threads), package.handle, checkpoint.handle,
        models, $0)
    }
    accumulationSteps = Int(odtpack_session_accumulation_steps(handle))
  }
  deinit { odtpack_session_release(handle) }

  /// Free the models; closing twice is allowed. An evaluation or a training step that runs is ended,
  /// and throws `closed`: the checkpoint is as before it. For other calls this waits, an optimizer
  /// step and one in the step model among them, which write over what they read. The checkpoint
  /// remains, and may be saved. Every later call but those that read a number or names throws
  /// `closed`.
  public func close() throws { try call(odtpack_session_close(handle)) }

  /// What follows a step whose loss or gradient is not finite: it changed nothing.
  public func setOnNotFinite(_ policy: OnNotFinite) throws {
    try call(odtpack_session_set_stops_on_not_finite(handle, policy == .stop))
  }
  /// Steps that changed nothing, as their loss or a gradient was not finite; in the step model the
  /// other parameters of a step whose loss is finite were updated.
  public var skippedSteps: Int { Int(odtpack_session_skipped_steps(handle)) }
  /// The last step whose loss or gradient was not finite. Ask between calls.
  public var lastNotFinite: NotFinite? {
    var isFound = false, step: Int64 = 0, names = odtpack_text()
    let code = try? text {
      odtpack_session_last_not_finite(handle, &isFound, $0, &step, &names)
    }
    guard isFound, let code else { return nil }
    let parameters = names.take()!.split(separator: "\0").map(String.init)
    return NotFinite(code: code, step: Int(step), parameters: parameters)
  }

  /// Whether stepOn and trainBatch make steps in the package's step model.
  public var hasStepModel: Bool { odtpack_session_has_step_model(handle) }

  /// Whether native kernels compute nodes of the session's models (docs/native.md).
  public var hasKernels: Bool { odtpack_session_has_kernels(handle) }

  /// Make an optimizer step on one batch: what trainStep, optimizerStep and lazyResetGrad do, and
  /// with less memory where the session has a step model. Returns the user's outputs, the loss
  /// before the step first. The error `step-of-several` if the package accumulates batches.
  public func stepOn(_ inputs: [ORTValue]) throws -> [ORTValue] {
    try run(ODTPACK_STEP_ON, inputs)
  }
  /// Compute loss and gradients of a batch, which are added to those that are accumulated.
  /// Returns the user's outputs, the loss first. The first call closes the step model, if there is
  /// one, and opens the training model: from then on all steps are made with that.
  public func trainStep(withInputValues inputs: [ORTValue]) throws -> [ORTValue] {
    try run(ODTPACK_TRAIN_STEP, inputs)
  }
  /// Compute the loss of a batch with the evaluation model.
  public func evalStep(withInputValues inputs: [ORTValue]) throws -> [ORTValue] {
    try run(ODTPACK_EVAL_STEP, inputs)
  }
  /// Let the next training step replace the gradients, not add to them.
  public func lazyResetGrad() throws { try call(odtpack_session_lazy_reset_grad(handle)) }
  /// Change the parameters by the accumulated gradients, which remain as they are.
  public func optimizerStep() throws { try call(odtpack_session_optimizer_step(handle)) }

  /// A training step and, where they are due, the optimizer's step, the schedule's and the reset.
  /// Returns the loss of the batch.
  @discardableResult
  public func trainBatch(_ inputs: [ORTValue]) throws -> Double {
    var loss = 0.0
    try withExtendedLifetime(inputs) {
      try call(
        odtpack_session_train_batch(handle, inputs.map { $0.handle }, inputs.count, &loss))
    }
    return loss
  }
  /// Train on batches as long as `isActive` says so, which is asked before each. Returns the number
  /// of batches; the session is as after the last one.
  @discardableResult
  public func fit<Batches: Sequence<[ORTValue]>>(
    _ batches: Batches, while isActive: () -> Bool = { true }
  ) throws -> Int {
    var count = 0
    for batch in batches {
      if !isActive() { break }
      try trainBatch(batch)
      count += 1
    }
    return count
  }
  /// The mean loss over batches, where each sample counts alike, and the share of labels whose
  /// score is the highest; that is nil where the model has no labels or no scores for them.
  public func evaluate<Batches: Sequence<[ORTValue]>>(
    _ batches: Batches
  ) throws -> (loss: Double, accuracy: Double?) {
    var sum = odtpack_evaluation()
    for batch in batches {
      try withExtendedLifetime(batch) {
        try call(odtpack_session_eval_batch(handle, batch.map { $0.handle }, batch.count, &sum))
      }
    }
    if sum.samples == 0 { throw OdtpackError("empty-batch", "There is no batch to evaluate.") }
    let accuracy = sum.labels == 0 ? nil : Double(sum.right) / Double(sum.labels)
    return (sum.loss_sum / Double(sum.samples), accuracy)
  }

  public func setLearningRate(_ rate: Float) throws {
    try call(odtpack_session_set_learning_rate(handle, rate))
  }
  public func getLearningRate() throws -> Float {
    var rate: Float = 0
    try call(odtpack_session_get_learning_rate(handle, &rate))
    return rate
  }
  /// Number of optimizer steps made, those before a resumed checkpoint included.
  public var stepCount: Int {
    get throws {
      var count: Int64 = 0
      try call(odtpack_session_step_count(handle, &count))
      return Int(count)
    }
  }

  /// Let the rate follow a schedule, which is saved with the checkpoint.
  public func setSchedule(_ schedule: Schedule, initialRate: Double) throws {
    try schedule.withC { try call(odtpack_session_set_schedule(handle, $0, initialRate)) }
  }
  /// Go on with the schedule that the checkpoint was saved with; false if there is none.
  public func restoreSchedule() throws -> Bool {
    var isFound = false
    try call(odtpack_session_restore_schedule(handle, &isFound))
    return isFound
  }
  /// The schedule that the package proposes, over so many steps if it does not say; with its rate.
  public func proposedSchedule(totalSteps: Int) throws -> (schedule: Schedule, rate: Double)? {
    var isFound = false, found = odtpack_schedule(), rate = 0.0
    try call(
      odtpack_session_proposed_schedule(handle, Int64(totalSteps), &isFound, &found, &rate))
    defer { odtpack_free(UnsafeMutablePointer(mutating: found.milestones)) }
    return isFound ? (Schedule(found), rate) : nil
  }
  /// Linear warm-up from 0 to the rate, then linear decay to 0.
  public func registerLinearLRScheduler(
    withWarmupStepCount warmup: Int64, totalStepCount total: Int64, initialLr rate: Float
  ) throws {
    let schedule = try Schedule(kind: "linear", warmupSteps: Int(warmup), totalSteps: Int(total))
    try setSchedule(schedule, initialRate: Double("\(rate)") ?? Double(rate))  // 0.001, as written
  }
  /// Set the rate of the next optimizer step.
  public func schedulerStep() throws { try call(odtpack_session_scheduler_step(handle)) }

  public func inputNames(withTraining: Bool) -> [String] { package.inputs.map(\.name) }
  public func outputNames(withTraining isTraining: Bool) -> [String] {
    (isTraining ? package.outputs : package.evaluationOutputs).map(\.name)
  }

  /// All parameters, or the trainable ones, one after the other in the order of the manifest.
  public func toBuffer(withTrainable onlyTrainable: Bool) throws -> ORTValue {
    try ORTValue(owning: made { odtpack_session_to_buffer(handle, onlyTrainable, $0) })
  }
  /// Set the parameters from such a vector.
  public func fromBuffer(withValue buffer: ORTValue, onlyTrainable: Bool = true) throws {
    try withExtendedLifetime(buffer) {
      try call(odtpack_session_from_buffer(handle, buffer.handle, onlyTrainable))
    }
  }

  /// Write an inference model with the current parameters inside, whole or not at all.
  public func exportModelForInference(
    withOutputPath path: String, graphOutputNames names: [String]
  ) throws {
    try withNames(names) { try call(odtpack_session_export(handle, plain(path), $0, names.count)) }
  }
  /// Predicts with a copy of the current parameters.
  public func predictor(outputNames names: [String]) throws -> Predictor {
    let model = try withNames(names) { list in
      try made { odtpack_session_predictor(handle, list, names.count, $0) }
    }
    return try Predictor(env, owning: model, names)
  }

  private func run(_ kind: odtpack_run, _ inputs: [ORTValue]) throws -> [ORTValue] {
    var count = package.evaluationOutputs.count
    var outputs = [OpaquePointer?](repeating: nil, count: count)
    try withExtendedLifetime(inputs) {
      try call(
        odtpack_session_run(
          handle, kind, inputs.map { $0.handle }, inputs.count, &outputs, &count))
    }
    return try outputs.prefix(count).map { try ORTValue(owning: $0!) }
  }
}
