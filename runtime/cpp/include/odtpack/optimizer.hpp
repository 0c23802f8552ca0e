// The optimizer model, run over flat vectors as the manifest's layout says.
#pragma once

#include <numeric>

#include "odtpack/graph.hpp"

namespace odtpack::detail {

/// Rows and columns of a parameter seen as a matrix: the cut with the fewest of them together.
inline std::pair<size_t, Shape> MatrixOf(const Shape& shape) {
  size_t cut = 0;
  int64_t best = INT64_MAX;
  Shape matrix = {1, 1};
  for (const int64_t size : shape) matrix[1] *= size;
  for (size_t i = 1; i < shape.size(); ++i) {
    Shape sides = {1, 1};
    for (size_t k = 0; k < shape.size(); ++k) sides[k < i ? 0 : 1] *= shape[k];
    if (sides[0] + sides[1] >= best) continue;
    best = sides[0] + sides[1];
    cut = i;
    matrix = sides;
  }
  return {cut, matrix};
}

/// An optimizer model and what it carries; continues the state's optimizer if there is one.
class Optimizer {
 public:
  Optimizer(Ort::Session session, const Json& manifest, State& state,
            const std::vector<const Spec*>& trainable, Tensor flat, Tensor gradients)
      : session_(std::move(session)), state_(state), gradients_(std::move(gradients)) {
    if (trainable.empty()) {
      throw Error("nothing-trainable", "The checkpoint marks no parameter as trainable.");
    }
    const Json& layout = manifest["layout"];
    inputs_ = layout.Texts("inputs");
    const bool by_parameter = layout.Get<std::string>("run") == "parameters";
    vectors_.push_back({"params", true, {0, 1}, {}, flat});
    vectors_.push_back({"gradients", false, {0, 1}, {}, gradients_});
    for (const Json& entry : layout.Get<Json::List>("state")) {
      Vector vector{entry.Get<std::string>("name"), true, {0, 1}, {}, {}};
      if (!entry["axes"].IsNull()) vector.axes.clear();
      for (const Json& axis : entry.Get<Json::List>("axes", {})) vector.axes.insert(axis.Whole("axes"));
      if (!by_parameter) vector.whole = Zeros(flat.type, flat.shape);
      vectors_.push_back(std::move(vector));
    }
    PlaceState(trainable, manifest["optimizer"].Get<std::string>("kind"));
    std::map<std::string, size_t> owners;
    for (const Json& group : manifest.Get<Json::List>("groups", {})) {
      const auto names = group.Texts("parameters");
      for (const auto& name : names) owners[name] = rates_.size();
      AddGroup(group.Get<double>("learning_rate_scale"), group.Get<double>("weight_decay"));
      state_.optimizer->groups.push_back(names);
    }
    if (rates_.empty()) {
      AddGroup(1, 0);
      state_.optimizer->groups.emplace_back();
      for (const Spec* spec : trainable) state_.optimizer->groups[0].push_back(spec->name);
    } else if (owners.size() != trainable.size()) {
      Json::Fail("the groups do not hold each trainable parameter once");
    }
    step_ = Zeros(ONNX_TENSOR_ELEMENT_DATA_TYPE_INT64, {1});
    norm_ = Zeros(flat.type, {1});
    SetRate(state_.optimizer->rate);
    const auto group_of = [&owners](const Spec* spec) {
      const auto found = owners.find(spec->name);
      return found == owners.end() ? size_t{0} : found->second;
    };
    const int64_t chunk = layout.Get<std::string>("run") == "whole"
                              ? INT64_MAX : std::max<int64_t>(layout.Whole("chunk_elements", 131072), 1);
    for (size_t i = 0, next = 0; i < trainable.size(); i = next) {
      const size_t group = group_of(trainable[i]);
      next = i + 1;
      if (by_parameter) {
        AddParameterRun(*trainable[i], i, group);
        continue;
      }
      while (next < trainable.size() && group_of(trainable[next]) == group) ++next;
      const int64_t stop = next < trainable.size() ? trainable[next]->offset : flat.shape[0];
      for (int64_t at = trainable[i]->offset; at < stop; at += std::min(chunk, stop - at)) {
        std::map<std::string, Tensor> slices;
        for (const Vector& vector : vectors_) {
          slices[vector.name] = Part(vector.whole, at, {std::min(chunk, stop - at)});
        }
        AddRun(slices, group);
      }
    }
  }

  void Step() {
    *step_.As<int64_t>() = state_.optimizer->step + 1;
    if (std::count(inputs_.begin(), inputs_.end(), "gradient_norm") > 0) SetNorm();
    for (Arguments& run : runs_) {
      run.Run(session_, "load the last checkpoint: parameters may hold part of the step");
    }
    ++state_.optimizer->step;
  }

  void SetRate(float rate) {
    if (!std::isfinite(rate)) {
      throw Error("bad-learning-rate", "The learning rate must be a finite number.");
    }
    state_.optimizer->rate = rate;
    for (const auto& [tensor, scale] : rates_) {
      *tensor.As<float>() = static_cast<float>(static_cast<double>(rate) * scale);
    }
  }

 private:
  struct Vector {
    std::string name;
    bool written;
    std::set<int64_t> axes;     // of a parameter as a matrix: those that are kept
    std::vector<Tensor> parts;  // of the state, by parameter
    Tensor whole;
  };

  static Tensor Part(const Tensor& vector, int64_t offset, Shape shape) {
    uint8_t* start = vector.data.get() + static_cast<size_t>(offset) * ItemSize(vector.type);
    return {vector.type, std::move(shape), {vector.data, start}};
  }

  /// Give every moment its place, and take over those of the loaded state.
  void PlaceState(const std::vector<const Spec*>& trainable, const std::string& kind) {
    const OptimizerState loaded = state_.optimizer.value_or(OptimizerState{});
    OptimizerState placed{loaded.step, loaded.rate, {}, {}, kind};
    bool same = loaded.kind.empty() || loaded.kind == kind, idle = true;
    std::map<std::string, const std::vector<Tensor>*> old;
    for (const auto& [name, moments] : loaded.moments) {
      old[name] = &moments;
      same = same && moments.size() == vectors_.size() - 2;
      for (const Tensor& moment : moments) {
        const uint8_t* bytes = moment.data.get();
        idle = idle && std::none_of(bytes, bytes + moment.Bytes(), [](uint8_t byte) { return byte; });
      }
    }
    same = same && (vectors_.size() == 2 || !old.empty() || !state_.optimizer);
    for (const Spec* spec : trainable) {
      std::vector<Tensor> moments;
      for (size_t v = 2; v < vectors_.size(); ++v) {
        Shape shape = spec->shape;
        const size_t cut = MatrixOf(shape).first;
        for (size_t i = 0; i < shape.size(); ++i) {
          if (vectors_[v].axes.count(i >= cut ? 1 : 0) == 0) shape[i] = 1;
        }
        vectors_[v].parts.push_back(vectors_[v].whole.data
                                        ? Part(vectors_[v].whole, spec->offset, shape)
                                        : Zeros(gradients_.type, shape));
        moments.push_back(vectors_[v].parts.back());
        const auto found = old.find(spec->name);
        same = same && (found == old.end() || (*found->second)[v - 2].shape == shape);
      }
      if (!moments.empty()) placed.moments.emplace_back(spec->name, std::move(moments));
    }
    // The reference saves one moment per parameter with SGD, and never uses it.
    const bool one = !loaded.moments.empty() && loaded.moments[0].second.size() == 1;
    if (!same && !(idle && (loaded.step == 0 || (one && vectors_.size() == 2)))) {
      throw Error("optimizer-mismatch", "The checkpoint holds the state of another optimizer.", {},
                  "use the optimizer it was saved with, or a checkpoint without optimizer state");
    }
    for (auto& [name, moments] : placed.moments) {
      for (size_t i = 0; same && old.count(name) > 0 && i < moments.size(); ++i) {
        std::memcpy(moments[i].data.get(), (*old[name])[i].data.get(), moments[i].Bytes());
      }
    }
    state_.optimizer = std::move(placed);
  }

  void AddGroup(double scale, double decay) {
    rates_.emplace_back(Zeros(ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT, {1}), scale);
    decays_.push_back(Zeros(gradients_.type, {1}));
    if (gradients_.type == ONNX_TENSOR_ELEMENT_DATA_TYPE_DOUBLE) *decays_.back().As<double>() = decay;
    else *decays_.back().As<float>() = static_cast<float>(decay);
  }

  void AddParameterRun(const Spec& spec, size_t index, size_t group) {
    const Shape matrix = MatrixOf(spec.shape).second;
    if (matrix[0] * matrix[1] == 0) return;
    std::map<std::string, Tensor> slices;
    for (const Vector& vector : vectors_) {
      Tensor part = vector.parts.empty() ? Part(vector.whole, spec.offset, matrix) : vector.parts[index];
      part.shape = matrix;
      for (int64_t axis = 0; axis < 2; ++axis) {
        if (vector.axes.count(axis) == 0) part.shape[static_cast<size_t>(axis)] = 1;
      }
      slices[vector.name] = part;
    }
    slices["factored"] = Zeros(ONNX_TENSOR_ELEMENT_DATA_TYPE_BOOL, {1});
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
      kept_.push_back({tensor, tensor.Value()});
      values[name] = kept_.back().second;
    }
    for (const std::string& name : inputs_) {
      if (values.count(name) == 0) ThrowMismatch("the optimizer model takes '" + name + "'");
      run.input_names.push_back(name.c_str());
      run.inputs.push_back(values[name]);
    }
    for (const Vector& vector : vectors_) {
      if (!vector.written) continue;
      if (output_names_.size() < vectors_.size()) output_names_.push_back(vector.name + ".out");
      run.outputs.push_back(values[vector.name]);
    }
    for (size_t i = 0; i < run.outputs.size(); ++i) run.output_names.push_back(output_names_[i].c_str());
    runs_.push_back(std::move(run));
  }

  /// The L2 norm of all gradients, squared and summed in float64.
  void SetNorm() const {
    const auto sum = [this](const auto* values) {
      double sums[8] = {};
      for (int64_t i = 0; i < gradients_.shape[0]; i += 8) {  // vectors end at a whole cache line
        for (int64_t k = 0; k < 8; ++k) sums[k] += double{values[i + k]} * double{values[i + k]};
      }
      return std::sqrt(std::accumulate(sums, sums + 8, 0.0));
    };
    if (norm_.type == ONNX_TENSOR_ELEMENT_DATA_TYPE_DOUBLE) {
      *norm_.As<double>() = sum(gradients_.As<double>());
    } else {
      *norm_.As<float>() = static_cast<float>(sum(gradients_.As<float>()));
    }
  }

  Ort::Session session_;
  State& state_;
  Tensor gradients_, step_, norm_;
  std::vector<std::string> inputs_;
  std::deque<std::string> output_names_;
  std::vector<Vector> vectors_;
  std::vector<std::pair<Tensor, double>> rates_;
  std::vector<Tensor> decays_;
  std::deque<std::pair<Tensor, Ort::Value>> kept_;
  std::vector<Arguments> runs_;
};

}  // namespace odtpack::detail
