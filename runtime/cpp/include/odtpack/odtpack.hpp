// odtpack for C++: trains a package on a stock ONNX Runtime. This is the header to include.
#pragma once

#include "odtpack/generator.hpp"
#include "odtpack/session.hpp"

namespace odtpack {

/// Bring trained parameters into the state of a newer package's checkpoint, before a session is
/// made of it; everything else comes from the newer one. Without `names` those that were trained;
/// with an empty list none. Moments of parameters that are not named are zero; without the
/// optimizer's state the schedule of its learning rate stays behind too. After a session was made
/// of it, this is the error `busy`.
inline void CarryOver(const CheckpointState& trained, const CheckpointState& fresh,
                      std::optional<std::vector<std::string>> names = {},
                      bool optimizer_state = true) {
  const detail::State& from = *trained.Internal();
  detail::State& to = *fresh.Internal();
  const detail::Gate::Call call(*to.gate);
  std::optional<detail::Gate::Call> other;
  if (&from != &to) other.emplace(*from.gate);
  from.RequireValues();
  from.Refresh();
  to.RequireValues();
  if (to.flat.data)
    throw Error("busy", "A session is training this state.", "",
                "carry over before a session is made of it");
  const auto same = [&](const std::string& name) {
    const auto one = from.parameters.find(name);
    const auto two = std::as_const(to).parameters.find(name);
    return one != from.parameters.end() && two != to.parameters.end() &&
           one->second.value.type == two->second.value.type &&
           one->second.value.shape == two->second.value.shape;
  };
  const bool all = !names;
  if (all) names.emplace();
  for (const auto& [name, parameter] : from.parameters) {
    if (all && parameter.trainable) names->push_back(name);
  }
  for (const auto& name : *names) {
    if (!same(name))
      throw Error("carry-over-parameter",
                  "'" + name + "' does not go over: it is missing, or has another shape or type.",
                  "", "see odtpack diff OLD NEW");
  }
  std::shared_ptr<detail::OptimizerState> state;
  if (optimizer_state && from.optimizer) {
    const auto& old_state = *from.optimizer;
    state = std::make_shared<detail::OptimizerState>();
    *state = {old_state.step, old_state.rate, {}, {{}}, old_state.kind};
    std::map<std::string, std::vector<detail::Tensor>> old(old_state.moments.begin(),
                                                           old_state.moments.end());
    for (const auto& [name, parameter] : to.parameters) {
      if (!parameter.trainable || old.empty()) continue;
      if (old.count(name) == 0 || !same(name)) {
        throw Error("carry-over-optimizer", "There is no optimizer state for '" + name + "'.", "",
                    "pass optimizer_state = false");
      }
      for (detail::Tensor& moment : old[name]) {
        const detail::Tensor copy = detail::Zeros(moment.type, moment.shape);
        if (std::find(names->begin(), names->end(), name) != names->end())
          copy.CopyFrom(moment.data.get());
        moment = copy;
      }
      state->moments.emplace_back(name, old[name]);
      state->groups[0].push_back(name);
    }
  }
  for (const auto& name : *names) {
    to.parameters.at(name).value.CopyFrom(from.parameters.at(name).value.data.get());
  }
  for (const auto& [name, value] : from.properties) {
    if (optimizer_state || name != detail::kScheduleProperty) to.properties[name] = value;
  }
  to.optimizer = std::move(state);
}

/// Train the package's made-up batch for a few steps and compare with what the build measured:
/// tells within seconds whether training is right on this device. Throws an Error if not. With the
/// options of a session, such as those that AddDevice changed, it is the device of these.
inline void SelfCheck(const Ort::Env& env, const Package& package,
                      const Ort::SessionOptions* options = nullptr) {
  const detail::Json& check = package.Manifest()["self_check"];
  if (!check || check["reason"]) {
    throw Error("no-self-check", "The package has no self-check" +
                                     (check ? ": " + check.Get<std::string>("reason") : "."));
  }
  const auto own = package.SessionOptions(env);
  TrainingSession session(env, options == nullptr ? own : *options, package,
                          CheckpointState::LoadCheckpoint(package.Path("checkpoint")));
  session.SetLearningRate(static_cast<float>(check.Get<double>("learning_rate")));
  std::vector<Ort::Value> batch;
  std::vector<detail::Tensor> tensors;
  uint32_t counter = 0;
  for (const auto& spec : package.Inputs()) {
    for (const detail::Json& input : check.Get<detail::Json::List>("inputs")) {
      if (input.Get<std::string>("name") != spec.name) continue;
      const int64_t bound =
          spec.type == detail::kBool ? 2 : std::max<int64_t>(input.Whole("bound", 1), 1);
      const bool floating = detail::IsFloating(spec.type);
      const size_t size = detail::TypeInfo(spec.type).second;
      tensors.push_back(
          detail::Zeros(floating ? detail::kFloat : spec.type, input.Wholes("shape")));
      for (size_t i = 0; i < tensors.back().Count(); ++i) {
        const uint32_t bits = (++counter * 2654435761u) >> 8;
        const int64_t whole = bits % bound;  // little-endian: its first bytes are the number
        if (floating)
          tensors.back().As<float>()[i] = (static_cast<float>(bits) - 8388608) / 8388608;
        else
          std::memcpy(tensors.back().data.get() + i * size, &whole, size);
      }
      if (floating) tensors.back() = detail::Convert(tensors.back(), spec.type);
      batch.push_back(tensors.back().Value());
    }
  }
  const auto& losses = check.Get<detail::Json::List>("losses");
  const auto& tolerances = check.Get<detail::Json::List>("tolerances");
  const bool whole = session.AccumulationSteps() == 1;
  for (size_t step = 0; step <= losses.size() && step < tolerances.size(); ++step) {
    const bool last = step == losses.size();
    const auto results = last    ? session.EvalStep(batch)
                         : whole ? session.StepOn(batch)
                                 : session.TrainStep(batch);
    if (!last && !whole) {
      session.OptimizerStep();
      session.LazyResetGrad();
    }
    const double wanted = last ? check.Get<double>("evaluation_loss") : losses[step].As<double>();
    const double found = detail::AsDouble(results[0]);
    if (!(std::abs(found - wanted) <= tolerances[step].As<double>())) {
      throw Error("self-check-failed",
                  "Step " + std::to_string(step + 1) + " gives the loss " + std::to_string(found) +
                      ", and not " + std::to_string(wanted) + ".",
                  "", "do not train on this device with this ONNX Runtime, and report it");
    }
  }
}

}  // namespace odtpack
