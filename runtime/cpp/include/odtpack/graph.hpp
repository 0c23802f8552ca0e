// Models of a package on ONNX Runtime, run on memory that stays where it is.
#pragma once

#include <deque>

#include "odtpack/checkpoint.hpp"
#include "odtpack/package.hpp"

namespace odtpack::detail {

[[noreturn]] inline void ThrowMismatch(const std::string& reason, const std::string& where = {}) {
  throw Error("model-mismatch", "The models do not go with the checkpoint: " + reason + ".", where,
              "use the models and the checkpoint of one package");
}

inline Ort::Session OpenSession(const Ort::Env& env, const std::string& path,
                                const Ort::SessionOptions& options) {
  if (!fs::is_regular_file(path)) throw Error("model-not-found", "There is no model " + path + ".");
  try {
    return Ort::Session(env, path.c_str(), options);
  } catch (const Ort::Exception& error) {
    throw Error("model-not-loadable", "ONNX Runtime " + Ort::GetVersionString() + " cannot load " +
                path + ": " + error.what(), path, "build the package for this ONNX Runtime");
  }
}

/// Arguments of a session's run that stand at fixed addresses; nothing is copied.
struct Arguments {
  std::vector<const char*> input_names, output_names;
  std::vector<const OrtValue*> inputs;
  std::vector<OrtValue*> outputs;

  void Run(Ort::Session& session, const char* hint) {
    const Ort::Status status(Ort::GetApi().Run(
        session, nullptr, input_names.data(), inputs.data(), inputs.size(), output_names.data(),
        output_names.size(), outputs.data()));
    if (status.IsOK()) return;
    throw Error("run-failed", "ONNX Runtime failed: " + status.GetErrorMessage(), {}, hint);
  }
};

/// Memory by the names that models call it; the tensors and their OrtValues.
class Bound {
 public:
  void Add(const std::string& name, const Tensor& tensor) {
    tensors_[name] = tensor;
    values_.insert_or_assign(name, tensor.Value());
  }
  const Tensor* Find(const std::string& name) const {
    const auto found = tensors_.find(name);
    return found == tensors_.end() ? nullptr : &found->second;
  }
  OrtValue* Value(const std::string& name) { return values_.at(name); }

 private:
  std::map<std::string, Tensor> tensors_;
  std::map<std::string, Ort::Value> values_;
};

/// A training or evaluation model whose parameters, gradients and state stand in bound memory.
class Graph {
 public:
  Graph(Ort::Session session, const std::vector<Spec>& inputs, const std::vector<Spec>& outputs,
        Bound& bound, const std::string& where)
      : session_(std::move(session)), inputs_(inputs), outputs_(outputs) {
    const Ort::AllocatorWithDefaultOptions allocator;
    const auto bind = [&](bool input, size_t index, const std::vector<Spec>& specs,
                          std::vector<size_t>& places) {
      names_.push_back(input ? session_.GetInputNameAllocated(index, allocator).get()
                             : session_.GetOutputNameAllocated(index, allocator).get());
      const std::string& name = names_.back();
      const auto type = input ? session_.GetInputTypeInfo(index) : session_.GetOutputTypeInfo(index);
      const auto user = std::find_if(specs.begin(), specs.end(),
                                     [&name](const Spec& spec) { return spec.name == name; });
      if (type.GetONNXType() != ONNX_TYPE_TENSOR) ThrowMismatch("'" + name + "' is no tensor", where);
      const auto info = type.GetTensorTypeAndShapeInfo();
      if (user != specs.end()) {
        if (info.GetElementType() != user->type) ThrowMismatch("the type of '" + name + "'", where);
        places[static_cast<size_t>(user - specs.begin())] = index;
        return static_cast<OrtValue*>(nullptr);
      }
      const Tensor* tensor = bound.Find(name);
      Shape shape = info.GetShape();
      if (tensor == nullptr) ThrowMismatch("'" + name + "' belongs to no parameter", where);
      for (size_t i = 0; i < shape.size() && i < tensor->shape.size(); ++i) {
        if (shape[i] < 0) shape[i] = tensor->shape[i];
      }
      if (info.GetElementType() != tensor->type || (!shape.empty() && shape != tensor->shape)) {
        ThrowMismatch("'" + name + "' is " + tensor->Description() + " in the checkpoint", where);
      }
      return bound.Value(name);
    };
    input_places_.assign(inputs.size(), SIZE_MAX);
    output_places_.assign(outputs.size(), SIZE_MAX);
    for (size_t i = 0; i < session_.GetInputCount(); ++i) {
      arguments_.inputs.push_back(bind(true, i, inputs, input_places_));
      arguments_.input_names.push_back(names_.back().c_str());
    }
    for (size_t i = 0; i < session_.GetOutputCount(); ++i) {
      arguments_.outputs.push_back(bind(false, i, outputs, output_places_));
      arguments_.output_names.push_back(names_.back().c_str());
    }
    for (const auto* places : {&input_places_, &output_places_}) {
      if (std::count(places->begin(), places->end(), SIZE_MAX) > 0) {
        ThrowMismatch("an input or output of the manifest is missing", where);
      }
    }
    loss_ = Zeros(static_cast<ONNXTensorElementDataType>(outputs[0].type), {});
    loss_value_ = loss_.Value();
    if (!outputs[0].shape.empty()) loss_value_ = Ort::Value(nullptr);
  }

  std::vector<Ort::Value> Run(const std::vector<Ort::Value>& values) {
    CheckBatch(values);
    for (size_t i = 0; i < values.size(); ++i) arguments_.inputs[input_places_[i]] = values[i];
    for (const size_t place : output_places_) arguments_.outputs[place] = nullptr;
    arguments_.outputs[output_places_[0]] = loss_value_;
    arguments_.Run(session_, "call LazyResetGrad(): gradients may hold part of the step");
    std::vector<Ort::Value> results;
    for (const size_t place : output_places_) results.emplace_back(arguments_.outputs[place]);
    if (loss_value_) {  // a copy, that the caller may keep while the next step runs
      results[0].release();
      results[0] = Ort::Value::CreateTensor(allocator_, nullptr, 0, loss_.type);
      std::memcpy(results[0].GetTensorMutableRawData(), loss_.data.get(), loss_.Bytes());
    }
    return results;
  }

 private:
  void CheckBatch(const std::vector<Ort::Value>& values) {
    if (values.size() != inputs_.size()) {
      std::string wanted;
      for (const Spec& spec : inputs_) wanted += " " + spec.name + ": " + spec.Description();
      throw Error("input-count", "The model takes " + std::to_string(inputs_.size()) +
                  " inputs and " + std::to_string(values.size()) + " were given.", {},
                  "pass, in this order," + wanted);
    }
    std::map<std::string, std::pair<int64_t, std::string>> sizes;
    for (size_t i = 0; i < values.size(); ++i) {
      const Spec& spec = inputs_[i];
      const auto fail = [&spec](const std::string& code, const std::string& problem) {
        throw Error(code, "Input '" + spec.name + "' must be " + spec.Description() + ", and " +
                    problem + ".");
      };
      if (!values[i] || !values[i].IsTensor()) fail("input-type", "it is no tensor");
      const auto info = values[i].GetTensorTypeAndShapeInfo();
      const Shape shape = info.GetShape();
      if (info.GetElementType() != spec.type) {
        fail("input-type", std::string("its elements are ") + TypeName(info.GetElementType()));
      }
      if (!spec.Fits(spec.type, shape)) fail("input-shape", "its shape is " + Text(shape));
      for (size_t axis = 0; axis < spec.shape.size(); ++axis) {
        if (shape[axis] == 0 && spec.shape[axis] != 0) fail("empty-batch", "it is empty");
        const std::string& symbol = spec.symbols[axis];
        if (symbol.empty()) continue;
        const auto& [known, owner] = sizes.try_emplace(symbol, shape[axis], spec.name).first->second;
        if (known != shape[axis]) {
          fail("input-sizes-differ", "'" + symbol + "' is " + std::to_string(shape[axis]) +
               " here and " + std::to_string(known) + " in '" + owner + "'");
        }
      }
    }
    for (size_t i = 0; i < values.size(); ++i) {
      const Spec& spec = inputs_[i];
      const bool labels = spec.name == "labels" && spec.class_count > 0;
      if (labels && spec.type == ONNX_TENSOR_ELEMENT_DATA_TYPE_INT64) CheckLabels(spec, values[i]);
    }
  }

  static void CheckLabels(const Spec& spec, const Ort::Value& value) {
    const auto* labels = value.GetTensorData<int64_t>();
    const size_t count = value.GetTensorTypeAndShapeInfo().GetElementCount();
    for (size_t k = 0; k < count; ++k) {
      if ((labels[k] < 0 || labels[k] >= spec.class_count) && labels[k] != spec.ignored) {
        throw Error("label-out-of-range", "Input 'labels' holds " + std::to_string(labels[k]) +
                    " as its element " + std::to_string(k) + ", and the model's " +
                    std::to_string(spec.class_count) + " classes are numbered from 0.");
      }
    }
  }

  Ort::Session session_;
  const std::vector<Spec>&inputs_, &outputs_;
  std::deque<std::string> names_;
  Arguments arguments_;
  std::vector<size_t> input_places_, output_places_;
  Ort::AllocatorWithDefaultOptions allocator_;
  Tensor loss_;
  Ort::Value loss_value_{nullptr};
};

}  // namespace odtpack::detail
