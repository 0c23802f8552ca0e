// What the programs of this folder share: tensors and settings from JSON files.
import Foundation
@testable import Odtpack

func content(_ path: String) throws -> Data { try Data(contentsOf: URL(fileURLWithPath: path)) }
func readJson(_ path: String) throws -> Json { try Json(data: content(path)) }

extension ElementType {
  init(name: String) throws {
    guard let type = Self.allCases.first(where: { "\($0)" == name }) else {
      throw invalid("there is no type '\(name)'")
    }
    self = type
  }
}

/// A tensor {"name", "dtype", "shape", "file", "offset"} whose bytes lie in a file of `folder`.
func readTensor(_ json: Json, _ folder: String) throws -> ORTValue {
  let value = try ORTValue(ElementType(name: json["dtype"].text()), json["shape"].wholes())
  let file = try json["file"].text()
  let content = try content(file.hasPrefix("/") ? file : "\(folder)/\(file)")
  let offset = try json["offset"].whole(0)
  guard offset + value.byteCount <= content.count else {
    throw OdtpackError("data-unreadable", "\(file) is too short.")
  }
  content.withUnsafeBytes { if value.byteCount > 0 { value.copy(from: $0.baseAddress! + offset) } }
  return value
}

func readBatch(_ list: Json, _ folder: String) throws -> [ORTValue] {
  try list.list().map { try readTensor($0, folder) }
}

/// The session of a job: {"package", "models", "checkpoint", "learning_rate", "schedule",
/// "step_model"}, the last of which may be false.
struct Training {
  let checkpoint: ORTCheckpoint, session: ORTTrainingSession
  var isScheduled = false

  /// With the job's checkpoint, or another one.
  init(
    _ env: ORTEnv, _ json: Json, _ folder: String, threads: Int, checkpoint other: String? = nil
  ) throws {
    func inFolder(_ path: String) -> String { path.hasPrefix("/") ? path : "\(folder)/\(path)" }
    let package = try TrainingPackage(path: inFolder(json["package"].text()))
    let models = try json["models"], given = try json["checkpoint"]
    func model(_ key: String) throws -> String {
      guard models.isPresent, try models[key].isPresent else { return try package.path(key) }
      return try inFolder(models[key].text())
    }
    let own = try given.isPresent ? inFolder(given.text()) : package.path("checkpoint")
    checkpoint = try ORTCheckpoint(path: other ?? own)
    let options = try package.sessionOptions(threads: threads), device = try json["device"]
    if device.isPresent { try options.addDevice(env, library: device["library"].text()) }
    session = try ORTTrainingSession(
      env: env, sessionOptions: options, package: package,
      checkpoint: checkpoint, trainModelPath: model("training_model"),
      evalModelPath: model("eval_model"), optimizerModelPath: model("optimizer_model"),
      stepModelPath: json["step_model"].flag(true) ? package.stepModel() : nil)
    let rate = try json["learning_rate"], schedule = try json["schedule"]
    if rate.isPresent { try session.setLearningRate(Float(rate.real())) }
    isScheduled = try schedule.isPresent || session.restoreSchedule()
    if schedule.isPresent {
      let settings = try schedule["settings"]
      let made = try Schedule(
        kind: schedule["kind"].text(), warmupSteps: settings["warmup_steps"].whole(0),
        totalSteps: settings["total_steps"].whole(0), period: settings["period"].whole(0),
        floor: settings["floor"].real(0), gamma: settings["gamma"].real(0.1),
        milestones: settings["milestones"].wholes())
      try session.setSchedule(made, initialRate: schedule["initial_lr"].real())
    }
  }
}
