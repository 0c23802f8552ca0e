// The checkpoint: what training changes, read from and saved to the file of
// onnxruntime-training 1.19.2 (docs/formats/checkpoint.md).
#pragma once

#include "odtpack/checkpoint_writer.hpp"

namespace odtpack {

/// The state of a training: parameters, properties, and what the optimizer carries. A handle:
/// copies are of one state, which lives as long as any of them or an open session made of it. What reads or
/// changes it is refused with `busy` while a session of it, or another of these calls, runs.
class CheckpointState {
 public:
  /// Load a checkpoint of odtpack or of ONNX Runtime training 1.17 to 1.19. If it is damaged or
  /// missing and the save before it was kept, that one is loaded; Recovered() then says so.
  static CheckpointState LoadCheckpoint(const std::string& path) {
    return CheckpointState(detail::ReadLastGood(path));
  }
  static CheckpointState LoadCheckpointFromBuffer(const std::vector<uint8_t>& buffer) {
    const std::string_view view(reinterpret_cast<const char*>(buffer.data()), buffer.size());
    detail::CheckpointReader reader(view, "the buffer", "", detail::Values::kCopied);
    return CheckpointState(reader.Read());
  }
  /// Save to one file, whole or not at all. With the optimizer's state, training goes on from it
  /// bit by bit; accumulated gradients are not in it: save after OptimizerStep. The file that is
  /// replaced is kept as `<path>.previous` if that is asked for and it is whole: it is read first,
  /// unless this state loaded or wrote it.
  static void SaveCheckpoint(const CheckpointState& state, const std::string& path,
                             bool include_optimizer_state = false, bool keep_previous = false) {
    const detail::Gate::Call call(*state.state_->gate);
    detail::WriteCheckpoint(path, *state.state_, include_optimizer_state, detail::kExternalAbove,
                            keep_previous);
  }

  /// What is wrong with the file that was to be loaded, and what was lost, if the save before it
  /// was loaded instead; empty otherwise.
  const std::string& Recovered() const { return state_->recovered; }

  void AddProperty(const std::string& name, const Property& value) {
    const auto* text = std::get_if<std::string>(&value);
    if (name.empty()) throw Error("property-type", "A property needs a name.");
    if (!detail::IsUtf8(name) || (text != nullptr && !detail::IsUtf8(*text)))
      throw Error("property-not-text", "A property's name and its text must be UTF-8.");
    if (name == detail::kOptimizerProperty)
      throw Error("property-type",
                  "'" + name + "' is reserved: files keep the optimizer's kind there.");
    const detail::Gate::Call call(*state_->gate);
    state_->properties[name] = value;
  }
  Property GetProperty(const std::string& name) const {
    const detail::Gate::Call call(*state_->gate);
    const auto found = state_->properties.find(name);
    if (found != state_->properties.end()) return found->second;
    throw Error("unknown-property", "The state has no property '" + name + "'.");
  }
  bool HasProperty(const std::string& name) const {
    const detail::Gate::Call call(*state_->gate);
    return state_->properties.count(name) > 0;
  }

  /// The parameter itself, not a copy: it shows the training's progress, and is valid as long as
  /// the state lives. The first session that is made of the state moves what it trains: a
  /// parameter that was taken before remains valid and shows the value of then, in memory that is
  /// kept for it; take it again. While it is trained on a device it is as of this call, and
  /// UpdateParameter alone changes it.
  Ort::Value GetParameter(const std::string& name) const {
    const detail::Gate::Call call(*state_->gate);
    const detail::Tensor& found = Find(name);
    state_->Refresh();
    if (!state_->flat.data && state_->parameters.at(name).trainable) taken_->insert(found.data);
    return found.Value();
  }

  void UpdateParameter(const std::string& name, const Ort::Value& value) {
    const detail::Gate::Call call(*state_->gate);
    const detail::Tensor& target = Find(name);
    const bool same_type = detail::IsTensorOf(target.type, value);
    if (!same_type || value.GetTensorTypeAndShapeInfo().GetShape() != target.shape) {
      throw Error(
          same_type ? "parameter-shape" : "parameter-type",
          "Parameter '" + name + "' is " + target.Description() + ", unlike the new value.");
    }
    state_->Refresh(true);
    target.CopyFrom(value.GetTensorRawData());
  }

  /// True if the file carried a digest of all that it holds, which was right. Those of ONNX
  /// Runtime's own training carry none, and load unchecked.
  bool IsChecked() const { return state_->checked; }

  /// True as long as the parameters have names and no values.
  bool IsNominal() const {
    const detail::Gate::Call call(*state_->gate);
    return state_->nominal;
  }

  /// Set all parameters to those of a complete checkpoint of the same model. Properties and the
  /// optimizer's state remain as they are.
  void LoadParameters(const std::string& path) {
    const detail::Gate::Call call(*state_->gate);
    const detail::State other = detail::ReadCheckpoint(path);
    other.RequireValues();
    const bool free = state_->nominal && !state_->flat.data;  // shapes are not known yet
    const auto same = [free](const auto& ours, const auto& theirs) {
      const detail::Tensor &one = ours.second.value, &two = theirs.second.value;
      return ours.first == theirs.first && one.type == two.type && (free || one.shape == two.shape);
    };
    if (!std::equal(state_->parameters.begin(), state_->parameters.end(), other.parameters.begin(),
                    other.parameters.end(), same)) {
      throw Error("checkpoint-mismatch", "The checkpoint has other parameters than this state.",
                  path, "load a checkpoint of the same model");
    }
    state_->Refresh(true);
    for (auto& [name, parameter] : state_->parameters) {
      const detail::Tensor& value = other.parameters.at(name).value;
      if (free)
        parameter.value = value;
      else
        parameter.value.CopyFrom(value.data.get());
    }
    state_->nominal = false;
  }

  /// The state itself, for the sessions.
  const std::shared_ptr<detail::State>& Internal() const { return state_; }

 private:
  explicit CheckpointState(detail::State state)
      : state_(std::make_shared<detail::State>(std::move(state))) {}

  const detail::Tensor& Find(const std::string& name) const {
    state_->RequireValues();
    const auto found = state_->parameters.find(name);
    if (found != state_->parameters.end()) return found->second.value;
    throw Error("unknown-parameter", "The state has no parameter '" + name + "'.");
  }

  std::shared_ptr<detail::State> state_;
  // The memory of parameters that were taken before a session moved them.
  std::shared_ptr<std::set<detail::Memory>> taken_ =
      std::make_shared<std::set<detail::Memory>>();
};

}  // namespace odtpack
