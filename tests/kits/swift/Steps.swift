// Trains a job (see Job.swift) on its first batch, first with stepOn and then as an app that looks
// at gradients does, in turn, and prints the losses and whether the step model is open after each.
// Then it saves, and exports if the job says where to.
import Foundation
@testable import Odtpack

func makeSteps(_ path: String) throws {
  let json = try readJson(path), folder = (path as NSString).deletingLastPathComponent
  let training = try Training(ORTEnv(), json, folder, threads: 1), session = training.session
  let batch = try readBatch(json["steps"].list()[0]["inputs"], folder)
  for step in 0..<8 {
    let isApart = step / 2 % 2 == 1
    let results = try isApart ? session.trainStep(withInputValues: batch) : session.stepOn(batch)
    if isApart {
      try session.optimizerStep()
      try session.lazyResetGrad()
    }
    try print(results[0].scalar, session.hasStepModel ? 1 : 0)
  }
  try training.checkpoint.saveCheckpoint(
    toPath: "\(folder)/\(json["save"].text())", withOptimizerState: true)
  let export = try json["export"]
  if export.isPresent {
    try session.exportModelForInference(
      withOutputPath: export.text(), graphOutputNames: ["logits"])
  }
}
