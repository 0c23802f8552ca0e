import Foundation
import Odtpack

/// One stretch of a training: from the last checkpoint on, until it is done or stopped. It needs
/// nothing of iOS.
final class Trainer: @unchecked Sendable {
  private static let steps = 2000, batchSize = 32, saveEvery = 50

  private let package: URL, files: URL
  private let lock = NSLock()
  private var reason: String?

  /// `package` is the folder in the bundle; `files` holds the samples, images.bin (float32) and
  /// labels.bin (int64), and what the training makes: trained.ckpt and personal.onnx.
  init(package: URL, files: URL) { (self.package, self.files) = (package, files) }

  /// Let the step that is under way end, and save. May be called on any thread.
  func stop(_ why: String) {
    lock.lock()
    defer { lock.unlock() }
    reason = reason ?? why
  }
  private var isStopped: Bool {
    lock.lock()
    defer { lock.unlock() }
    return reason != nil
  }

  /// Returns whether all steps are made.
  func run(mayGoOn: () -> Bool) throws -> Bool {
    let env = try ORTEnv()
    let package = try TrainingPackage(path: package.path)
    let saved = files.appendingPathComponent("trained.ckpt").path
    let isResumed = FileManager.default.fileExists(atPath: saved)
    if !isResumed { try package.selfCheck(env) }
    let checkpoint = try ORTCheckpoint(path: isResumed ? saved : package.path("checkpoint"))
    let session = try ORTTrainingSession(env: env, package: package, checkpoint: checkpoint)
    if !isResumed {
      try checkpoint.addIntProperty(withName: "app.batches", value: 0)
      try session.registerLinearLRScheduler(
        withWarmupStepCount: 10, totalStepCount: Int64(Self.steps), initialLr: 0.001)
    } else {
      _ = try session.restoreSchedule()
    }
    let labels = try load("labels.bin", .int64), images = try load("images.bin", .float32)
    let pixels = images.count / labels.count
    let side = Int(Double(pixels).squareRoot()), batches = labels.count / Self.batchSize
    let each = session.accumulationSteps
    var done = Int(try checkpoint.getIntProperty(withName: "app.batches"))
    var goesOn = !isStopped && mayGoOn()
    while goesOn && done < Self.steps * each {
      let first = done % batches * Self.batchSize
      try session.trainBatch([
        images.part(first * pixels, [Self.batchSize, 1, side, side]),
        labels.part(first, [Self.batchSize]),
      ])
      done += 1
      // Gradients that wait for their step are not saved: their batches are trained on again.
      try checkpoint.addIntProperty(withName: "app.batches", value: Int64(done - done % each))
      goesOn = !isStopped && mayGoOn()
      if !goesOn || done % (Self.saveEvery * each) == 0 || done == Self.steps * each {
        try checkpoint.saveCheckpoint(toPath: saved, withOptimizerState: true)
      }
    }
    if done < Self.steps * each { return false }
    try session.exportModelForInference(
      withOutputPath: files.appendingPathComponent("personal.onnx").path,
      graphOutputNames: ["output"])
    return true
  }

  private func load(_ name: String, _ type: ElementType) throws -> ORTValue {
    let path = files.appendingPathComponent(name).path
    let data = try NSMutableData(contentsOfFile: path, options: [])
    return try ORTValue(
      tensorData: data, elementType: type, shape: [NSNumber(value: data.length / type.size)])
  }
}
