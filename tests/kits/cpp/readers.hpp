// What the kit's readers make of hostile files, for the comparison with Python's.
//
// `hostile` takes the cases of FOLDER/index.json and prints "NAME<TAB>ok" or "NAME<TAB>CODE";
// `read` takes every *.ckpt, with a digest of what it holds, and every *.json as a manifest.
#pragma once

#include <iomanip>
#include <iostream>

#include "job.hpp"

namespace readers {

namespace fs = std::filesystem;
using job::Json;
using odtpack::CheckpointState;
using odtpack::detail::Tensor;

inline std::string Hex(const std::string& text) {
  std::ostringstream stream;
  for (const char c : text)
    stream << std::hex << std::setw(2) << std::setfill('0')
           << static_cast<int>(static_cast<uint8_t>(c));
  return stream.str();
}
inline std::string Sha256(const void* data, size_t size) {
  return odtpack::detail::Hex(odtpack::detail::Sha256Bytes(data, size));
}
inline std::string Bits(float value) {
  uint32_t bits = 0;
  std::memcpy(&bits, &value, sizeof bits);
  std::ostringstream stream;
  stream << std::hex << std::setw(8) << std::setfill('0') << bits;
  return stream.str();
}

/// A digest of everything that a checkpoint holds.
inline std::string Digest(const odtpack::detail::State& state) {
  using Lines = std::map<std::string, std::string>;  // in the order of the names in hex
  std::string text;
  const auto add = [&text](const std::string& line) { text += (text.empty() ? "" : "\n") + line; };
  Lines lines;
  for (const auto& [name, parameter] : state.parameters) {
    const Tensor& value = parameter.value;
    std::string dims;
    for (const int64_t size : state.nominal ? odtpack::detail::Shape{} : value.shape)
      dims += (dims.empty() ? "" : "x") + std::to_string(size);
    lines[Hex(name)] = std::string("P ") + (parameter.trainable ? "t " : "f ") +
                       odtpack::detail::TypeInfo(value.type).first + " " +
                       (dims.empty() ? "-" : dims) + " " + Sha256(value.data.get(), value.Bytes());
  }
  for (const auto& [name, line] : lines) add(line + " " + name);
  if (state.optimizer) {
    add("O " + std::to_string(state.optimizer->step) + " " + Bits(state.optimizer->rate));
    const std::map<std::string, std::vector<Tensor>> moments(state.optimizer->moments.begin(),
                                                             state.optimizer->moments.end());
    for (size_t group = 0; group < state.optimizer->groups.size(); ++group) {
      lines.clear();
      for (const auto& name : state.optimizer->groups[group]) {
        if (moments.count(name) == 0) continue;  // nothing is kept of it
        const auto& own = moments.at(name);
        for (size_t i = 0; i < own.size(); ++i)
          lines[Hex(name) + " " + std::to_string(i)] =
              "M " + std::to_string(group) + " momentum" + std::to_string(i) + " " +
              Sha256(own[i].data.get(), own[i].Bytes()) + " " + Hex(name);
      }
      for (const auto& item : lines) add(item.second);
    }
  }
  lines.clear();
  for (const auto& [name, value] : state.properties) {
    const auto* number = std::get_if<int64_t>(&value);
    const auto* real = std::get_if<float>(&value);
    lines[Hex(name)] = number != nullptr ? "V i " + std::to_string(*number)
                       : real != nullptr ? "V f " + Bits(*real)
                                         : "V s " + Hex(std::get<std::string>(value));
  }
  for (const auto& [name, line] : lines) add(line + " " + name);
  return Sha256(text.data(), text.size());
}

/// Print a name and what an action gave, or the code of the error that it threw.
template <class Action>
void Print(const std::string& name, Action action) {
  std::string result;
  try {
    result = action();
  } catch (const odtpack::Error& error) {
    result = error.Code();
  } catch (const std::exception& error) {
    result = std::string("foreign:") + typeid(error).name();
  }
  std::cout << name << '\t' << result << std::endl;
}

inline int Hostile(const fs::path& folder) {
  const Ort::Env env(ORT_LOGGING_LEVEL_FATAL, "hostile");
  const Json index = job::ReadJson(folder / "index.json");
  for (const Json& each : index.Get<Json::List>("cases")) {
    Print(each.Get<std::string>("name"), [&] {
      const auto action = each.Get<std::string>("action");
      const auto path = [&](const char* key) {
        return (folder / each.Get<std::string>(key)).string();
      };
      if (action == "checkpoint") {
        odtpack::detail::ReadCheckpoint(path("checkpoint"));
        return "ok";
      }
      const auto package = odtpack::Package::Open(path("package"));
      if (action == "open") return "ok";
      const odtpack::TrainingSession session(
          env, package, CheckpointState::LoadCheckpoint(path("checkpoint")), 1);
      return "ok";
    });
  }
  return 0;
}

inline int Read(const fs::path& folder) {
  std::set<fs::path> paths;
  for (const auto& entry : fs::directory_iterator(folder)) paths.insert(entry.path());
  for (const auto& path : paths) {
    const std::string name = path.filename().string();
    if (path.extension() == ".ckpt") {
      Print(name, [&] { return "ok\t" + Digest(odtpack::detail::ReadCheckpoint(path.string())); });
    } else if (path.extension() == ".json") {
      Print(name, [&] {
        odtpack::detail::ReadManifest(job::ReadFile(path), name);
        return std::string("ok\t-");
      });
    }
  }
  return 0;
}

}  // namespace readers
