// Models of a package on ONNX Runtime, run on memory that stays where it is.
#pragma once

#include <unordered_map>

#include "odtpack/checkpoint.hpp"
#include "odtpack/package.hpp"

#if defined(ODTPACK_KERNELS)  // they are linked: runtime/native
extern "C" OrtStatus* ORT_API_CALL odtpack_register_kernels(OrtSessionOptions*, const OrtApiBase*);
#endif

namespace odtpack {

/// What the batches of an evaluation add up to; each sample counts alike.
struct Evaluation {
  double loss_sum = 0;  // over the samples
  int64_t samples = 0, right = 0, labels = 0;

  double Loss() const {
    if (samples == 0) throw Error("empty-batch", "There is no batch to evaluate.");
    return loss_sum / static_cast<double>(samples);
  }
  /// The share of labels whose class has the highest score; none without labels or such scores.
  std::optional<double> Accuracy() const {
    if (labels == 0) return {};
    return static_cast<double>(right) / static_cast<double>(labels);
  }
};

}  // namespace odtpack

namespace odtpack::detail {

[[noreturn]] inline void ThrowMismatch(const std::string& reason) {
  throw Error("model-mismatch", "The package does not go with the checkpoint: " + reason + ".", "",
              "use the models and the checkpoint of one package");
}

constexpr const char* kKernels = "odtpack.native";  // the domain; of session options: "0" for none

/// How many operators of each kind a session must know, by the names of those in its models: a
/// session keeps some kilobytes of each.
inline std::string CountsOf(const std::set<std::string>& operators) {
  std::string text;
  for (const std::string kind : {"Kernel", "Codes", "SignedCodes"}) {
    size_t count = 0;
    for (const std::string& name : operators) {
      if (name.compare(0, kind.size(), kind) != 0) continue;
      const std::string number = name.substr(kind.size());
      if (number.empty() || number.size() > 4 || number.find_first_not_of("0123456789") != number.npos)
        continue;
      count = std::max<size_t>(count, 1 + std::stoul(number));
    }
    text += (text.empty() ? "" : " ") + std::to_string(count);
  }
  return text;
}

/// Register the kernels of these operators with options, unless there are none, or those or the
/// environment say otherwise. Returns whether they are; the first failure is said, as bodies
/// compute the same.
inline bool AddKernels(Ort::SessionOptions& options, const std::set<std::string>& operators) {
  if (operators.empty()) return false;
#if defined(ODTPACK_KERNELS)
  const char* const wanted = std::getenv("ODTPACK_NATIVE");
  if (options.HasConfigEntry(kKernels) || (wanted != nullptr && std::string(wanted) == "0")) return false;
  options.AddConfigEntry("odtpack.native.operators", CountsOf(operators).c_str());
  const Ort::Status status(odtpack_register_kernels(options, OrtGetApiBase()));
  if (status.IsOK()) return true;
  static std::once_flag said;
  std::call_once(said, [&status] {
    std::fprintf(stderr, "odtpack: native kernels are not used: %s\n",
                 status.GetErrorMessage().c_str());
  });
#else
  static_cast<void>(options);
#endif
  return false;
}

/// The app's environment, which this does not free. The app may move its Ort::Env meanwhile.
struct GivenEnv : Ort::Env {
  GivenEnv(const Ort::Env& env)
      : Ort::Env(const_cast<OrtEnv*>(static_cast<const OrtEnv*>(env))) {}
  ~GivenEnv() { release(); }
};

/// A session of what its constructor takes; `path` says what could not be loaded.
template <class... From>
Ort::Session Load(const std::string& path, const From&... from) try {
  return Ort::Session(from...);
} catch (const Ort::Exception& error) {
  throw Error("model-not-loadable",
              "ONNX Runtime " + Ort::GetVersionString() + " cannot load it: " + error.what(), path,
              "build the package for this ONNX Runtime");
}
inline Ort::Session OpenSession(const Ort::Env& env, const std::string& path,
                                const Ort::SessionOptions& options) {
  if (path.find('\0') != path.npos || !fs::is_regular_file(path))
    throw Error("model-not-found", "There is no model " + path + ".");
  return Load(path, env, path.c_str(), options);
}

/// While it exists, sessions that ask for the environment's allocator get one arena together, which
/// they own and which goes with the last of them. An arena that the app has registered is replaced
/// from ONNX Runtime 1.24 on: the app registers its own after the package is open.
class SharedArena {
 public:
  /// `session` is what the manifest says of sessions.
  SharedArena(const Ort::Env& env, const Json& session)
      : env_(const_cast<OrtEnv*>(static_cast<const OrtEnv*>(env))) {
    std::unordered_map<std::string, size_t> sizes;
    for (const char* key : {"initial_chunk_size_bytes", "max_dead_bytes_per_chunk"}) {
      if (!session[key]) continue;
      sizes[key] = static_cast<size_t>(session[key].Whole());
    }
    const Ort::ArenaCfg arena(sizes);
    ours_ = Ort::Status(Ort::GetApi().CreateAndRegisterAllocator(env_, memory_, arena)).IsOK();
  }
  ~SharedArena() {
    if (ours_) Ort::Status(Ort::GetApi().UnregisterAllocator(env_, memory_));
  }
  SharedArena(const SharedArena&) = delete;
  SharedArena& operator=(const SharedArena&) = delete;

 private:
  OrtEnv* env_;
  Ort::MemoryInfo memory_ = Ort::MemoryInfo::CreateCpu(OrtArenaAllocator, OrtMemTypeDefault);
  bool ours_ = false;
};

/// Ends the runs of a session that is closed. Not for those that write over what no copy is kept of.
class Ending {
 public:
  void Ask() {
    asked_ = true;
    options_.SetTerminate();
  }
  const OrtRunOptions* Options() const { return options_; }
  /// What to say of a run that failed because it was ended.
  void Check() const {
    if (asked_) throw Error("closed", "The session was closed, and that ended this call.");
  }

 private:
  Ort::RunOptions options_;
  std::atomic<bool> asked_{false};
};

/// Arguments of a session's run that stand at fixed addresses; nothing is copied.
struct Arguments {
  std::vector<const char*> input_names, output_names;
  std::vector<const OrtValue*> inputs;
  std::vector<OrtValue*> outputs;

  /// Without an `ending` the run always goes on to its end.
  void Run(Ort::Session& session, const char* hint, const Ending* ending = nullptr) {
    const Ort::Status status(
        Ort::GetApi().Run(session, ending == nullptr ? nullptr : ending->Options(),
                          input_names.data(), inputs.data(), inputs.size(), output_names.data(),
                          output_names.size(), outputs.data()));
    if (status.IsOK()) return;
    if (ending != nullptr) ending->Check();
    throw Error("run-failed",
                "ONNX Runtime failed in the middle of a step: " + status.GetErrorMessage(), "",
                hint);
  }
};

/// Tensors by the names that models call them, with their OrtValues.
class Bound {
 public:
  /// What a device takes from the processor in each run.
  void Add(const std::string& name, const Tensor& tensor) {
    bound_.insert_or_assign(name, std::make_pair(tensor, tensor.Value()));
  }
  /// What lives on a device, if there is one.
  void Add(const std::string& name, const Tensor& tensor, Twins::Role role) {
    if (twins == nullptr) return Add(name, tensor);
    bound_.insert_or_assign(name, std::make_pair(tensor, twins->Value(tensor, role)));
  }
  const std::pair<Tensor, Ort::Value>* Find(const std::string& name) const {
    const auto found = bound_.find(name);
    return found == bound_.end() ? nullptr : &found->second;
  }

  std::shared_ptr<Twins> twins{};

 private:
  std::map<std::string, std::pair<Tensor, Ort::Value>> bound_;
};

/// Check that a batch is what the manifest says of the inputs.
inline void CheckBatch(const std::vector<Spec>& inputs, const std::vector<Ort::Value>& values) {
  if (values.size() != inputs.size()) {
    std::string wanted;
    for (const Spec& spec : inputs)
      wanted += (wanted.empty() ? "" : ", ") + spec.name + ": " + spec.Description();
    throw Error("input-count", std::to_string(values.size()) + " inputs were given.", "",
                "pass, in this order, " + wanted);
  }
  std::map<std::string, std::pair<int64_t, std::string>> sizes;
  for (size_t i = 0; i < values.size(); ++i) {
    const Spec& spec = inputs[i];
    const auto refuse = [&spec](const char* code, const std::string& problem) {
      throw Error(code,
                  "Input '" + spec.name + "' must be " + spec.Description() + ", and " + problem + ".");
    };
    if (!values[i] || !values[i].IsTensor()) refuse("input-type", "it is not a tensor");
    const auto info = values[i].GetTensorTypeAndShapeInfo();
    const Shape shape = info.GetShape();
    const auto found = [&shape] { return "its shape is " + Text(shape); };
    if (const Type type = info.GetElementType(); type != spec.type)
      refuse("input-type", std::string("its elements are ") + TypeInfo(type).first);
    if (!spec.Fits(shape)) refuse("input-shape", found());
    for (size_t axis = 0; axis < spec.shape.size(); ++axis) {
      if (shape[axis] == 0 && spec.shape[axis] != 0)
        refuse("empty-batch", "it is empty: " + found());
      const std::string& symbol = spec.symbols[axis];
      if (symbol.empty()) continue;
      const auto& [size, owner] = sizes.try_emplace(symbol, shape[axis], spec.name).first->second;
      if (size != shape[axis])
        refuse("input-sizes-differ",
               "'" + symbol + "' is " + std::to_string(size) + " in '" + owner + "': " + found());
    }
  }
  for (size_t i = 0; i < values.size(); ++i) {
    const Spec& spec = inputs[i];
    const bool tokens = spec.name == "input_ids" || spec.name == "decoder_input_ids";
    if (spec.type != kInt64 || (spec.class_count == 0 && !tokens)) continue;
    const auto place = values[i].GetTensorMemoryInfo();
    if (place.GetDeviceType() != OrtMemoryInfoDeviceType_CPU &&
        place.GetMemoryType() == OrtMemTypeDefault) {  // of others the processor can read as well
      if (spec.class_count == 0) continue;
      throw Error("input-type",
                  "Input '" + spec.name + "' lies on a device, where labels cannot be checked.", "",
                  "pass a tensor in the processor's memory");
    }
    const auto* labels = values[i].GetTensorData<int64_t>();
    for (size_t k = 0; k < values[i].GetTensorTypeAndShapeInfo().GetElementCount(); ++k) {
      if (tokens && labels[k] < 0)  // ONNX's Gather counts it from the end of its table
        throw Error("bad-prompt",
                    "Input '" + spec.name + "' holds " + std::to_string(labels[k]) +
                        ", and tokens are numbered from 0.",
                    "", "pass the numbers that the tokenizer gives: -100 is for labels only");
      if (spec.class_count == 0) continue;
      if ((labels[k] >= 0 && labels[k] < spec.class_count) || labels[k] == spec.ignored) continue;
      throw Error("label-out-of-range",
                  "Element " + std::to_string(k) + " of '" + spec.name + "' is " +
                      std::to_string(labels[k]) + ", and the classes are numbered 0 to " +
                      std::to_string(spec.class_count - 1) + ".",
                  "", "number the classes from 0, or set ignore_index for labels to skip");
    }
  }
}

/// A loss as a number, of whatever type it is.
inline double AsDouble(const Ort::Value& value) {
  return Element(value.GetTensorTypeAndShapeInfo().GetElementType(), value.GetTensorRawData(), 0);
}

/// Add a batch and its results to an evaluation.
inline void Add(Evaluation& sum, const Package& package, const std::vector<Ort::Value>& batch,
                const std::vector<Ort::Value>& results) {
  Shape shape;  // of the first input that has an axis, along which Python counts as well
  for (const auto& input : batch)
    if (shape.empty()) shape = input.GetTensorTypeAndShapeInfo().GetShape();
  const int64_t size = shape.empty() ? 1 : shape[0];
  sum.loss_sum += AsDouble(results[0]) * static_cast<double>(size);
  sum.samples += size;
  const auto find = [](const std::vector<Spec>& specs, auto is) {
    return static_cast<size_t>(std::find_if(specs.begin(), specs.end(), is) - specs.begin());
  };
  const auto &inputs = package.Inputs(), &outputs = package.EvaluationOutputs();
  const size_t place = find(inputs, [](const Spec& spec) {
    return spec.role == "labels" && spec.class_count > 0 && spec.type == kInt64;
  });
  if (place == inputs.size()) return;
  const Spec& labels = inputs[place];
  const size_t output = find(outputs, [&labels](const Spec& spec) {
    return spec.role == "prediction" && IsFloating(spec.type) && spec.shape.size() > 1 &&
           spec.shape[1] == labels.class_count && spec.shape.size() == labels.shape.size() + 1;
  });
  if (output == outputs.size()) return;
  const Type type = outputs[output].type;
  const auto classes = static_cast<size_t>(labels.class_count);
  const size_t count = batch[place].GetTensorTypeAndShapeInfo().GetElementCount();
  if (!IsTensorOf(type, results[output]) || count == 0) return;
  const auto info = results[output].GetTensorTypeAndShapeInfo();
  if (!outputs[output].Fits(info.GetShape()) || info.GetElementCount() != count * classes) return;
  const size_t inner = count / static_cast<size_t>(info.GetShape()[0]);
  const auto* truth = batch[place].GetTensorData<int64_t>();
  const void* scores = results[output].GetTensorRawData();
  for (size_t i = 0; i < count; ++i) {
    if (truth[i] == labels.ignored) continue;
    const auto score = [&](size_t of) {
      return Element(type, scores, (i / inner * classes + of) * inner + i % inner);
    };
    size_t best = 0;  // as numpy: of equal ones the first, and NaN before all others
    for (size_t of = 1; of < classes; ++of)
      if (!(score(of) <= score(best)) && !std::isnan(score(best))) best = of;
    sum.right += truth[i] == static_cast<int64_t>(best);
    ++sum.labels;
  }
}

/// A training, step or evaluation model.
class Model {
 public:
  Model() = default;
  Model(const Model&) = delete;
  Model& operator=(const Model&) = delete;
  virtual ~Model() = default;
  /// Compute a batch, which CheckBatch has looked at; returns the user's outputs, the loss first.
  virtual std::vector<Ort::Value> Run(const std::vector<Ort::Value>& values) = 0;
};

/// A model whose parameters and what is kept of them stand in bound memory.
class Graph : public Model {
 public:
  /// Refers to the package, its `outputs` among it, and to the tensors in `bound`; `hint` says what
  /// to do after a run that failed.
  Graph(Ort::Session session, const Package& package, const std::vector<Spec>& outputs,
        const Bound& bound, const Ending* ending,
        const char* hint = "nothing was changed by it")
      : session_(std::move(session)),
        inputs_(package.Inputs()),
        ending_(ending),
        hint_(hint),
        loss_(Zeros(outputs[0].type, {})) {
    for (size_t i = 0; i < session_.GetInputCount(); ++i) {
      names_.push_back(session_.GetInputNameAllocated(i, allocator_).get());
      arguments_.inputs.push_back(
          Bind(inputs_, input_places_, i, session_.GetInputTypeInfo(i), bound));
      arguments_.input_names.push_back(names_.back().c_str());
    }
    for (size_t i = 0; i < session_.GetOutputCount(); ++i) {
      names_.push_back(session_.GetOutputNameAllocated(i, allocator_).get());
      if (names_.back().rfind("update.order.", 0) == 0) continue;  // it only orders the nodes
      arguments_.outputs.push_back(Bind(outputs, output_places_, arguments_.outputs.size(),
                                        session_.GetOutputTypeInfo(i), bound));
      arguments_.output_names.push_back(names_.back().c_str());
    }
    if (input_places_.size() != inputs_.size() || output_places_.size() != outputs.size()) {
      ThrowMismatch("a model lacks an input or output of the manifest");
    }
    if (outputs[0].shape.empty()) loss_value_ = loss_.Value();
  }

  std::vector<Ort::Value> Run(const std::vector<Ort::Value>& values) override {
    for (size_t i = 0; i < values.size(); ++i) arguments_.inputs[input_places_[i]] = values[i];
    for (const auto& place : output_places_) arguments_.outputs[place.second] = nullptr;
    if (loss_value_) arguments_.outputs[output_places_[0]] = loss_value_;
    arguments_.Run(session_, hint_, ending_);
    std::vector<Ort::Value> results;
    for (const auto& place : output_places_) {
      if (place.first > 0 || !loss_value_) {
        results.emplace_back(arguments_.outputs[place.second]);
        continue;
      }
      // A copy, which the caller may keep while the next step runs.
      results.push_back(Ort::Value::CreateTensor(allocator_, nullptr, 0, loss_.type));
      std::memcpy(results[0].GetTensorMutableRawData(), loss_.data.get(), loss_.Bytes());
    }
    return results;
  }

 private:
  using Places = std::map<size_t, size_t>;  // from the manifest's order to the model's

  OrtValue* Bind(const std::vector<Spec>& specs, Places& places, size_t index,
                 const Ort::TypeInfo& found, const Bound& bound) const {
    const std::string& name = names_.back();
    if (found.GetONNXType() != ONNX_TYPE_TENSOR) ThrowMismatch("'" + name + "' is no tensor");
    const auto info = found.GetTensorTypeAndShapeInfo();
    Shape shape = info.GetShape();
    for (size_t i = 0; i < specs.size(); ++i) {
      if (specs[i].name != name) continue;
      if (info.GetElementType() != specs[i].type) ThrowMismatch("the type of '" + name + "'");
      places[i] = index;
      return nullptr;
    }
    const auto* own = bound.Find(name);
    if (own == nullptr) ThrowMismatch("'" + name + "' belongs to no parameter");
    for (size_t i = 0; i < std::min(shape.size(), own->first.shape.size()); ++i) {
      if (shape[i] < 0) shape[i] = own->first.shape[i];
    }
    if (info.GetElementType() != own->first.type || (!shape.empty() && shape != own->first.shape)) {
      ThrowMismatch("'" + name + "' is " + own->first.Description() + " in the checkpoint");
    }
    return const_cast<OrtValue*>(static_cast<const OrtValue*>(own->second));
  }

  Ort::AllocatorWithDefaultOptions allocator_;
  Ort::Session session_;
  const std::vector<Spec>& inputs_;
  const Ending* ending_;
  const char* hint_;
  std::deque<std::string> names_;
  Arguments arguments_;
  Places input_places_, output_places_;
  Tensor loss_;
  Ort::Value loss_value_{nullptr};
};

}  // namespace odtpack::detail
