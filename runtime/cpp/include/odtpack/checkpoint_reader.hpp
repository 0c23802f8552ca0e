// Checkpoints are read: what a file holds, checked before it is used (docs/formats/checkpoint.md).
#pragma once

#include <unordered_set>

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
  std::optional<FileIdentity> whole;  // of the file that was last loaded whole, or written
  std::shared_ptr<Gate> gate = std::make_shared<Gate>();

  void RequireValues() const {
    if (nominal)
      throw Error("nominal-state", "The parameters of a nominal checkpoint have no values.", "",
                  "load a complete checkpoint, or all parameters with FromBuffer");
  }
};

template <class Table>
using Tables = flatbuffers::Vector<flatbuffers::Offset<Table>>;

/// Number of entries of a list that may be absent.
template <class List>
size_t SizeOf(const List* list) {
  return list == nullptr ? 0 : list->size();
}

/// What becomes of the elements of tensors: they are left alone, looked at where they are (checked,
/// and valid as long as the file's bytes), or copied.
enum class Values { kNone, kViewed, kCopied };

/// Reads one file; what it finds wrong is an Error.
class CheckpointReader {
 public:
  CheckpointReader(std::string_view bytes, std::string where, std::string data_path, Values values)
      : bytes_(bytes), where_(std::move(where)), data_path_(std::move(data_path)), values_(values) {
    const auto* data = reinterpret_cast<const uint8_t*>(bytes.data());
    Require(bytes.size() >= 8 && bytes.size() < FLATBUFFERS_MAX_BUFFER_SIZE, "its size");
    Require(fbs::CheckpointBufferHasIdentifier(data), "it does not carry the identifier ODTC");
    // A table and the offset to it take eight bytes: more of them are there several times.
    flatbuffers::Verifier verifier(data, bytes.size(), 64,
                                   static_cast<flatbuffers::uoffset_t>(bytes.size() / 8 + 1));
    Require(fbs::VerifyCheckpointBuffer(verifier), "its offsets lead out of the file");
    root_ = fbs::GetCheckpoint(data);
    Enter(Plain(root_), "44444");
    if (root_->version() != 2) throw Error("checkpoint-version", where_ + " is not of version 2.");
  }

  State Read() {
    const auto* module = root_->module_state();
    Require(module != nullptr, "it has no module state");
    Enter(Plain(module), "4411");
    State state;
    state.nominal = nominal_ = module->is_nominal_state();
    outline_ = Outline(nominal_);
    inline_left_ = bytes_.size();
    external_ = module->has_external_data();
    if (external_ && values_ != Values::kNone) {
      Require(!data_path_.empty() && !fs::is_symlink(data_path_), "it has no data file");
      data_ = Map(data_path_);
    }
    external_left_ = values_ == Values::kNone ? SIZE_MAX : data_->size();
    for (const bool trainable : {true, false}) {
      for (auto& [name, tensor] :
           ReadTensors(trainable ? module->requires_grad_params() : module->frozen_params())) {
        Require(state.parameters.emplace(name, Parameter{tensor, trainable}).second,
                "parameter '" + name + "' is both trainable and frozen");
      }
    }
    outline_.Count(SizeOf(root_->optimizer_groups()));
    if (SizeOf(root_->optimizer_groups()) > 0) state.optimizer = Optimizer(state);
    if (const auto* bag = root_->property_bag()) Enter(Plain(bag), "444");
    Properties(root_->property_bag(), state);
    if (values_ != Values::kNone) state.checked = CheckDigest();
    return state;
  }

  /// The part of the data file that is used, empty if none is; after Read().
  std::pair<size_t, size_t> external = {SIZE_MAX, 0};

 private:
  void Require(bool good, const std::string& reason) const {
    if (!good)
      throw Error("checkpoint-corrupt", "It is not a readable checkpoint: " + reason + ".", where_,
                  "copy or download the file again, or fall back to an earlier one");
  }

  /// Note that a table is read, and check what the verifier does not: that nothing else refers to
  /// it, and that its fields lie inside it. `widths` has a digit for each field: its bytes.
  void Enter(const flatbuffers::Table* table, std::string_view widths) {
    Require(entered_.insert(table).second, "two places refer to one table");
    const auto* start = reinterpret_cast<const uint8_t*>(table);
    const uint8_t* const fields = FieldsOf(table);
    const auto read = [fields](size_t at) {
      return size_t{flatbuffers::ReadScalar<flatbuffers::voffset_t>(fields + at)};
    };
    const auto* end = reinterpret_cast<const uint8_t*>(bytes_.data()) + bytes_.size();
    const size_t size = read(2);
    Require(read(0) >= 4 && size >= 4 && size <= static_cast<size_t>(end - start),
            "a table is malformed");
    for (size_t i = 0; i < widths.size() && 6 + 2 * i <= read(0); ++i) {
      const size_t field = read(4 + 2 * i), width = static_cast<size_t>(widths[i] - '0');
      Require(field == 0 || (field >= 4 && field + width <= size),
              "a field lies outside of its table");
    }
  }
  template <class Table>
  static const flatbuffers::Table* Plain(const Table* table) {
    return reinterpret_cast<const flatbuffers::Table*>(table);
  }
  static const uint8_t* FieldsOf(const flatbuffers::Table* table) {
    const auto* start = reinterpret_cast<const uint8_t*>(table);
    return start - flatbuffers::ReadScalar<flatbuffers::soffset_t>(start);
  }

  /// Whether anything says that odtpack wrote the file, which then carried a digest.
  bool IsOurs() const {
    const auto fields = flatbuffers::ReadScalar<flatbuffers::voffset_t>(FieldsOf(Plain(root_)));
    if (fields > fbs::Checkpoint::VT_DIGEST) return true;  // the reference has no such field
    const size_t end = kDigestTextBytes + 1;
    if (bytes_.size() > end && bytes_.substr(bytes_.size() - end, 7) == "sha256:") return true;
    return std::any_of(said_.begin(), said_.end(), [](const auto& each) {
             return each.second.compare(0, 7, "sha256:") == 0;
           });
  }

  /// Compare with the digests that the file carries; false if it carries none.
  bool CheckDigest() {
    const std::string said = String(root_->digest());
    if (said.empty()) {
      Require(!IsOurs(), "odtpack wrote it, and its digest is missing");
      return false;
    }
    const auto digests = outline_.Digests();
    std::string odd;
    for (size_t i = 0; i < said_.size(); ++i) {
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

  std::vector<std::pair<std::string, Tensor>> ReadTensors(const Tables<fbs::Tensor>* list,
                                                          const std::string& of = "") {
    std::vector<std::pair<std::string, Tensor>> tensors;
    std::set<std::string> names;
    outline_.Count(SizeOf(list));
    for (size_t i = 0; i < SizeOf(list); ++i) {
      const auto* table = list->Get(static_cast<flatbuffers::uoffset_t>(i));
      Enter(Plain(table), "4444448");
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
    const bool outside = offset != SIZE_MAX;
    Require(table.string_data() == nullptr, "'" + name + "' holds strings");
    if (nominal_) {
      Require(tensor.shape.empty() && stored == 0 && !outside, "it is nominal and has values");
      tensor.shape = {0};
      return tensor;
    }
    const size_t bytes = tensor.Bytes();
    Require(stored == (outside ? 0 : bytes), "the shape of '" + name + "' is not its size");
    size_t& left = outside ? external_left_ : inline_left_;
    Require(bytes <= left, "its tensors overlap");
    left -= bytes;
    if (outside) {
      Require(external_ && offset <= kMostElements, "'" + name + "' lies outside of its data file");
      external = {std::min(external.first, offset), std::max(external.second, offset + bytes)};
    }
    if (values_ == Values::kNone) return tensor;
    Require(!outside || (bytes <= data_->size() && offset <= data_->size() - bytes),
            "'" + name + "' lies outside of its data file");
    const auto* source = outside ? reinterpret_cast<const uint8_t*>(data_->data()) + offset
                         : table.raw_data() == nullptr ? nullptr
                                                       : table.raw_data()->data();
    if (values_ == Values::kCopied) {
      tensor = Zeros(tensor.type, tensor.shape);
      tensor.CopyFrom(source);
    } else {
      tensor.data = Memory(data_, const_cast<uint8_t*>(source));
    }
    Require(tensor.type != kBool || std::all_of(tensor.data.get(), tensor.data.get() + bytes,
                                                [](uint8_t value) { return value < 2; }),
            "'" + name + "' holds bools that are neither 0 nor 1");
    return tensor;
  }

  OptimizerState Optimizer(const State& state) {
    const auto& groups = *root_->optimizer_groups();
    OptimizerState optimizer;
    optimizer.step = groups.Get(0)->step();
    optimizer.rate = groups.Get(0)->initial_learning_rate();
    Require(optimizer.step >= 0 && std::isfinite(optimizer.rate), "its optimizer's step or rate");
    std::set<std::string> seen;
    for (const auto* group : groups) {
      Enter(Plain(group), "4844");
      const std::string name = "group" + std::to_string(optimizer.groups.size());
      Require(String(group->group_name()) == name && group->step() == optimizer.step &&
                  group->initial_learning_rate() == optimizer.rate,
              "its optimizer groups have other names, or stand at different steps or rates");
      outline_.Text(name);
      outline_.Number(group->step());
      outline_.Number(group->initial_learning_rate());
      const auto* entries = group->optimizer_states();
      outline_.Count(SizeOf(entries));
      optimizer.groups.emplace_back();
      for (size_t i = 0; i < SizeOf(entries); ++i) {
        const auto* entry = entries->Get(static_cast<flatbuffers::uoffset_t>(i));
        Enter(Plain(entry), "44");
        const std::string of = String(entry->param_name());
        const auto owner = state.parameters.find(of);
        Require(
            owner != state.parameters.end() && owner->second.trainable && seen.insert(of).second,
            "the optimizer state of '" + of + "' occurs twice or belongs to no parameter");
        std::vector<Tensor> moments;
        outline_.Text(of);
        for (auto& [label, moment] : ReadTensors(entry->momentums(), of)) {
          const Shape& shape = owner->second.value.shape;
          bool fits = label == "momentum" + std::to_string(moments.size()) &&
                      moment.type == owner->second.value.type &&
                      moment.shape.size() == shape.size();
          for (size_t axis = 0; fits && axis < shape.size(); ++axis)
            fits = moment.shape[axis] == 1 || moment.shape[axis] == shape[axis];
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
    const auto each = [&](const auto* list, const char* widths, const auto& value) {
      outline_.Count(SizeOf(list));
      for (size_t i = 0; i < SizeOf(list); ++i) {
        const auto* entry = list->Get(static_cast<flatbuffers::uoffset_t>(i));
        Enter(Plain(entry), widths);
        add(entry->name(), value(*entry));
      }
    };
    const auto plain = [](const auto& entry) { return Property(entry.value()); };
    each(bag ? bag->ints() : nullptr, "48", plain);
    each(bag ? bag->floats() : nullptr, "44", plain);
    each(bag ? bag->strings() : nullptr, "44",
         [this](const auto& entry) { return Property(String(entry.value())); });
    const auto kind = state.properties.find(kOptimizerProperty);
    if (!state.optimizer || kind == state.properties.end()) return;
    Require(std::holds_alternative<std::string>(kind->second), "its odtpack.optimizer is no text");
    state.optimizer->kind = std::get<std::string>(kind->second);
    state.properties.erase(kind);
  }

  std::string_view bytes_;
  std::string where_, data_path_;
  Values values_;
  bool nominal_ = false, external_ = false;
  Outline outline_{false};
  std::vector<std::pair<std::string, std::string>> said_;  // tensors, and the file's digests
  std::unordered_set<const void*> entered_;
  const fbs::Checkpoint* root_ = nullptr;
  std::shared_ptr<const std::string_view> data_ = std::make_shared<std::string_view>();
  size_t inline_left_ = 0, external_left_ = 0, text_ = 0;
};

inline State ReadCheckpoint(const std::string& path, Values values = Values::kCopied) {
  for (int attempt = 0;; ++attempt) {
    const auto identity = IdentityOf(path);
    try {
      const auto content = Map(path);
      State state = CheckpointReader(*content, path, path + ".data", values).Read();
      if (identity && identity == IdentityOf(path)) state.whole = identity;
      return state;
    } catch (const std::system_error& error) {
      const bool missing = error.code() == std::errc::no_such_file_or_directory;
      throw Error(missing ? "checkpoint-not-found" : "checkpoint-unreadable",
                  "The checkpoint cannot be read: " + error.code().message() + ".", path);
    } catch (const Error&) {
      // A save by another process may have replaced it, and then its elements in the data file.
      if (attempt == 3 || identity == IdentityOf(path)) throw;
    }
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
      const State left = CheckpointReader(*content, path, "", Values::kNone).Read();
      if (left.optimizer) last = left.optimizer->step;
    } catch (const std::exception&) {
    }
    const int64_t step = state->optimizer ? state->optimizer->step : 0;
    state->recovered =
        std::string(error.what()) + "\nThe save before it was loaded, " + before +
        ", of optimizer step " + std::to_string(step) + ": " +
        (last > step ? std::to_string(last - step) + " optimizer steps made since are lost."
                     : "what was trained since is lost.");
    return *std::move(state);
  }
}

}  // namespace detail
}  // namespace odtpack
