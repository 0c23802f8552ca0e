// What an app may rely on in a session (docs/formats/kits.md), on a job of Job.swift; TIMES is how
// often it is tried.
//
//     kit calls close JOB.json TIMES      the session is closed while another thread trains
//     kit calls end JOB.json TIMES        a call that takes long is ended by close
//     kit calls threads JOB.json TIMES    two threads train at once
//     kit calls closed JOB.json TIMES     every call after close
//     kit calls nan JOB.json TIMES        a batch with a NaN among others
//     kit calls misuse JOB.json TIMES     what is refused changes nothing, and says what is wrong
//     kit calls gradient JOB.json TIMES   parameters with which a gradient overflows
import Foundation
@testable import Odtpack

private func code(_ body: () throws -> Void) -> String {
  do { try body() } catch let error as OdtpackError { return error.code } catch { return "\(error)" }
  return "ok"
}

private final class Calls {
  let env: ORTEnv, json: Json, folder: String, batch: [ORTValue]
  let times: Int
  var known: [Int: String] = [:]

  init(_ path: String, _ times: Int) throws {
    env = try ORTEnv()
    json = try readJson(path)
    folder = (path as NSString).deletingLastPathComponent
    batch = try readBatch(json["steps"].list()[0]["inputs"], folder)
    self.times = times
  }
  func start() throws -> ORTTrainingSession {
    try Training(env, json, folder, threads: 1).session
  }
  /// The digest after so many batches in one thread.
  func after(_ batches: Int) throws -> String {
    if let known = known[batches] { return known }
    let session = try start()
    for _ in 0..<batches { try session.trainBatch(batch) }
    known[batches] = try digest(session.checkpoint)
    return known[batches]!
  }
  /// The batch with another first number.
  func bad(_ value: Float) throws -> [ORTValue] {
    let batch = try readBatch(json["steps"].list()[0]["inputs"], folder)
    batch.first { $0.elementType == .float32 }!.elements(Float.self)[0] = value
    return batch
  }

  func close() throws {
    var most = 0
    for round in 0..<times {
      let session = try start(), ended = DispatchSemaphore(value: 0)
      let made = DispatchSemaphore(value: 0)
      var last = "ok", batches = 0
      Thread.detachNewThread { [batch] in
        while last == "ok" {
          last = code { try session.trainBatch(batch) }
          batches += last == "ok" ? 1 : 0
          made.signal()
        }
        ended.signal()
      }
      for _ in 0..<round % 3 { made.wait() }
      usleep(UInt32(997 * round % 5000))
      try session.close()
      try session.close()
      ended.wait()
      try expect(last == "closed", "the thread that trains ended with \(last)")
      try expect(digest(session.checkpoint) == after(batches), "a step was cut off")
      try expect(session.stepCount == batches, "\(session.stepCount) steps, and not \(batches)")
      most = max(most, batches)
    }
    try expect(most > 0, "the session was closed before it trained")
  }

  func end() throws {
    var endedCalls = 0, couldEnd = false
    for round in 0..<times {
      let session = try start(), ended = DispatchSemaphore(value: 0), lock = NSLock()
      let evaluates = round % 2 == 1, waits = session.hasStepModel && !evaluates
      let before = try digest(session.checkpoint)
      var found: String?
      Thread.detachNewThread { [batch] in
        var own = "busy"
        while own == "busy" {  // the other thread asks whether it runs
          own = code {
            if evaluates {
              _ = try session.evalStep(withInputValues: batch)
            } else {
              try session.trainBatch(batch)
            }
          }
        }
        lock.withLock { found = own }
        ended.signal()
      }
      while lock.withLock({ found == nil }), code({ try session.setOnNotFinite(.skip) }) != "busy" {}
      try session.close()
      ended.wait()
      try expect(found == "ok" || (found == "closed" && !waits), "it ended with \(found!)")
      let made = found == "ok" && !evaluates ? 1 : 0
      let wanted = made == 1 ? try after(1) : before
      try expect(digest(session.checkpoint) == wanted, "the state is neither that before nor after")
      try expect(session.stepCount == made, "the step count")
      endedCalls += found == "closed" ? 1 : 0
      couldEnd = couldEnd || !waits
    }
    try expect(endedCalls > 0 || !couldEnd, "no call was ended")
  }

  func threads() throws {
    let session = try start(), lock = NSLock(), ended = DispatchSemaphore(value: 0)
    var found: [String: Int] = [:]
    for _ in 0..<2 {
      Thread.detachNewThread { [batch, times] in
        for _ in 0..<50 * times {
          let own = code { try session.trainBatch(batch) }
          lock.withLock { found[own, default: 0] += 1 }
        }
        ended.signal()
      }
    }
    for _ in 0..<2 { ended.wait() }
    try expect(found.keys.sorted() == ["busy", "ok"], "the calls gave \(found)")
    try expect(digest(session.checkpoint) == after(found["ok"]!), "two steps ran at once")
  }

  func nan() throws {
    let bad = try bad(.nan)
    let session = try start()
    for round in 0..<times {
      for _ in 0..<round % 3 { try session.trainBatch(batch) }
      let before = try digest(session.checkpoint), steps = try session.stepCount
      try session.setOnNotFinite(.skip)
      try expect(session.trainBatch(bad).isNaN, "the loss is not what it was")
      try expect(digest(session.checkpoint) == before, "the batch changed something")
      try expect(session.stepCount == steps, "it counts as a step")
      try expect(session.skippedSteps == 2 * round + 1, "it is not counted")
      let wanted = NotFinite(code: "loss-not-finite", step: steps + 1, parameters: [])
      try expect(session.lastNotFinite == wanted, "\(String(describing: session.lastNotFinite))")
      try session.setOnNotFinite(.stop)
      let stopped = code { try session.trainBatch(bad) }
      try expect(stopped == "loss-not-finite", "it gives \(stopped)")
      try expect(digest(session.checkpoint) == before, "the batch changed something")
      try expect(try session.fit([batch, batch]) == 2, "it does not go on")
      try expect(session.stepCount == steps + 2, "the steps are not counted")
    }
    try session.setOnNotFinite(.skip)
    let before = try digest(session.checkpoint), steps = try session.stepCount
    _ = try session.trainStep(withInputValues: bad)
    try session.lazyResetGrad()
    try session.optimizerStep()
    try expect(digest(session.checkpoint) == before, "a reset makes bad gradients good")
    try expect(session.stepCount == steps, "a step on nothing counts")
    let other = try ORTTrainingSession(
      env: env, package: session.package, checkpoint: session.checkpoint)
    try other.optimizerStep()
    try expect(digest(session.checkpoint) == before, "they are good for another session")
    try expect(other.stepCount == steps, "a step on nothing counts")
  }

  /// As in calls.cpp; prints what the session says of it.
  func gradient() throws {
    let session = try start()
    for value in batch where value.elementType == .float32 {
      value.elements(Float.self).update(repeating: 1e25)
    }
    for (name, value) in [("fc1.weight", Float(1e-30)), ("fc1.bias", 0), ("fc2.weight", 1e25)] {
      let parameter = try session.checkpoint.parameter(name)
      for i in 0..<parameter.byteCount / 4 {
        parameter.elements(Float.self)[i] = i * 7 % 3 == 0 ? value : value / 2
      }
    }
    try expect(session.trainBatch(batch).isFinite, "the loss is not finite")
    let last = session.lastNotFinite!
    let numbers = try "\(session.skippedSteps) \(session.stepCount) \(last.code) \(last.step)"
    print(([numbers] + last.parameters).joined(separator: " "))
  }

  func closed() throws {
    for _ in 0..<times {
      let session = try start()
      try session.trainBatch(batch)
      let buffer = try session.toBuffer(withTrainable: true)
      let before = try digest(session.checkpoint)
      try session.close()
      try session.close()
      let batch = batch
      let calls: [() throws -> Void] = [
        { _ = try session.stepOn(batch) }, { _ = try session.trainStep(withInputValues: batch) },
        { _ = try session.evalStep(withInputValues: batch) }, { try session.trainBatch(batch) },
        { try session.optimizerStep() }, { try session.lazyResetGrad() },
        { try session.setLearningRate(0.1) }, { _ = try session.toBuffer(withTrainable: true) },
        { try session.fromBuffer(withValue: buffer) }, { try session.schedulerStep() },
        { try session.setOnNotFinite(.stop) },
        { _ = try session.predictor(outputNames: ["output"]) },
        {
          try session.exportModelForInference(
            withOutputPath: "/dev/null", graphOutputNames: ["output"])
        },
      ]
      for (number, call) in calls.enumerated() {
        let found = code(call)
        try expect(found == "closed", "call \(number) gives \(found)")
      }
      try expect(session.stepCount == 1 && session.skippedSteps == 0, "the numbers are gone")
      try expect(digest(session.checkpoint) == before, "a call changed the state")
    }
  }

  func misuse() throws {
    let session = try start(), whole = try ORTValue(.int64, [2])
    let value = try ORTValue([Float](repeating: 1, count: 8), .float32, shape: [2, 4])
    let package = session.package, other = try ORTCheckpoint(path: package.path("checkpoint"))
    let bare = try ORTTrainingSession(
      env: env, sessionOptions: package.sessionOptions(threads: 1), package: package,
      checkpoint: ORTCheckpoint(path: package.path("checkpoint")),
      trainModelPath: package.path("training_model"), evalModelPath: nil, optimizerModelPath: nil)
    let refused: [(String, () throws -> Void)] = [
      ("buffer-type", { _ = try value.array(of: Int32.self) }),
      ("buffer-type", { _ = try whole.scalar }),
      ("buffer-type", { try whole.withElements(Double.self) { _ in } }),
      ("buffer-type", { _ = try ORTValue(.float32, [0]).scalar }),
      ("buffer-type", { _ = try ORTValue([Int32](repeating: 1, count: 8), .float32, shape: [8]) }),
      ("bad-argument", { _ = try TrainingPackage(path: package.folder + "\0") }),
      ("bad-argument", { _ = try package.path("checkpoint\0") }),
      ("bad-argument", { _ = try ORTCheckpoint(path: package.path("checkpoint") + "\0") }),
      ("bad-argument", { try other.saveCheckpoint(toPath: "a\0", withOptimizerState: true) }),
      ("bad-argument", { try other.addIntProperty(withName: "a\0b", value: 2) }),
      ("bad-argument", { _ = try other.property("a\0b") }),
      ("bad-argument", { try other.carryOver(from: session.checkpoint, names: ["fc1.weight\0"]) }),
      ("bad-argument", { _ = try session.predictor(outputNames: ["output\0"]) }),
      (
        "bad-argument",
        { try session.exportModelForInference(withOutputPath: "a\0", graphOutputNames: ["output"]) }
      ),
      ("bad-argument", { _ = try Schedule(kind: "step\0", period: 2) }),
      ("bad-argument", { _ = try package.sessionOptions(threads: 257) }),
      ("buffer-size", { _ = try value.part(Int.max, [2]) }),
      ("buffer-size", { _ = try value.part(0, [Int.max, 2]) }),
      ("buffer-size", { _ = try value.part(0, [-1]) }),
      ("buffer-size", { _ = try ORTValue(.float32, [Int.max, 2]) }),
      ("empty-batch", { _ = try session.evaluate([[ORTValue]]()) }),
      ("no-optimizer-model", { _ = try bare.stepCount }),
      ("property-type", { try session.checkpoint.setProperty("odtpack.optimizer", .int(1)) }),
      ("busy", { try session.checkpoint.carryOver(from: other) }),
    ]
    for (number, (wanted, call)) in refused.enumerated() {
      let found = code(call)
      try expect(found == wanted, "call \(number) gives \(found), and not \(wanted)")
    }
    try expect(value.part(4, [4]).array(of: Float.self) == [1, 1, 1, 1], "a part")
    try session.trainBatch(batch)
    try session.checkpoint.setProperty("app", .int(3))
    let before = try other.parameter("fc1.weight").array(of: Float.self)
    try other.carryOver(from: session.checkpoint, names: [], optimizerState: false)
    try expect(other.property("app") == .int(3) && other.property("none") == nil, "properties")
    try expect(other.parameter("fc1.weight").array(of: Float.self) == before, "an empty list")
    let ended = DispatchSemaphore(value: 0), started = DispatchSemaphore(value: 0)
    Thread.detachNewThread { [batch] in
      started.signal()
      while code({ try session.trainBatch(batch) }) != "closed" {}
      ended.signal()
    }
    started.wait()
    var found = ""
    while found != "busy" { found = code { _ = try session.checkpoint.property("app") } }
    try session.close()
    ended.wait()
  }
}

func testCalls(_ command: String, _ path: String, _ times: Int) throws {
  let calls = try Calls(path, times)
  switch command {
  case "close": try calls.close()
  case "end": try calls.end()
  case "threads": try calls.threads()
  case "nan": try calls.nan()
  case "gradient": try calls.gradient()
  case "closed": try calls.closed()
  case "misuse": try calls.misuse()
  default: throw invalid("there is no command \(command)")
  }
  print("done")
}
