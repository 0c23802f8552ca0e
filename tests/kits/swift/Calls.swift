// What an app may rely on in a session (docs/formats/kits.md), each 20 times: close during a step,
// calls of two threads, batches that are not finite, use after close. Prints the number of rounds.
import Foundation

private func code(_ body: () throws -> Void) throws -> String {
  do { try body() } catch let error as OdtpackError { return error.code }
  return "ok"
}

func testCalls(_ path: String) throws {
  let env = try ORTEnv(), package = try TrainingPackage(path: path), rounds = 20
  func open() throws -> ORTTrainingSession {
    try ORTTrainingSession(
      env: env, package: package, checkpoint: ORTCheckpoint(path: package.path("checkpoint")),
      threads: 1)
  }
  func batch(_ value: Float) throws -> [ORTValue] {
    try package.inputs.map { spec in
      let tensor = try ORTValue(spec.type!, spec.sizes.map { $0 ?? 64 })
      if spec.type == .float32 { tensor.elements(Float.self).update(repeating: value) }
      return tensor
    }
  }
  func parameters(_ session: ORTTrainingSession) throws -> [[UInt8]] {
    try session.checkpoint.parameterNames.map {
      try session.checkpoint.parameter($0).array(of: UInt8.self)
    }
  }
  let good = try batch(0.5), bad = try batch(.nan)

  for round in 0..<rounds {  // close during a step
    let session = try open(), begun = DispatchSemaphore(value: 0), ended = DispatchSemaphore(value: 0)
    var last = "", steps = 0
    Thread.detachNewThread {
      begun.signal()
      while last.isEmpty || last == "ok" {
        last = (try? code { _ = try session.stepOn(good) }) ?? "foreign"
        steps += last == "ok" ? 1 : 0
      }
      ended.signal()
    }
    begun.wait()
    usleep(UInt32(round * 300))
    try session.close()
    try session.close()
    ended.wait()
    try expect(last == "closed", "a step of a closed session gives \(last)")
    try expect(session.stepCount == steps, "\(session.stepCount) steps, and not \(steps)")
  }
  for _ in 0..<rounds {  // two threads
    let session = try open(), lock = NSLock(), ended = DispatchSemaphore(value: 0)
    var found: [String: Int] = [:]
    func call() -> String {
      let own = (try? code { _ = try session.stepOn(good) }) ?? "foreign"
      lock.withLock { found[own, default: 0] += 1 }
      return own
    }
    for _ in 0..<2 {
      Thread.detachNewThread {
        while lock.withLock({ found["busy"] == nil || found["ok"] == nil }) { _ = call() }
        ended.signal()
      }
    }
    for _ in 0..<2 { ended.wait() }
    try expect(found.keys.sorted() == ["busy", "ok"], "the calls gave \(found)")
    try expect(session.stepCount == found["ok"], "a refused call made a step")
  }
  for round in 0..<rounds {  // batches that are not finite
    let session = try open()
    for _ in 0..<round % 3 { try session.trainBatch(good) }
    let before = try parameters(session), steps = session.stepCount
    try expect(session.lastNotFinite == nil, "there was one already")
    try expect(session.trainBatch(bad).isNaN, "the loss is not what it was")
    try expect(try parameters(session) == before, "the batch changed something")
    try expect(session.stepCount == steps && session.skippedSteps == 1, "it counts as a step")
    let wanted = NotFinite(code: "loss-not-finite", step: steps + 1, parameters: [])
    try expect(session.lastNotFinite == wanted, "\(String(describing: session.lastNotFinite))")
    try session.setOnNotFinite(.stop)
    let stopped = try code { try session.trainBatch(bad) }
    try expect(stopped == "loss-not-finite", "it gives \(stopped)")
    try expect(try parameters(session) == before, "the batch changed something")
    try expect(try session.fit([good, good]) == 2, "it does not go on")
    try expect(session.stepCount == steps + 2, "the steps are not counted")
  }
  for _ in 0..<rounds {  // use after close
    let session = try open()
    try session.trainBatch(good)
    let buffer = try session.toBuffer(withTrainable: true)
    try session.close()
    let calls: [() throws -> Void] = [
      { _ = try session.stepOn(good) }, { _ = try session.trainStep(withInputValues: good) },
      { _ = try session.evalStep(withInputValues: good) }, { try session.trainBatch(good) },
      { try session.optimizerStep() }, { try session.lazyResetGrad() },
      { try session.setLearningRate(0.1) }, { _ = try session.toBuffer(withTrainable: true) },
      { try session.fromBuffer(withValue: buffer) }, { try session.schedulerStep() },
      { _ = try session.predictor(outputNames: ["output"]) },
      { try session.exportModelForInference(
          withOutputPath: "/dev/null", graphOutputNames: ["output"]) },
    ]
    for (number, call) in calls.enumerated() {
      let found = try code(call)
      try expect(found == "closed", "call \(number) gives \(found)")
    }
    try expect(session.stepCount == 1 && session.skippedSteps == 0, "the numbers are gone")
    try expect(try parameters(session).count > 0, "the state is gone")
  }
  print(rounds)
}
