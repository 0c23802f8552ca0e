// The C interface: every call goes to the C++ kit, and what that throws becomes an error.
#if defined(__clang__)
#pragma STDC FP_CONTRACT OFF  // the same bits as from other compilers
#endif
// ONNX Runtime is what the app hands in: nothing of it is linked, not even this function.
#define OrtGetApiBase odtpack_given_api_base
#define ORT_API_MANUAL_INIT
#include "odtpack.h"

#include "odtpack/benchmark.hpp"

using odtpack::detail::Tensor;

struct odtpack_error {
  std::string code, message, place, hint;
};
struct odtpack_memory {
  odtpack::detail::Memory memory;
};
struct odtpack_package {
  odtpack::Package package;
};
struct odtpack_state {
  odtpack::CheckpointState state;
  std::vector<const std::string*> names;  // of the parameters, in order

  explicit odtpack_state(odtpack::CheckpointState loaded) : state(std::move(loaded)) {
    for (const auto& each : state.Internal()->parameters) names.push_back(&each.first);
  }
};

namespace {

const OrtApiBase* given_base = nullptr;
odtpack_error out_of_memory{"out-of-memory", "There is not enough memory.", "", ""};

/// What belongs to the caller, as C++ sees it for a while.
template <class Value>
struct Borrowed {
  Value value;
  template <class Raw>
  explicit Borrowed(const Raw* raw) : value(const_cast<Raw*>(raw)) {}
  ~Borrowed() { value.release(); }
  Borrowed(const Borrowed&) = delete;
  Borrowed& operator=(const Borrowed&) = delete;
};
struct Batch {
  std::vector<Ort::Value> values;

  Batch(const OrtValue* const* raw, size_t count) {
    values.reserve(count);
    for (size_t i = 0; i < count; ++i) values.emplace_back(const_cast<OrtValue*>(raw[i]));
  }
  ~Batch() {
    for (Ort::Value& value : values) value.release();
  }
  Batch(const Batch&) = delete;
  Batch& operator=(const Batch&) = delete;
};

/// Take the place and the hint out of what an Error says.
odtpack_error* Split(const std::string& code, std::string text) {
  const auto cut = [&text](const char* mark) {
    const size_t at = text.find(mark);
    if (at == std::string::npos) return std::string();
    std::string rest = text.substr(at + std::strlen(mark));
    text.resize(at);
    return rest;
  };
  const std::string hint = cut("\n  help: "), place = cut("\n  in: ");
  return new odtpack_error{code, text, place, hint};
}

/// Do something, for which ONNX Runtime must be there; return what went wrong.
template <class Body>
odtpack_error* Try(Body body, const OrtApiBase* const& base = given_base) noexcept try {
  try {
    if (base == nullptr)
      throw odtpack::Error("bad-argument", "ONNX Runtime was not handed in.", "",
                           "call odtpack_init first");
    body();
    return nullptr;
  } catch (const odtpack::Error& error) {
    return Split(error.Code(), error.what());
  } catch (const Ort::Exception& error) {
    return new odtpack_error{
        "run-failed", "ONNX Runtime " + Ort::GetVersionString() + ": " + error.what(), "", ""};
  } catch (const std::bad_alloc&) {
    throw;
  } catch (const std::exception& error) {
    return new odtpack_error{"internal", error.what(), "", ""};
  }
} catch (...) {
  return &out_of_memory;
}

odtpack_text Text(const std::string& text) {
  auto* bytes = static_cast<char*>(std::malloc(text.size() + 1));
  if (bytes == nullptr) throw std::bad_alloc();
  std::memcpy(bytes, text.c_str(), text.size() + 1);
  return {bytes, text.size()};
}

std::vector<std::string> Names(const char* const* names, size_t count) {
  return {names, names + count};
}

/// The tensor itself, and what keeps its memory.
void HandOut(const Tensor& tensor, OrtValue** value, odtpack_memory** memory) {
  auto kept = std::make_unique<odtpack_memory>(odtpack_memory{tensor.data});
  *value = tensor.Value().release();
  *memory = kept.release();
}

odtpack_property HandOut(const odtpack::Property& value) {
  odtpack_property property{static_cast<odtpack_property_kind>(value.index()), 0, 0, {}};
  if (const auto* whole = std::get_if<int64_t>(&value)) property.whole = *whole;
  if (const auto* real = std::get_if<float>(&value)) property.real = *real;
  if (const auto* text = std::get_if<std::string>(&value)) property.text = Text(*text);
  return property;
}

odtpack::Schedule Schedule(const odtpack_schedule& given) {
  return {given.kind, given.warmup_steps, given.total_steps, given.period, given.floor,
          given.gamma, {given.milestones, given.milestones + given.milestone_count}};
}

const std::vector<odtpack::detail::Spec>& Specs(const odtpack_package* package,
                                                odtpack_list list) {
  const odtpack::Package& from = package->package;
  return list == ODTPACK_INPUTS               ? from.Inputs()
         : list == ODTPACK_OUTPUTS            ? from.Outputs()
         : list == ODTPACK_EVALUATION_OUTPUTS ? from.EvaluationOutputs()
         : list == ODTPACK_ADAPTER            ? from.Adapter()
                                              : from.Parameters();
}

template <class Items>
auto At(const Items& items, size_t index) {
  if (index >= items.size())
    throw odtpack::Error("bad-argument", "There is no item " + std::to_string(index) + ".");
  return std::next(items.begin(), static_cast<std::ptrdiff_t>(index));
}

}  // namespace

struct odtpack_session {
  Borrowed<Ort::Env> env;
  odtpack::TrainingSession session;

  template <class... Rest>
  explicit odtpack_session(const OrtEnv* raw, const Rest&... rest)
      : env(raw), session(env.value, rest...) {}
};

struct odtpack_generator {
  std::shared_ptr<odtpack::Generator> generator;
};
struct odtpack_tokens {
  std::shared_ptr<odtpack::Generator> generator;
  odtpack::Generator::Tokens tokens;
};

extern "C" {

const OrtApiBase* ORT_API_CALL odtpack_given_api_base(void) NO_EXCEPTION { return given_base; }

int32_t odtpack_version(void) { return ODTPACK_VERSION; }
void odtpack_free(void* memory) { std::free(memory); }

const char* odtpack_error_code(const odtpack_error* error) { return error->code.c_str(); }
const char* odtpack_error_message(const odtpack_error* error) { return error->message.c_str(); }
const char* odtpack_error_place(const odtpack_error* error) { return error->place.c_str(); }
const char* odtpack_error_hint(const odtpack_error* error) { return error->hint.c_str(); }
void odtpack_error_release(odtpack_error* error) {
  if (error != &out_of_memory) delete error;
}

odtpack_error* odtpack_init(const OrtApiBase* base) {
  return Try(
      [base] {
        const OrtApi* api = base->GetApi(17);
        if (api == nullptr)
          throw odtpack::Error("bad-argument",
                               std::string("ONNX Runtime ") + base->GetVersionString() +
                                   " is older than 1.17.",
                               "", "ship ONNX Runtime 1.17 or newer with the app");
        Ort::InitApi(api);
        given_base = base;
      },
      base);
}
void odtpack_disable_telemetry(void) { odtpack::DisableTelemetry(); }

odtpack_error* odtpack_package_open(const char* folder, odtpack_signature_check check,
                                    void* context, odtpack_package** package) {
  return Try([&] {
    odtpack::Package::SignatureCheck signature;
    if (check != nullptr) {
      signature = [&](const std::string& manifest, const std::string& mark) {
        return check(context, reinterpret_cast<const uint8_t*>(manifest.data()), manifest.size(),
                     reinterpret_cast<const uint8_t*>(mark.data()));
      };
    }
    *package = new odtpack_package{odtpack::Package::Open(folder, signature)};
  });
}
void odtpack_package_release(odtpack_package* package) { delete package; }

odtpack_error* odtpack_manifest_check(const void* bytes, size_t size) {
  return Try([&] {
    odtpack::detail::ReadManifest(std::string(static_cast<const char*>(bytes), size), "manifest.json");
  });
}

size_t odtpack_package_count(const odtpack_package* package, odtpack_list list) {
  return Specs(package, list).size();
}
bool odtpack_package_spec(const odtpack_package* package, odtpack_list list, size_t index,
                          odtpack_spec* spec) {
  const auto& specs = Specs(package, list);
  if (index >= specs.size()) return false;
  const auto& from = specs[index];
  *spec = {from.name.c_str(), from.role.c_str(), from.type,
           from.shape.data(), from.shape.size(), from.class_count,
           from.ignored.has_value(), from.ignored.value_or(0)};
  return true;
}
odtpack_error* odtpack_package_path(const odtpack_package* package, const char* key,
                                    odtpack_text* path) {
  return Try([&] { *path = Text(package->package.Path(key)); });
}
odtpack_error* odtpack_package_step_model(const odtpack_package* package, odtpack_text* path) {
  return Try([&] {
    const auto found = package->package.StepModel();
    *path = found ? Text(*found) : odtpack_text{};
  });
}
odtpack_error* odtpack_package_ort_model(const odtpack_package* package, const char* model,
                                         const char* style, const char* platform,
                                         odtpack_text* path) {
  return Try([&] { *path = Text(package->package.OrtModel(model, style, platform)); });
}
odtpack_error* odtpack_package_session_options(const odtpack_package* package, int32_t threads,
                                               OrtSessionOptions** options) {
  return Try([&] {
    *options = package->package.SessionOptions(Ort::Env(nullptr), threads).release();
  });
}
odtpack_error* odtpack_package_self_check(const odtpack_package* package, const OrtEnv* env) {
  return Try([&] {
    const Borrowed<Ort::Env> borrowed(env);
    odtpack::SelfCheck(borrowed.value, package->package);
  });
}
odtpack_error* odtpack_package_self_check_with(const odtpack_package* package, const OrtEnv* env,
                                               const OrtSessionOptions* options) {
  return Try([&] {
    const Borrowed<Ort::Env> borrowed(env);
    const Borrowed<Ort::SessionOptions> chosen(options);
    odtpack::SelfCheck(borrowed.value, package->package, &chosen.value);
  });
}
odtpack_error* odtpack_add_device(const OrtEnv* env, OrtSessionOptions* options,
                                  const char* library, size_t index) {
  return Try([&] {
    const Borrowed<Ort::Env> borrowed(env);
    Borrowed<Ort::SessionOptions> chosen(options);
    odtpack::AddDevice(borrowed.value, chosen.value, library, index);
  });
}

odtpack_error* odtpack_schedule_check(const odtpack_schedule* schedule) {
  return Try([&] { Schedule(*schedule).Check(); });
}
double odtpack_schedule_factor(const odtpack_schedule* schedule, int64_t step) {
  double factor = std::nan("");
  odtpack_error_release(Try([&] { factor = Schedule(*schedule).Factor(step); }));
  return factor;
}

odtpack_error* odtpack_state_load(const char* path, odtpack_state** state) {
  return Try(
      [&] { *state = new odtpack_state(odtpack::CheckpointState::LoadCheckpoint(path)); });
}
odtpack_error* odtpack_state_load_buffer(const void* bytes, size_t size, odtpack_state** state) {
  return Try([&] {
    const auto* from = static_cast<const uint8_t*>(bytes);
    *state = new odtpack_state(
        odtpack::CheckpointState::LoadCheckpointFromBuffer({from, from + size}));
  });
}
void odtpack_state_release(odtpack_state* state) { delete state; }
odtpack_error* odtpack_state_save(const odtpack_state* state, const char* path,
                                  bool optimizer_state, bool keep_previous) {
  return odtpack_state_save_above(state, path, optimizer_state, keep_previous,
                                  odtpack::detail::kExternalAbove);
}
odtpack_error* odtpack_state_save_above(const odtpack_state* state, const char* path,
                                        bool optimizer_state, bool keep_previous,
                                        uint64_t external_above) {
  return Try([&] {
    odtpack::detail::State& own = *state->state.Internal();
    const odtpack::detail::Gate::Call call(*own.gate);
    odtpack::detail::WriteCheckpoint(path, own, optimizer_state,
                                     static_cast<size_t>(external_above), keep_previous);
  });
}
odtpack_error* odtpack_state_recovered(const odtpack_state* state, odtpack_text* text) {
  return Try([&] {
    const std::string& said = state->state.Recovered();
    *text = said.empty() ? odtpack_text{} : Text(said);
  });
}
bool odtpack_state_is_checked(const odtpack_state* state) { return state->state.IsChecked(); }
bool odtpack_state_is_nominal(const odtpack_state* state) {
  bool nominal = false;
  state->state.Internal()->gate->Await([&] { nominal = state->state.Internal()->nominal; });
  return nominal;
}

size_t odtpack_state_property_count(const odtpack_state* state) {
  size_t count = 0;
  state->state.Internal()->gate->Await([&] { count = state->state.Internal()->properties.size(); });
  return count;
}
odtpack_error* odtpack_state_property_at(const odtpack_state* state, size_t index,
                                         odtpack_text* name, odtpack_property* property) {
  return Try([&] {
    const odtpack::detail::State& from = *state->state.Internal();
    const odtpack::detail::Gate::Call call(*from.gate);
    const auto found = At(from.properties, index);
    *property = HandOut(found->second);
    *name = Text(found->first);
  });
}
odtpack_error* odtpack_state_set_property(odtpack_state* state, const char* name,
                                          const odtpack_property* property) {
  return Try([&] {
    if (property == nullptr) {
      const odtpack::detail::Gate::Call call(*state->state.Internal()->gate);
      state->state.Internal()->properties.erase(name);
    } else if (property->kind == ODTPACK_INT) {
      state->state.AddProperty(name, property->whole);
    } else if (property->kind == ODTPACK_FLOAT) {
      state->state.AddProperty(name, property->real);
    } else {
      state->state.AddProperty(name, std::string(property->text.bytes, property->text.size));
    }
  });
}
odtpack_error* odtpack_state_get_property(const odtpack_state* state, const char* name,
                                          odtpack_property* property) {
  return Try([&] {
    *property = HandOut(state->state.GetProperty(name));
  });
}

size_t odtpack_state_parameter_count(const odtpack_state* state) { return state->names.size(); }
odtpack_error* odtpack_state_parameter_info(const odtpack_state* state, size_t index,
                                            odtpack_text* name, bool* trainable,
                                            ONNXTensorElementDataType* type) {
  return Try([&] {
    const std::string& found = **At(state->names, index);
    const auto& parameter = std::as_const(*state->state.Internal()).parameters.at(found);
    *trainable = parameter.trainable;
    *type = parameter.value.type;
    *name = Text(found);
  });
}
odtpack_error* odtpack_state_parameter(const odtpack_state* state, size_t index, OrtValue** value,
                                       odtpack_memory** memory) {
  return Try([&] {
    const odtpack::detail::State& from = *state->state.Internal();
    const odtpack::detail::Gate::Call call(*from.gate);
    from.RequireValues();
    from.Refresh();
    HandOut(from.parameters.at(**At(state->names, index)).value, value, memory);
  });
}
void odtpack_memory_release(odtpack_memory* memory) { delete memory; }
odtpack_error* odtpack_state_optimizer(const odtpack_state* state, bool* found, int64_t* step,
                                       float* learning_rate, odtpack_text* kind, size_t* moments) {
  return Try([&] {
    const odtpack::detail::Gate::Call call(*state->state.Internal()->gate);
    const auto& optimizer = state->state.Internal()->optimizer;
    *found = optimizer != nullptr;
    if (!optimizer) return;
    *kind = Text(optimizer->kind);
    *step = optimizer->step;
    *learning_rate = optimizer->rate;
    *moments = 0;
    for (const auto& each : optimizer->moments) *moments += each.second.size();
  });
}
odtpack_error* odtpack_state_moment(const odtpack_state* state, size_t index, odtpack_text* name,
                                    size_t* number, size_t* group, OrtValue** value,
                                    odtpack_memory** memory) {
  return Try([&] {
    const odtpack::detail::State& from = *state->state.Internal();
    const odtpack::detail::Gate::Call call(*from.gate);
    from.Refresh();
    const auto& optimizer = from.optimizer;
    const size_t each =
        optimizer && !optimizer->moments.empty() ? optimizer->moments[0].second.size() : 0;
    if (each == 0 || index / each >= optimizer->moments.size())
      throw odtpack::Error("bad-argument", "There is no moment " + std::to_string(index) + ".");
    const auto& [of, vectors] = optimizer->moments[index / each];
    *number = index % each;
    const auto& groups = optimizer->groups;
    const auto holds = [&of = of](const std::vector<std::string>& names) {
      return std::find(names.begin(), names.end(), of) != names.end();
    };
    *group =
        static_cast<size_t>(std::find_if(groups.begin(), groups.end(), holds) - groups.begin());
    HandOut(vectors[*number], value, memory);
    *name = Text(of);
  });
}
odtpack_error* odtpack_state_load_parameters(odtpack_state* state, const char* path) {
  return Try([&] { state->state.LoadParameters(path); });
}
odtpack_error* odtpack_state_carry_over(odtpack_state* state, const odtpack_state* trained,
                                        const char* const* names, size_t count,
                                        bool optimizer_state) {
  return Try([&] {
    std::optional<std::vector<std::string>> given;
    if (names != nullptr) given = Names(names, count);
    odtpack::CarryOver(trained->state, state->state, given, optimizer_state);
  });
}

odtpack_error* odtpack_adapter_save(const odtpack_package* package, const odtpack_state* state,
                                    const char* path) {
  return Try([&] { odtpack::SaveAdapter(package->package, state->state, path); });
}
odtpack_error* odtpack_adapter_load(const odtpack_package* package, odtpack_state* state,
                                    const char* path) {
  return Try([&] { odtpack::LoadAdapter(package->package, state->state, path); });
}

odtpack_error* odtpack_session_create(const OrtEnv* env, const OrtSessionOptions* options,
                                      int32_t threads, const odtpack_package* package,
                                      odtpack_state* state, const odtpack_models* models,
                                      odtpack_session** session) {
  return Try([&] {
    using Path = std::optional<std::string>;
    const odtpack::Package& from = package->package;
    const odtpack_models all = models == nullptr ? odtpack_models{} : *models;
    const auto path = [&](const char* given, const char* key) -> Path {
      if (models == nullptr) return from.Path(key);
      return given == nullptr ? Path() : Path(given);
    };
    const Path training = path(all.training, "training_model");
    const Path evaluation = path(all.evaluation, "eval_model");
    const Path optimizer = path(all.optimizer, "optimizer_model");
    const Path step = models == nullptr ? from.StepModel() : path(all.step, "");
    const Borrowed<Ort::Env> borrowed(env);
    const Ort::SessionOptions own = options == nullptr
                                        ? from.SessionOptions(borrowed.value, threads)
                                        : Ort::SessionOptions(nullptr);
    const Borrowed<Ort::SessionOptions> chosen(
        options == nullptr ? static_cast<const OrtSessionOptions*>(own) : options);
    *session = new odtpack_session(env, chosen.value, state->state, from, training.value(),
                                   evaluation, optimizer, step);
  });
}
odtpack_error* odtpack_session_close(odtpack_session* session) {
  return Try([&] { session->session.Close(); });
}
void odtpack_session_release(odtpack_session* session) { delete session; }

odtpack_error* odtpack_session_run(odtpack_session* session, odtpack_run run,
                                   const OrtValue* const* inputs, size_t count, OrtValue** outputs,
                                   size_t* output_count) {
  return Try([&] {
    if (static_cast<unsigned>(run) > ODTPACK_EVAL_STEP)
      throw odtpack::Error("bad-argument", "There is no such kind of run.");
    const Batch batch(inputs, count);
    odtpack::TrainingSession& own = session->session;
    auto results = run == ODTPACK_STEP_ON      ? own.StepOn(batch.values)
                   : run == ODTPACK_TRAIN_STEP ? own.TrainStep(batch.values)
                                               : own.EvalStep(batch.values);
    *output_count = std::min(*output_count, results.size());
    for (size_t i = 0; i < *output_count; ++i) outputs[i] = results[i].release();
  });
}
odtpack_error* odtpack_session_train_batch(odtpack_session* session, const OrtValue* const* inputs,
                                           size_t count, double* loss) {
  return Try([&] { *loss = session->session.TrainBatch(Batch(inputs, count).values); });
}
odtpack_error* odtpack_session_eval_batch(odtpack_session* session, const OrtValue* const* inputs,
                                          size_t count, odtpack_evaluation* sum) {
  return Try([&] {
    odtpack::Evaluation all{sum->loss_sum, sum->samples, sum->right, sum->labels};
    session->session.EvalBatch(Batch(inputs, count).values, all);
    *sum = {all.loss_sum, all.samples, all.right, all.labels};
  });
}
odtpack_error* odtpack_session_lazy_reset_grad(odtpack_session* session) {
  return Try([&] { session->session.LazyResetGrad(); });
}
odtpack_error* odtpack_session_optimizer_step(odtpack_session* session) {
  return Try([&] { session->session.OptimizerStep(); });
}
bool odtpack_session_has_step_model(const odtpack_session* session) {
  return session->session.HasStepModel();
}
bool odtpack_session_has_kernels(const odtpack_session* session) {
  bool has = false;
  odtpack_error_release(Try([&] { has = session->session.HasKernels(); }));
  return has;
}
int64_t odtpack_session_accumulation_steps(const odtpack_session* session) {
  return session->session.AccumulationSteps();
}
odtpack_error* odtpack_session_step_count(const odtpack_session* session, int64_t* count) {
  return Try([&] { *count = session->session.StepCount(); });
}

odtpack_error* odtpack_session_set_stops_on_not_finite(odtpack_session* session, bool stops) {
  using odtpack::OnNotFinite;
  return Try(
      [&] { session->session.SetOnNotFinite(stops ? OnNotFinite::kStop : OnNotFinite::kSkip); });
}
int64_t odtpack_session_skipped_steps(const odtpack_session* session) {
  return session->session.SkippedSteps();
}
odtpack_error* odtpack_session_last_not_finite(const odtpack_session* session, bool* found,
                                               odtpack_text* code, int64_t* step,
                                               odtpack_text* parameters) {
  return Try([&] {
    const auto& last = session->session.LastNotFinite();
    *found = last.has_value();
    if (!last) return;
    std::string names;
    for (const std::string& name : last->parameters) names += name + '\0';
    *step = last->step;
    *parameters = Text(names);
    *code = Text(last->code);
  });
}

odtpack_error* odtpack_session_set_learning_rate(odtpack_session* session, float rate) {
  return Try([&] { session->session.SetLearningRate(rate); });
}
odtpack_error* odtpack_session_get_learning_rate(const odtpack_session* session, float* rate) {
  return Try([&] { *rate = session->session.GetLearningRate(); });
}
odtpack_error* odtpack_session_set_schedule(odtpack_session* session,
                                            const odtpack_schedule* schedule,
                                            double initial_rate) {
  return Try([&] { session->session.SetSchedule(Schedule(*schedule), initial_rate); });
}
odtpack_error* odtpack_session_proposed_schedule(const odtpack_session* session,
                                                 int64_t total_steps, bool* found,
                                                 odtpack_schedule* schedule, double* rate) {
  return Try([&] {
    const auto proposed = session->session.ProposedSchedule(total_steps);
    *found = proposed.has_value();
    if (!proposed) return;
    const odtpack::Schedule& from = proposed->first;
    const size_t bytes = from.milestones.size() * sizeof(int64_t);
    auto* milestones = static_cast<int64_t*>(std::malloc(bytes + 1));
    if (milestones == nullptr) throw std::bad_alloc();
    std::copy(from.milestones.begin(), from.milestones.end(), milestones);
    const char* const kinds[] = {"constant", "linear", "cosine", "step", "multistep"};
    const auto* kind = std::find(std::begin(kinds), std::end(kinds) - 1, from.kind);
    *schedule = {*kind, from.warmup_steps, from.total_steps, from.period, from.floor, from.gamma,
                 milestones, from.milestones.size()};
    *rate = proposed->second;
  });
}
odtpack_error* odtpack_session_restore_schedule(odtpack_session* session, bool* found) {
  return Try([&] { *found = session->session.RestoreSchedule(); });
}
odtpack_error* odtpack_session_scheduler_step(odtpack_session* session) {
  return Try([&] { session->session.SchedulerStep(); });
}

odtpack_error* odtpack_session_to_buffer(odtpack_session* session, bool only_trainable,
                                         OrtValue** buffer) {
  return Try([&] { *buffer = session->session.ToBuffer(only_trainable).release(); });
}
odtpack_error* odtpack_session_from_buffer(odtpack_session* session, const OrtValue* buffer,
                                           bool only_trainable) {
  return Try([&] {
    const Borrowed<Ort::Value> borrowed(buffer);
    session->session.FromBuffer(borrowed.value, only_trainable);
  });
}
odtpack_error* odtpack_session_export(odtpack_session* session, const char* path,
                                      const char* const* outputs, size_t count) {
  return Try(
      [&] { session->session.ExportModelForInferencing(path, Names(outputs, count)); });
}
odtpack_error* odtpack_session_predictor(odtpack_session* session, const char* const* outputs,
                                         size_t count, OrtSession** predictor) {
  return Try([&] {
    *predictor =
        session->session.InferenceSession(session->env.value, Names(outputs, count)).release();
  });
}

odtpack_error* odtpack_generator_create(const OrtEnv* env, const OrtSessionOptions* options,
                                        int32_t threads, const odtpack_package* package,
                                        odtpack_generator** generator) {
  return Try([&] {
    const Borrowed<Ort::Env> borrowed(env);
    const Borrowed<Ort::SessionOptions> chosen(options);
    const auto& from = package->package;
    *generator = new odtpack_generator{
        options == nullptr
            ? std::make_shared<odtpack::Generator>(borrowed.value, from, threads)
            : std::make_shared<odtpack::Generator>(borrowed.value, from, chosen.value)};
  });
}
void odtpack_generator_release(odtpack_generator* generator) { delete generator; }
odtpack_error* odtpack_generator_add_adapter(odtpack_generator* generator, const char* name,
                                             const char* path) {
  return Try([&] { generator->generator->AddAdapter(name, std::string(path)); });
}
odtpack_error* odtpack_generator_add_state(odtpack_generator* generator, const char* name,
                                           const odtpack_state* state) {
  return Try([&] { generator->generator->AddAdapter(name, state->state); });
}
odtpack_error* odtpack_generator_remove_adapter(odtpack_generator* generator, const char* name) {
  return Try([&] { generator->generator->RemoveAdapter(name); });
}
odtpack_error* odtpack_generator_logits(odtpack_generator* generator, const int64_t* tokens,
                                        size_t count, const char* adapter, OrtValue** logits) {
  return Try([&] {
    const auto found =
        generator->generator->Logits({tokens, tokens + count}, adapter == nullptr ? "" : adapter);
    const Ort::AllocatorWithDefaultOptions allocator;
    const auto size = static_cast<int64_t>(found.size());
    Ort::Value value = Ort::Value::CreateTensor<float>(allocator, &size, 1);
    std::copy(found.begin(), found.end(), value.GetTensorMutableData<float>());
    *logits = value.release();
  });
}
odtpack_error* odtpack_tokens_begin(odtpack_generator* generator, const int64_t* prompt,
                                    size_t count, const odtpack_generate_options* options,
                                    odtpack_tokens** tokens) {
  return Try([&] {
    odtpack::GenerateOptions all;
    if (options != nullptr) {
      all = {options->adapter == nullptr ? "" : options->adapter,
             options->max_tokens,
             {options->stop, options->stop + options->stop_count},
             options->temperature,
             static_cast<size_t>(options->top_k),
             options->top_p,
             options->seed};
    }
    const auto& from = generator->generator;
    *tokens = new odtpack_tokens{from, from->Begin({prompt, prompt + count}, all)};
  });
}
odtpack_error* odtpack_tokens_next(odtpack_tokens* tokens, bool* found, int64_t* token) {
  return Try([&] {
    const auto next = tokens->tokens.Next();
    *found = next.has_value();
    *token = next.value_or(0);
  });
}
void odtpack_tokens_release(odtpack_tokens* tokens) { delete tokens; }

odtpack_error* odtpack_benchmark(const OrtEnv* env, const char* kit, const char* folder,
                                 int32_t threads, uint64_t memory_limit, uint64_t file_bytes,
                                 double load_minutes, odtpack_text* json) {
  return Try([&] {
    const Borrowed<Ort::Env> borrowed(env);
    std::string found = odtpack::Benchmark(borrowed.value, folder, threads,
                                           static_cast<size_t>(memory_limit),
                                           static_cast<size_t>(file_bytes), load_minutes);
    const std::string own = "\"kit\": \"cpp\"";
    *json = Text(found.replace(found.find(own), own.size(), std::string("\"kit\": \"") + kit + "\""));
  });
}

}  // extern "C"
