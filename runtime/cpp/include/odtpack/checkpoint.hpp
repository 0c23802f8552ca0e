// The checkpoint: what training changes, read from and saved to the file of
// onnxruntime-training 1.19.2 (docs/formats/checkpoint.md).
#pragma once

#include <cmath>
#include <map>
#include <optional>
#include <set>
#include <utility>
#include <variant>

#include "odtpack/base.hpp"
#include "odtpack/checkpoint_generated.h"

namespace odtpack {

/// A value that the user attaches to a state: saved with it.
using Property = std::variant<int64_t, float, std::string>;

namespace detail {

constexpr const char* kOptimizerProperty = "odtpack.optimizer";  // of a file, not of a state
constexpr size_t kExternalAbove = size_t{1800} << 20;  // bytes; a flatbuffer ends below 2 GiB

struct Parameter {
  Tensor value;
  bool trainable = false;
};

/// What an optimizer carries from step to step, in the order of the file.
struct OptimizerState {
  int64_t step = 0;
  float rate = 0.001f;
  std::vector<std::pair<std::string, std::vector<Tensor>>> moments;
  std::vector<std::vector<std::string>> groups;
  std::string kind;  // empty if the file does not say
};

/// Everything that training changes. Without values if nominal.
struct State {
  std::map<std::string, Parameter> parameters;
  std::map<std::string, Property> properties;
  std::optional<OptimizerState> optimizer;
  bool nominal = false;
  Memory flat, gradients;  // vectors of the trainable parameters, once a session placed them

  void RequireValues() const {
    if (!nominal) return;
    throw Error("nominal-state", "The checkpoint is nominal: its parameters have no values.", {},
                "load a complete checkpoint, or all parameters with FromBuffer");
  }
};

template <class Table>
std::vector<const Table*> Each(const flatbuffers::Vector<flatbuffers::Offset<Table>>* tables) {
  return tables == nullptr ? std::vector<const Table*>{}
                           : std::vector<const Table*>(tables->begin(), tables->end());
}

/// Reads one file; what it finds wrong is an Error.
class CheckpointReader {
 public:
  CheckpointReader(std::string_view bytes, std::string where, std::string data_path)
      : bytes_(bytes), where_(std::move(where)), data_path_(std::move(data_path)) {
    const auto* data = reinterpret_cast<const uint8_t*>(bytes.data());
    Require(bytes.size() >= 8 && bytes.size() < FLATBUFFERS_MAX_BUFFER_SIZE, "its size");
    Require(fbs::CheckpointBufferHasIdentifier(data), "it does not carry the identifier ODTC");
    flatbuffers::Verifier verifier(data, bytes.size());
    Require(fbs::VerifyCheckpointBuffer(verifier), "its offsets lead out of the file");
    root_ = fbs::GetCheckpoint(data);
    if (root_->version() != 2) {
      throw Error("checkpoint-version", where_ + " has a version other than 2.", where_,
                  "write it again with ONNX Runtime training 1.17 or later");
    }
    Require(root_->module_state() != nullptr, "it has no module state");
  }

  State Read() {
    const auto* module = root_->module_state();
    State state;
    state.nominal = nominal_ = module->is_nominal_state();
    inline_left_ = bytes_.size();
    if (module->has_external_data()) {
      Require(!data_path_.empty() && !fs::is_symlink(data_path_), "its data file is missing");
      data_.emplace(data_path_, O_RDONLY | O_NONBLOCK);
      data_size_ = external_left_ = data_->Size();
    }
    for (const bool trainable : {true, false}) {
      for (auto& [name, tensor] : Tensors(trainable ? module->requires_grad_params()
                                                    : module->frozen_params())) {
        const bool added = state.parameters.emplace(name, Parameter{tensor, trainable}).second;
        Require(added, "parameter '" + name + "' is both trainable and frozen");
      }
    }
    if (!Each(root_->optimizer_groups()).empty()) state.optimizer = Optimizer(state);
    if (root_->property_bag() != nullptr) Properties(*root_->property_bag(), state);
    return state;
  }

  /// The lowest offset at which the file uses its data file, if it does.
  std::optional<size_t> FirstExternalOffset() const {
    const auto* module = root_->module_state();
    if (!module->has_external_data()) return {};
    auto tensors = Each(module->requires_grad_params());
    const auto add = [&tensors](const std::vector<const fbs::Tensor*>& more) {
      tensors.insert(tensors.end(), more.begin(), more.end());
    };
    add(Each(module->frozen_params()));
    for (const auto* group : Each(root_->optimizer_groups())) {
      for (const auto* entry : Each(group->optimizer_states())) add(Each(entry->momentums()));
    }
    std::optional<size_t> first;
    for (const auto* tensor : tensors) {
      const auto offset = static_cast<size_t>(tensor->external_data_offset());  // -1: the largest
      if (offset != SIZE_MAX) first = std::min(first.value_or(SIZE_MAX), offset);
    }
    return first;
  }

 private:
  void Require(bool good, const std::string& reason) const {
    if (good) return;
    throw Error("checkpoint-corrupt", where_ + " is not a readable checkpoint: " + reason + ".",
                where_, "copy or download the file again, or fall back to an earlier one");
  }

  std::string String(const flatbuffers::String* text) {
    if (text == nullptr) return {};
    text_ += text->size();
    Require(text_ <= bytes_.size(), "its strings overlap");  // one may be referred to many times
    Require(IsUtf8(text->str()), "it holds text that is not UTF-8");
    return text->str();
  }

  std::vector<std::pair<std::string, Tensor>> Tensors(
      const flatbuffers::Vector<flatbuffers::Offset<fbs::Tensor>>* list) {
    std::vector<std::pair<std::string, Tensor>> tensors;
    std::set<std::string> names;
    for (const auto* table : Each(list)) {
      std::string name = String(table->name());
      Require(!name.empty() && names.insert(name).second, "'" + name + "' is empty or not unique");
      tensors.emplace_back(name, ReadTensor(name, *table));
    }
    return tensors;
  }

  Tensor ReadTensor(const std::string& name, const fbs::Tensor& table) {
    if (ItemSize(table.data_type()) == 0) {
      throw Error("checkpoint-dtype", "'" + name + "' has elements of ONNX type " +
                  std::to_string(table.data_type()) + ", which are not supported.", where_);
    }
    Tensor tensor{static_cast<ONNXTensorElementDataType>(table.data_type()), {}, nullptr};
    if (table.dims() != nullptr && table.dims()->size() <= 32) {
      tensor.shape.assign(table.dims()->begin(), table.dims()->end());
    }
    const bool small = table.dims() == nullptr || table.dims()->size() <= 32;
    double most = 1;  // not the product itself, which would be 0 for a zero beside any size
    for (const int64_t size : tensor.shape) most *= size < 0 ? 1e300 : std::max(1.0, 1.0 * size);
    Require(small && most <= 1LL << 48, "'" + name + "' has an impossible shape");
    const size_t stored = table.raw_data() == nullptr ? 0 : table.raw_data()->size();
    const int64_t offset = table.external_data_offset();
    Require(table.string_data() == nullptr, "'" + name + "' holds strings");
    if (nominal_) {
      Require(tensor.shape.empty() && stored == 0 && offset == -1, "it is nominal and has values");
      tensor.shape = {0};
      return tensor;
    }
    const size_t bytes = tensor.Bytes();
    size_t& left = offset == -1 ? inline_left_ : external_left_;
    Require(stored == (offset == -1 ? bytes : 0), "the shape of '" + name + "' is not its size");
    Require(bytes <= left, "its tensors overlap");
    left -= bytes;
    tensor.data = Allocate(bytes);
    if (offset == -1) {
      if (bytes > 0) std::memcpy(tensor.data.get(), table.raw_data()->data(), bytes);
    } else {
      const auto start = static_cast<size_t>(offset);
      Require(data_ && start <= data_size_ - bytes && data_->Read(tensor.data.get(), bytes, start),
              "'" + name + "' lies outside of its data file");
    }
    const uint8_t* values = tensor.data.get();
    Require(tensor.type != ONNX_TENSOR_ELEMENT_DATA_TYPE_BOOL ||
                std::all_of(values, values + bytes, [](uint8_t value) { return value < 2; }),
            "'" + name + "' holds bools that are neither 0 nor 1");
    return tensor;
  }

  OptimizerState Optimizer(const State& state) {
    const auto groups = Each(root_->optimizer_groups());
    OptimizerState optimizer{groups[0]->step(), groups[0]->initial_learning_rate(), {}, {}, {}};
    Require(optimizer.step >= 0 && std::isfinite(optimizer.rate), "its optimizer's step or rate");
    std::set<std::string> seen;
    size_t trained = 0;
    for (const auto& item : state.parameters) trained += item.second.trainable ? 1 : 0;
    for (const auto* group : groups) {
      const std::string name = "group" + std::to_string(optimizer.groups.size());
      Require(String(group->group_name()) == name, "its optimizer groups are not called group0, ...");
      Require(group->step() == optimizer.step && group->initial_learning_rate() == optimizer.rate,
              "its optimizer groups stand at different steps or learning rates");
      optimizer.groups.emplace_back();
      for (const auto* entry : Each(group->optimizer_states())) {
        const std::string of = String(entry->param_name());
        const auto owner = state.parameters.find(of);
        Require(owner != state.parameters.end() && owner->second.trainable && seen.insert(of).second,
                "the optimizer state of '" + of + "' occurs twice or belongs to no parameter");
        optimizer.moments.emplace_back(of, Moments(*entry, owner->second.value));
        optimizer.groups.back().push_back(of);
        Require(optimizer.moments.back().second.size() == optimizer.moments[0].second.size(),
                "its optimizer state is uneven");
      }
    }
    Require(seen.empty() || seen.size() == trained, "its optimizer state lacks parameters");
    return optimizer;
  }

  std::vector<Tensor> Moments(const fbs::ParameterOptimizerState& entry, const Tensor& parameter) {
    std::vector<Tensor> moments;
    for (auto& [name, moment] : Tensors(entry.momentums())) {
      bool fits = name == "momentum" + std::to_string(moments.size()) &&
                  moment.type == parameter.type && moment.shape.size() == parameter.shape.size();
      for (size_t i = 0; fits && i < moment.shape.size(); ++i) {
        fits = moment.shape[i] == 1 || moment.shape[i] == parameter.shape[i];
      }
      Require(fits, "'" + name + "' of " + moment.Description() + " is no moment of " +
                        parameter.Description());
      moments.push_back(std::move(moment));
    }
    return moments;
  }

  void Properties(const fbs::PropertyBag& bag, State& state) {
    const auto add = [&](const flatbuffers::String* label, Property value) {
      const std::string name = String(label);
      Require(!name.empty() && state.properties.emplace(name, std::move(value)).second,
              "a property name, '" + name + "', is empty or occurs twice");
    };
    for (const auto* entry : Each(bag.ints())) add(entry->name(), entry->value());
    for (const auto* entry : Each(bag.floats())) add(entry->name(), entry->value());
    for (const auto* entry : Each(bag.strings())) add(entry->name(), String(entry->value()));
    const auto kind = state.properties.find(kOptimizerProperty);
    if (!state.optimizer || kind == state.properties.end()) return;
    Require(std::holds_alternative<std::string>(kind->second), "its odtpack.optimizer is no text");
    state.optimizer->kind = std::get<std::string>(kind->second);
    state.properties.erase(kind);
  }

  std::string_view bytes_;
  std::string where_, data_path_;
  const fbs::Checkpoint* root_ = nullptr;
  std::optional<File> data_;
  size_t data_size_ = 0, inline_left_ = 0, external_left_ = 0, text_ = 0;
  bool nominal_ = false;
};

inline State ReadCheckpoint(const std::string& path) {
  try {
    const MappedFile file(path);
    return CheckpointReader(file.View(), path, path + ".data").Read();
  } catch (const std::system_error& error) {
    const bool missing = error.code() == std::errc::no_such_file_or_directory;
    throw Error(missing ? "checkpoint-not-found" : "checkpoint-unreadable",
                "The checkpoint cannot be read: " + error.code().message() + ".", path,
                "pass the path of the checkpoint file of a package");
  }
}

/// Everything of a file but the tensors' bytes, which follow it or lie in the data file.
class CheckpointWriter {
 public:
  CheckpointWriter(const State& state, bool with_optimizer, std::optional<size_t> external_from)
      : nominal_(state.nominal), external_at_(external_from) {
    no_bytes_ = to_.CreateVector(std::vector<uint8_t>());
    std::vector<flatbuffers::Offset<fbs::Tensor>> tensors[2];
    for (const bool frozen : {false, true}) {
      for (const auto& [name, parameter] : state.parameters) {
        if (parameter.trainable != frozen) tensors[frozen].push_back(Add(name, parameter.value));
      }
    }
    const auto module = fbs::CreateModuleState(
        to_, to_.CreateVector(tensors[0]), to_.CreateVector(tensors[1]), nominal_,
        external_from.has_value());
    std::vector<flatbuffers::Offset<fbs::OptimizerGroup>> groups;
    auto properties = state.properties;
    if (with_optimizer && state.optimizer) {
      for (const auto& names : state.optimizer->groups) {
        groups.push_back(Group(*state.optimizer, names, groups.size()));
      }
      const std::string& kind = state.optimizer->kind;
      if (!kind.empty()) properties[kOptimizerProperty] = kind;
    }
    const auto optimizer = to_.CreateVector(groups);
    fbs::FinishCheckpointBuffer(
        to_, fbs::CreateCheckpoint(to_, 2, module, optimizer, Bag(properties)));
    if (!external_from) PlacePayload();
  }

  void Write(File& file) const { file.Write(to_.GetBufferPointer(), to_.GetSize()); }

  /// Write the tensors' bytes: each with its length in front, or one after the other.
  void WritePayload(File& file, bool external) const {
    const uint8_t zeros[16] = {};
    for (size_t i = 0; i < payload_.size(); ++i) {
      const size_t size = payload_[i].second->Bytes();
      const auto length = static_cast<flatbuffers::uoffset_t>(size);
      if (!external) file.Write(zeros, gaps_[i]);
      if (!external) file.Write(&length, sizeof length);
      file.Write(payload_[i].second->data.get(), size);
    }
  }

 private:
  flatbuffers::Offset<fbs::Tensor> Add(const std::string& name, const Tensor& tensor) {
    const auto label = to_.CreateSharedString(name);
    const auto dims = to_.CreateVector(nominal_ ? Shape{} : tensor.shape);
    const bool kept = !nominal_ && tensor.Bytes() > 0;
    const bool external = kept && external_at_;
    // raw_data stays absent with external data: the reference looks no further if it is there.
    const auto offset = fbs::CreateTensor(
        to_, label, 0, dims, tensor.type, external ? 0 : no_bytes_, 0,
        external ? static_cast<int64_t>(*external_at_) : -1);
    if (external) *external_at_ += tensor.Bytes();
    if (kept) payload_.emplace_back(offset.o, &tensor);
    return offset;
  }

  flatbuffers::Offset<fbs::OptimizerGroup> Group(
      const OptimizerState& state, const std::vector<std::string>& names, size_t index) {
    std::vector<flatbuffers::Offset<fbs::ParameterOptimizerState>> entries;
    for (const auto& name : names) {
      for (const auto& [owner, moments] : state.moments) {
        if (owner != name) continue;
        std::vector<flatbuffers::Offset<fbs::Tensor>> tensors;
        for (const Tensor& moment : moments) {
          tensors.push_back(Add("momentum" + std::to_string(tensors.size()), moment));
        }
        entries.push_back(fbs::CreateParameterOptimizerState(
            to_, to_.CreateSharedString(name), to_.CreateVector(tensors)));
      }
    }
    return fbs::CreateOptimizerGroup(to_, to_.CreateString("group" + std::to_string(index)),
                                     state.step, state.rate, to_.CreateVector(entries));
  }

  flatbuffers::Offset<fbs::PropertyBag> Bag(const std::map<std::string, Property>& properties) {
    std::vector<flatbuffers::Offset<fbs::IntProperty>> ints;
    std::vector<flatbuffers::Offset<fbs::FloatProperty>> floats;
    std::vector<flatbuffers::Offset<fbs::StringProperty>> strings;
    for (const auto& [name, value] : properties) {
      const auto label = to_.CreateString(name);
      if (const auto* number = std::get_if<int64_t>(&value)) {
        ints.push_back(fbs::CreateIntProperty(to_, label, *number));
      } else if (const auto* real = std::get_if<float>(&value)) {
        floats.push_back(fbs::CreateFloatProperty(to_, label, *real));
      } else {
        const auto text = to_.CreateString(std::get<std::string>(value));
        strings.push_back(fbs::CreateStringProperty(to_, label, text));
      }
    }
    if (properties.empty()) return 0;
    return fbs::CreatePropertyBag(to_, to_.CreateVector(ints), to_.CreateVector(floats),
                                  to_.CreateVector(strings));
  }

  /// Payload follows the head, each tensor at a multiple of 16: offsets point forward.
  void PlacePayload() {
    uint8_t* head = to_.GetBufferPointer();
    size_t end = to_.GetSize();
    for (const auto& [table, tensor] : payload_) {
      auto* fields = reinterpret_cast<flatbuffers::Table*>(head + to_.GetSize() - table);
      auto* slot = const_cast<uint8_t*>(fields->GetAddressOf(fbs::Tensor::VT_RAW_DATA));
      const size_t position = (end + 4 + 15) / 16 * 16;
      gaps_.push_back(position - 4 - end);
      const auto distance = position - 4 - static_cast<size_t>(slot - head);
      flatbuffers::WriteScalar(slot, static_cast<flatbuffers::uoffset_t>(distance));
      end = position + tensor->Bytes();
    }
  }

  flatbuffers::FlatBufferBuilder to_;
  bool nominal_;
  std::optional<size_t> external_at_;
  flatbuffers::Offset<flatbuffers::Vector<uint8_t>> no_bytes_;
  std::vector<std::pair<flatbuffers::uoffset_t, const Tensor*>> payload_;
  std::vector<size_t> gaps_;
};

/// Write a checkpoint whole or not at all. Above `external_above` bytes the tensors go to
/// `<path>.data`, where the current checkpoint has none: killed at any moment, it is whole.
inline void WriteCheckpoint(const std::string& path, const State& state, bool with_optimizer,
                            size_t external_above = kExternalAbove) {
  with_optimizer = with_optimizer && !state.nominal;
  size_t total = 0;
  for (const auto& item : state.parameters) {
    total += state.nominal ? 0 : item.second.value.Bytes();
  }
  for (const auto& of : with_optimizer && state.optimizer ? state.optimizer->moments
                                                          : decltype(OptimizerState::moments)()) {
    for (const Tensor& moment : of.second) total += moment.Bytes();
  }
  std::optional<size_t> occupied;
  try {
    const MappedFile current(path);
    occupied = CheckpointReader(current.View(), path, {}).FirstExternalOffset();
  } catch (const std::exception&) {  // absent or unreadable: nothing to preserve
  }
  const std::string data_path = path + ".data";
  if (total <= external_above) {
    const CheckpointWriter writer(state, with_optimizer, {});
    WriteAtomically(path, [&writer](File& file) {
      writer.Write(file);
      writer.WritePayload(file, false);
    });
    if (occupied) ::unlink(data_path.c_str());
    return;
  }
  try {
    File data(data_path, O_RDWR | O_CREAT | O_NOFOLLOW);
    const size_t start = !occupied || *occupied >= total ? 0 : data.Size();
    const CheckpointWriter writer(state, with_optimizer, start);
    Check(::lseek(data.handle, static_cast<off_t>(start), SEEK_SET) >= 0);
    writer.WritePayload(data, true);
    Check(::fsync(data.handle) == 0);
    SyncFolder(data_path);
    WriteAtomically(path, [&writer](File& file) { writer.Write(file); });
    if (start == 0) Check(::ftruncate(data.handle, static_cast<off_t>(total)) == 0);
  } catch (const std::system_error& error) {
    ThrowNotWritten(data_path, error);
  }
}

}  // namespace detail

/// The state of a training: parameters, properties, and what the optimizer carries. A handle:
/// copies are of one state, which lives as long as any of them or a session made of it.
class CheckpointState {
 public:
  /// Load a checkpoint of odtpack or of ONNX Runtime training 1.17 to 1.19.
  static CheckpointState LoadCheckpoint(const std::string& path) {
    return CheckpointState(detail::ReadCheckpoint(path));
  }
  static CheckpointState LoadCheckpointFromBuffer(const std::vector<uint8_t>& buffer) {
    const std::string_view view(reinterpret_cast<const char*>(buffer.data()), buffer.size());
    return CheckpointState(detail::CheckpointReader(view, "the buffer", {}).Read());
  }
  /// Save to one file, whole or not at all. With the optimizer's state, training goes on from it
  /// bit by bit; accumulated gradients are not in it: save after OptimizerStep.
  static void SaveCheckpoint(const CheckpointState& state, const std::string& path,
                             bool include_optimizer_state = false) {
    detail::WriteCheckpoint(path, *state.state_, include_optimizer_state);
  }

  void AddProperty(const std::string& name, const Property& value) {
    const auto* text = std::get_if<std::string>(&value);
    if (name.empty() || !detail::IsUtf8(name) || (text != nullptr && !detail::IsUtf8(*text))) {
      throw Error("property-type", "A property needs a name, and it and its text are UTF-8.");
    }
    state_->properties[name] = value;
  }
  Property GetProperty(const std::string& name) const {
    const auto found = state_->properties.find(name);
    if (found != state_->properties.end()) return found->second;
    throw Error("unknown-property", "The state has no property '" + name + "'.");
  }
  bool HasProperty(const std::string& name) const { return state_->properties.count(name) > 0; }

  /// The parameter itself, not a copy: it shows the training's progress.
  Ort::Value GetParameter(const std::string& name) const { return Find(name).Value(); }

  void UpdateParameter(const std::string& name, const Ort::Value& value) {
    const detail::Tensor& target = Find(name);
    const auto info = value.GetTensorTypeAndShapeInfo();
    if (info.GetElementType() != target.type || info.GetShape() != target.shape) {
      throw Error(info.GetElementType() != target.type ? "parameter-type" : "parameter-shape",
                  "Parameter '" + name + "' is " + target.Description() + ", and the new value " +
                      detail::TypeName(info.GetElementType()) + detail::Text(info.GetShape()) + ".");
    }
    std::memcpy(target.data.get(), value.GetTensorRawData(), target.Bytes());
  }

  /// True as long as the parameters have names and no values.
  bool IsNominal() const { return state_->nominal; }

  /// Set all parameters to those of a complete checkpoint of the same model. Properties and the
  /// optimizer's state remain as they are.
  void LoadParameters(const std::string& path) {
    detail::State other = detail::ReadCheckpoint(path);
    other.RequireValues();
    const bool free = state_->nominal && state_->flat == nullptr;  // shapes are not known yet
    const auto same = [free](const auto& ours, const auto& theirs) {
      const detail::Tensor &one = ours.second.value, &two = theirs.second.value;
      return ours.first == theirs.first && one.type == two.type && (free || one.shape == two.shape);
    };
    if (!std::equal(state_->parameters.begin(), state_->parameters.end(), other.parameters.begin(),
                    other.parameters.end(), same)) {
      throw Error("checkpoint-mismatch", "The checkpoint has other parameters than this state.",
                  path, "load a checkpoint of the same model");
    }
    for (auto& [name, parameter] : state_->parameters) {
      const detail::Tensor& value = other.parameters.at(name).value;
      if (free) parameter.value = value;
      else std::memcpy(parameter.value.data.get(), value.data.get(), value.Bytes());
    }
    state_->nominal = false;
  }

  /// The state itself, for the sessions.
  const std::shared_ptr<detail::State>& Internal() const { return state_; }

 private:
  explicit CheckpointState(detail::State state)
      : state_(std::make_shared<detail::State>(std::move(state))) {}

  const detail::Tensor& Find(const std::string& name) const {
    const auto found = state_->parameters.find(name);
    if (found == state_->parameters.end()) {
      throw Error("unknown-parameter", "The state has no parameter '" + name + "'.");
    }
    state_->RequireValues();
    return found->second.value;
  }

  std::shared_ptr<detail::State> state_;
};

}  // namespace odtpack
