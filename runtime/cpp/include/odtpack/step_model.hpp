// The step model: a training model that updates the parameters (docs/formats/package.md).
#pragma once

#include "odtpack/optimizer.hpp"

namespace odtpack::detail {

/// Open a step model on the memory of the parameters that it updates, `trained`, and of what their
/// optimizer keeps. New values are written over the old ones, in the shapes that the model has for
/// them: it may cut a matrix into parts. `not_updated` has an element for each of them, in the order
/// of the manifest.
inline std::unique_ptr<Graph> MakeStepGraph(Ort::Session session, const Package& package,
                                            const std::map<std::string, Tensor>& trained,
                                            const Optimizer& optimizer, Bound& bound,
                                            const Tensor& not_updated) {
  const std::map<std::string, Tensor> kept = optimizer.Bind(bound);
  const auto bind = [&bound](const std::string& name, Tensor tensor, const Ort::TypeInfo& found,
                             bool lives = true) {
    if (found.GetONNXType() != ONNX_TYPE_TENSOR) ThrowMismatch("'" + name + "' is no tensor");
    const auto info = found.GetTensorTypeAndShapeInfo();
    const size_t count = tensor.Count();
    tensor.shape = info.GetShape();
    if (info.GetElementType() != tensor.type || tensor.Count() != count ||
        std::any_of(tensor.shape.begin(), tensor.shape.end(), [](int64_t n) { return n < 0; })) {
      ThrowMismatch("the step model has another '" + name + "'");
    }
    if (lives)
      bound.Add(name, tensor, Twins::kWritten);
    else
      bound.Add(name, tensor);
  };
  Ort::AllocatorWithDefaultOptions allocator;
  for (size_t i = 0; i < session.GetInputCount(); ++i) {
    const auto found = kept.find(session.GetInputNameAllocated(i, allocator).get());
    if (found != kept.end()) bind(found->first, found->second, session.GetInputTypeInfo(i));
  }
  std::map<std::string, Tensor> updated = trained;
  updated.insert(kept.begin(), kept.end());
  const std::string end = ".update.out";
  for (size_t i = 0; i < session.GetOutputCount(); ++i) {
    const std::string name = session.GetOutputNameAllocated(i, allocator).get();
    if (name == "update.kept") bind(name, not_updated, session.GetOutputTypeInfo(i), false);
    const size_t size = name.size() - std::min(name.size(), end.size());
    const auto found = updated.find(name.substr(0, size));
    if (name.substr(size) != end || found == updated.end()) continue;
    bind(name, found->second, session.GetOutputTypeInfo(i));
    updated.erase(found);
  }
  if (!updated.empty())
    ThrowMismatch("the step model does not update '" + updated.begin()->first + "'");
  return std::make_unique<Graph>(std::move(session), package, package.Outputs(), bound, nullptr,
                                 "load the last checkpoint: parameters may hold part of the step");
}

}  // namespace odtpack::detail
