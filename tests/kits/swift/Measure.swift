// Lives the life of an app that trains: evaluates, trains, evaluates, saves, is closed and resumes;
// prints one line of JSON with the losses, those of the evaluations, the time of every step, the
// processor time of those before the save, the anonymous memory after every tenth of them, its peak
// in each phase, and whether the step model is open after them. A job is that of a training (see
// Job.swift) and
//     "steps": [{"inputs": [tensors]}, ...]   batches, taken in turn
//     "count": 100                            training steps, by default one for each batch, of
//     "whole_steps": 3                        which the first are made with trainBatch, or all;
//                                             the others as in an app that looks at gradients
//     "threads": 1
//     "evaluate_first": true                  evaluate the first batch before the training
//     "evaluation": {"inputs": [tensors]}     evaluated after the training, if given; or true for
//                                             the first batch
//     "save": "trained.ckpt"                  saved with the optimizer's state, if given
//     "resume": 10                            steps to make from the saved file, in a new session
//     "wait": "done"                          a file to make at last; then wait for the end, with
//                                             everything still open
import Foundation
@testable import Odtpack

/// Anonymous memory of this process in bytes: the kernel counts pages, which takes its time.
private func anonymousBytes() throws -> Int {
  let text = try String(contentsOfFile: "/proc/self/smaps_rollup", encoding: .utf8)
  let line = text.split(separator: "\n").first { $0.hasPrefix("Anonymous:") }!
  return Int(line.split(separator: " ")[1])! * 1024
}

private func seconds(_ clock: clockid_t) -> Double {
  var time = timespec()
  clock_gettime(clock, &time)
  return Double(time.tv_sec) + Double(time.tv_nsec) * 1e-9
}

/// Looks at the memory every 200 microseconds and keeps the highest figure of a phase.
private final class Phases {
  private let lock = NSLock()
  private var peak = 0, own = 0.0, isDone = false
  private(set) var json: [String] = []

  init() { Thread.detachNewThread { [self] in watch() } }
  func end() { lock.withLock { isDone = true } }
  /// Processor time that the watching itself has taken.
  var ownSeconds: Double { lock.withLock { own } }

  func run<Result>(_ name: String, _ body: () throws -> Result) throws -> Result {
    lock.withLock { peak = 0 }
    let result = try body()
    let end = try anonymousBytes()
    json.append("\"\(name)\": {\"peak_anonymous_bytes\": \(lock.withLock { max(peak, end) })}")
    return result
  }
  private func watch() {
    let statm = open("/proc/self/statm", O_RDONLY), page = Int(getpagesize())
    var text = [CChar](repeating: 0, count: 128)
    while lock.withLock({ !isDone }) {
      text[max(pread(statm, &text, text.count - 1, 0), 0)] = 0
      let now = text.withUnsafeBufferPointer { text in
        var rest: UnsafeMutablePointer<CChar>?
        strtol(text.baseAddress!, &rest, 10)  // its whole size
        let resident = strtol(rest!, &rest, 10)
        return (resident - strtol(rest!, &rest, 10)) * page  // less what is of files
      }
      lock.withLock { (peak, own) = (max(peak, now), seconds(CLOCK_THREAD_CPUTIME_ID)) }
      usleep(200)
    }
    close(statm)
  }
}

func measure(_ path: String) throws {
  let json = try readJson(path), folder = (path as NSString).deletingLastPathComponent
  let env = try ORTEnv(), phases = Phases(), before = try anonymousBytes()
  defer { phases.end() }
  let batches = try json["steps"].list().map { try readBatch($0["inputs"], folder) }
  let count = try json["count"].whole(batches.count), whole = try json["whole_steps"].whole(count)
  func room() -> [Double] {  // its pages are touched before anything is measured
    var list = [Double](repeating: 0, count: 2 * count)
    list.removeAll(keepingCapacity: true)
    return list
  }
  var losses = room(), times = room()
  var evaluated: [Double] = [], memory: [Int] = []
  func open(_ checkpoint: String? = nil) throws -> Training {
    try Training(env, json, folder, threads: json["threads"].whole(0), checkpoint: checkpoint)
  }
  var training: Training! = try phases.run("load") { try open() }
  func train(_ steps: Int, whole: Int) throws {
    for step in 0..<steps {
      let batch = batches[step % batches.count], start = seconds(CLOCK_MONOTONIC)
      if step < whole {
        losses.append(try training.session.trainBatch(batch))
      } else {
        losses.append(try training.session.trainStep(withInputValues: batch)[0].scalar)
        try training.session.optimizerStep()
        if training.isScheduled { try training.session.schedulerStep() }
        try training.session.lazyResetGrad()
      }
      times.append(seconds(CLOCK_MONOTONIC) - start)
      if (step + 1) % max(steps / 10, 1) == 0 { memory.append(try anonymousBytes()) }
    }
  }
  func evaluate(_ name: String, _ batch: [ORTValue]) throws {
    evaluated.append(
      try phases.run(name) { try training.session.evalStep(withInputValues: batch)[0].scalar })
  }
  if try json["evaluate_first"].flag(false) { try evaluate("evaluate first", batches[0]) }
  let start = seconds(CLOCK_PROCESS_CPUTIME_ID) - phases.ownSeconds
  try phases.run("train") { try train(count, whole: whole) }
  let processor = seconds(CLOCK_PROCESS_CPUTIME_ID) - phases.ownSeconds - start
  let evaluation = try json["evaluation"]
  if evaluation.isPresent {
    let isFirst = (try? evaluation.flag(false)) == true
    try evaluate(
      "evaluate", isFirst ? batches[0] : readBatch(evaluation["inputs"], folder))
  }
  let save = try json["save"]
  let hasStepModel = training.session.hasStepModel, hasKernels = training.session.hasKernels
  if save.isPresent {
    let target = "\(folder)/\(try save.text())"
    try phases.run("save") {
      try training.checkpoint.saveCheckpoint(toPath: target, withOptimizerState: true)
    }
    let steps = try json["resume"].whole(0)
    if steps > 0 {
      training = nil
      try phases.run("resume") {
        training = try open(target)
        try train(steps, whole: steps)
      }
    }
  }
  print(
    "{\"before_anonymous_bytes\": \(before), \"phases\": {\(phases.json.joined(separator: ", "))}, "
      + "\"losses\": \(losses), \"evaluation\": \(evaluated), "
      + "\"step_seconds\": \(times), \"processor_seconds\": \(processor), "
      + "\"anonymous_bytes_by_tenth\": \(memory), \"step_model\": \(hasStepModel), "
      + "\"kernels\": \(hasKernels)}")
  let wait = try json["wait"]
  if wait.isPresent {
    let path = "\(folder)/\(try wait.text())"
    let isMade = FileManager.default.createFile(atPath: path, contents: nil)
    withExtendedLifetime(training) { while isMade { pause() } }
  }
}
