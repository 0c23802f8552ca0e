// Trains the package on the samples in data/. An app passes its own samples instead.
import Foundation
import Odtpack

/// An input, the shape of one of its samples, and all samples.
struct Input {
  let shape: [Int], size: Int, samples: Int, values: ORTValue

  init(_ name: String, _ type: ElementType, _ shape: [Int]) throws {
    let data = try NSMutableData(contentsOfFile: "data/\(name).bin", options: [])
    (self.shape, size) = (shape, shape.reduce(1, *))
    samples = data.length / (size * (type == .float32 ? 4 : 8))
    values = try ORTValue(
      tensorData: data, elementType: type, shape: [samples, size] as [NSNumber])
  }

  /// A view of some samples: nothing is copied.
  func part(_ first: Int, _ count: Int) throws -> ORTValue {
    try values.part(first * size, [count] + shape)
  }
}

let batchSize = @BATCH@, saved = "trained.ckpt"
let steps = CommandLine.arguments.count > 1 ? Int(CommandLine.arguments[1])! : 100
let inputs = [
@INPUTS@
]
let env = try ORTEnv()
let package = try TrainingPackage(path: "package")
let isResumed = FileManager.default.fileExists(atPath: saved)
let checkpoint = try ORTCheckpoint(path: isResumed ? saved : package.path("checkpoint"))
let session = try ORTTrainingSession(env: env, package: package, checkpoint: checkpoint)
if !isResumed {
  try checkpoint.addIntProperty(withName: "app.batches", value: 0)
  try session.registerLinearLRScheduler(
    withWarmupStepCount: 10, totalStepCount: Int64(steps), initialLr: @RATE@)
} else {
  _ = try session.restoreSchedule()
}
let begun = Int(try checkpoint.getIntProperty(withName: "app.batches"))
for number in begun..<max(begun, steps * session.accumulationSteps) {
  let first = number * batchSize % (inputs[0].samples - batchSize + 1)
  let loss = try session.trainBatch(inputs.map { try $0.part(first, batchSize) })
  try checkpoint.addIntProperty(withName: "app.batches", value: Int64(number + 1))
  if (number + 1) % (20 * session.accumulationSteps) == 0 {
    try print("\(session.stepCount): \(loss)")
    try checkpoint.saveCheckpoint(toPath: saved, withOptimizerState: true)
  }
}
try checkpoint.saveCheckpoint(toPath: saved, withOptimizerState: true)
try session.exportModelForInference(withOutputPath: "personal.onnx", graphOutputNames: ["output"])
