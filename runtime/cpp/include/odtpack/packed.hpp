// A decoder's weights as ONNX Runtime packs them for a processor, in a file that is mapped.
#pragma once

#include <sys/utsname.h>

#include <fstream>

#include "odtpack/model.hpp"

namespace odtpack::detail {

/// Session option: a folder that keeps packed weights of decoders.
constexpr const char* kPackedWeights = "odtpack.packed_weights";
constexpr const char* kPacked = "odtpack-packed-";  // starts the name of a folder in it

/// What packed weights depend on; ONNX Runtime does not check where they are from.
inline std::string PackedKey(const Package& package) {
  struct utsname known;
  Check(::uname(&known) == 0);
  std::set<std::string> about;
  std::ifstream processor("/proc/cpuinfo");
  for (std::string line; std::getline(processor, line);) {
    for (const char* name : {"flags", "Features", "model name", "CPU implementer", "CPU part"})
      if (line.rfind(name, 0) == 0) about.insert(line);
  }
  if (about.empty()) about = {known.version};
  std::string text = Sha256Mapped(*Map(package.Folder() + "/manifest.json"));
  text += "\n" + Ort::GetVersionString() + "\n" + known.machine;
  for (const std::string& line : about) text += "\n" + line;
  return Sha256Mapped(text).substr(0, 16);
}

/// Let ONNX Runtime write the decoder with its weights packed into a folder, whole or not at all.
inline void PackDecoder(const Ort::Env& env, const Package& package,
                        const Ort::SessionOptions& options, const fs::path& target) {
  fs::create_directories(target.parent_path());
  for (const auto& stale : fs::directory_iterator(target.parent_path()))
    if (stale.path().filename().string().rfind(kPacked, 0) == 0) fs::remove_all(stale.path());
  const fs::path stage = target.string() + ".part";
  fs::create_directory(stage);
  Ort::SessionOptions writing = options.Clone();
  writing.SetOptimizedModelFilePath((stage / "decoder.onnx").c_str());
  writing.AddConfigEntry("session.save_external_prepacked_constant_initializers", "1");
  writing.AddConfigEntry("session.optimized_model_external_initializers_file_name",
                         "decoder.weights");
  writing.AddConfigEntry("session.optimized_model_external_initializers_min_size_in_bytes", "1024");
  OpenSession(env, package.Decoder(), writing);
  GiveBackFreed();
  for (const auto& file : fs::directory_iterator(stage)) Sync(Open(file.path(), "r+be"));
  fs::rename(stage, target);
  SyncFolder(target);
}

/// Open a decoder, from packed weights where the options name a folder for them.
inline Ort::Session OpenDecoder(const Ort::Env& env, const Package& package,
                                const Ort::SessionOptions& options) {
  if (!options.HasConfigEntry(kPackedWeights)) return OpenSession(env, package.Decoder(), options);
  static std::mutex one_at_a_time;
  const std::lock_guard<std::mutex> lock(one_at_a_time);
  const fs::path folder = options.GetConfigEntry(kPackedWeights);
  const fs::path target = folder / (kPacked + PackedKey(package));
  try {
    if (!fs::is_directory(target)) PackDecoder(env, package, options, target);
  } catch (const std::exception& error) {
    std::error_code ignored;
    fs::remove_all(target.string() + ".part", ignored);  // it may have filled the disk
    throw Error("packed-not-written",
                std::string("Packed weights cannot be written: ") + error.what(), folder.string(),
                "name a folder with room for the decoder's weights twice");
  }
  return OpenSession(env, (target / "decoder.onnx").string(), options);
}

}  // namespace odtpack::detail
