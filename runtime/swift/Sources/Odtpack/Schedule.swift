// Schedules of the learning rate: the factor of the initial rate after so many optimizer steps.
import Foundation

/// constant, linear, cosine, step or multistep, after a linear warm-up.
public struct Schedule {
  public var kind = "constant"
  public var warmupSteps = 0, totalSteps = 0, period = 0
  public var floor = 0.0, gamma = 0.1
  public var milestones: [Int] = []

  public init(
    kind: String, warmupSteps: Int = 0, totalSteps: Int = 0, period: Int = 0, floor: Double = 0,
    gamma: Double = 0.1, milestones: [Int] = []
  ) throws {
    (self.kind, self.warmupSteps, self.totalSteps) = (kind, warmupSteps, totalSteps)
    (self.period, self.floor, self.gamma, self.milestones) = (period, floor, gamma, milestones)
    let isGood: Bool
    switch kind {
    case "linear", "cosine": isGood = totalSteps >= max(warmupSteps, 1)
    case "step": isGood = period > 0
    case "multistep": isGood = (milestones.first ?? -1) >= 0
    default: isGood = kind == "constant"
    }
    guard isGood, warmupSteps >= 0, (0...1).contains(floor), gamma > 0, gamma <= 1,
      milestones == milestones.sorted()
    else {
      throw OdtpackError(
        "bad-schedule", "The settings of the schedule '\(kind)' are out of range.",
        hint: "Schedule(kind: \"linear\", warmupSteps: 100, totalSteps: 1000)")
    }
  }
  /// From settings; `total` counts if they do not say where it ends.
  init(_ kind: String, _ settings: Json, total: Int) throws {
    try self.init(
      kind: kind, warmupSteps: settings["warmup_steps"].whole(0),
      totalSteps: settings["total_steps"].whole(total), period: settings["period"].whole(0),
      floor: settings["floor"].real(0), gamma: settings["gamma"].real(0.1),
      milestones: settings["milestones"].wholes())
  }

  /// The fraction of the initial rate that holds after `step` steps.
  public func factor(_ step: Int) -> Double {
    if step < warmupSteps { return Double(step) / Double(warmupSteps) }
    let isOver = step >= totalSteps, length = Double(totalSteps - warmupSteps)
    switch kind {
    case "step": return pow(gamma, Double(step / period))
    case "multistep": return pow(gamma, Double(milestones.filter { $0 <= step }.count))
    case "linear": return isOver ? 0 : Double(totalSteps - step) / length
    case "cosine":
      let done = isOver ? 1 : Double(step - warmupSteps) / length
      return floor + (1 - floor) * ((1 + cos(Double.pi * done)) / 2)
    default: return 1
    }
  }

  /// The property of a state that keeps a schedule, with the rate at factor 1.
  func json(initialRate: Double) -> String {
    var fields = [
      "initial_lr": "\(initialRate)", "kind": "\"\(kind)\"", "warmup_steps": "\(warmupSteps)",
    ]
    if kind == "linear" || kind == "cosine" { fields["total_steps"] = "\(totalSteps)" }
    if kind == "cosine" { fields["floor"] = "\(floor)" }
    if kind == "step" { fields["period"] = "\(period)" }
    if kind == "multistep" { fields["milestones"] = "\(milestones)" }
    if kind.hasSuffix("step") { fields["gamma"] = "\(gamma)" }
    let entries = fields.sorted { $0.key < $1.key }.map { "\"\($0)\": \($1)" }
    return "{\(entries.joined(separator: ", "))}"
  }
}
