// What the programs of this folder and the tests share: tensors and settings from JSON files.
#pragma once

#include <fstream>
#include <iterator>

#include "odtpack/odtpack.hpp"

namespace job {

namespace fs = std::filesystem;
using odtpack::detail::Json;
using odtpack::detail::Tensor;

inline std::string ReadFile(const fs::path& path) {
  std::ifstream stream(path, std::ios::binary);
  if (!stream) throw odtpack::Error("file-not-found", "There is no file " + path.string() + ".");
  return {std::istreambuf_iterator<char>(stream), {}};
}

inline Json ReadJson(const fs::path& path) {
  const std::string text = ReadFile(path);
  return odtpack::detail::JsonReader(text).Read();
}

/// A tensor {"name", "dtype", "shape", "file", "offset"} whose bytes lie in a file of `folder`.
inline Tensor ReadTensor(const Json& json, const fs::path& folder) {
  const auto type = odtpack::detail::Spec::TypeOf(json.Get<std::string>("dtype"));
  Tensor tensor = odtpack::detail::Zeros(type, json.Wholes("shape"));
  if (tensor.Bytes() == 0) return tensor;
  std::ifstream stream(folder / json.Get<std::string>("file"), std::ios::binary);
  stream.seekg(json.Whole("offset", 0));
  stream.read(tensor.As<char>(), static_cast<std::streamsize>(tensor.Bytes()));
  if (!stream) throw odtpack::Error("data-unreadable", "A file of data is too short.");
  return tensor;
}

/// The inputs of a batch; the values refer to the tensors.
struct Batch {
  Batch(const Json& list, const fs::path& folder) {
    for (const Json& json : list.As<Json::List>("inputs")) {
      tensors.push_back(ReadTensor(json, folder));
      values.push_back(tensors.back().Value());
    }
  }
  std::vector<Tensor> tensors;
  std::vector<Ort::Value> values;
};

/// The session of a job: {"package", "models", "checkpoint", "learning_rate", "schedule",
/// "device": {"library", "index"}}; paths are relative to `folder`. Models of one's own are used
/// without a step model, and so is "step_model": false; "kernels": false turns native kernels off.
struct Training {
  Training(const Ort::Env& env, const Json& json, const fs::path& folder, int threads,
           const std::string& checkpoint = "")
      : package(odtpack::Package::Open((folder / json.Get<std::string>("package")).string())),
        state(odtpack::CheckpointState::LoadCheckpoint(
            !checkpoint.empty()   ? checkpoint
            : !json["checkpoint"] ? package.Path("checkpoint")
                                  : (folder / json.Get<std::string>("checkpoint")).string())),
        session(env, Options(env, json, threads), state, package,
                Model(json, folder, "training_model"), Model(json, folder, "eval_model"),
                Model(json, folder, "optimizer_model"),
                json.Get<Json::Object>("models", {}).empty() && json.Get<bool>("step_model", true)
                    ? package.StepModel()
                    : std::nullopt) {
    if (json["learning_rate"]) {
      session.SetLearningRate(static_cast<float>(json.Get<double>("learning_rate")));
    }
    if (!json["schedule"]) {
      scheduled = session.RestoreSchedule();
      return;
    }
    const Json& schedule = json["schedule"];
    session.SetSchedule(
        odtpack::Schedule::FromJson(schedule.Get<std::string>("kind"), schedule["settings"], 0),
        schedule.Get<double>("initial_lr"));
    scheduled = true;
  }

  odtpack::Package package;
  odtpack::CheckpointState state;
  odtpack::TrainingSession session;
  bool scheduled = false;

 private:
  Ort::SessionOptions Options(const Ort::Env& env, const Json& json, int threads) const {
    auto options = package.SessionOptions(env, threads);
    if (!json.Get<bool>("kernels", true)) options.AddConfigEntry("odtpack.native", "0");
    if (const Json& device = json["device"])
      odtpack::AddDevice(env, options, device.Get<std::string>("library"),
                         static_cast<size_t>(device.Whole("index", 0)));
    return options;
  }
  std::string Model(const Json& json, const fs::path& folder, const std::string& key) const {
    const bool given = json["models"] && json["models"][key];
    return given ? (folder / json["models"].Get<std::string>(key)).string() : package.Path(key);
  }
};

}  // namespace job
