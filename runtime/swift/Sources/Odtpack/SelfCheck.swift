// A short training on made-up data, whose losses the build has measured.
import Foundation

extension TrainingPackage {
  /// Train the package's made-up batch for a few steps and compare with what the build measured:
  /// tells within seconds whether training is right on this device. Throws if not.
  public func selfCheck(_ env: ORTEnv) throws {
    let check = try manifest["self_check"]
    let reason = check.isPresent ? try check["reason"].text("") : "the build left it out"
    guard reason.isEmpty else {
      throw OdtpackError("no-self-check", "The package has no self-check: \(reason).")
    }
    let checkpoint = try ORTCheckpoint(path: path("checkpoint"))
    let session = try ORTTrainingSession(env: env, package: self, checkpoint: checkpoint)
    try session.setLearningRate(Float(check["learning_rate"].real()))
    let batch = try madeUpBatch(check["inputs"].list())
    let wanted = try check["losses"].list() + [check["evaluation_loss"]]
    let tolerances = try check["tolerances"].list()
    guard wanted.count == tolerances.count else { throw invalid("the tolerances of self_check") }
    for (step, (loss, tolerance)) in zip(wanted, tolerances).enumerated() {
      let isLast = step == wanted.count - 1
      let results =
        try isLast
        ? session.evalStep(withInputValues: batch) : session.stepOn(batch)
      let found = results[0].scalar
      guard try abs(found - loss.real()) <= tolerance.real() else {
        throw OdtpackError(
          "self-check-failed", "Step \(step + 1) gives the loss \(found), not \(try loss.real()).",
          hint: "do not train on this device with this ONNX Runtime, and report it")
      }
    }
  }

  private func madeUpBatch(_ entries: [Json]) throws -> [ORTValue] {
    var counter: UInt32 = 0
    return try zip(inputs, entries).map { spec, entry in
      guard try entry["name"].text() == spec.name else { throw invalid("the inputs of self_check") }
      let bound = spec.type == .bool ? 2 : max(try entry["bound"].whole(1), 1)
      let isFloating = spec.type.isFloating, shape = try entry["shape"].wholes()
      guard shape.count <= 32, shape.allSatisfy({ $0 >= 0 }),
        shape.reduce(1.0, { $0 * Double(max($1, 1)) }) <= 0x1p26
      else { throw invalid("the shape of '\(spec.name)'") }
      let value = try ORTValue(isFloating ? .float32 : spec.type, shape)
      for i in 0..<value.count {
        counter &+= 1
        let bits = Int((counter &* 2_654_435_761) >> 8)
        if isFloating {
          value.elements(Float.self)[i] = Float(bits - 8_388_608) / 8_388_608
        } else {  // little-endian: its first bytes are the number
          _ = withUnsafeBytes(of: (bits % bound).littleEndian) {
            memcpy(value.bytes + i * spec.type.size, $0.baseAddress!, spec.type.size)
          }
        }
      }
      return isFloating ? try value.converted(to: spec.type) : value
    }
  }
}
