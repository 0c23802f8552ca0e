// The checkpoint: what training changes, read from and saved to the file of
// onnxruntime-training 1.19.2 (docs/formats/checkpoint.md).
#pragma once

#include "odtpack/base.hpp"
#include "odtpack/checkpoint_generated.h"

namespace odtpack {

/// A value that the user attaches to a state: saved with it.
using Property = std::variant<int64_t, float, std::string>;

namespace detail {

constexpr const char* kOptimizerProperty = "odtpack.optimizer";  // of a file, not of a state
constexpr size_t kExternalAbove = size_t{1800} << 20;  // bytes; a flatbuffer ends below 2 GiB
constexpr size_t kMostElements = size_t{1} << 48;

struct Parameter {
  Tensor value;
  bool trainable = false;
};
using Moments = std::vector<std::pair<std::string, std::vector<Tensor>>>;

/// What an optimizer carries from step to step, in the order of the file; no kind if unknown.
struct OptimizerState {
  int64_t step = 0;
  float rate = 0.001f;
  Moments moments;
  std::vector<std::vector<std::string>> groups;
  std::string kind;
};

/// Everything that training changes; without values if nominal. The trainable parameters and
/// their gradients are parts of two vectors, once a session placed them.
struct State {
  std::map<std::string, Parameter> parameters;
  std::map<std::string, Property> properties;
  std::optional<OptimizerState> optimizer;
  bool nominal = false;
  Tensor flat, gradients;

  void RequireValues() const {
    if (nominal)
      throw Error("nominal-state", "The parameters of a nominal checkpoint have no values.", "",
                  "load a complete checkpoint, or all parameters with FromBuffer");
  }
};

template <class Table>
std::vector<const Table*> Each(const flatbuffers::Vector<flatbuffers::Offset<Table>>* tables) {
  if (tables == nullptr) return {};
  return {tables->begin(), tables->end()};
}

/// Reads one file; what it finds wrong is an Error.
class CheckpointReader {
 public:
  /// Without `values`, tensors are described and not read.
  CheckpointReader(std::string_view bytes, std::string where, std::string data_path, bool values)
      : bytes_(bytes), where_(std::move(where)), data_path_(std::move(data_path)), values_(values) {
    const auto* data = reinterpret_cast<const uint8_t*>(bytes.data());
    Require(bytes.size() >= 8 && bytes.size() < FLATBUFFERS_MAX_BUFFER_SIZE, "its size");
    Require(fbs::CheckpointBufferHasIdentifier(data), "it does not carry the identifier ODTC");
    flatbuffers::Verifier verifier(data, bytes.size());
    Require(fbs::VerifyCheckpointBuffer(verifier), "its offsets lead out of the file");
    root_ = fbs::GetCheckpoint(data);
    if (root_->version() != 2) throw Error("checkpoint-version", where_ + " is not of version 2.");
  }

  State Read() {
    const auto* module = root_->module_state();
    Require(module != nullptr, "it has no module state");
    State state;
    state.nominal = nominal_ = module->is_nominal_state();
    inline_left_ = bytes_.size();
    if (module->has_external_data() && values_) {
      Require(!data_path_.empty() && !fs::is_symlink(data_path_), "it has no data file");
      data_ = Open(data_path_, "rbe");
      data_size_ = fs::file_size(data_path_);
    }
    external_left_ = values_ ? data_size_ : SIZE_MAX;
    for (const bool trainable : {true, false}) {
      for (auto& [name, tensor] :
           Tensors(trainable ? module->requires_grad_params() : module->frozen_params())) {
        Require(state.parameters.emplace(name, Parameter{tensor, trainable}).second,
                "parameter '" + name + "' is both trainable and frozen");
      }
    }
    if (!Each(root_->optimizer_groups()).empty()) state.optimizer = Optimizer(state);
    if (const auto* bag = root_->property_bag()) Properties(*bag, state);
    return state;
  }

  size_t first_external = SIZE_MAX;  // lowest offset in the data file, after Read()

 private:
  void Require(bool good, const std::string& reason) const {
    if (!good)
      throw Error("checkpoint-corrupt", "It is not a readable checkpoint: " + reason + ".", where_,
                  "copy or download the file again, or fall back to an earlier one");
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
      Require(!name.empty() && names.insert(name).second, "a name is empty or occurs twice");
      tensors.emplace_back(name, ReadTensor(name, *table));
    }
    return tensors;
  }

  Tensor ReadTensor(const std::string& name, const fbs::Tensor& table) {
    if (TypeInfo(table.data_type()).second == 0) {
      throw Error("checkpoint-dtype",
                  "'" + name + "' has elements of ONNX type " + std::to_string(table.data_type()) +
                      ", which are not supported.",
                  where_);
    }
    Tensor tensor{static_cast<Type>(table.data_type()), {}, nullptr};
    double most = 1;  // the product itself would be 0 for a zero beside any size
    for (size_t i = 0; table.dims() != nullptr && i < table.dims()->size(); ++i) {
      const int64_t size = table.dims()->Get(i);
      most *= std::max(1.0, static_cast<double>(size));
      Require(i < 32 && size >= 0 && most <= kMostElements,
              "'" + name + "' has an impossible shape");
      tensor.shape.push_back(size);
    }
    const size_t stored = table.raw_data() == nullptr ? 0 : table.raw_data()->size();
    const auto offset = static_cast<size_t>(table.external_data_offset());
    const bool external = offset != SIZE_MAX;
    Require(table.string_data() == nullptr, "'" + name + "' holds strings");
    if (nominal_) {
      Require(tensor.shape.empty() && stored == 0 && !external, "it is nominal and has values");
      tensor.shape = {0};
      return tensor;
    }
    const size_t bytes = tensor.Bytes();
    Require(stored == (external ? 0 : bytes), "the shape of '" + name + "' is not its size");
    size_t& left = external ? external_left_ : inline_left_;
    Require(bytes <= left, "its tensors overlap");
    left -= bytes;
    first_external = std::min(first_external, offset);
    if (!values_) return tensor;
    tensor = Zeros(tensor.type, tensor.shape);
    if (!external) {
      if (bytes > 0) tensor.CopyFrom(table.raw_data()->data());
    } else {
      Require(offset <= data_size_ - bytes &&
                  ::fseeko(data_.get(), table.external_data_offset(), SEEK_SET) == 0 &&
                  std::fread(tensor.data.get(), 1, bytes, data_.get()) == bytes,
              "'" + name + "' lies outside of its data file");
    }
    Require(tensor.type != kBool || std::all_of(tensor.data.get(), tensor.data.get() + bytes,
                                                [](uint8_t value) { return value < 2; }),
            "'" + name + "' holds bools that are neither 0 nor 1");
    return tensor;
  }

  OptimizerState Optimizer(const State& state) {
    const auto groups = Each(root_->optimizer_groups());
    OptimizerState optimizer{groups[0]->step(), groups[0]->initial_learning_rate(), {}, {}, {}};
    Require(optimizer.step >= 0 && std::isfinite(optimizer.rate), "its optimizer's step or rate");
    std::set<std::string> seen;
    for (const auto* group : groups) {
      const std::string name = "group" + std::to_string(optimizer.groups.size());
      Require(String(group->group_name()) == name && group->step() == optimizer.step &&
                  group->initial_learning_rate() == optimizer.rate,
              "its optimizer groups have other names, or stand at different steps or rates");
      optimizer.groups.emplace_back();
      for (const auto* entry : Each(group->optimizer_states())) {
        const std::string of = String(entry->param_name());
        const auto owner = state.parameters.find(of);
        Require(
            owner != state.parameters.end() && owner->second.trainable && seen.insert(of).second,
            "the optimizer state of '" + of + "' occurs twice or belongs to no parameter");
        std::vector<Tensor> moments;
        for (auto& [label, moment] : Tensors(entry->momentums())) {
          const Shape& shape = owner->second.value.shape;
          bool fits = label == "momentum" + std::to_string(moments.size()) &&
                      moment.type == owner->second.value.type &&
                      moment.shape.size() == shape.size();
          for (size_t i = 0; fits && i < shape.size(); ++i) {
            fits = moment.shape[i] == 1 || moment.shape[i] == shape[i];
          }
          Require(fits, "'" + label + "' of '" + of + "' has another shape or type than it");
          moments.push_back(std::move(moment));
        }
        optimizer.moments.emplace_back(of, std::move(moments));
        optimizer.groups.back().push_back(of);
        Require(optimizer.moments.back().second.size() == optimizer.moments[0].second.size(),
                "its optimizer state is uneven");
      }
    }
    for (const auto& [name, parameter] : state.parameters) {
      Require(seen.empty() || seen.count(name) == parameter.trainable, "it lacks optimizer state");
    }
    return optimizer;
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
  bool values_, nominal_ = false;
  const fbs::Checkpoint* root_ = nullptr;
  File data_{nullptr, std::fclose};
  size_t data_size_ = 0, inline_left_ = 0, external_left_ = 0, text_ = 0;
};

inline State ReadCheckpoint(const std::string& path) {
  try {
    return CheckpointReader(*Map(path), path, path + ".data", true).Read();
  } catch (const std::system_error& error) {
    const bool missing = error.code() == std::errc::no_such_file_or_directory;
    throw Error(missing ? "checkpoint-not-found" : "checkpoint-unreadable",
                "The checkpoint cannot be read: " + error.code().message() + ".", path);
  }
}

/// Everything of a file but the tensors' bytes, which follow it or lie in the data file.
class CheckpointWriter {
 public:
  CheckpointWriter(const State& state, const OptimizerState* optimizer, bool external, size_t from)
      : nominal_(state.nominal), external_(external), at_(from) {
    no_bytes_ = to_.CreateVector(std::vector<uint8_t>());
    std::vector<flatbuffers::Offset<fbs::Tensor>> tensors[2];
    for (const bool frozen : {false, true}) {
      for (const auto& [name, parameter] : state.parameters) {
        if (parameter.trainable != frozen) tensors[frozen].push_back(Add(name, parameter.value));
      }
    }
    const auto module = fbs::CreateModuleState(to_, to_.CreateVector(tensors[0]),
                                               to_.CreateVector(tensors[1]), nominal_, external);
    std::vector<flatbuffers::Offset<fbs::OptimizerGroup>> groups;
    auto properties = state.properties;
    if (optimizer != nullptr && !optimizer->kind.empty())
      properties[kOptimizerProperty] = optimizer->kind;
    for (size_t i = 0; optimizer != nullptr && i < optimizer->groups.size(); ++i) {
      std::vector<flatbuffers::Offset<fbs::ParameterOptimizerState>> entries;
      for (const auto& name : optimizer->groups[i]) {
        for (const auto& [owner, moments] : optimizer->moments) {
          if (owner != name) continue;
          std::vector<flatbuffers::Offset<fbs::Tensor>> own;
          for (const Tensor& one : moments)
            own.push_back(Add("momentum" + std::to_string(own.size()), one));
          entries.push_back(fbs::CreateParameterOptimizerState(to_, to_.CreateSharedString(name),
                                                               to_.CreateVector(own)));
        }
      }
      groups.push_back(fbs::CreateOptimizerGroup(to_, to_.CreateString("group" + std::to_string(i)),
                                                 optimizer->step, optimizer->rate,
                                                 to_.CreateVector(entries)));
    }
    const auto all = to_.CreateVector(groups);
    fbs::FinishCheckpointBuffer(to_, fbs::CreateCheckpoint(to_, 2, module, all, Bag(properties)));
    if (!external) PlacePayload();
  }

  void WriteHead(const File& file) const { Write(file, to_.GetBufferPointer(), to_.GetSize()); }

  /// Write the tensors' bytes: each with its length in front, or one after the other.
  void WritePayload(const File& file) const {
    const uint8_t zeros[16] = {};
    for (size_t i = 0; i < payload_.size(); ++i) {
      const auto size = static_cast<flatbuffers::uoffset_t>(payload_[i].second->Bytes());
      if (!external_) Write(file, zeros, gaps_[i]);
      if (!external_) Write(file, &size, sizeof size);
      Write(file, payload_[i].second->data.get(), payload_[i].second->Bytes());
    }
  }

 private:
  flatbuffers::Offset<fbs::Tensor> Add(const std::string& name, const Tensor& tensor) {
    const auto label = to_.CreateSharedString(name);
    const auto dims = to_.CreateVector(nominal_ ? Shape{} : tensor.shape);
    const bool kept = !nominal_ && tensor.Bytes() > 0, external = kept && external_;
    // raw_data stays absent with external data: the reference looks no further if it is there.
    const auto table = fbs::CreateTensor(to_, label, 0, dims, tensor.type, external ? 0 : no_bytes_,
                                         0, external ? static_cast<int64_t>(at_) : -1);
    if (external) at_ += tensor.Bytes();
    if (kept) payload_.emplace_back(table.o, &tensor);
    return table;
  }

  flatbuffers::Offset<fbs::PropertyBag> Bag(const std::map<std::string, Property>& properties) {
    std::vector<flatbuffers::Offset<fbs::IntProperty>> ints;
    std::vector<flatbuffers::Offset<fbs::FloatProperty>> floats;
    std::vector<flatbuffers::Offset<fbs::StringProperty>> texts;
    for (const auto& [name, value] : properties) {
      const auto* number = std::get_if<int64_t>(&value);
      const auto* real = std::get_if<float>(&value);
      const auto* text = std::get_if<std::string>(&value);
      const auto label = to_.CreateString(name);
      if (number != nullptr) ints.push_back(fbs::CreateIntProperty(to_, label, *number));
      if (real != nullptr) floats.push_back(fbs::CreateFloatProperty(to_, label, *real));
      if (text != nullptr)
        texts.push_back(fbs::CreateStringProperty(to_, label, to_.CreateString(*text)));
    }
    if (properties.empty()) return 0;
    return fbs::CreatePropertyBag(to_, to_.CreateVector(ints), to_.CreateVector(floats),
                                  to_.CreateVector(texts));
  }

  /// Payload follows the head, each tensor at a multiple of 16: offsets point forward.
  void PlacePayload() {
    uint8_t* head = to_.GetBufferPointer();
    size_t end = to_.GetSize();
    for (const auto& [table, tensor] : payload_) {
      auto* fields = reinterpret_cast<flatbuffers::Table*>(head + to_.GetSize() - table);
      uint8_t* slot = fields->GetAddressOf(fbs::Tensor::VT_RAW_DATA);
      const size_t position = (end + 4 + 15) / 16 * 16;
      gaps_.push_back(position - 4 - end);
      flatbuffers::WriteScalar(slot,
                               static_cast<flatbuffers::uoffset_t>(position - 4 - (slot - head)));
      end = position + tensor->Bytes();
    }
  }

  flatbuffers::FlatBufferBuilder to_;
  bool nominal_, external_;
  size_t at_;
  flatbuffers::Offset<flatbuffers::Vector<uint8_t>> no_bytes_;
  std::vector<std::pair<flatbuffers::uoffset_t, const Tensor*>> payload_;
  std::vector<size_t> gaps_;
};

/// Write a checkpoint whole or not at all. Above `external_above` bytes the tensors go to
/// `<path>.data`, where the current checkpoint has none: killed at any moment, it is whole.
inline void WriteCheckpoint(const std::string& path, const State& state, bool with_optimizer,
                            size_t external_above = kExternalAbove) {
  const auto* optimizer =
      with_optimizer && !state.nominal && state.optimizer ? &*state.optimizer : nullptr;
  size_t total = 0;
  for (const auto& item : state.parameters) total += state.nominal ? 0 : item.second.value.Bytes();
  for (size_t i = 0; optimizer != nullptr && i < optimizer->moments.size(); ++i) {
    for (const Tensor& moment : optimizer->moments[i].second) total += moment.Bytes();
  }
  size_t occupied = SIZE_MAX;
  try {
    const auto current = Map(path);
    CheckpointReader reader(*current, path, "", false);
    reader.Read();
    occupied = reader.first_external;
  } catch (const std::exception&) {  // absent or unreadable: nothing to preserve
  }
  const std::string data_path = path + ".data";
  if (total <= external_above) {
    const CheckpointWriter writer(state, optimizer, false, 0);
    WriteAtomically(path, [&writer](const File& file) {
      writer.WriteHead(file);
      writer.WritePayload(file);
    });
    if (occupied != SIZE_MAX) ::unlink(data_path.c_str());
    return;
  }
  try {
    if (fs::is_symlink(data_path)) throw std::system_error(ELOOP, std::generic_category());
    const File data = Open(data_path, fs::exists(data_path) ? "r+be" : "wbxe");
    const size_t start = occupied >= total ? 0 : fs::file_size(data_path);
    const CheckpointWriter writer(state, optimizer, true, start);
    Check(::fseeko(data.get(), static_cast<off_t>(start), SEEK_SET) == 0);
    writer.WritePayload(data);
    Sync(data);
    SyncFolder(data_path);
    WriteAtomically(path, [&writer](const File& file) { writer.WriteHead(file); });
    if (start == 0) fs::resize_file(data_path, total);
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
    return CheckpointState(detail::CheckpointReader(view, "the buffer", "", true).Read());
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
    if (HasProperty(name)) return state_->properties.at(name);
    throw Error("unknown-property", "The state has no property '" + name + "'.");
  }
  bool HasProperty(const std::string& name) const { return state_->properties.count(name) > 0; }

  /// The parameter itself, not a copy: it shows the training's progress.
  Ort::Value GetParameter(const std::string& name) const { return Find(name).Value(); }

  void UpdateParameter(const std::string& name, const Ort::Value& value) {
    const detail::Tensor& target = Find(name);
    const auto info = value.GetTensorTypeAndShapeInfo();
    const bool same_type = info.GetElementType() == target.type;
    if (!same_type || info.GetShape() != target.shape) {
      throw Error(
          same_type ? "parameter-shape" : "parameter-type",
          "Parameter '" + name + "' is " + target.Description() + ", unlike the new value.");
    }
    target.CopyFrom(value.GetTensorRawData());
  }

  /// True as long as the parameters have names and no values.
  bool IsNominal() const { return state_->nominal; }

  /// Set all parameters to those of a complete checkpoint of the same model. Properties and the
  /// optimizer's state remain as they are.
  void LoadParameters(const std::string& path) {
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
};

}  // namespace odtpack
