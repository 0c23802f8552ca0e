// Training on stock ONNX Runtime, under the names of its former training API.
#pragma once

#include "odtpack/inference.hpp"
#include "odtpack/optimizer.hpp"
#include "odtpack/schedule.hpp"

namespace odtpack {

/// Trains a package: `Ort::TrainingSession` of ONNX Runtime 1.19 on a stock library. Parameters
/// live in the state, as flat vectors on which all models work in place. Not safe for concurrent
/// calls.
class TrainingSession {
 public:
  /// Train a package with its models and session options.
  TrainingSession(const Ort::Env& env, const Package& package, const CheckpointState& state,
                  int threads = 0)
      : TrainingSession(env, package.SessionOptions(env, threads), state, package,
                        package.Path("training_model"), package.Path("eval_model"),
                        package.Path("optimizer_model")) {}

  /// The former constructor. The models lie in the folder of their package.
  TrainingSession(const Ort::Env& env, const Ort::SessionOptions& options,
                  const CheckpointState& state, const std::string& training_model,
                  const std::optional<std::string>& eval_model = std::nullopt,
                  const std::optional<std::string>& optimizer_model = std::nullopt)
      : TrainingSession(env, options, state,
                        Package::Open(detail::fs::path(training_model).parent_path().string()),
                        training_model, eval_model, optimizer_model) {}

  TrainingSession(const Ort::Env& env, const Ort::SessionOptions& options,
                  const CheckpointState& state, const Package& package,
                  const std::string& training_model, const std::optional<std::string>& eval_model,
                  const std::optional<std::string>& optimizer_model)
      : handle_(state), state_(*state.Internal()), package_(package) {
    using detail::Json;
    const Json& manifest = package_.Manifest();
    for (const Json& json : manifest.Get<Json::List>("inputs")) inputs_.emplace_back(json);
    for (const Json& json : manifest.Get<Json::List>("outputs")) outputs_.emplace_back(json);
    for (const Json& json : manifest.Get<Json::List>("parameters")) specs_.emplace_back(json);
    if (outputs_.empty()) Json::Fail("there are no outputs");
    const Json& layout = manifest["layout"];
    const auto dtype = layout.Get<std::string>("dtype");
    type_ = dtype == "float64" ? ONNX_TENSOR_ELEMENT_DATA_TYPE_DOUBLE
                               : ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT;
    if (dtype != "float32" && dtype != "float64") Json::Fail("the dtype of 'layout'");
    elements_ = layout["elements"].Whole("'elements'");
    auto training = detail::OpenSession(env, training_model, options);
    std::optional<Ort::Session> evaluation;
    if (eval_model) evaluation = detail::OpenSession(env, *eval_model, options);
    Place();
    reset_ = detail::Zeros(ONNX_TENSOR_ELEMENT_DATA_TYPE_BOOL, {1});
    LazyResetGrad();
    bound_.Add("lazy_reset_grad", reset_);
    training_ = std::make_unique<detail::Graph>(std::move(training), inputs_, outputs_, bound_,
                                                training_model);
    if (evaluation) {
      evaluation_ = std::make_unique<detail::Graph>(std::move(*evaluation), inputs_, outputs_,
                                                    bound_, *eval_model);
    }
    if (optimizer_model) {
      const detail::Shape shape = {elements_};
      optimizer_ = std::make_unique<detail::Optimizer>(
          detail::OpenSession(env, *optimizer_model, options), manifest, state_, trainable_,
          detail::Tensor{type_, shape, state_.flat}, detail::Tensor{type_, shape, state_.gradients});
    }
  }
  TrainingSession(const TrainingSession&) = delete;
  TrainingSession& operator=(const TrainingSession&) = delete;

  /// Compute loss and gradients of a batch, which are added to those that are accumulated.
  /// Returns the user's outputs, the loss first.
  std::vector<Ort::Value> TrainStep(const std::vector<Ort::Value>& inputs) {
    state_.RequireValues();
    auto results = training_->Run(inputs);
    *reset_.data = 0;
    return results;
  }

  /// Compute the loss of a batch with the evaluation model.
  std::vector<Ort::Value> EvalStep(const std::vector<Ort::Value>& inputs) {
    state_.RequireValues();
    if (evaluation_) return evaluation_->Run(inputs);
    throw Error("no-eval-model", "Evaluation needs an evaluation model, and none was given.");
  }

  /// Let the next training step replace the gradients, not add to them.
  void LazyResetGrad() { *reset_.data = 1; }

  /// Change the parameters by the accumulated gradients, which remain as they are.
  void OptimizerStep() {
    state_.RequireValues();
    Optimizer().Step();
  }

  void SetLearningRate(float rate) { Optimizer().SetRate(rate); }
  float GetLearningRate() { return Optimizer(), state_.optimizer->rate; }

  /// Number of optimizer steps made, those before a resumed checkpoint included.
  int64_t StepCount() { return Optimizer(), state_.optimizer->step; }

  /// Let the rate follow a schedule, which is saved with the state.
  void SetSchedule(const Schedule& schedule, double initial_rate) {
    schedule.Check();
    schedule_ = schedule;
    initial_rate_ = initial_rate;
    SchedulerStep();
    state_.properties[kScheduleProperty] = schedule.ToJson(initial_rate);
  }
  /// Go on with the schedule that the state was saved with; false if there is none.
  bool RestoreSchedule() {
    const auto found = state_.properties.find(kScheduleProperty);
    if (found == state_.properties.end()) return false;
    try {
      const detail::Json json = detail::JsonReader(std::get<std::string>(found->second)).Read();
      SetSchedule(Schedule::FromJson(json.Get<std::string>("kind"), json, 0),
                  json.Get<double>("initial_lr"));
    } catch (const std::exception&) {
      throw Error("bad-schedule", "The state's property odtpack.schedule is no schedule.", {},
                  "call SetSchedule, which replaces it");
    }
    return true;
  }
  /// Linear warm-up from 0 to `initial_rate`, then linear decay to 0.
  void RegisterLinearLRScheduler(int64_t warmup_steps, int64_t total_steps, double initial_rate) {
    SetSchedule(Schedule::Linear(warmup_steps, total_steps), initial_rate);
  }
  /// Set the rate of the next optimizer step.
  void SchedulerStep() {
    if (!schedule_) throw Error("bad-schedule", "No schedule was set.", {}, "call SetSchedule");
    SetLearningRate(static_cast<float>(initial_rate_ * schedule_->Factor(StepCount())));
  }

  ONNXTensorElementDataType InputType(const std::string& name) const {
    for (const auto& spec : inputs_) {
      if (spec.name == name) return static_cast<ONNXTensorElementDataType>(spec.type);
    }
    throw Error("manifest-invalid", "The package has no input '" + name + "'.");
  }
  std::vector<std::string> InputNames(bool = true) const { return Names(inputs_); }
  std::vector<std::string> OutputNames(bool = true) const { return Names(outputs_); }

  /// All parameters, or the trainable ones, one after the other in the order of the manifest.
  Ort::Value ToBuffer(bool only_trainable) {
    state_.RequireValues();
    const detail::Shape shape = {static_cast<int64_t>(BufferSize(only_trainable))};
    Ort::Value buffer = Ort::Value::CreateTensor(Ort::AllocatorWithDefaultOptions(), shape.data(),
                                                 1, type_);
    Exchange(static_cast<uint8_t*>(buffer.GetTensorMutableRawData()), only_trainable, true);
    return buffer;
  }
  /// Set the parameters from such a vector.
  void FromBuffer(const Ort::Value& buffer, bool only_trainable = true) {
    if (only_trainable) state_.RequireValues();
    const auto info = buffer.GetTensorTypeAndShapeInfo();
    if (info.GetElementType() != type_) {
      throw Error("buffer-type", std::string("Parameters are set from ") + detail::TypeName(type_));
    }
    if (info.GetElementCount() != BufferSize(only_trainable)) {
      throw Error("buffer-size", "The buffer holds " + std::to_string(info.GetElementCount()) +
                  " elements, and the parameters " + std::to_string(BufferSize(only_trainable)));
    }
    Exchange(static_cast<uint8_t*>(const_cast<void*>(buffer.GetTensorRawData())), only_trainable,
             false);
    state_.nominal = false;
  }

  /// Write an inference model with the current parameters inside, whole or not at all.
  void ExportModelForInferencing(const std::string& path, const std::vector<std::string>& outputs) {
    detail::WriteAtomically(path, [&](detail::File& file) {
      const auto write = [&file](const void* data, size_t size) { file.Write(data, size); };
      detail::WriteInference(package_, state_, specs_, outputs, write);
    });
  }
  /// A session that predicts with a copy of the current parameters.
  Ort::Session InferenceSession(const Ort::Env& env, const std::vector<std::string>& outputs) {
    std::string model;
    detail::WriteInference(package_, state_, specs_, outputs, [&model](const void* data, size_t size) {
      model.append(static_cast<const char*>(data), size);
    });
    return Ort::Session(env, model.data(), model.size(), Ort::SessionOptions());
  }

  /// Batches per optimizer step: the gradient of each is divided by this number.
  int64_t AccumulationSteps() const { return package_.Manifest().Whole("accumulation_steps", 1); }

  /// The schedule that the package proposes, over so many steps if it does not say; with its rate.
  std::optional<std::pair<Schedule, double>> ProposedSchedule(int64_t total_steps) const {
    const detail::Json& json = package_.Manifest()["schedule"];
    if (json.IsNull()) return {};
    const detail::Json settings = json["settings"].IsNull() ? detail::Json{detail::Json::Object{}}
                                                            : json["settings"];
    return {{Schedule::FromJson(json.Get<std::string>("kind"), settings, total_steps),
             json.Get<double>("learning_rate", 0.001)}};
  }

  const CheckpointState& State() const { return handle_; }
  const Package& GetPackage() const { return package_; }

 private:
  static constexpr const char* kScheduleProperty = "odtpack.schedule";

  static std::vector<std::string> Names(const std::vector<detail::Spec>& specs) {
    std::vector<std::string> names;
    for (const auto& spec : specs) names.push_back(spec.name);
    return names;
  }

  detail::Optimizer& Optimizer() {
    if (optimizer_) return *optimizer_;
    throw Error("no-optimizer-model", "No optimizer model was given.", {},
                "pass the package, or its optimizer_model.onnx");
  }

  /// Move the trainable parameters into one flat vector, at the manifest's offsets.
  void Place() {
    const size_t item = detail::ItemSize(type_);
    for (const auto& spec : specs_) {
      const auto found = state_.parameters.find(spec.name);
      if (found == state_.parameters.end()) {
        detail::ThrowMismatch("the checkpoint lacks '" + spec.name + "'");
      }
      const detail::Parameter& parameter = found->second;
      const bool free = state_.nominal && !state_.flat;
      if (parameter.trainable != (spec.role == "trainable") || parameter.value.type != spec.type ||
          (!free && parameter.value.shape != spec.shape) || (parameter.trainable && spec.type != type_)) {
        detail::ThrowMismatch("'" + spec.name + "' is " + spec.Description() + " in the package");
      }
      if (parameter.trainable) trainable_.push_back(&spec);
    }
    if (state_.parameters.size() != specs_.size()) {
      detail::ThrowMismatch("the checkpoint has parameters that the package does not know");
    }
    std::sort(trainable_.begin(), trainable_.end(),
              [](const auto* one, const auto* two) { return one->offset < two->offset; });
    int64_t end = 0;
    const auto aligned = static_cast<int64_t>(detail::kAlignment / item);
    for (const auto* spec : trainable_) {
      if (spec->offset != (end + aligned - 1) / aligned * aligned) {
        detail::Json::Fail("the offset of '" + spec->name + "'");
      }
      end = spec->offset + static_cast<int64_t>(detail::Tensor{type_, spec->shape, {}}.Count());
    }
    if (elements_ != (end + aligned - 1) / aligned * aligned) detail::Json::Fail("'elements'");
    const bool fresh = !state_.flat;
    const size_t bytes = static_cast<size_t>(elements_) * item;
    if (fresh) state_.flat = detail::Allocate(bytes);
    if (fresh) state_.gradients = detail::Allocate(bytes);
    if (!fresh) std::memset(state_.gradients.get(), 0, bytes);
    for (const auto& spec : specs_) {
      detail::Tensor& value = state_.parameters.at(spec.name).value;
      if (spec.role == "trainable") {
        const size_t offset = static_cast<size_t>(spec.offset) * item;
        const detail::Tensor placed{type_, spec.shape, {state_.flat, state_.flat.get() + offset}};
        if (!fresh && placed.data.get() != value.data.get()) {
          detail::ThrowMismatch("the state belongs to another package's session");
        }
        if (value.data && fresh) std::memcpy(placed.data.get(), value.data.get(), placed.Bytes());
        value = placed;  // what was moved is freed
        const detail::Tensor gradient{type_, spec.shape,
                                      {state_.gradients, state_.gradients.get() + offset}};
        bound_.Add(spec.name + "_grad.accumulation.buffer", gradient);
        bound_.Add(spec.name + "_grad.accumulation.out", gradient);
      } else if (!value.data) {
        value = detail::Zeros(value.type, spec.shape);
      }
      bound_.Add(spec.name, value);
      if (spec.role == "state") bound_.Add(spec.name + ".update.out", value);
    }
  }

  size_t BufferSize(bool only_trainable) const {
    size_t count = 0;
    for (const auto& spec : specs_) {
      if (only_trainable && spec.role != "trainable") continue;
      if (spec.type != type_ && spec.type != ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT16 &&
          spec.type != ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT) {
        throw Error("parameter-type", "'" + spec.name + "' does not fit into a buffer of " +
                    detail::TypeName(type_) + ".", {}, "pass only_trainable = true");
      }
      count += state_.parameters.at(spec.name).value.Count();
    }
    return count;
  }

  void Exchange(uint8_t* buffer, bool only_trainable, bool out) {
    const size_t item = detail::ItemSize(type_);
    for (const auto& spec : specs_) {
      if (only_trainable && spec.role != "trainable") continue;
      const detail::Tensor& tensor = state_.parameters.at(spec.name).value;
      const size_t count = tensor.Count();
      for (size_t i = 0; spec.type != type_ && i < count; ++i) Convert(buffer + i * item, tensor, i, out);
      if (spec.type == type_) {
        std::memcpy(out ? buffer : tensor.data.get(), out ? tensor.data.get() : buffer, count * item);
      }
      buffer += count * item;
    }
  }

  /// Exchange one element of a narrower type.
  void Convert(uint8_t* at, const detail::Tensor& tensor, size_t i, bool out) const {
    const bool half = tensor.type == ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT16;
    double value = half ? tensor.As<Ort::Float16_t>()[i].ToFloat() : tensor.As<float>()[i];
    const bool wide = type_ == ONNX_TENSOR_ELEMENT_DATA_TYPE_DOUBLE;
    if (out && wide) std::memcpy(at, &value, sizeof value);
    const auto narrow = static_cast<float>(value);
    if (out && !wide) std::memcpy(at, &narrow, sizeof narrow);
    if (out) return;
    const double given = wide ? *reinterpret_cast<double*>(at) : *reinterpret_cast<float*>(at);
    if (half) tensor.As<Ort::Float16_t>()[i] = Ort::Float16_t(static_cast<float>(given));
    else tensor.As<float>()[i] = static_cast<float>(given);
  }

  CheckpointState handle_;
  detail::State& state_;
  Package package_;
  std::vector<detail::Spec> inputs_, outputs_, specs_;
  std::vector<const detail::Spec*> trainable_;
  ONNXTensorElementDataType type_;
  int64_t elements_ = 0;
  detail::Bound bound_;
  detail::Tensor reset_;
  std::unique_ptr<detail::Graph> training_, evaluation_;
  std::unique_ptr<detail::Optimizer> optimizer_;
  std::optional<Schedule> schedule_;
  double initial_rate_ = 0;
};

}  // namespace odtpack
