// Schedules of the learning rate: the factor of the initial rate after so many optimizer steps.
#pragma once

#include "odtpack/json.hpp"

namespace odtpack {

/// constant, linear, cosine, step or multistep, after a linear warm-up.
struct Schedule {
  std::string kind = "constant";
  int64_t warmup_steps = 0, total_steps = 0, period = 0;
  double floor = 0, gamma = 0.1;
  std::vector<int64_t> milestones;

  static Schedule Linear(int64_t warmup, int64_t total) {
    return {"linear", warmup, total, 0, 0, 0.1, {}};
  }

  /// The fraction of the initial rate that holds after `step` steps.
  double Factor(int64_t step) const {
    Check();
    const auto real = [](int64_t count) { return static_cast<double>(count); };
    if (step < warmup_steps) return real(step) / real(warmup_steps);
    if (kind == "step") return std::pow(gamma, real(step / period));
    const auto reached = std::upper_bound(milestones.begin(), milestones.end(), step);
    if (kind == "multistep") return std::pow(gamma, real(reached - milestones.begin()));
    if (kind == "constant") return 1;
    const bool over = step >= total_steps;
    const double length = real(total_steps - warmup_steps);
    if (kind == "linear") return over ? 0 : real(total_steps - step) / length;
    const double done = over ? 1 : real(step - warmup_steps) / length;
    return floor + (1 - floor) * ((1 + std::cos(3.141592653589793 * done)) / 2);
  }

  void Check() const {
    const bool ends = kind == "linear" || kind == "cosine";
    const bool good = ends                  ? total_steps >= std::max<int64_t>(warmup_steps, 1)
                      : kind == "step"      ? period > 0
                      : kind == "multistep" ? !milestones.empty() && milestones[0] >= 0
                                            : kind == "constant";
    const int64_t last = std::max(
        {warmup_steps, total_steps, period, milestones.empty() ? int64_t{0} : milestones.back()});
    if (!good || warmup_steps < 0 || last >= int64_t{1} << 53 || !(floor >= 0 && floor <= 1) ||
        !(gamma > 0 && gamma <= 1) || !std::is_sorted(milestones.begin(), milestones.end())) {
      throw Error("bad-schedule", "The settings of the schedule '" + kind + "' are out of range.",
                  "",
                  "linear and cosine end after the warm-up, a step has a period of 1 or more, and "
                  "milestones rise");
    }
  }

  /// The property of a state that keeps a schedule, with the rate at factor 1.
  std::string ToJson(double initial_rate) const {
    std::map<std::string, std::string> fields = {{"initial_lr", detail::Repr(initial_rate)},
                                                 {"kind", "\"" + kind + "\""},
                                                 {"warmup_steps", std::to_string(warmup_steps)}};
    if (kind == "linear" || kind == "cosine") fields["total_steps"] = std::to_string(total_steps);
    if (kind == "cosine") fields["floor"] = detail::Repr(floor);
    if (kind == "step") fields["period"] = std::to_string(period);
    if (kind == "multistep") fields["milestones"] = detail::Text(milestones);
    if (kind == "step" || kind == "multistep") fields["gamma"] = detail::Repr(gamma);
    std::string text;
    for (const auto& [key, value] : fields) text += ", \"" + key + "\": " + value;
    return "{" + text.substr(2) + "}";
  }

  /// A schedule from its settings; `total` counts if they do not say where it ends.
  static Schedule FromJson(const std::string& kind, const detail::Json& settings, int64_t total) {
    static const std::map<std::string, std::set<std::string>> known = {
        {"constant", {}},
        {"linear", {"total_steps"}},
        {"cosine", {"total_steps", "floor"}},
        {"step", {"period", "gamma"}},
        {"multistep", {"milestones", "gamma"}}};
    const auto own = known.find(kind);
    if (own == known.end()) throw Error("bad-schedule", "There is no schedule '" + kind + "'.");
    for (const auto& [key, value] : settings.As<detail::Json::Object>("settings")) {
      if (!value || (key != "warmup_steps" && own->second.count(key) == 0))
        throw Error("bad-schedule", "The schedule '" + kind + "' has no setting '" + key + "'.");
    }
    const Schedule schedule{kind,
                            settings.Whole("warmup_steps", 0),
                            settings.Whole("total_steps", total),
                            settings.Whole("period", 0),
                            settings.Get<double>("floor", 0),
                            settings.Get<double>("gamma", 0.1),
                            settings.Wholes("milestones")};
    schedule.Check();
    return schedule;
  }
};

}  // namespace odtpack
