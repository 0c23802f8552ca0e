// Checkpoints are read: what a file holds, checked before it is used (docs/formats/checkpoint.md).
#pragma once

#include "odtpack/base.hpp"
#include "odtpack/checkpoint_generated.h"
#include "odtpack/digest.hpp"

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
  bool checked = false;  // whether its file carried a digest, which was right
  Tensor flat, gradients;
  std::string recovered;  // what was wrong with the file, if the save before it was loaded
  std::string damaged;    // that file

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
    outline_ = Outline(nominal_);
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
    outline_.Count(Each(root_->optimizer_groups()).size());
    if (!Each(root_->optimizer_groups()).empty()) state.optimizer = Optimizer(state);
    Properties(root_->property_bag(), state);
    if (values_) state.checked = CheckDigest();
    return state;
  }

  size_t first_external = SIZE_MAX;  // lowest offset in the data file, after Read()

 private:
  void Require(bool good, const std::string& reason) const {
    if (!good)
      throw Error("checkpoint-corrupt", "It is not a readable checkpoint: " + reason + ".", where_,
                  "copy or download the file again, or fall back to an earlier one");
  }

  /// Compare with the digests that the file carries; false if it carries none.
  bool CheckDigest() {
    const std::string said = String(root_->digest());
    const bool marked = std::any_of(said_.begin(), said_.end(), [](const auto& each) {
      return each.second.compare(0, 7, "sha256:") == 0;
    });
    if (said.empty() && !marked) return false;
    const auto digests = outline_.Digests();
    std::string odd;
    for (size_t i = 0; marked && i < said_.size(); ++i) {
      if (said_[i].second != digests[i]) odd += (odd.empty() ? "'" : ", '") + said_[i].first + "'";
    }
    if (odd.empty()) odd = "its names, shapes, optimizer state or properties";
    Require(said == digests.back(), "what is stored is not what was saved: " + odd);
    return true;
  }

  std::string String(const flatbuffers::String* text) {
    if (text == nullptr) return {};
    text_ += text->size();
    Require(text_ <= bytes_.size(), "its strings overlap");  // one may be referred to many times
    Require(IsUtf8(text->str()), "it holds text that is not UTF-8");
    return text->str();
  }

  std::vector<std::pair<std::string, Tensor>> Tensors(
      const flatbuffers::Vector<flatbuffers::Offset<fbs::Tensor>>* list,
      const std::string& of = "") {
    std::vector<std::pair<std::string, Tensor>> tensors;
    std::set<std::string> names;
    outline_.Count(Each(list).size());
    for (const auto* table : Each(list)) {
      std::string name = String(table->name());
      Require(!name.empty() && names.insert(name).second, "a name is empty or occurs twice");
      tensors.emplace_back(name, ReadTensor(name, *table));
      outline_.AddTensor(name, tensors.back().second);
      if (!nominal_)
        said_.emplace_back(of.empty() ? name : name + " of " + of, String(table->doc_string()));
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
      int64_t size = 0;  // a hostile file's are not aligned, which the verifier does not see
      std::memcpy(&size, table.dims()->Data() + i * sizeof size, sizeof size);
      size = flatbuffers::EndianScalar(size);
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
      outline_.Text(name);
      outline_.Number(group->step());
      outline_.Number(group->initial_learning_rate());
      outline_.Count(Each(group->optimizer_states()).size());
      optimizer.groups.emplace_back();
      for (const auto* entry : Each(group->optimizer_states())) {
        const std::string of = String(entry->param_name());
        const auto owner = state.parameters.find(of);
        Require(
            owner != state.parameters.end() && owner->second.trainable && seen.insert(of).second,
            "the optimizer state of '" + of + "' occurs twice or belongs to no parameter");
        std::vector<Tensor> moments;
        outline_.Text(of);
        for (auto& [label, moment] : Tensors(entry->momentums(), of)) {
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

  void Properties(const fbs::PropertyBag* bag, State& state) {
    const auto add = [&](const flatbuffers::String* label, Property value) {
      const std::string name = String(label);
      outline_.Text(name);
      if (const auto* number = std::get_if<int64_t>(&value)) outline_.Number(*number);
      if (const auto* real = std::get_if<float>(&value)) outline_.Number(*real);
      if (const auto* text = std::get_if<std::string>(&value)) outline_.Text(*text);
      Require(!name.empty() && state.properties.emplace(name, std::move(value)).second,
              "a property name, '" + name + "', is empty or occurs twice");
    };
    const auto each = [&](const auto* list, const auto& value) {
      outline_.Count(Each(list).size());
      for (const auto* entry : Each(list)) add(entry->name(), value(*entry));
    };
    const auto plain = [](const auto& entry) { return Property(entry.value()); };
    each(bag ? bag->ints() : nullptr, plain);
    each(bag ? bag->floats() : nullptr, plain);
    each(bag ? bag->strings() : nullptr,
         [this](const auto& entry) { return Property(String(entry.value())); });
    const auto kind = state.properties.find(kOptimizerProperty);
    if (!state.optimizer || kind == state.properties.end()) return;
    Require(std::holds_alternative<std::string>(kind->second), "its odtpack.optimizer is no text");
    state.optimizer->kind = std::get<std::string>(kind->second);
    state.properties.erase(kind);
  }

  std::string_view bytes_;
  std::string where_, data_path_;
  bool values_, nominal_ = false;
  Outline outline_{false};
  std::vector<std::pair<std::string, std::string>> said_;  // tensors, and the file's digests
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

/// Where the checkpoint before the one at a path is kept.
inline std::string PreviousPath(const std::string& path) { return path + ".previous"; }

/// Read a checkpoint, or the one before it if it is damaged or missing.
inline State ReadLastGood(const std::string& path) {
  try {
    return ReadCheckpoint(path);
  } catch (const Error& error) {
    static const std::set<std::string> harmed = {"checkpoint-corrupt", "checkpoint-not-found",
                                                 "checkpoint-unreadable", "checkpoint-version",
                                                 "checkpoint-dtype"};
    const std::string before = PreviousPath(path);
    if (harmed.count(error.Code()) == 0 || !fs::is_regular_file(before)) throw;
    std::optional<State> state;
    try {
      state = ReadCheckpoint(before);
    } catch (const Error&) {
    }
    if (!state) throw;
    int64_t last = -1;
    try {  // what is left of the damaged file
      const auto content = Map(path);
      const State left = CheckpointReader(*content, path, "", false).Read();
      if (left.optimizer) last = left.optimizer->step;
    } catch (const std::exception&) {
    }
    const int64_t step = state->optimizer ? state->optimizer->step : 0;
    state->recovered =
        std::string(error.what()) + "\nThe save before it was loaded, " + before +
        ", of optimizer step " + std::to_string(step) + ": " +
        (last > step ? std::to_string(last - step) + " optimizer steps made since are lost."
                     : "what was trained since is lost.");
    state->damaged = path;
    return *std::move(state);
  }
}

}  // namespace detail
}  // namespace odtpack
