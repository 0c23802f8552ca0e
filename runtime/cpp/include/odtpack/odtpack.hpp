// odtpack for C++: trains a package on a stock ONNX Runtime. This is the header to include.
#pragma once

#include "odtpack/training.hpp"

namespace odtpack {

/// Bring trained parameters into the state of a newer package's checkpoint, before a session is
/// made of it; everything else comes from the newer one. Without `names` those that were trained.
inline void CarryOver(const CheckpointState& trained, const CheckpointState& fresh,
                      std::vector<std::string> names = {}, bool optimizer_state = true) {
  const detail::State& from = *trained.Internal();
  detail::State& to = *fresh.Internal();
  from.RequireValues();
  to.RequireValues();
  const auto same = [&](const std::string& name) {
    const auto one = from.parameters.find(name);
    const auto two = std::as_const(to).parameters.find(name);
    return one != from.parameters.end() && two != to.parameters.end() &&
           one->second.value.type == two->second.value.type &&
           one->second.value.shape == two->second.value.shape;
  };
  const bool all = names.empty();
  for (const auto& [name, parameter] : from.parameters) {
    if (all && parameter.trainable) names.push_back(name);
  }
  for (const auto& name : names) {
    if (same(name)) continue;
    throw Error("carry-over-parameter", "The trained parameters do not go over: '" + name +
                "' is missing in the new package, or has another shape or type.", {},
                "odtpack diff OLD NEW says what goes over");
  }
  std::optional<detail::OptimizerState> state;
  if (optimizer_state && from.optimizer) {
    state = detail::OptimizerState{from.optimizer->step, from.optimizer->rate, {}, {{}}, {}};
    std::map<std::string, const std::vector<detail::Tensor>*> moments;
    for (const auto& [name, own] : from.optimizer->moments) moments[name] = &own;
    for (const auto& [name, parameter] : to.parameters) {
      if (!parameter.trainable || moments.empty()) continue;
      if (moments.count(name) == 0 || !same(name)) {
        throw Error("carry-over-optimizer", "There is no optimizer state for '" + name +
                    "', which the new package trains.", {}, "pass optimizer_state = false");
      }
      std::vector<detail::Tensor> copies;
      for (const detail::Tensor& moment : *moments[name]) {
        copies.push_back(detail::Zeros(moment.type, moment.shape));
        std::memcpy(copies.back().data.get(), moment.data.get(), moment.Bytes());
      }
      state->moments.emplace_back(name, std::move(copies));
      state->groups[0].push_back(name);
    }
  }
  for (const auto& name : names) {
    const detail::Tensor& value = from.parameters.at(name).value;
    std::memcpy(to.parameters.at(name).value.data.get(), value.data.get(), value.Bytes());
  }
  for (const auto& [name, value] : from.properties) to.properties[name] = value;
  to.optimizer = std::move(state);
}

namespace detail {

/// Set an element from 24 random bits, as the self-check of a package says.
inline void Fill(const Tensor& tensor, size_t i, uint32_t bits, int64_t bound) {
  const float real = (static_cast<float>(bits) - 8388608.0f) / 8388608.0f;
  const int64_t whole = tensor.type == ONNX_TENSOR_ELEMENT_DATA_TYPE_BOOL ? bits % 2 : bits % bound;
  if (tensor.type == ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT) tensor.As<float>()[i] = real;
  else if (tensor.type == ONNX_TENSOR_ELEMENT_DATA_TYPE_DOUBLE) tensor.As<double>()[i] = real;
  else if (tensor.type == ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT16) {
    tensor.As<Ort::Float16_t>()[i] = Ort::Float16_t(real);
  } else {  // little-endian: the first bytes of the number
    const size_t size = ItemSize(tensor.type);
    std::memcpy(tensor.data.get() + i * size, &whole, size);
  }
}

inline double AsDouble(const Ort::Value& value) {
  const auto type = value.GetTensorTypeAndShapeInfo().GetElementType();
  if (type == ONNX_TENSOR_ELEMENT_DATA_TYPE_DOUBLE) return *value.GetTensorData<double>();
  if (type == ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT) return *value.GetTensorData<float>();
  return value.GetTensorData<Ort::Float16_t>()->ToFloat();
}

}  // namespace detail

/// Train the package's made-up batch for five steps and compare with what the build measured:
/// tells within seconds whether training is right on this device. Throws an Error if not.
inline void SelfCheck(const Ort::Env& env, const Package& package) {
  using detail::Json;
  const Json& check = package.Manifest()["self_check"];
  if (check.IsNull() || !check["reason"].IsNull()) {
    throw Error("no-self-check", "The package has no self-check" +
                (check.IsNull() ? "." : ": " + check.Get<std::string>("reason")));
  }
  const CheckpointState state = CheckpointState::LoadCheckpoint(package.Path("checkpoint"));
  TrainingSession session(env, package, state);
  session.SetLearningRate(static_cast<float>(check.Get<double>("learning_rate")));
  std::vector<detail::Tensor> batch;
  std::vector<Ort::Value> values;
  uint32_t counter = 0;
  for (const Json& input : check.Get<Json::List>("inputs")) {
    detail::Shape shape;
    for (const Json& size : input.Get<Json::List>("shape")) shape.push_back(size.Whole("a size"));
    const auto name = input.Get<std::string>("name");
    const auto type = session.InputType(name);
    batch.push_back(detail::Zeros(type, shape));
    const int64_t bound = std::max<int64_t>(input.Whole("bound", 1), 1);
    for (size_t i = 0; i < batch.back().Count(); ++i) {
      detail::Fill(batch.back(), i, (++counter * 2654435761u) >> 8, bound);
    }
    values.push_back(batch.back().Value());
  }
  const auto& expected = check.Get<Json::List>("losses");
  const auto& tolerances = check.Get<Json::List>("tolerances");
  for (size_t step = 0; step <= expected.size(); ++step) {
    const bool last = step == expected.size();
    const auto results = last ? session.EvalStep(values) : session.TrainStep(values);
    const double wanted = last ? check.Get<double>("evaluation_loss") : expected[step].As<double>();
    const double found = detail::AsDouble(results[0]);
    if (!(std::abs(found - wanted) <= tolerances.at(step).As<double>())) {
      throw Error("self-check-failed", "Step " + std::to_string(step + 1) + " gives the loss " +
                  std::to_string(found) + ", and not " + std::to_string(wanted) + ".", {},
                  "do not train on this device with this ONNX Runtime; report it");
    }
    if (last) break;
    session.OptimizerStep();
    session.LazyResetGrad();
  }
}

}  // namespace odtpack
