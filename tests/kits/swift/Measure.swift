// Trains as a job says, and prints one line of JSON: the losses, the loss of the evaluation, the
// processor time of the steps, the anonymous memory after every tenth of them, and whether the step
// model is open at the end. A job is that of a training (see Job.swift) and
//     "steps": [{"inputs": [tensors]}, ...]   batches, taken in turn
//     "count": 100                            training steps, of which
//     "whole_steps": 3                        the first are made with trainBatch, all by default;
//                                             the others as in an app that looks at gradients
//     "threads": 1, "evaluation": {"inputs": [tensors]}, "save": "trained.ckpt"
import Foundation

/// Anonymous memory of this process in bytes.
private func anonymousBytes() throws -> Int {
  let text = try String(contentsOfFile: "/proc/self/smaps_rollup", encoding: .utf8)
  let line = text.split(separator: "\n").first { $0.hasPrefix("Anonymous:") }!
  return Int(line.split(separator: " ")[1])! * 1024
}

func measure(_ path: String) throws {
  let json = try readJson(path), folder = (path as NSString).deletingLastPathComponent
  let training = try Training(ORTEnv(), json, folder, threads: json["threads"].whole(0))
  let batches = try json["steps"].list().map { try readBatch($0["inputs"], folder) }
  let count = try json["count"].whole(), whole = try json["whole_steps"].whole(count)
  var losses = [Double](repeating: 0, count: count), memory: [Int] = []
  let start = clock()
  for step in 0..<count {
    let batch = batches[step % batches.count]
    if step < whole {
      losses[step] = try training.session.trainBatch(batch)
    } else {
      losses[step] = try training.session.trainStep(withInputValues: batch)[0].scalar
      try training.session.optimizerStep()
      if training.isScheduled { try training.session.schedulerStep() }
      try training.session.lazyResetGrad()
    }
    if (step + 1) % max(count / 10, 1) == 0 { memory.append(try anonymousBytes()) }
  }
  let processor = Double(clock() - start) / Double(CLOCKS_PER_SEC)
  let evaluation = try training.session.evalStep(
    withInputValues: readBatch(json["evaluation"]["inputs"], folder))
  let save = try json["save"]
  if save.isPresent {
    try training.checkpoint.saveCheckpoint(
      toPath: "\(folder)/\(save.text())", withOptimizerState: true)
  }
  print(
    "{\"losses\": \(losses), \"evaluation\": \(evaluation[0].scalar), "
      + "\"processor_seconds\": \(processor), \"anonymous_bytes_by_tenth\": \(memory), "
      + "\"step_model\": \(training.session.hasStepModel)}")
}
