// Runs the cases of a folder of conformance vectors and prints one line for each: "passed NAME"
// or "FAILED NAME: why".
import Foundation
@testable import Odtpack

struct Failure: Error, CustomStringConvertible {
  let description: String
}

func expect(_ good: Bool, _ what: @autoclosure () throws -> String) throws {
  if !good { throw try Failure(description: what()) }
}

struct Comparison {
  let isExact: Bool, tolerance: Double

  func loss(_ found: Double, _ wanted: Double, _ what: String) throws {
    let isClose = abs(found - wanted) <= tolerance * max(1, abs(wanted))
    try expect(isExact ? found == wanted : isClose, "\(what) is \(found), not \(wanted)")
  }
  func same(_ found: ORTValue, _ wanted: ORTValue, _ what: String) throws {
    try expect(
      found.elementType == wanted.elementType && found.shape == wanted.shape,
      "\(what) is \(found.description) and not \(wanted.description)")
    if memcmp(found.bytes, wanted.bytes, found.byteCount) == 0 { return }
    try expect(!isExact && found.elementType.isFloating, "\(what) differs")
    let largest = (0..<wanted.count).map { abs(wanted.real($0)) }.max() ?? 0
    let worst = (0..<wanted.count).map { abs(wanted.real($0) - found.real($0)) }.max() ?? 0
    try expect(worst <= tolerance * max(largest, 1), "\(what) differs by \(worst)")
  }
  func same(_ found: State, _ wanted: State) throws {
    try expect(
      found.parameters.map(\.name) == wanted.parameters.map(\.name), "other parameters")
    for (own, other) in zip(found.parameters, wanted.parameters) {
      try expect(
        own.isTrainable == other.isTrainable, "\(own.name) is trainable in one of them")
      try same(own.value, other.value, "'\(own.name)'")
    }
    try expect(
      found.properties.map(\.name) == wanted.properties.map(\.name)
        && found.properties.map(\.value) == wanted.properties.map(\.value),
      "the properties differ")
    try expect((found.optimizer == nil) == (wanted.optimizer == nil), "the optimizer's state")
    guard let one = found.optimizer, let two = wanted.optimizer else { return }
    try expect(
      one.step == two.step && one.rate == two.rate && one.kind == two.kind,
      "the optimizer stands elsewhere")
    try expect(one.moments.count == two.moments.count, "other moments")
    for (own, other) in zip(one.moments, two.moments) {
      try expect(
        own.name == other.name && own.number == other.number && own.group == other.group,
        "the order of the moments")
      try same(own.value, other.value, "a moment of \(own.name)")
    }
  }
}

struct Conformance {
  let env: ORTEnv, threads: Int, scratch: String

  static func run(_ folder: String, only chosen: [String]) throws -> Int32 {
    let scratch = NSTemporaryDirectory() + "/odtpack-\(getpid())"
    try FileManager.default.createDirectory(atPath: scratch, withIntermediateDirectories: true)
    defer { try? FileManager.default.removeItem(atPath: scratch) }
    let index = try readJson("\(folder)/index.json")
    let suite = Conformance(
      env: try ORTEnv(), threads: try index["threads"].whole(0), scratch: scratch)
    var failed: Int32 = 0
    for test in try index["cases"].list() {
      let name = try test["name"].text()
      if !chosen.isEmpty && !chosen.contains(name) { continue }
      do {
        try suite.check("\(folder)/\(name)")
        print("passed \(name)")
      } catch {
        failed = 1
        print("FAILED \(name): \(error)")
      }
    }
    return failed
  }

  private func check(_ folder: String) throws {
    let test = try readJson("\(folder)/case.json")
    switch try test["kind"].text() {
    case "train", "resume", "not_finite": try train(test, folder)
    case "nominal": try nominal(test, folder)
    case "error": try refused(test, folder)
    case "recover": try recover(test, folder)
    case "buffer":
      let training = try Training(env, test, folder, threads: threads)
      try Comparison(isExact: true, tolerance: 0).same(
        training.session.toBuffer(withTrainable: false), readTensor(test["values"], folder),
        "the buffer")
    case "self_check":
      let package = try TrainingPackage(path: "\(folder)/\(test["package"].text())")
      let code = try test["code"].text("")
      var found = ""
      do { try package.selfCheck(env) } catch let error as OdtpackError { found = error.code }
      try expect(found == code, "the self-check gives '\(found)', not '\(code)'")
    case let kind: throw Failure(description: "there is no kind \(kind)")
    }
  }

  private func comparison(_ test: Json) throws -> Comparison {
    Comparison(isExact: try test["exact"].flag(true), tolerance: try test["tolerance"].real(2e-6))
  }

  private func steps(_ training: Training, _ test: Json, _ folder: String) throws {
    let compare = try comparison(test), session = training.session
    for (number, step) in try test["steps"].list().enumerated() {
      let batch = try readBatch(step["inputs"], folder), isWhole = session.hasStepModel
      let rate = try step["rate"]
      if try step["update"].flag(true) && rate.isPresent {
        let own = try session.getLearningRate()
        try expect(own == Float(try rate.real()), "the learning rate is \(own)")
      }
      let before = try session.stepCount, skipped = session.skippedSteps
      let found = try isWhole ? session.stepOn(batch) : session.trainStep(withInputValues: batch)
      let code = try step["not_finite"]
      try expect(
        session.skippedSteps - skipped == (code.isPresent ? 1 : 0), "the number of skipped steps")
      if code.isPresent {
        try expect(!found[0].scalar.isFinite, "loss \(number + 1) is finite")
        try expect(session.lastNotFinite?.code == code.text(), "the reason of the skipped step")
      } else {
        try compare.loss(found[0].scalar, step["loss"].real(), "loss \(number + 1)")
        try compareOutputs(compare, Array(found.dropFirst()), step["outputs"], folder)
      }
      if try step["update"].flag(true) {
        if !isWhole { try session.optimizerStep() }
        if try training.isScheduled && session.stepCount > before { try session.schedulerStep() }
      }
      if try !isWhole && step["reset"].flag(true) { try session.lazyResetGrad() }
    }
  }

  private func compareOutputs(
    _ compare: Comparison, _ found: [ORTValue], _ wanted: Json, _ folder: String
  ) throws {
    if !wanted.isPresent { return }
    let list = try wanted.list()
    try expect(found.count == list.count, "another number of outputs")
    for (value, json) in zip(found, list) {
      try compare.same(value, readTensor(json, folder), "output \(try json["name"].text())")
    }
  }

  private func train(_ test: Json, _ folder: String) throws {
    let training = try Training(env, test, folder, threads: threads), session = training.session
    let compare = try comparison(test), name = try test["name"].text()
    let hasStepModel = try test["step_model"].flag(false)
    try expect(session.hasStepModel == hasStepModel, "the step model is used, or not, as it should")
    try steps(training, test, folder)
    try expect(
      session.skippedSteps == test["skipped_steps"].whole(0), "the number of skipped steps")
    let evaluation = try test["evaluation"]
    if evaluation.isPresent {
      let batch = try readBatch(evaluation["inputs"], folder)
      try compare.loss(
        session.evalStep(withInputValues: batch)[0].scalar, evaluation["loss"].real(),
        "the evaluation's loss")
      let accuracy = try evaluation["accuracy"]
      let wanted = accuracy.isPresent ? try accuracy.real() : nil
      try expect(
        !compare.isExact || session.evaluate([batch]).accuracy == wanted, "the accuracy")
    }
    let properties = try test["properties"]
    for (name, json) in properties.isPresent ? try properties.object() : [:] {
      if let value = try? json.text() {
        try training.checkpoint.addStringProperty(withName: name, value: value)
      } else if let value = try? json.whole() {
        try training.checkpoint.addIntProperty(withName: name, value: Int64(value))
      } else {
        try training.checkpoint.addFloatProperty(withName: name, value: Float(json.real()))
      }
    }
    if try test["after"].isPresent {
      let saved = "\(scratch)/\(name).ckpt"
      try training.checkpoint.saveCheckpoint(toPath: saved, withOptimizerState: true)
      let wanted = try State(path: "\(folder)/\(test["after"].text())")
      try compare.same(State(path: saved), wanted)
    }
    let exported = try test["export"]
    if !exported.isPresent { return }
    let names = try exported["outputs"].list().map { try $0["name"].text() }
    let path = "\(scratch)/\(name).onnx"
    try session.exportModelForInference(withOutputPath: path, graphOutputNames: names)
    let isEqual = try content(path) == content("\(folder)/\(exported["file"].text())")
    try expect(!compare.isExact || isEqual, "the exported model has other bytes")
    let predictor = try session.predictor(outputNames: names)
    let inputs = try exported["inputs"].list()
    let order = try predictor.inputNames.map { name in
      try readTensor(inputs.first { try $0["name"].text() == name }!, folder)
    }
    let close = Comparison(isExact: false, tolerance: 1e-5)  // other session options
    try compareOutputs(close, predictor.predict(order), exported["outputs"], folder)
  }

  private func nominal(_ test: Json, _ folder: String) throws {
    let training = try Training(env, test, folder, threads: threads)
    let batch = try readBatch(test["steps"].list()[0]["inputs"], folder)
    do {
      _ = try training.session.trainStep(withInputValues: batch)
      throw Failure(description: "a step works without values")
    } catch let error as OdtpackError {
      try expect(error.code == "nominal-state", "the code is \(error.code)")
    }
    let values = try readTensor(test["values"], folder)
    try training.session.fromBuffer(withValue: values, onlyTrainable: false)
    try steps(training, test, folder)
  }

  private func recover(_ test: Json, _ folder: String) throws {
    let names = try ["checkpoint", "previous"].map { try test[$0].text() }
    let path = "\(scratch)/\(names[0])", before = "\(scratch)/\(names[1])"
    for name in names {
      unlink("\(scratch)/\(name)")
      if !FileManager.default.fileExists(atPath: "\(folder)/\(name)") { continue }
      try FileManager.default.copyItem(atPath: "\(folder)/\(name)", toPath: "\(scratch)/\(name)")
    }
    let checkpoint = try ORTCheckpoint(path: path)
    var words = try ["of optimizer step \(test["step"].whole()):"]
    if try test["lost"].isPresent {
      try words.append("\(test["lost"].whole()) optimizer steps made since")
    }
    for each in words {
      try expect(checkpoint.recovered?.contains(each) == true, "\(checkpoint.recovered ?? "")")
    }
    try Comparison(isExact: true, tolerance: 0).same(
      State(checkpoint), State(path: before))
    // The first save stands in for the damaged file; only the next moves it on.
    func save() throws {
      try checkpoint.saveCheckpoint(toPath: path, withOptimizerState: true, keepPrevious: true)
    }
    let good = try content(before)
    try save()
    try expect(content(before) == good, "the save before is another one")
    let first = try content(path)
    try checkpoint.addIntProperty(withName: "again", value: 1)
    try save()
    try expect(content(before) == first, "the save before was not kept")
    try expect(ORTCheckpoint(path: path).recovered == nil, "it is damaged")
  }

  private func refused(_ test: Json, _ folder: String) throws {
    let action = try test["action"].text(), code = try test["code"].text()
    do {
      if action == "open" {
        _ = try TrainingPackage(path: "\(folder)/\(test["package"].text())")
      } else if action == "load_checkpoint" {
        _ = try ORTCheckpoint(path: "\(folder)/\(test["checkpoint"].text())")
      } else {
        let training = try Training(env, test, folder, threads: threads)
        if action == "export" {
          try training.session.exportModelForInference(
            withOutputPath: "\(scratch)/refused.onnx", graphOutputNames: test["outputs"].texts())
        }
        if action == "step" {
          let batch = try readBatch(test["inputs"], folder)
          _ = try training.session.trainStep(withInputValues: batch)
        }
      }
    } catch let error as OdtpackError {
      try expect(error.code == code, "the code is \(error.code) and not \(code): \(error)")
      return
    }
    throw Failure(description: "it is accepted, and should be refused with \(code)")
  }
}
