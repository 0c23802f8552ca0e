// Checkpoints are read: what a file holds, checked before it is used (docs/formats/checkpoint.md).
#pragma once

#include "odtpack/device.hpp"
#include "odtpack/checkpoint_generated.h"
#include "odtpack/digest.hpp"
#include "odtpack/flatbuffer.hpp"

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

/// Property of a state: the schedule that its optimizer follows, as JSON.
inline constexpr const char* kScheduleProperty = "odtpack.schedule";

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
  std::shared_ptr<OptimizerState> optimizer;  // that of the session made last
  bool nominal = false;
  bool checked = false;  // whether its file carried a digest, which was right
  Tensor flat, gradients;
  bool spoiled = false;   // the gradients are of no use: the step that was to make them is void
  std::string recovered;  // what was wrong with the file, if the save before it was loaded
  std::optional<FileIdentity> whole;  // of the file that was last loaded whole, or written
  std::shared_ptr<Gate> gate = std::make_shared<Gate>();
  std::weak_ptr<Twins> twins;  // while it is trained on a device

  /// Let tensors hold what was trained, before they are read, or written if that is so.
  void Refresh(bool written = false) const {
    const auto living = twins.lock();
    if (living) written ? living->Change() : living->Pull();
  }
  void RequireValues() const {
    if (nominal)
      throw Error("nominal-state", "The parameters of a nominal checkpoint have no values.", "",
                  "load a complete checkpoint, or all parameters with FromBuffer");
  }
};

/// What becomes of the elements of tensors: they are left alone, looked at where they are (checked,
/// and valid as long as the file's bytes), or copied.
enum class Values { kNone, kViewed, kCopied };

/// Reads one file; what it finds wrong is an Error.
class CheckpointReader {
 public:
  CheckpointReader(std::string_view bytes, std::string where, std::string data_path, Values values)
      : bytes_(bytes),
        where_(std::move(where)),
        data_path_(std::move(data_path)),
        values_(values),
        source_(bytes, where_) {
    Require(bytes.size() >= 8 && bytes.size() <= INT32_MAX, "its size");
    Require(bytes.substr(4, 4) == fbs::CheckpointIdentifier(),
            "it does not carry the identifier ODTC");
    root_.emplace(source_, source_.Number<uint32_t>(0));
    if (root_->Number<int32_t>(fbs::Checkpoint::VT_VERSION) != 2)
      throw Error("checkpoint-version", where_ + " is not of version 2.");
  }

  State Read() {
    using Module = fbs::ModuleState;
    const auto module = root_->Table(fbs::Checkpoint::VT_MODULE_STATE);
    Require(module.has_value(), "it has no module state");
    State state;
    state.nominal = nominal_ = module->Number<uint8_t>(Module::VT_IS_NOMINAL_STATE) != 0;
    outline_ = Outline(nominal_);
    inline_left_ = bytes_.size();
    external_ = module->Number<uint8_t>(Module::VT_HAS_EXTERNAL_DATA) != 0;
    if (external_ && values_ != Values::kNone) {
      Require(!data_path_.empty() && !fs::is_symlink(data_path_), "it has no data file");
      if (!fs::exists(data_path_))
        throw Error("checkpoint-not-found", "There is no data file " + data_path_ + ".", where_);
      // Another process may save meanwhile, and cut the file.
      if (values_ == Values::kCopied)
        data_file_ = Open(data_path_, "rbe");
      else
        data_ = Map(data_path_);
      data_size_ = data_file_ ? fs::file_size(data_path_) : data_->size();
    }
    external_left_ = values_ == Values::kNone ? SIZE_MAX : data_size_;
    for (const bool trainable : {true, false}) {
      for (auto& [name, tensor] : ReadTensors(
               *module, trainable ? Module::VT_REQUIRES_GRAD_PARAMS : Module::VT_FROZEN_PARAMS)) {
        Require(state.parameters.emplace(name, Parameter{tensor, trainable}).second,
                "parameter '" + name + "' is both trainable and frozen");
      }
    }
    const size_t groups = root_->Count(fbs::Checkpoint::VT_OPTIMIZER_GROUPS);
    outline_.Count(groups);
    if (groups > 0) state.optimizer = std::make_shared<OptimizerState>(Optimizer(state));
    Properties(root_->Table(fbs::Checkpoint::VT_PROPERTY_BAG), state);
    if (values_ != Values::kNone) state.checked = CheckDigest(state);
    return state;
  }

  /// The part of the data file that is used, empty if none is; after Read().
  std::pair<size_t, size_t> external = {SIZE_MAX, 0};

 private:
  void Require(bool good, const std::string& reason) const {
    if (!good) source_.Fail(reason);
  }

  /// Whether digests stand in a file that refers to none: a few bytes may hide all of them. Those
  /// that are texts of properties do not count.
  bool LostDigests(const State& state) const {
    const auto is_digest = [](std::string_view text) {
      return text.size() == kDigestTextBytes && text.substr(0, 7) == "sha256:" &&
             text.find_first_not_of("0123456789abcdef", 7) == text.npos;
    };
    int64_t found = 0;
    for (const auto& [name, value] : state.properties) {
      const auto* text = std::get_if<std::string>(&value);
      if (text != nullptr && is_digest(*text)) --found;
    }
    const std::string start = std::string("\x47\0\0\0", 4) + "sha256:";  // 71 bytes follow
    for (size_t at = bytes_.find(start); at != bytes_.npos; at = bytes_.find(start, at + 1)) {
      const size_t end = at + 4 + kDigestTextBytes;
      if (end < bytes_.size() && bytes_[end] == 0 && is_digest(bytes_.substr(at + 4, end - at - 4)))
        ++found;
    }
    return found > 0;
  }

  /// Compare with the digests that the file carries; false if it carries none.
  bool CheckDigest(const State& state) {
    const std::string said = root_->Text(fbs::Checkpoint::VT_DIGEST);
    if (said.empty()) {
      const bool marked = std::any_of(said_.begin(), said_.end(), [](const auto& each) {
        return each.second.compare(0, 7, "sha256:") == 0;
      });
      Require(!marked && !LostDigests(state), "odtpack wrote it, and its digest is missing");
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

  std::vector<std::pair<std::string, Tensor>> ReadTensors(const FlatTable& owner, int field,
                                                          const std::string& of = "") {
    std::vector<std::pair<std::string, Tensor>> tensors;
    std::set<std::string> names;
    outline_.Count(owner.Count(field));
    owner.Each(field, [&](const FlatTable& table) {
      std::string name = table.Text(fbs::Tensor::VT_NAME);
      Require(!name.empty() && names.insert(name).second, "a name is empty or occurs twice");
      tensors.emplace_back(name, ReadTensor(name, table));
      outline_.AddTensor(name, tensors.back().second);
      if (nominal_) return;
      said_.emplace_back(of.empty() ? name : name + " of " + of,
                         table.Text(fbs::Tensor::VT_DOC_STRING));
    });
    return tensors;
  }

  Tensor ReadTensor(const std::string& name, const FlatTable& table) {
    const auto type = table.Number<int32_t>(fbs::Tensor::VT_DATA_TYPE);
    if (TypeInfo(type).second == 0) {
      throw Error("checkpoint-dtype",
                  "'" + name + "' has elements of ONNX type " + std::to_string(type) +
                      ", which are not supported.",
                  where_);
    }
    Tensor tensor{static_cast<Type>(type), {}, nullptr};
    const FlatVector dims = table.Vector(fbs::Tensor::VT_DIMS, sizeof(int64_t));
    double most = 1;  // the product itself would be 0 for a zero beside any size
    for (int64_t i = 0; i < dims.length; ++i) {
      const auto size = source_.Number<int64_t>(dims.position + 8 * i);
      most *= std::max(1.0, static_cast<double>(size));
      Require(i < 32 && size >= 0 && most <= kMostElements,
              "'" + name + "' has an impossible shape");
      tensor.shape.push_back(size);
    }
    const FlatVector raw = table.Vector(fbs::Tensor::VT_RAW_DATA, 1);
    const auto stored = static_cast<size_t>(raw.length);
    const auto offset =
        static_cast<size_t>(table.Number<int64_t>(fbs::Tensor::VT_EXTERNAL_DATA_OFFSET, -1));
    const bool outside = offset != SIZE_MAX;
    Require(!table.Vector(fbs::Tensor::VT_STRING_DATA, 4).there,
            "'" + name + "' holds strings");
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
    Require(!outside || (bytes <= data_size_ && offset <= data_size_ - bytes),
            "'" + name + "' lies outside of its data file");
    const auto* source = outside && data_file_ == nullptr
                             ? reinterpret_cast<const uint8_t*>(data_->data()) + offset
                         : raw.there ? reinterpret_cast<const uint8_t*>(source_.At(raw.position))
                                     : nullptr;
    if (values_ == Values::kCopied) {
      tensor = Zeros(tensor.type, tensor.shape);
      if (!outside)
        tensor.CopyFrom(source);
      else
        Require(ReadAt(data_file_, tensor.data.get(), bytes, offset), "its data became shorter");
    } else {
      tensor.data = Memory(data_, const_cast<uint8_t*>(source));
    }
    Require(tensor.type != kBool || std::all_of(tensor.data.get(), tensor.data.get() + bytes,
                                                [](uint8_t value) { return value < 2; }),
            "'" + name + "' holds bools that are neither 0 nor 1");
    return tensor;
  }

  OptimizerState Optimizer(const State& state) {
    using Group = fbs::OptimizerGroup;
    OptimizerState optimizer;
    std::vector<FlatTable> groups;
    root_->Each(fbs::Checkpoint::VT_OPTIMIZER_GROUPS,
                [&groups](const FlatTable& group) { groups.push_back(group); });
    optimizer.step = groups[0].Number<int64_t>(Group::VT_STEP);
    optimizer.rate = groups[0].Number<float>(Group::VT_INITIAL_LEARNING_RATE);
    Require(optimizer.step >= 0 && std::isfinite(optimizer.rate), "its optimizer's step or rate");
    std::set<std::string> seen;
    for (const FlatTable& group : groups) {
      const std::string name = "group" + std::to_string(optimizer.groups.size());
      const auto step = group.Number<int64_t>(Group::VT_STEP);
      const auto rate = group.Number<float>(Group::VT_INITIAL_LEARNING_RATE);
      Require(group.Text(Group::VT_GROUP_NAME) == name && step == optimizer.step &&
                  rate == optimizer.rate,
              "its optimizer groups have other names, or stand at different steps or rates");
      outline_.Text(name);
      outline_.Number(step);
      outline_.Number(rate);
      outline_.Count(group.Count(Group::VT_OPTIMIZER_STATES));
      optimizer.groups.emplace_back();
      group.Each(Group::VT_OPTIMIZER_STATES, [&](const FlatTable& entry) {
        const std::string of = entry.Text(fbs::ParameterOptimizerState::VT_PARAM_NAME);
        const auto owner = state.parameters.find(of);
        Require(
            owner != state.parameters.end() && owner->second.trainable && seen.insert(of).second,
            "the optimizer state of '" + of + "' occurs twice or belongs to no parameter");
        std::vector<Tensor> moments;
        outline_.Text(of);
        for (auto& [label, moment] :
             ReadTensors(entry, fbs::ParameterOptimizerState::VT_MOMENTUMS, of)) {
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
      });
    }
    for (const auto& [name, parameter] : state.parameters) {
      Require(seen.empty() || seen.count(name) == parameter.trainable, "it lacks optimizer state");
    }
    return optimizer;
  }

  void Properties(const std::optional<FlatTable>& bag, State& state) {
    const auto each = [&](int field, int label, const auto& read) {
      outline_.Count(bag ? bag->Count(field) : 0);
      if (!bag) return;
      bag->Each(field, [&](const FlatTable& entry) {
        const std::string name = entry.Text(label);
        Property value = read(entry);
        outline_.Text(name);
        if (const auto* number = std::get_if<int64_t>(&value)) outline_.Number(*number);
        if (const auto* real = std::get_if<float>(&value)) outline_.Number(*real);
        if (const auto* text = std::get_if<std::string>(&value)) outline_.Text(*text);
        Require(!name.empty() && state.properties.emplace(name, std::move(value)).second,
                "a property name, '" + name + "', is empty or occurs twice");
      });
    };
    each(fbs::PropertyBag::VT_INTS, fbs::IntProperty::VT_NAME, [](const FlatTable& entry) {
      return Property(entry.Number<int64_t>(fbs::IntProperty::VT_VALUE));
    });
    each(fbs::PropertyBag::VT_FLOATS, fbs::FloatProperty::VT_NAME, [](const FlatTable& entry) {
      return Property(entry.Number<float>(fbs::FloatProperty::VT_VALUE));
    });
    each(fbs::PropertyBag::VT_STRINGS, fbs::StringProperty::VT_NAME, [](const FlatTable& entry) {
      return Property(entry.Text(fbs::StringProperty::VT_VALUE));
    });
    const auto kind = state.properties.find(kOptimizerProperty);
    if (kind == state.properties.end()) return;
    if (state.optimizer) {
      const auto* text = std::get_if<std::string>(&kind->second);
      Require(text != nullptr, "its odtpack.optimizer is no text");
      state.optimizer->kind = *text;
    }
    state.properties.erase(kind);
  }

  std::string_view bytes_;
  std::string where_, data_path_;
  Values values_;
  bool nominal_ = false, external_ = false;
  Outline outline_{false};
  std::vector<std::pair<std::string, std::string>> said_;  // tensors, and the file's digests
  FlatBuffer source_;
  std::optional<FlatTable> root_;
  std::shared_ptr<const std::string_view> data_ = std::make_shared<std::string_view>();
  File data_file_{nullptr, std::fclose};
  size_t data_size_ = 0;
  size_t inline_left_ = 0, external_left_ = 0;
};

/// The lock of a checkpoint's data file, if there is one: as long as this exists nobody saves
/// there.
inline File LockedData(const std::string& path) {
  try {
    for (;;) {
      File file = Open(path + ".data", "rbe");
      if (LockNamed(file, path + ".data")) return file;
    }
  } catch (const std::system_error&) {
    return {nullptr, std::fclose};
  }
}

/// Read a checkpoint as ReadCheckpoint, also where it is replaced meanwhile.
inline State ReadOnce(const std::string& path, Values values) {
  try {
    const auto identity = IdentityOf(path);
    const auto content = Map(path);
    State state = CheckpointReader(*content, path, path + ".data", values).Read();
    if (identity && identity == IdentityOf(path)) state.whole = identity;
    return state;
  } catch (const std::system_error& error) {
    const bool missing = error.code() == std::errc::no_such_file_or_directory;
    throw Error(missing ? "checkpoint-not-found" : "checkpoint-unreadable",
                "The checkpoint cannot be read: " + error.code().message() + ".", path);
  }
}

/// Read a checkpoint. A save by another process may replace it, and then its elements in the data
/// file: it is read again, at last while nobody saves.
inline State ReadCheckpoint(const std::string& path) {
  for (int attempt = 0; attempt < 3; ++attempt) {
    const auto identity = IdentityOf(path);
    try {
      return ReadOnce(path, Values::kCopied);
    } catch (const Error&) {
      if (identity == IdentityOf(path)) throw;
    }
  }
  const File lock = LockedData(path);
  return ReadOnce(path, Values::kCopied);
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
    const std::string text = error.what();
    state->recovered =
        text.substr(0, text.find("\n  in: ")) + " The save before it was loaded, " + before +
        ", of optimizer step " + std::to_string(step) + ": " +
        (last > step ? std::to_string(last - step) + " optimizer steps made since are lost."
                     : "what was trained since is lost.");
    return *std::move(state);
  }
}

}  // namespace detail
}  // namespace odtpack
