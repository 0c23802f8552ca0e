// The optimizer model over flat vectors, and what it keeps of every parameter.
#pragma once

#include "odtpack/model.hpp"

namespace odtpack::detail {

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

/// The rate of the next optimizer step and how many were made, for every thread to read.
struct Progress {
  std::atomic<float> rate{0};
  std::atomic<int64_t> step{0};
};

/// An optimizer model and what it carries; continues the state's optimizer if there is one.
class Optimizer {
 public:
  /// `flat` and `gradients` are where the state's come to lie. The state is looked at only:
  /// TakeOver moves what its optimizer kept.
  Optimizer(Ort::Session session, const Json& manifest, State& state, const Tensor& flat,
            const Tensor& gradients, const std::vector<const Spec*>& trainable, Progress& progress)
      : session_(std::move(session)),
        state_(state),
        progress_(progress),
        flat_(flat),
        gradients_(gradients),
        inputs_(manifest["layout"].Texts("inputs")) {
    if (trainable.empty()) throw Error("nothing-trainable", "The checkpoint has nothing to train.");
    const Json& layout = manifest["layout"];
    const std::string run = layout.Get<std::string>("run", "chunks");
    if (twins_ && run == "whole")
      ThrowNoDevice("The optimizer reads all parameters as one vector.",
                    "train on the processor, or build with another optimizer");
    vectors_.push_back({"params", {0, 1}, flat, {}});
    vectors_.push_back({"gradients", {0, 1}, gradients, {}});
    for (const Json& entry : layout.Get<Json::List>("state", {})) {
      const auto axes = entry["axes"] ? entry.Wholes("axes") : Shape{0, 1};
      vectors_.push_back({entry.Get<std::string>("name"),
                          {axes.begin(), axes.end()},
                          run == "parameters" ? Tensor{} : Zeros(flat.type, flat.shape),
                          {}});
    }
    for (const Vector& vector : vectors_) {
      if (vector.name != "gradients") output_names_.push_back(vector.name + ".out");
    }
    PlaceState(trainable, manifest["optimizer"].Get<std::string>("kind"));
    std::map<std::string, size_t> groups;
    const auto& listed = manifest.Get<Json::List>("groups", {});
    scaled_ = Zeros(kFloat, {std::max<int64_t>(static_cast<int64_t>(listed.size()), 1)});
    for (const Json& group : listed) {
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
    SetRate(own_->rate);
    progress_.step = own_->step;
    const int64_t chunk = std::max<int64_t>(layout.Whole("chunk_elements", 131072), 1);
    for (size_t i = 0, next = 0; i < trainable.size(); i = next) {
      const size_t group = groups[trainable[i]->name];
      next = i + 1;
      if (run == "parameters" || twins_) {
        AddParameterRun(*trainable[i], i, group, run == "parameters");
        continue;
      }
      while (next < trainable.size() && groups[trainable[next]->name] == group) ++next;
      const int64_t stop = next < trainable.size() ? trainable[next]->offset : flat.shape[0];
      for (int64_t at = trainable[i]->offset, size = 0; at < stop; at += size) {
        size = run == "whole" ? stop - at : std::min(chunk, stop - at);
        std::map<std::string, Tensor> slices;
        for (const Vector& vector : vectors_) slices[vector.name] = vector.whole.From(at, {size});
        AddRun(slices, group);
      }
    }
  }

  /// Continue the state's optimizer, whose moments are freed as they are copied.
  void TakeOver() {
    std::map<std::string, std::vector<Tensor>> old;
    if (state_.optimizer) {
      // Another session may have them still, of which this is a later one.
      const auto& kept = state_.optimizer->moments;
      old.insert(kept.begin(), kept.end());
      state_.optimizer.reset();
    }
    for (auto& [name, moments] : own_->moments) {
      for (size_t i = 0; goes_on_ && i < moments.size(); ++i)
        moments[i].CopyFrom(old[name][i].data.get());
      old.erase(name);  // so that one at a time exists twice
    }
    state_.optimizer = own_;
  }

  /// Go on in another session of the same model.
  void Reopen(Ort::Session session) { session_ = std::move(session); }

  /// Refuse a step where another session has the moments and the step count.
  void RequireOwn() const {
    if (state_.optimizer && state_.optimizer != own_)
      throw Error("optimizer-mismatch", "A later session has the state's moments and step count.",
                  "", "make the steps with that one, or with a new one if it is closed");
  }

  void Step() {
    *step_.As<int64_t>() = own_->step + 1;
    if (std::count(inputs_.begin(), inputs_.end(), "gradient_norm") > 0) {
      if (twins_) twins_->PullGradients();
      if (norm_.type == kDouble)
        *norm_.As<double>() = Norm(gradients_.As<double>());
      else
        *norm_.As<float>() = static_cast<float>(Norm(gradients_.As<float>()));
    }
    for (Arguments& run : runs_) {
      run.Run(session_, "load the last checkpoint: parameters may hold part of the step");
    }
    Advance();
  }

  /// Run a step model that is bound to what Bind gave; Advance counts its step.
  std::vector<Ort::Value> RunStep(Model& model, const std::vector<Ort::Value>& batch) {
    *step_.As<int64_t>() = own_->step + 1;
    return model.Run(batch);
  }
  void Advance() { progress_.step = ++own_->step; }

  /// Bind the learning rates and the number of the step, as a step model calls them; returns what
  /// is kept of each parameter, by the names "<parameter>.<vector>".
  std::map<std::string, Tensor> Bind(Bound& bound) const {
    bound.Add("update.learning_rate", scaled_);
    bound.Add("update.step", step_);
    std::map<std::string, Tensor> kept;
    for (const auto& [name, moments] : own_->moments) {
      for (size_t i = 0; i < moments.size(); ++i)
        kept[name + "." + vectors_[i + 2].name] = moments[i];
    }
    return kept;
  }

  void SetRate(float rate) {
    bool good = std::isfinite(rate) && rate >= 0;
    for (const auto& group : rates_)
      good = good && std::isfinite(static_cast<float>(double{rate} * group.second));
    if (!good)
      throw Error("bad-learning-rate", "A learning rate is negative or not finite.", "",
                  "pass a rate of 0 or more, such as 0.001");
    progress_.rate = own_->rate = rate;
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

  /// Give every moment its place, and check those of the loaded state.
  void PlaceState(const std::vector<const Spec*>& trainable, const std::string& kind) {
    const OptimizerState loaded = state_.optimizer ? *state_.optimizer : OptimizerState{};
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
                                                 : Zeros(flat_.type, shape));
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
    goes_on_ = same;
    own_ = std::make_shared<OptimizerState>(std::move(placed));
  }

  void AddGroup(double scale, double decay, const std::vector<std::string>& names) {
    own_->groups.push_back(names);
    rates_.emplace_back(scaled_.From(static_cast<int64_t>(rates_.size()), {1}), scale);
    decays_.push_back(Zeros(flat_.type, {1}));
    if (flat_.type == kDouble)
      *decays_.back().As<double>() = decay;
    else
      *decays_.back().As<float>() = static_cast<float>(decay);
  }

  /// A run on one parameter, as a matrix or as a vector.
  void AddParameterRun(const Spec& spec, size_t index, size_t group, bool as_matrix) {
    const Shape matrix = MatrixOf(spec.shape).second;
    if (matrix[0] * matrix[1] == 0) return;
    std::map<std::string, Tensor> slices;
    for (const Vector& vector : vectors_) {
      Tensor part = vector.whole.data ? vector.whole.From(spec.offset, {}) : vector.parts[index];
      part.shape = {vector.axes.count(0) > 0 ? matrix[0] : 1,
                    vector.axes.count(1) > 0 ? matrix[1] : 1};
      if (!as_matrix) part.shape = {matrix[0] * matrix[1]};
      slices[vector.name] = part;
    }
    slices["factored"] = Zeros(kBool, {1});
    *slices["factored"].data = spec.shape.size() > 1;
    AddRun(slices, group);
  }

  void AddRun(std::map<std::string, Tensor>& slices, size_t group) {
    Arguments run;
    std::set<std::string> there;  // what lives on a device
    for (const Vector& vector : vectors_) {
      if (twins_) there.insert(vector.name);
    }
    slices["learning_rate"] = rates_[group].first;
    slices["weight_decay"] = decays_[group];
    slices["gradient_norm"] = norm_;
    slices["step"] = step_;
    std::map<std::string, OrtValue*> values;
    for (const auto& [name, tensor] : slices) {
      const auto role = name == "gradients" ? Twins::kGradient : Twins::kWritten;
      kept_.emplace_back(tensor, there.count(name) > 0 ? twins_->Value(tensor, role)
                                                       : tensor.Value());
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
    for (int64_t i = 0; i < gradients_.shape[0]; i += 8) {  // ends with a whole cache line
      for (int64_t k = 0; k < 8; ++k) sums[k] += double{values[i + k]} * double{values[i + k]};
    }
    return std::sqrt(std::accumulate(sums, sums + 8, 0.0));
  }

  Ort::Session session_;
  State& state_;
  Progress& progress_;
  const Tensor flat_, gradients_;
  std::shared_ptr<OptimizerState> own_;
  bool goes_on_ = false;  // with the moments of the one before
  std::shared_ptr<Twins> twins_ = state_.twins.lock();
  std::vector<std::string> inputs_, output_names_;
  std::vector<Vector> vectors_;
  Tensor scaled_;  // the rate of each group, and each with its scale
  std::vector<std::pair<Tensor, double>> rates_;
  std::vector<Tensor> decays_;
  Tensor step_ = Zeros(kInt64, {1}), norm_ = Zeros(flat_.type, {1});
  std::deque<std::pair<Tensor, Ort::Value>> kept_;
  std::vector<Arguments> runs_;
};

}  // namespace odtpack::detail
