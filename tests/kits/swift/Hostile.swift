// Reads from standard input lines "checkpoint PATH" or "package PATH", tries what an app would do
// with that, and prints for each "accepted" or "refused CODE". Nothing else may happen.
import Foundation
@testable import Odtpack

func readHostile() throws {
  let env = try ORTEnv()
  while let line = readLine() {
    let parts = line.split(separator: " ", maxSplits: 1).map(String.init)
    do {
      if parts[0] == "checkpoint" {
        try ORTCheckpoint(path: parts[1])
          .saveCheckpoint(toPath: parts[1] + ".again", withOptimizerState: true)
      } else {
        try usePackage(env, parts[1])
      }
      print("accepted")
    } catch let error as OdtpackError {
      print("refused \(error.code)")
    }
  }
}

/// Open, load, and train a step on zeros, two samples wherever a size may vary.
private func usePackage(_ env: ORTEnv, _ path: String) throws {
  let package = try TrainingPackage(path: path)
  let checkpoint = try ORTCheckpoint(path: package.path("checkpoint"))
  let session = try ORTTrainingSession(
    env: env, package: package, checkpoint: checkpoint, threads: 1)
  let batch = try package.inputs.map { spec in
    let shape = spec.sizes.map { $0 ?? 2 }
    guard shape.reduce(1.0, { $0 * Double(max($1, 1)) }) <= 0x1p20 else {
      throw OdtpackError("input-shape", "too large for a test")
    }
    return try ORTValue(spec.type!, shape)
  }
  _ = try session.trainStep(withInputValues: batch)
  try session.optimizerStep()
  if let (schedule, rate) = try session.proposedSchedule(totalSteps: 10) {
    try session.setSchedule(schedule, initialRate: rate)
  }
  try session.fromBuffer(withValue: session.toBuffer(withTrainable: true))
  do { try package.selfCheck(env) } catch is OdtpackError {}
}
