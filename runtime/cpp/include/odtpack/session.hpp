// Training on stock ONNX Runtime, under the names of its former training API.
#pragma once

#include "odtpack/inference.hpp"
#include "odtpack/not_finite.hpp"
#include "odtpack/schedule.hpp"
#include "odtpack/segments.hpp"
#include "odtpack/step_model.hpp"

namespace odtpack {

/// Trains a package: `Ort::TrainingSession` of ONNX Runtime 1.19 on a stock library. Parameters
/// live in the state, as flat vectors on which all models work in place. One call runs at a time:
/// another one, from whatever thread, is the error `busy` at once, and after Close it is `closed`.
class TrainingSession {
 public:
  /// Train a package with its models and session options; with its step model, where it has one.
  TrainingSession(const Ort::Env& env, const Package& package, const CheckpointState& state,
                  int threads = 0)
      : TrainingSession(env, package.SessionOptions(env, threads), state, package,
                        package.Path("training_model"), package.Path("eval_model"),
                        package.Path("optimizer_model"), package.StepModel()) {}
  /// The same with options of the caller's choice. Where AddDevice named a device, parameters,
  /// gradients and moments live in its memory.
  TrainingSession(const Ort::Env& env, const Ort::SessionOptions& options, const Package& package,
                  const CheckpointState& state)
      : TrainingSession(env, options, state, package, package.Path("training_model"),
                        package.Path("eval_model"), package.Path("optimizer_model"),
                        package.StepModel()) {}

  /// The former constructor. The models lie in the folder of their package.
  TrainingSession(const Ort::Env& env, const Ort::SessionOptions& options,
                  const CheckpointState& state, const std::string& training_model,
                  const std::optional<std::string>& eval_model = std::nullopt,
                  const std::optional<std::string>& optimizer_model = std::nullopt)
      : TrainingSession(env, options, state,
                        Package::Open(detail::fs::absolute(training_model).parent_path().string()),
                        training_model, eval_model, optimizer_model) {}

  /// With options and models of the caller's choice: those in ORT format, for example. A step
  /// model needs the optimizer model beside it; the training model is then opened once a step asks
  /// for gradients.
  TrainingSession(const Ort::Env& env, const Ort::SessionOptions& options,
                  const CheckpointState& state, const Package& package,
                  const std::string& training_model, const std::optional<std::string>& eval_model,
                  const std::optional<std::string>& optimizer_model,
                  const std::optional<std::string>& step_model = std::nullopt)
      : own_(new Own{state, *state.Internal(), state.Internal()->gate, package, env, options.Clone(), training_model,
                     eval_model, optimizer_model}) {
    if (std::getenv(kNoTelemetry) == nullptr) {
      Ort::Status(Ort::GetApi().DisableTelemetryEvents(env));
    }
    const detail::Gate::Call call(*own_->gate);
    const detail::Json& manifest = own_->package.Manifest();
    Sessions opened = Open(step_model.value_or(training_model));
    PlaceOnDevice(opened);
    Places places =
        Place(detail::Spec::TypeOf(manifest["layout"].Get<std::string>("dtype", "float32")),
              manifest["layout"]["elements"].Whole());
    *own_->reset.data = 1;
    own_->bound.Add("lazy_reset_grad", own_->reset);
    if (own_->segments) {
      own_->training = std::make_unique<detail::SegmentedGraph>(
          *own_->segments, own_->package, own_->package.Outputs(), own_->bound, own_->ending, true);
      if (eval_model) {
        own_->evaluation = std::make_unique<detail::SegmentedGraph>(
            *own_->segments, own_->package, own_->package.EvaluationOutputs(), own_->bound,
            own_->ending, false);
      }
    }
    if (opened.optimizer) {
      own_->optimizer = std::make_unique<detail::Optimizer>(std::move(*opened.optimizer), manifest,
                                                            own_->state, places.flat,
                                                            places.gradients, own_->trainable,
                                                            own_->progress);
      own_->optimizes = true;
    }
    if (step_model && !own_->segments) {
      std::map<std::string, detail::Tensor> trained;
      for (const auto* spec : own_->trainable)
        trained[spec->name] = places.flat.From(spec->offset, spec->shape);
      own_->not_updated =
          detail::Zeros(detail::kBool, {static_cast<int64_t>(own_->trainable.size())});
      own_->step = detail::MakeStepGraph(std::move(*opened.first), own_->package, trained,
                                         Optimizer(), own_->bound, own_->not_updated);
      opened.first.reset();
    }
    MakeGraphs(std::move(opened));
    own_->has_step_model = own_->step != nullptr;
    // Nothing has been changed so far: a session that cannot be made leaves the state alone.
    TakeOver(std::move(places));
    detail::GiveBackFreed();  // what sessions needed to load, and what was moved
  }
  /// A session may be moved between calls. What is left may be assigned to or destroyed.
  TrainingSession(TrainingSession&&) noexcept = default;
  TrainingSession& operator=(TrainingSession&& other) noexcept {
    TrainingSession former(std::move(*this));
    own_ = std::move(other.own_);
    return *this;
  }
  ~TrainingSession() {
    if (own_) Close();
  }

  /// Free the models; closing twice is allowed. An evaluation or a training step that runs is
  /// ended, and is the error `closed`: the state is as before it. For other calls this waits, an
  /// optimizer step and one in the step model among them, which write over what they read. The
  /// state remains where the app holds it, and may be saved. Every later call but those that read a number or names is the
  /// error `closed`.
  void Close() {
    const auto free = [this] {
      own_->training.reset();
      own_->step.reset();
      own_->evaluation.reset();
      own_->optimizer.reset();
      own_->segments.reset();
      own_->statistics = {};
      own_->accumulated = {};
      if (own_->bound.twins.use_count() == 1) own_->bound.twins->Pull();
      own_->bound = {};
      own_->handle.reset();
    };
    own_->gate->Close(own_->closed, [this] { own_->ending.Ask(); }, free);
  }

  /// Make an optimizer step on one batch: what TrainStep, OptimizerStep and LazyResetGrad do, and
  /// with less memory where the session has a step model. Returns the user's outputs, the loss
  /// before the step first. The error `step-of-several` if AccumulationSteps() is not 1.
  std::vector<Ort::Value> StepOn(const std::vector<Ort::Value>& inputs) {
    const auto call = Enter();
    Optimizer().RequireOwn();
    if (const int64_t steps = AccumulationSteps(); steps > 1) {
      throw Error("step-of-several",
                  "A step of this package takes " + std::to_string(steps) +
                      " batches, and each gradient is divided by so many: one batch makes no step.",
                  "", "call TrainBatch for each batch");
    }
    return MakeStep(inputs);
  }
  /// Whether StepOn makes its steps in a step model.
  bool HasStepModel() const { return own_->has_step_model; }
  /// Whether native kernels compute its models' nodes of the domain odtpack.native (docs/native.md).
  bool HasKernels() const { return own_->has_kernels; }

  /// Compute loss and gradients of a batch, which are added to those that are accumulated.
  /// Returns the user's outputs, the loss first. The first call closes the step model, if there is
  /// one, and opens the training model: from then on all steps are made with that. If it cannot be
  /// opened, the session is closed. If the loss or a
  /// gradient is not finite, the batch changes nothing: see SetOnNotFinite.
  std::vector<Ort::Value> TrainStep(const std::vector<Ort::Value>& inputs) {
    const auto call = Enter();
    return Train(inputs);
  }
  /// Compute the loss of a batch with the evaluation model.
  std::vector<Ort::Value> EvalStep(const std::vector<Ort::Value>& inputs) {
    const auto call = Enter();
    Ready();
    if (own_->evaluation) {
      detail::CheckBatch(own_->package.Inputs(), inputs);
      return own_->evaluation->Run(inputs);
    }
    throw Error("no-eval-model", "Evaluation needs an evaluation model, and none was given.");
  }
  /// Add a batch to what those before add up to, with the evaluation model.
  void EvalBatch(const std::vector<Ort::Value>& inputs, Evaluation& sum) {
    detail::Add(sum, own_->package, inputs, EvalStep(inputs));
  }
  /// Evaluate batches: their loss and accuracy.
  template <class Batches>
  Evaluation Evaluate(const Batches& batches) {
    Evaluation sum;
    for (const std::vector<Ort::Value>& batch : batches) EvalBatch(batch, sum);
    return sum;
  }
  /// Let the next training step replace the gradients, not add to them.
  void LazyResetGrad() {
    const auto call = Enter();
    Reset();
  }
  /// Change the parameters by the accumulated gradients, which remain as they are. Does nothing if
  /// every batch since the last reset was skipped, or its training step failed.
  void OptimizerStep() {
    const auto call = Enter();
    Optimizer().RequireOwn();
    Update();
  }

  /// One batch of a whole training: a training step, and after every AccumulationSteps() of them an
  /// optimizer step, the schedule's step and a lazy reset; StepOn where that is every batch.
  /// Returns the loss.
  double TrainBatch(const std::vector<Ort::Value>& inputs) {
    const auto call = Enter();
    Optimizer().RequireOwn();
    const int64_t steps = AccumulationSteps(), before = StepCount();
    const auto follow = [&] {
      if (own_->schedule && StepCount() != before) FollowSchedule();
    };
    double loss = 0;
    try {
      loss = detail::AsDouble((steps == 1 ? MakeStep(inputs) : Train(inputs))[0]);
      if (++own_->pending < steps) return loss;
      own_->pending = 0;
      if (steps > 1) Update();
    } catch (...) {
      follow();  // a step that is counted may be an error as well: SetOnNotFinite
      throw;
    }
    follow();
    if (steps > 1) Reset();
    return loss;
  }
  /// Train on batches as long as `active` says so, which is asked before each. Returns the number
  /// of batches; the session is as after the last one.
  template <class Batches>
  int64_t Fit(const Batches& batches, const std::function<bool()>& active = nullptr) {
    int64_t count = 0;
    for (const std::vector<Ort::Value>& batch : batches) {
      if (active && !active()) break;
      TrainBatch(batch);
      ++count;
    }
    return count;
  }

  /// What follows a step whose loss or gradient is not finite; kSkip at first.
  void SetOnNotFinite(OnNotFinite policy) {
    const auto call = Enter();
    own_->on_not_finite = policy;
  }
  /// Steps that changed nothing, as their loss or a gradient was not finite; in the step model the
  /// other parameters of a step whose loss is finite were updated.
  int64_t SkippedSteps() const { return own_->skipped; }
  /// The last step whose loss or gradient was not finite, if there was one. Ask between calls; the
  /// numbers of a session may be read at any time.
  const std::optional<NotFinite>& LastNotFinite() const { return own_->last_not_finite; }

  /// Set the rate of the next optimizer step: 0 or more, and finite also after each group's scale.
  void SetLearningRate(float rate) {
    const auto call = Enter();
    Optimizer().SetRate(rate);
  }
  float GetLearningRate() const { return Progress().rate; }
  /// Number of optimizer steps made, those before a resumed checkpoint included.
  int64_t StepCount() const { return Progress().step; }
  /// Batches per optimizer step: the gradient of each is divided by this number.
  int64_t AccumulationSteps() const {
    return own_->package.Manifest().Whole("accumulation_steps", 1);
  }

  /// Let the rate follow a schedule, which is saved with the state.
  void SetSchedule(const Schedule& schedule, double initial_rate) {
    const auto call = Enter();
    Follow(schedule, initial_rate);
  }
  /// Go on with the schedule that the state was saved with; false if there is none.
  bool RestoreSchedule() {
    const auto call = Enter();
    const auto found = own_->state.properties.find(detail::kScheduleProperty);
    if (found == own_->state.properties.end()) return false;
    Optimizer();  // without one there is another error
    try {
      const detail::Json json = detail::JsonReader(std::get<std::string>(found->second)).Read();
      auto settings = json.As<detail::Json::Object>("a schedule");
      for (const char* key : {"kind", "initial_lr"}) settings.erase(key);
      Follow(Schedule::FromJson(json.Get<std::string>("kind"), {std::move(settings)}, 0),
             json.Get<double>("initial_lr"));
    } catch (const std::exception&) {
      throw Error("bad-schedule",
                  "The state's property odtpack.schedule is not a schedule that this version "
                  "knows.",
                  "", "call SetSchedule, which replaces it");
    }
    return true;
  }
  /// The schedule that the package proposes, over so many steps if it does not say; with its rate.
  std::optional<std::pair<Schedule, double>> ProposedSchedule(int64_t total_steps) const {
    const detail::Json& json = own_->package.Manifest()["schedule"];
    if (!json) return {};
    const detail::Json none{detail::Json::Object{}};
    return {{Schedule::FromJson(json.Get<std::string>("kind"),
                                json["settings"] ? json["settings"] : none, total_steps),
             json.Get<double>("learning_rate", 0.001)}};
  }
  /// Linear warm-up from 0 to `initial_rate`, then linear decay to 0.
  void RegisterLinearLRScheduler(int64_t warmup_steps, int64_t total_steps, double initial_rate) {
    SetSchedule(Schedule::Linear(warmup_steps, total_steps), initial_rate);
  }
  /// Set the rate of the next optimizer step to that of the schedule.
  void SchedulerStep() {
    const auto call = Enter();
    FollowSchedule();
  }

  std::vector<std::string> InputNames(bool = true) const { return Names(own_->package.Inputs()); }
  std::vector<std::string> OutputNames(bool = true) const { return Names(own_->package.Outputs()); }

  /// All parameters, or the trainable ones, one after the other in the order of the manifest.
  Ort::Value ToBuffer(bool only_trainable) {
    const auto call = Enter();
    own_->state.RequireValues();
    own_->state.Refresh();
    const detail::Shape shape = {BufferSize(only_trainable)};
    auto buffer = Ort::Value::CreateTensor(Ort::AllocatorWithDefaultOptions(), shape.data(), 1,
                                           own_->state.flat.type);
    auto* at = static_cast<uint8_t*>(buffer.GetTensorMutableRawData());
    for (const auto& spec : own_->specs) {
      if (only_trainable && spec.role != "trainable") continue;
      const auto own =
          detail::Convert(own_->state.parameters.at(spec.name).value, own_->state.flat.type);
      at = std::copy_n(own.data.get(), own.Bytes(), at);
    }
    return buffer;
  }
  /// Set the parameters from such a vector.
  void FromBuffer(const Ort::Value& buffer, bool only_trainable = true) {
    const auto call = Enter();
    if (only_trainable) own_->state.RequireValues();
    if (!detail::IsTensorOf(own_->state.flat.type, buffer))
      throw Error("buffer-type", std::string("The buffer is not a tensor of ") +
                                     detail::TypeInfo(own_->state.flat.type).first + ".");
    const auto info = buffer.GetTensorTypeAndShapeInfo();
    if (static_cast<int64_t>(info.GetElementCount()) != BufferSize(only_trainable)) {
      throw Error("buffer-size", "The buffer holds " + std::to_string(info.GetElementCount()) +
                                     " elements, and the parameters " +
                                     std::to_string(BufferSize(only_trainable)) + ".");
    }
    for (const bool copies : {false, true}) {  // a value that is refused changes nothing
      if (copies) own_->state.Refresh(true);
      const auto* at = static_cast<const uint8_t*>(buffer.GetTensorRawData());
      for (const auto& spec : own_->specs) {
        if (only_trainable && spec.role != "trainable") continue;
        detail::Tensor given = detail::Zeros(own_->state.flat.type, spec.shape);
        given.CopyFrom(at);
        at += given.Bytes();
        given = detail::Convert(given, spec.type);
        if (copies) own_->state.parameters.at(spec.name).value.CopyFrom(given.data.get());
      }
    }
    own_->state.nominal = false;
  }

  /// Write an inference model with the current parameters inside, whole or not at all.
  void ExportModelForInferencing(const std::string& path, const std::vector<std::string>& outputs) {
    const auto call = Enter();
    RequireTemplate();
    detail::WriteAtomically(path, [&](const detail::File& file) {
      detail::WriteInference(
          own_->package, own_->state, outputs,
          [&file](const void* data, size_t size) { detail::Write(file, data, size); });
    });
  }
  /// A session that predicts with a copy of the current parameters, with this one's options.
  Ort::Session InferenceSession(const Ort::Env& env, const std::vector<std::string>& outputs) {
    const auto call = Enter();
    RequireTemplate();
    std::string model;
    detail::WriteInference(own_->package, own_->state, outputs,
                           [&model](const void* data, size_t size) {
                             model.append(static_cast<const char*>(data), size);
                           });
    return detail::Load(own_->package.Path("inference_template"), env, model.data(), model.size(),
                        own_->options);
  }

 private:
  static constexpr size_t kMostNamed = 10;

  static std::vector<std::string> Names(const std::vector<detail::Spec>& specs) {
    std::vector<std::string> names;
    for (const auto& spec : specs) names.push_back(spec.name);
    return names;
  }

  detail::Gate::Call Enter() const { return detail::Gate::Call(*own_->gate, &own_->closed); }

  struct Sessions {
    std::optional<Ort::Session> first, evaluation, optimizer;
  };

  // Open the models, a step model or the training model first, in one arena, which is then theirs
  // alone: no later session can join it.
  Sessions Open(const std::string& first) {
    const detail::Json& manifest = own_->package.Manifest();
    std::optional<detail::SharedArena> shared;
    if (manifest["session"] && manifest["session"].Get<bool>("shared_allocator", false))
      shared.emplace(own_->env, manifest["session"]);
    Sessions opened;
    if (manifest["segments"]) {
      own_->segments = std::make_unique<detail::Segments>(own_->env, own_->options, own_->package,
                                                          own_->training_model, own_->eval_model);
    } else {
      opened.first = detail::OpenSession(own_->env, first, own_->options);
      if (own_->eval_model)
        opened.evaluation = detail::OpenSession(own_->env, *own_->eval_model, own_->options);
    }
    if (own_->optimizer_model)
      opened.optimizer = detail::OpenSession(own_->env, *own_->optimizer_model, own_->options);
    return opened;
  }

  // Go on with the training model in place of the step model. All sessions are opened again: in an
  // arena of its own the new one would take memory beside the others' arena, which does not shrink.
  void Switch() {
    own_->step.reset();
    own_->has_step_model = false;
    own_->evaluation.reset();
    if (own_->optimizer) own_->optimizer->Reopen(Ort::Session(nullptr));
    detail::GiveBackFreed();
    try {
      Sessions opened = Open(own_->training_model);
      if (opened.optimizer) own_->optimizer->Reopen(std::move(*opened.optimizer));
      MakeGraphs(std::move(opened));
    } catch (...) {
      own_->gate->Shut(own_->closed);
      throw;
    }
    detail::GiveBackFreed();
  }

  void MakeGraphs(Sessions opened) {
    const auto graph = [this](Ort::Session session, const std::vector<detail::Spec>& outputs) {
      return std::make_unique<detail::Graph>(std::move(session), own_->package, outputs,
                                             own_->bound, &own_->ending);
    };
    if (opened.first) own_->training = graph(std::move(*opened.first), own_->package.Outputs());
    if (opened.evaluation)
      own_->evaluation = graph(std::move(*opened.evaluation), own_->package.EvaluationOutputs());
  }

  /// The next training step begins an accumulation.
  void Reset() {
    *own_->reset.data = 1;
    own_->pending = 0;
  }

  /// Before a model runs.
  void Ready() {
    own_->state.RequireValues();
    if (own_->bound.twins) own_->bound.twins->Push();
  }

  std::vector<Ort::Value> MakeStep(const std::vector<Ort::Value>& inputs) {
    Ready();
    if (!own_->step) {
      auto results = Train(inputs);
      Update();
      Reset();
      return results;
    }
    detail::CheckBatch(own_->package.Inputs(), inputs);
    own_->statistics.Copy();
    std::fill_n(own_->not_updated.data.get(), own_->not_updated.Bytes(), 0);
    std::vector<Ort::Value> results;
    try {
      results = Optimizer().RunStep(*own_->step, inputs);
    } catch (...) {
      own_->statistics.PutBack();
      throw;
    }
    if (!detail::AllFinite(results[0])) {
      own_->statistics.PutBack();
      Report({"loss-not-finite", StepCount() + 1, {}});
      return results;
    }
    NotFinite odd{"gradient-not-finite", StepCount() + 1, {}};
    size_t trained = 0, kept = 0;
    for (const auto& spec : own_->specs) {
      if (spec.role != "trainable" || own_->not_updated.data.get()[trained++] == 0) continue;
      ++kept;
      if (odd.parameters.size() < kMostNamed) odd.parameters.push_back(spec.name);
    }
    if (kept < trained || trained == 0) Optimizer().Advance();
    if (kept > 0) Report(std::move(odd));
    return results;
  }

  std::vector<Ort::Value> Train(const std::vector<Ort::Value>& inputs) {
    Ready();
    detail::CheckBatch(own_->package.Inputs(), inputs);
    if (!own_->training) Switch();
    if (own_->state.spoiled && *own_->reset.data == 0) Reset();  // by another session
    const bool adds = *own_->reset.data == 0;
    own_->statistics.Copy();
    if (adds) own_->accumulated.Copy();
    const auto put_back = [&] {
      own_->statistics.PutBack();
      if (!adds) return DropGradients();
      own_->accumulated.PutBack();
      if (own_->bound.twins) own_->bound.twins->PullGradients();
    };
    std::vector<Ort::Value> results;
    try {
      results = own_->training->Run(inputs);
      if (own_->bound.twins) own_->bound.twins->PullGradients();
    } catch (...) {
      put_back();
      throw;
    }
    NotFinite odd{"", own_->state.optimizer ? own_->state.optimizer->step + 1 : 0, {}};
    if (!detail::AllFinite(results[0])) {
      odd.code = "loss-not-finite";
    } else if (!detail::AllFinite(own_->state.gradients.type, own_->state.gradients.data.get(),
                                  own_->state.gradients.Count())) {
      odd.code = "gradient-not-finite";
      for (const auto& spec : own_->specs) {
        if (spec.role != "trainable" || odd.parameters.size() == kMostNamed) continue;
        const auto own = own_->state.gradients.From(spec.offset, spec.shape);
        if (!detail::AllFinite(own.type, own.data.get(), own.Count()))
          odd.parameters.push_back(spec.name);
      }
    } else {
      *own_->reset.data = 0;
      own_->state.spoiled = false;
      return results;
    }
    put_back();
    Report(std::move(odd));
    return results;
  }

  void Update() {
    Ready();
    auto& optimizer = Optimizer();
    if (!own_->state.spoiled) optimizer.Step();
  }

  /// After a training step that was to replace the gradients, of which there is no copy, and is
  /// void: the reset remains to be done.
  void DropGradients() {
    own_->state.spoiled = true;
    const auto& gradients = own_->state.gradients;
    std::fill_n(gradients.data.get(), gradients.Bytes(), uint8_t{0});
    if (own_->bound.twins) own_->bound.twins->PushGradients();
  }

  /// Count a step that was not finite, and stop if that was asked for.
  void Report(NotFinite odd) {
    ++own_->skipped;
    own_->last_not_finite = std::move(odd);
    if (own_->on_not_finite == OnNotFinite::kSkip) return;
    const NotFinite& last = *own_->last_not_finite;
    std::string names;
    for (const auto& name : last.parameters) names += (names.empty() ? "'" : ", '") + name + "'";
    const bool loss = last.code == "loss-not-finite";
    throw Error(last.code,
                loss ? "The loss of a batch is not finite; the step was not made."
                     : "Gradients are not finite, those of " + names +
                           "; these parameters were not changed.",
                "step " + std::to_string(last.step), "look for NaN in the batch");
  }

  void Follow(const Schedule& schedule, double initial_rate) {
    schedule.Check();
    Optimizer().SetRate(static_cast<float>(initial_rate));  // the largest, with each group's scale
    own_->schedule = {schedule, initial_rate};
    FollowSchedule();
    own_->state.properties[detail::kScheduleProperty] = schedule.ToJson(initial_rate);
  }
  void FollowSchedule() {
    if (!own_->schedule)
      throw Error("bad-schedule", "No schedule was set.", "", "call SetSchedule");
    const double factor = own_->schedule->first.Factor(StepCount());
    Optimizer().SetRate(static_cast<float>(own_->schedule->second * factor));
  }

  void RequireTemplate() const {
    if (!own_->segments) return;
    throw Error("segments-unsupported", "A package of segments holds no model for inference.", "",
                "use odtpack adapter export PACKAGE --checkpoint FILE");
  }

  detail::Optimizer& Optimizer() const {
    Progress();  // says so if there is none
    return *own_->optimizer;
  }
  const detail::Progress& Progress() const {
    if (own_->optimizes) return own_->progress;
    throw Error("no-optimizer-model", "No optimizer model was given.", "",
                "pass optimizer_model.onnx");
  }

  /// Let the state live where the models want it, which is where it lives already.
  void PlaceOnDevice(const Sessions& opened) {
    auto& twins = own_->bound.twins;
    twins = detail::Twins::Of(own_->env, own_->segments ? *own_->segments->last.session
                                                        : *opened.first);
    const auto living = own_->state.twins.lock();
    if (twins && own_->segments)
      detail::ThrowNoDevice("Segments are trained on the processor only.",
                            "use the package's own session options");
    if (living && !twins)
      detail::ThrowNoDevice("The state lives on a device, with another session.",
                            "load the checkpoint again");
    if (living) {
      living->Change();  // it is read, and what is bound anew is written to it
      twins = living;
    }
    own_->state.twins = twins;
  }

  /// Where the state comes to live, and what moves there.
  struct Places {
    detail::Tensor flat, gradients;
    std::vector<std::pair<detail::Tensor*, detail::Tensor>> moves;
  };

  /// Find a place for the trainable parameters in one flat vector, at the manifest's offsets, and
  /// bind the models to it.
  Places Place(detail::Type type, int64_t elements) {
    const bool fresh = !own_->state.flat.data;
    for (const auto& spec : own_->specs) {
      const auto found = own_->state.parameters.find(spec.name);
      const bool trainable = spec.role == "trainable";
      if (found == own_->state.parameters.end() || found->second.trainable != trainable ||
          found->second.value.type != spec.type || (trainable && spec.type != type) ||
          (found->second.value.shape != spec.shape && !(own_->state.nominal && fresh))) {
        detail::ThrowMismatch("the package has '" + spec.name + "' as " + spec.Description());
      }
      if (trainable) own_->trainable.push_back(&spec);
    }
    if (own_->state.parameters.size() != own_->specs.size())
      detail::ThrowMismatch("one has parameters that the other does not know");
    std::sort(own_->trainable.begin(), own_->trainable.end(),
              [](const auto* one, const auto* two) { return one->offset < two->offset; });
    const auto line = static_cast<int64_t>(detail::kAlignment / detail::TypeInfo(type).second);
    int64_t end = 0;
    for (const auto* spec : own_->trainable) {
      if (spec->offset != end) detail::Json::Fail("the offset of '" + spec->name + "'");
      end += static_cast<int64_t>(detail::Tensor{type, spec->shape, {}}.Count()) + line - 1;
      end -= end % line;
    }
    if (elements != end) detail::Json::Fail("the elements of 'layout'");
    Places places{own_->state.flat, own_->state.gradients, {}};
    if (fresh) places = {detail::Zeros(type, {elements}), detail::Zeros(type, {elements}), {}};
    for (const auto& spec : own_->specs) {
      detail::Tensor& old = own_->state.parameters.at(spec.name).value;
      detail::Tensor value = old;
      if (spec.role == "trainable") {
        value = places.flat.From(spec.offset, spec.shape);
        if (!fresh && value.data.get() != old.data.get())
          detail::ThrowMismatch("the order in memory");
        const detail::Tensor gradient = places.gradients.From(spec.offset, spec.shape);
        for (const char* end : {"_grad.accumulation.buffer", "_grad.accumulation.out"})
          own_->bound.Add(spec.name + end, gradient, detail::Twins::kGradient);
        if (own_->bound.twins)
          own_->accumulated.Add(gradient, own_->bound.twins, detail::Twins::kGradient);
      } else if (!value.data) {
        value = detail::Zeros(spec.type, spec.shape);
      }
      if (value.data.get() != old.data.get()) places.moves.emplace_back(&old, value);
      const auto role = spec.role == "frozen" ? detail::Twins::kRead : detail::Twins::kWritten;
      own_->bound.Add(spec.name, value, role);
      if (spec.role != "state") continue;
      own_->bound.Add(spec.name + ".update.out", value, role);
      // Gradients that are not finite are to change the loss scale.
      if (spec.name.rfind("mixed.", 0) != 0) own_->statistics.Add(value, own_->bound.twins, role);
    }
    if (!own_->bound.twins) own_->accumulated.Add(places.gradients);
    return places;
  }

  /// Let the state live in its places. What is moved is freed, unless GetParameter returned it.
  void TakeOver(Places places) {
    for (auto& [value, placed] : places.moves) {
      if (value->data) placed.CopyFrom(value->data.get());
      *value = std::move(placed);
    }
    own_->state.flat = std::move(places.flat);
    own_->state.gradients = std::move(places.gradients);
    if (own_->optimizer) own_->optimizer->TakeOver();
  }

  int64_t BufferSize(bool only_trainable) const {
    size_t count = 0;
    for (const auto& spec : own_->specs) {
      if (only_trainable && spec.role != "trainable") continue;
      const auto& value = own_->state.parameters.at(spec.name).value;
      count += value.Count();
      if (!detail::IsFloating(spec.type) ||
          detail::TypeInfo(spec.type).second > detail::TypeInfo(own_->state.flat.type).second) {
        throw Error("parameter-type",
                    "'" + spec.name + "' is " + value.Description() +
                        ", which does not fit into the buffer.",
                    "", "pass only_trainable = true");
      }
    }
    return static_cast<int64_t>(count);
  }

  /// What others point to, and what moves with it.
  struct Own {
    std::optional<CheckpointState> handle;  // none once it is closed
    detail::State& state;
    const std::shared_ptr<detail::Gate> gate;
    Package package;
    const detail::GivenEnv env;
    Ort::SessionOptions options;
    std::string training_model;
    std::optional<std::string> eval_model, optimizer_model;
    const bool has_kernels = detail::AddKernels(options, package.OperatorsOf(detail::kKernels));

    const std::vector<detail::Spec>& specs = package.Parameters();
    std::vector<const detail::Spec*> trainable{};
    detail::Bound bound{};
    detail::Tensor reset = detail::Zeros(detail::kBool, {1}), not_updated{};
    detail::Kept statistics{}, accumulated{};  // what a bad step must not change
    detail::Ending ending{};
    bool closed = false, optimizes = false;
    std::atomic<bool> has_step_model{false};
    detail::Progress progress{};
    OnNotFinite on_not_finite = OnNotFinite::kSkip;
    std::atomic<int64_t> skipped{0};
    int64_t pending = 0;
    std::optional<NotFinite> last_not_finite{};
    std::unique_ptr<detail::Segments> segments{};
    std::unique_ptr<detail::Model> training{}, step{}, evaluation{};
    std::unique_ptr<detail::Optimizer> optimizer{};
    std::optional<std::pair<Schedule, double>> schedule{};
  };
  std::unique_ptr<Own> own_;
};

}  // namespace odtpack
