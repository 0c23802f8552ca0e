// Checkpoints are written, whole or not at all.
#pragma once

#include "odtpack/checkpoint_reader.hpp"

namespace odtpack::detail {

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

}  // namespace odtpack::detail
