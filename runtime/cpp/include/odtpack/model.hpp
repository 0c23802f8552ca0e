// Models of a package on ONNX Runtime, run on memory that stays where it is.
#pragma once

#include "odtpack/checkpoint.hpp"
#include "odtpack/package.hpp"

namespace odtpack::detail {

[[noreturn]] inline void ThrowMismatch(const std::string& reason) {
  throw Error("model-mismatch", "The package does not go with the checkpoint: " + reason + ".", "",
              "use the models and the checkpoint of one package");
}

inline Ort::Session OpenSession(const Ort::Env& env, const std::string& path,
                                const Ort::SessionOptions& options) {
  if (!fs::is_regular_file(path)) throw Error("model-not-found", "There is no model " + path + ".");
  try {
    return Ort::Session(env, path.c_str(), options);
  } catch (const Ort::Exception& error) {
    throw Error("model-not-loadable",
                "ONNX Runtime " + Ort::GetVersionString() + " cannot load it: " + error.what(),
                path, "build the package for this ONNX Runtime");
  }
}

/// While it exists, sessions that ask for the environment's allocator get one arena together, which
/// they own and which goes with the last of them. An arena that the app has registered is replaced
/// from ONNX Runtime 1.24 on: the app registers its own after the package is open.
class SharedArena {
 public:
  explicit SharedArena(const Ort::Env& env)
      : env_(const_cast<OrtEnv*>(static_cast<const OrtEnv*>(env))) {
    ours_ = Ort::Status(Ort::GetApi().CreateAndRegisterAllocator(env_, memory_, nullptr)).IsOK();
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

/// Arguments of a session's run that stand at fixed addresses; nothing is copied.
struct Arguments {
  std::vector<const char*> input_names, output_names;
  std::vector<const OrtValue*> inputs;
  std::vector<OrtValue*> outputs;

  void Run(Ort::Session& session, const char* hint) {
    const Ort::Status status(Ort::GetApi().Run(session, nullptr, input_names.data(), inputs.data(),
                                               inputs.size(), output_names.data(),
                                               output_names.size(), outputs.data()));
    if (!status.IsOK())
      throw Error("run-failed", "ONNX Runtime: " + status.GetErrorMessage(), "", hint);
  }
};

/// Tensors by the names that models call them, with their OrtValues.
class Bound {
 public:
  void Add(const std::string& name, const Tensor& tensor) {
    bound_.insert_or_assign(name, std::make_pair(tensor, tensor.Value()));
  }
  const std::pair<Tensor, Ort::Value>* Find(const std::string& name) const {
    const auto found = bound_.find(name);
    return found == bound_.end() ? nullptr : &found->second;
  }

 private:
  std::map<std::string, std::pair<Tensor, Ort::Value>> bound_;
};

/// A training or evaluation model whose parameters, gradients and state stand in bound memory.
class Graph {
 public:
  /// Refers to the package, its `outputs` among it, and to the tensors in `bound`.
  Graph(Ort::Session session, const Package& package, const std::vector<Spec>& outputs,
        const Bound& bound)
      : session_(std::move(session)),
        inputs_(package.Inputs()),
        loss_(Zeros(outputs[0].type, {})) {
    for (size_t i = 0; i < session_.GetInputCount(); ++i) {
      names_.push_back(session_.GetInputNameAllocated(i, allocator_).get());
      arguments_.inputs.push_back(
          Bind(inputs_, input_places_, i, session_.GetInputTypeInfo(i), bound));
      arguments_.input_names.push_back(names_.back().c_str());
    }
    for (size_t i = 0; i < session_.GetOutputCount(); ++i) {
      names_.push_back(session_.GetOutputNameAllocated(i, allocator_).get());
      arguments_.outputs.push_back(
          Bind(outputs, output_places_, i, session_.GetOutputTypeInfo(i), bound));
      arguments_.output_names.push_back(names_.back().c_str());
    }
    if (input_places_.size() != inputs_.size() || output_places_.size() != outputs.size()) {
      ThrowMismatch("a model lacks an input or output of the manifest");
    }
    if (outputs[0].shape.empty()) loss_value_ = loss_.Value();
  }

  std::vector<Ort::Value> Run(const std::vector<Ort::Value>& values) {
    CheckBatch(values);
    for (size_t i = 0; i < values.size(); ++i) arguments_.inputs[input_places_[i]] = values[i];
    for (const auto& place : output_places_) arguments_.outputs[place.second] = nullptr;
    if (loss_value_) arguments_.outputs[output_places_[0]] = loss_value_;
    arguments_.Run(session_, "call LazyResetGrad(): gradients may hold part of the step");
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

  void CheckBatch(const std::vector<Ort::Value>& values) const {
    if (values.size() != inputs_.size()) {
      std::string wanted;
      for (const Spec& spec : inputs_) wanted += " " + spec.name + ": " + spec.Description();
      throw Error("input-count", std::to_string(values.size()) + " inputs were given.", "",
                  "pass, in this order," + wanted);
    }
    std::map<std::string, int64_t> sizes;
    for (size_t i = 0; i < values.size(); ++i) {
      const Spec& spec = inputs_[i];
      const auto require = [&spec](bool good, const char* code, const std::string& problem) {
        if (!good)
          throw Error(code, "Input '" + spec.name + "' must be " + spec.Description() + ", and " +
                                problem + ".");
      };
      require(values[i] && values[i].IsTensor(), "input-type", "it is no tensor");
      const auto info = values[i].GetTensorTypeAndShapeInfo();
      const Shape shape = info.GetShape();
      require(info.GetElementType() == spec.type, "input-type",
              std::string("its elements are ") + TypeInfo(info.GetElementType()).first);
      require(spec.Fits(shape), "input-shape", "its shape is " + Text(shape));
      for (size_t axis = 0; axis < spec.shape.size(); ++axis) {
        require(shape[axis] > 0 || spec.shape[axis] == 0, "empty-batch", "it is empty");
        const std::string& symbol = spec.symbols[axis];
        require(symbol.empty() || sizes.emplace(symbol, shape[axis]).first->second == shape[axis],
                "input-sizes-differ", "'" + symbol + "' is another in an input before");
      }
    }
    for (size_t i = 0; i < values.size(); ++i) {
      const Spec& spec = inputs_[i];
      if (spec.name != "labels" || spec.type != kInt64 || spec.class_count == 0) continue;
      const auto* labels = values[i].GetTensorData<int64_t>();
      for (size_t k = 0; k < values[i].GetTensorTypeAndShapeInfo().GetElementCount(); ++k) {
        if ((labels[k] >= 0 && labels[k] < spec.class_count) || labels[k] == spec.ignored) continue;
        throw Error("label-out-of-range", "Element " + std::to_string(k) + " of 'labels' is " +
                                              std::to_string(labels[k]) +
                                              ", and the classes are numbered 0 to " +
                                              std::to_string(spec.class_count - 1) + ".");
      }
    }
  }

  Ort::AllocatorWithDefaultOptions allocator_;
  Ort::Session session_;
  const std::vector<Spec>& inputs_;
  std::deque<std::string> names_;
  Arguments arguments_;
  Places input_places_, output_places_;
  Tensor loss_;
  Ort::Value loss_value_{nullptr};
};

/// The first axis of a parameter's columns, and its rows and columns: of all cuts between two
/// axes the one with the fewest of them together.
inline std::pair<size_t, Shape> MatrixOf(const Shape& shape) {
  const auto product = [&shape](size_t from, size_t to) {
    return std::accumulate(shape.begin() + static_cast<long>(from),
                           shape.begin() + static_cast<long>(to), int64_t{1},
                           std::multiplies<int64_t>());
  };
  std::pair<size_t, Shape> best = {0, {1, product(0, shape.size())}};
  for (size_t i = 1; i < shape.size(); ++i) {
    const Shape sides = {product(0, i), product(i, shape.size())};
    if (i == 1 || sides[0] + sides[1] < best.second[0] + best.second[1]) best = {i, sides};
  }
  return best;
}

/// An optimizer model and what it carries; continues the state's optimizer if there is one.
class Optimizer {
 public:
  Optimizer(Ort::Session session, const Json& manifest, State& state,
            const std::vector<const Spec*>& trainable)
      : session_(std::move(session)), state_(state), inputs_(manifest["layout"].Texts("inputs")) {
    if (trainable.empty()) throw Error("nothing-trainable", "The checkpoint has nothing to train.");
    const Json& layout = manifest["layout"];
    const std::string run = layout.Get<std::string>("run", "chunks");
    vectors_.push_back({"params", {0, 1}, state.flat, {}});
    vectors_.push_back({"gradients", {0, 1}, state.gradients, {}});
    for (const Json& entry : layout.Get<Json::List>("state", {})) {
      const auto axes = entry["axes"] ? entry.Wholes("axes") : Shape{0, 1};
      vectors_.push_back({entry.Get<std::string>("name"),
                          {axes.begin(), axes.end()},
                          run == "parameters" ? Tensor{} : Zeros(state.flat.type, state.flat.shape),
                          {}});
    }
    for (const Vector& vector : vectors_) {
      if (vector.name != "gradients") output_names_.push_back(vector.name + ".out");
    }
    PlaceState(trainable, manifest["optimizer"].Get<std::string>("kind"));
    std::map<std::string, size_t> groups;
    for (const Json& group : manifest.Get<Json::List>("groups", {})) {
      for (const auto& name : group.Texts("parameters")) groups[name] = rates_.size();
      AddGroup(group.Get<double>("learning_rate_scale"), group.Get<double>("weight_decay"),
               group.Texts("parameters"));
    }
    if (rates_.empty()) {
      std::vector<std::string> names;
      for (const Spec* spec : trainable) groups[spec->name] = 0, names.push_back(spec->name);
      AddGroup(1, 0, names);
    }
    for (const Spec* spec : trainable) {
      if (groups.count(spec->name) == 0) Json::Fail("'" + spec->name + "' is in no group");
    }
    SetRate(state.optimizer->rate);
    const int64_t chunk = std::max<int64_t>(layout.Whole("chunk_elements", 131072), 1);
    for (size_t i = 0, next = 0; i < trainable.size(); i = next) {
      const size_t group = groups[trainable[i]->name];
      next = i + 1;
      if (run == "parameters") {
        AddParameterRun(*trainable[i], i, group);
        continue;
      }
      while (next < trainable.size() && groups[trainable[next]->name] == group) ++next;
      const int64_t stop = next < trainable.size() ? trainable[next]->offset : state.flat.shape[0];
      for (int64_t at = trainable[i]->offset, size = 0; at < stop; at += size) {
        size = run == "whole" ? stop - at : std::min(chunk, stop - at);
        std::map<std::string, Tensor> slices;
        for (const Vector& vector : vectors_) slices[vector.name] = vector.whole.From(at, {size});
        AddRun(slices, group);
      }
    }
  }

  void Step() {
    *step_.As<int64_t>() = state_.optimizer->step + 1;
    if (std::count(inputs_.begin(), inputs_.end(), "gradient_norm") > 0) {
      if (norm_.type == kDouble)
        *norm_.As<double>() = Norm(state_.gradients.As<double>());
      else
        *norm_.As<float>() = static_cast<float>(Norm(state_.gradients.As<float>()));
    }
    for (Arguments& run : runs_) {
      run.Run(session_, "load the last checkpoint: parameters may hold part of the step");
    }
    ++state_.optimizer->step;
  }

  void SetRate(float rate) {
    if (!std::isfinite(rate)) throw Error("bad-learning-rate", "The learning rate is not finite.");
    state_.optimizer->rate = rate;
    for (const auto& [tensor, scale] : rates_)
      *tensor.As<float>() = static_cast<float>(double{rate} * scale);
  }

 private:
  struct Vector {
    std::string name;
    std::set<int64_t> axes;     // of a parameter as a matrix: those that are kept
    Tensor whole;               // one flat vector, or
    std::vector<Tensor> parts;  // one tensor for each parameter
  };

  /// Give every moment its place, and take over those of the loaded state.
  void PlaceState(const std::vector<const Spec*>& trainable, const std::string& kind) {
    OptimizerState loaded = state_.optimizer.value_or(OptimizerState{});
    OptimizerState placed{loaded.step, loaded.rate, {}, {}, kind};
    std::map<std::string, std::vector<Tensor>> old(loaded.moments.begin(), loaded.moments.end());
    const size_t kept = vectors_.size() - 2, count = old.empty() ? 0 : old.begin()->second.size();
    bool same = count == kept && (loaded.kind.empty() || loaded.kind == kind), idle = true;
    for (const auto& [name, moments] : old) {
      for (const Tensor& moment : moments) {
        idle = idle && std::all_of(moment.data.get(), moment.data.get() + moment.Bytes(),
                                   [](uint8_t byte) { return byte == 0; });
      }
    }
    for (const Spec* spec : trainable) {
      std::vector<Tensor> moments;
      for (size_t v = 2; v < vectors_.size(); ++v) {
        Vector& vector = vectors_[v];
        Shape shape = spec->shape;
        for (size_t i = 0; i < shape.size(); ++i) {
          if (vector.axes.count(i >= MatrixOf(spec->shape).first ? 1 : 0) == 0) shape[i] = 1;
        }
        vector.parts.push_back(vector.whole.data ? vector.whole.From(spec->offset, shape)
                                                 : Zeros(state_.flat.type, shape));
        moments.push_back(vector.parts.back());
        same = same && old.count(spec->name) > 0 && old[spec->name][v - 2].shape == shape;
      }
      if (kept > 0) placed.moments.emplace_back(spec->name, std::move(moments));
    }
    // The reference saves one moment per parameter with SGD, and never uses it.
    if (!same && !(idle && (loaded.step == 0 || (count == 1 && kept == 0)))) {
      throw Error("optimizer-mismatch", "The checkpoint holds the state of another optimizer.", "",
                  "use the optimizer it was saved with, or a checkpoint without optimizer state");
    }
    state_.optimizer.reset();
    loaded.moments.clear();
    for (auto& [name, moments] : placed.moments) {
      for (size_t i = 0; same && i < kept; ++i) moments[i].CopyFrom(old[name][i].data.get());
      old.erase(name);  // what was moved is freed, so that one at a time exists twice
    }
    state_.optimizer = std::move(placed);
  }

  void AddGroup(double scale, double decay, const std::vector<std::string>& names) {
    state_.optimizer->groups.push_back(names);
    rates_.emplace_back(Zeros(kFloat, {1}), scale);
    decays_.push_back(Zeros(state_.flat.type, {1}));
    if (state_.flat.type == kDouble)
      *decays_.back().As<double>() = decay;
    else
      *decays_.back().As<float>() = static_cast<float>(decay);
  }

  void AddParameterRun(const Spec& spec, size_t index, size_t group) {
    const Shape matrix = MatrixOf(spec.shape).second;
    if (matrix[0] * matrix[1] == 0) return;
    std::map<std::string, Tensor> slices;
    for (const Vector& vector : vectors_) {
      Tensor part = vector.whole.data ? vector.whole.From(spec.offset, {}) : vector.parts[index];
      part.shape = {vector.axes.count(0) > 0 ? matrix[0] : 1,
                    vector.axes.count(1) > 0 ? matrix[1] : 1};
      slices[vector.name] = part;
    }
    slices["factored"] = Zeros(kBool, {1});
    *slices["factored"].data = spec.shape.size() > 1;
    AddRun(slices, group);
  }

  void AddRun(std::map<std::string, Tensor>& slices, size_t group) {
    Arguments run;
    slices["learning_rate"] = rates_[group].first;
    slices["weight_decay"] = decays_[group];
    slices["gradient_norm"] = norm_;
    slices["step"] = step_;
    std::map<std::string, OrtValue*> values;
    for (const auto& [name, tensor] : slices) {
      kept_.emplace_back(tensor, tensor.Value());
      values[name] = kept_.back().second;
    }
    for (const std::string& name : inputs_) {
      if (values.count(name) == 0) ThrowMismatch("the optimizer model takes '" + name + "'");
      run.input_names.push_back(name.c_str());
      run.inputs.push_back(values[name]);
    }
    for (const std::string& name : output_names_) {
      run.output_names.push_back(name.c_str());
      run.outputs.push_back(values[name.substr(0, name.size() - 4)]);
    }
    runs_.push_back(std::move(run));
  }

  /// The L2 norm of all gradients, squared and summed in float64.
  template <class T>
  double Norm(const T* values) const {
    double sums[8] = {};
    for (int64_t i = 0; i < state_.gradients.shape[0]; i += 8) {  // ends with a whole cache line
      for (int64_t k = 0; k < 8; ++k) sums[k] += double{values[i + k]} * double{values[i + k]};
    }
    return std::sqrt(std::accumulate(sums, sums + 8, 0.0));
  }

  Ort::Session session_;
  State& state_;
  std::vector<std::string> inputs_, output_names_;
  std::vector<Vector> vectors_;
  std::vector<std::pair<Tensor, double>> rates_;
  std::vector<Tensor> decays_;
  Tensor step_ = Zeros(kInt64, {1}), norm_ = Zeros(state_.flat.type, {1});
  std::deque<std::pair<Tensor, Ort::Value>> kept_;
  std::vector<Arguments> runs_;
};

}  // namespace odtpack::detail
