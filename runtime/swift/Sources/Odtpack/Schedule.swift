// Schedules of the learning rate: the factor of the initial rate after so many optimizer steps.
import COdtpack

/// constant, linear, cosine, step or multistep, after a linear warm-up.
public struct Schedule {
  public let kind: String
  public let warmupSteps: Int, totalSteps: Int, period: Int
  public let floor: Double, gamma: Double
  public let milestones: [Int]

  public init(
    kind: String, warmupSteps: Int = 0, totalSteps: Int = 0, period: Int = 0, floor: Double = 0,
    gamma: Double = 0.1, milestones: [Int] = []
  ) throws {
    (self.kind, self.warmupSteps, self.totalSteps) = (try plain(kind), warmupSteps, totalSteps)
    (self.period, self.floor, self.gamma, self.milestones) = (period, floor, gamma, milestones)
    try withC { schedule in try call(odtpack_schedule_check(schedule)) }
  }
  init(_ schedule: odtpack_schedule) {
    kind = String(cString: schedule.kind)
    (warmupSteps, totalSteps) = (Int(schedule.warmup_steps), Int(schedule.total_steps))
    (period, floor, gamma) = (Int(schedule.period), schedule.floor, schedule.gamma)
    milestones = UnsafeBufferPointer(start: schedule.milestones, count: schedule.milestone_count)
      .map(Int.init)
  }

  /// The fraction of the initial rate that holds after `step` steps.
  public func factor(_ step: Int) -> Double {
    withC { odtpack_schedule_factor($0, Int64(step)) }
  }

  func withC<Result>(_ body: (UnsafePointer<odtpack_schedule>) throws -> Result) rethrows -> Result
  {
    try kind.withCString { kind in
      try milestones.map(Int64.init).withUnsafeBufferPointer {
        var schedule = odtpack_schedule(
          kind: kind, warmup_steps: Int64(warmupSteps), total_steps: Int64(totalSteps),
          period: Int64(period), floor: floor, gamma: gamma, milestones: $0.baseAddress,
          milestone_count: $0.count)
        return try body(&schedule)
      }
    }
  }
}
