// Checkpoints are written, whole or not at all.
#pragma once

#include <future>

#include "odtpack/checkpoint_reader.hpp"

namespace odtpack::detail {

/// Let a field of a table lead to a position, which may lie after what the builder holds.
inline void Refer(flatbuffers::FlatBufferBuilder& to, flatbuffers::uoffset_t table,
                  flatbuffers::voffset_t field, size_t position) {
  uint8_t* head = to.GetBufferPointer();
  auto* fields = reinterpret_cast<flatbuffers::Table*>(head + to.GetSize() - table);
  uint8_t* slot = fields->GetAddressOf(field);
  flatbuffers::WriteScalar(slot, static_cast<flatbuffers::uoffset_t>(position - (slot - head)));
}

/// Everything of a file but the tensors' bytes, which follow it or lie in the data file. While
/// they are written, a second thread hashes them.
class CheckpointWriter {
 public:
  CheckpointWriter(const State& state, const OptimizerState* optimizer, bool external, size_t from)
      : nominal_(state.nominal), external_(external), at_(from), outline_(state.nominal) {
    no_bytes_ = to_.CreateVector(std::vector<uint8_t>());
    std::vector<flatbuffers::Offset<fbs::Tensor>> tensors[2];
    const size_t trained = std::count_if(state.parameters.begin(), state.parameters.end(),
                                         [](const auto& item) { return item.second.trainable; });
    for (const bool frozen : {false, true}) {
      outline_.Count(frozen ? state.parameters.size() - trained : trained);
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
    outline_.Count(optimizer == nullptr ? 0 : optimizer->groups.size());
    for (size_t i = 0; optimizer != nullptr && i < optimizer->groups.size(); ++i) {
      std::vector<flatbuffers::Offset<fbs::ParameterOptimizerState>> entries;
      const auto& names = optimizer->groups[i];
      outline_.Text("group" + std::to_string(i));
      outline_.Number(optimizer->step);
      outline_.Number(optimizer->rate);
      outline_.Count(std::count_if(
          optimizer->moments.begin(), optimizer->moments.end(), [&names](const auto& item) {
            return std::find(names.begin(), names.end(), item.first) != names.end();
          }));
      for (const auto& name : optimizer->groups[i]) {
        for (const auto& [owner, moments] : optimizer->moments) {
          if (owner != name) continue;
          std::vector<flatbuffers::Offset<fbs::Tensor>> own;
          outline_.Text(name);
          outline_.Count(moments.size());
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
    const auto root = fbs::CreateCheckpoint(to_, 2, module, all, Bag(properties), no_bytes_.o);
    fbs::FinishCheckpointBuffer(to_, root);
    digested_.push_back(root.o);
    PlaceWhatFollows();
    digests_ = std::async([this] { return outline_.Digests(); });
  }

  void WriteHead(const File& file) const { Write(file, to_.GetBufferPointer(), to_.GetSize()); }

  /// Write the tensors' bytes: each with its length in front, or one after the other.
  void WritePayload(const File& file) const {
    const uint8_t zeros[16] = {};
    off_t begun = ::ftello(file.get());
    for (size_t i = 0; i < payload_.size(); ++i) {
      const Tensor& tensor = *payload_[i].second;
      const auto size = static_cast<flatbuffers::uoffset_t>(tensor.Bytes());
      if (!external_) Write(file, zeros, gaps_[i]);
      if (!external_) Write(file, &size, sizeof size);
      for (size_t done = 0; done < tensor.Bytes(); done += kAtOnce) {
        Write(file, tensor.data.get() + done, std::min(kAtOnce, tensor.Bytes() - done));
        if (::ftello(file.get()) - begun >= static_cast<off_t>(kAtOnce))
          begun = StartWriting(file, begun);
      }
    }
    StartWriting(file, begun);
  }

  /// Write the digests, at the end of the file; once.
  void WriteDigests(const File& file) {
    const uint8_t zeros[4] = {};
    const auto size = static_cast<flatbuffers::uoffset_t>(kDigestTextBytes);
    Write(file, zeros, last_gap_);
    for (const std::string& text : digests_.get()) {
      Write(file, &size, sizeof size);
      Write(file, text.c_str(), kDigestTextBytes + 1);
    }
  }

 private:
  flatbuffers::Offset<fbs::Tensor> Add(const std::string& name, const Tensor& tensor) {
    const auto label = to_.CreateSharedString(name);
    const auto dims = to_.CreateVector(nominal_ ? Shape{} : tensor.shape);
    const bool kept = !nominal_ && tensor.Bytes() > 0, external = kept && external_;
    // raw_data stays absent with external data: the reference looks no further if it is there.
    const auto table = fbs::CreateTensor(to_, label, nominal_ ? 0 : no_bytes_.o, dims, tensor.type,
                                         external ? 0 : no_bytes_, 0,
                                         external ? static_cast<int64_t>(at_) : -1);
    outline_.AddTensor(name, tensor);
    if (!nominal_) digested_.push_back(table.o);
    if (external) at_ += tensor.Bytes();
    if (kept) payload_.emplace_back(table.o, &tensor);
    return table;
  }

  flatbuffers::Offset<fbs::PropertyBag> Bag(const std::map<std::string, Property>& properties) {
    std::vector<flatbuffers::Offset<fbs::IntProperty>> ints;
    std::vector<flatbuffers::Offset<fbs::FloatProperty>> floats;
    std::vector<flatbuffers::Offset<fbs::StringProperty>> texts;
    Describe<int64_t>(properties, [this](int64_t value) { outline_.Number(value); });
    Describe<float>(properties, [this](float value) { outline_.Number(value); });
    Describe<std::string>(properties, [this](const std::string& value) { outline_.Text(value); });
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

  /// Add the properties of one type to the outline.
  template <class Kind, class Add>
  void Describe(const std::map<std::string, Property>& properties, const Add& add) {
    outline_.Count(
        std::count_if(properties.begin(), properties.end(), [](const auto& item) {
          return std::holds_alternative<Kind>(item.second);
        }));
    for (const auto& [name, value] : properties) {
      if (!std::holds_alternative<Kind>(value)) continue;
      outline_.Text(name);
      add(std::get<Kind>(value));
    }
  }

  /// Payload follows the head, each tensor at a multiple of 16, then the digests: offsets point
  /// forward.
  void PlaceWhatFollows() {
    size_t end = to_.GetSize();
    for (size_t i = 0; !external_ && i < payload_.size(); ++i) {
      const auto& [table, tensor] = payload_[i];
      const size_t position = (end + 4 + 15) / 16 * 16;
      gaps_.push_back(position - 4 - end);
      Refer(to_, table, fbs::Tensor::VT_RAW_DATA, position - 4);
      end = position + tensor->Bytes();
    }
    last_gap_ = (4 - end % 4) % 4;
    end += last_gap_;
    for (const auto& table : digested_) {
      const bool whole = &table == &digested_.back();
      const auto field = static_cast<flatbuffers::voffset_t>(
          whole ? int{fbs::Checkpoint::VT_DIGEST} : int{fbs::Tensor::VT_DOC_STRING});
      Refer(to_, table, field, end);
      end += 4 + kDigestTextBytes + 1;
    }
  }

  static constexpr size_t kAtOnce = size_t{1} << 23;  // bytes before the disk begins with them

  flatbuffers::FlatBufferBuilder to_;
  bool nominal_, external_;
  size_t at_, last_gap_ = 0;
  Outline outline_;
  flatbuffers::Offset<flatbuffers::Vector<uint8_t>> no_bytes_;
  std::vector<std::pair<flatbuffers::uoffset_t, const Tensor*>> payload_;
  std::vector<size_t> gaps_;
  std::vector<flatbuffers::uoffset_t> digested_;  // tables; the whole's comes last
  std::future<std::vector<std::string>> digests_;  // last: it waits for the thread
};

/// Where a checkpoint uses its data file, as start and end; empty if it does not, or cannot be read.
inline std::pair<size_t, size_t> RegionOf(const std::string& path) {
  try {
    const auto content = Map(path);
    CheckpointReader reader(*content, path, "", Values::kNone);
    reader.Read();
    if (reader.external.first < reader.external.second) return reader.external;
  } catch (const std::exception&) {  // nothing to preserve
  }
  return {0, 0};
}

inline bool ReadsWhole(const std::string& path) {
  try {
    ReadOnce(path, Values::kViewed);
    return true;
  } catch (const std::exception&) {
    return false;
  }
}

/// Gives the file that is replaced, and its elements in the data file, their names as the save
/// before. At any moment one of the two is whole.
class KeepPrevious {
 public:
  explicit KeepPrevious(const std::string& path) : path_(path), before_(PreviousPath(path)) {}

  /// `external`: whether the file uses the data file.
  void Keep(bool external) {
    const fs::path link = TemporaryName(path_), data_link = TemporaryName(path_);
    const std::string data = path_ + ".data", kept = before_ + ".data";
    std::error_code refused;
    fs::create_hard_link(path_, link, refused);
    try {
      const bool there = fs::exists(kept);
      const bool shared = there && external && fs::equivalent(kept, data);
      if (external && !shared) fs::create_hard_link(data, data_link);  // before anything is removed
      if (there && !shared) {
        fs::remove(before_);  // first what refers to the data
        fs::remove(kept);
      }
      if (external && !shared) fs::rename(data_link, kept);
      fs::rename(refused ? fs::path(path_) : link, before_);
      moved_ = bool(refused);
    } catch (...) {
      ::unlink(data_link.c_str());
      ::unlink(link.c_str());
      throw;
    }
    if (!refused) ::unlink(link.c_str());  // two names of one file: the rename did nothing
  }
  /// After a save that failed: the file had to be renamed where there are no hard links.
  void Undo() const {
    if (moved_) ::rename(before_.c_str(), path_.c_str());
  }

 private:
  std::string path_, before_;
  bool moved_ = false;
};

/// Lock the data file of a checkpoint, which is made if it is not there: one save at a time.
/// `made`: whether it was, and nobody has used it.
inline File MadeData(const std::string& checkpoint, bool& made) {
  const std::string path = checkpoint + ".data";
  for (;;) {
    made = !fs::exists(path);
    try {
      File file = Open(path, made ? "wbxe" : "r+be");
      if (made) TakeMode(file, checkpoint, 0600);  // each save opens it again
      if (!LockNamed(file, path)) continue;
      made = made && fs::file_size(path) == 0;  // another process may have had the lock first
      return file;
    } catch (const std::system_error& error) {
      using std::errc;
      if (error.code() != (made ? errc::file_exists : errc::no_such_file_or_directory)) throw;
    }
  }
}

/// Write a checkpoint whole or not at all, and keep the one that it replaces as the save before if
/// `keep_previous` says so and it is whole. Above `external_above` bytes the tensors go to
/// `<path>.data`, where neither the current checkpoint nor one before it that stays has any.
inline void WriteCheckpoint(const std::string& path, State& state, bool with_optimizer,
                            size_t external_above = kExternalAbove, bool keep_previous = false) {
  state.Refresh();
  const auto* optimizer =
      with_optimizer && !state.nominal ? state.optimizer.get() : nullptr;
  size_t total = 0;
  for (const auto& item : state.parameters) total += state.nominal ? 0 : item.second.value.Bytes();
  for (size_t i = 0; optimizer != nullptr && i < optimizer->moments.size(); ++i) {
    for (const Tensor& moment : optimizer->moments[i].second) total += moment.Bytes();
  }
  const std::string before = PreviousPath(path), data_path = path + ".data";
  std::pair<size_t, size_t> current = {0, 0};
  bool keeps = false;
  const auto look = [&] {  // under the lock: another process may have saved
    const auto identity = IdentityOf(path);
    std::error_code none;
    // What this state did not load or write itself may be damaged, and then replaces nothing.
    const bool there = fs::is_regular_file(path, none);
    const bool whole = there && ((identity && identity == state.whole) || ReadsWhole(path));
    if (whole) current = RegionOf(path);
    keeps = keep_previous && whole;
  };
  RefuseLink(path);
  KeepPrevious previous(path);
  const auto last = [&] {
    if (keeps) previous.Keep(current.second > 0);
  };
  std::optional<FileIdentity> placed;
  if (total <= external_above) {
    File lock = LockedData(path);
    look();
    CheckpointWriter writer(state, optimizer, false, 0);
    try {
      WriteAtomically(
          path,
          [&](const File& file) {
            writer.WriteHead(file);
            writer.WritePayload(file);
            writer.WriteDigests(file);
          },
          last, &placed);
    } catch (...) {
      if (!placed) previous.Undo();
      if (placed) state.whole = placed;
      throw;
    }
    state.whole = placed;
    if (current.second == 0) return;
    if (!lock) lock = LockedData(path);
    if (IdentityOf(path) == placed) ::unlink(data_path.c_str());  // else another process saved
    return;
  }
  std::optional<size_t> size;  // of the data file once it is open, to which a failure cuts it
  bool made = false;
  File lock(nullptr, std::fclose);  // until what a failure leaves is removed
  try {
    if (fs::is_directory(path)) throw Error("path-is-a-folder", path + " is a folder.");
    RefuseLink(data_path);
    lock = MadeData(path, made);
    size = fs::file_size(data_path);
    look();
    // The save before stays if it is not replaced, with its part of the file.
    std::error_code other;
    const bool shared = fs::equivalent(before + ".data", data_path, other);
    const auto kept = shared && !keeps ? RegionOf(before) : std::pair<size_t, size_t>{0, 0};
    size_t start = SIZE_MAX;
    for (const size_t from : {size_t{0}, current.second, kept.second}) {
      const auto free = [&](const std::pair<size_t, size_t>& used) {
        return used.second <= from || from + total <= used.first;
      };
      if (free(current) && free(kept)) start = std::min(start, from);
    }
    const File data = Open(data_path, "r+be");
    CheckpointWriter writer(state, optimizer, true, start);
    Check(::fseeko(data.get(), static_cast<off_t>(start), SEEK_SET) == 0);
    writer.WritePayload(data);
    Sync(data);
    SyncFolder(data_path);
    WriteAtomically(
        path,
        [&](const File& file) {
          writer.WriteHead(file);
          writer.WriteDigests(file);
        },
        last, &placed);
    state.whole = placed;
    const size_t end = std::max({start + total, keeps ? current.second : 0, kept.second});
    std::error_code ignored;
    if (fs::file_size(data_path) > end) fs::resize_file(data_path, end, ignored);
  } catch (const std::exception& error) {
    if (placed) state.whole = placed;
    if (!placed) {
      previous.Undo();
      std::error_code ignored;  // what a full disk got is given back
      if (size && made)
        fs::remove(data_path, ignored);
      else if (size && fs::file_size(data_path, ignored) > *size)
        fs::resize_file(data_path, *size, ignored);
    }
    const auto* refused = dynamic_cast<const std::system_error*>(&error);
    if (refused == nullptr) throw;
    ThrowNotWritten(data_path, refused->code().message());
  }
}

}  // namespace odtpack::detail
