// A decoder's weights as ONNX Runtime packs them for a processor, in a file that is mapped.
//
// To write that file ONNX Runtime has all packed weights in memory, so that they are packed part
// by part here, each part as a model of its own. Source of the entries "prepacked_0", ... of a
// tensor's external data, "key|offset;length;checksum|...": its
// core/framework/tensor_external_data_info.cc.
#pragma once

#include <dirent.h>
#include <sys/utsname.h>

#include <fstream>
#include <sstream>

#include "odtpack/inference.hpp"
#include "odtpack/model.hpp"

namespace odtpack::detail {

/// Session option: a folder that keeps packed weights of decoders.
constexpr const char* kPackedWeights = "odtpack.packed_weights";
constexpr const char* kPacked = "odtpack-packed-";  // starts the name of a folder in it

// Entries of session options that decide how weights are packed.
constexpr const char* kPackingChoices[] = {"mlas.disable_kleidiai", "mlas.use_lut_gemm"};
inline int64_t packed_at_once = 32 << 20;  // bytes of weights; the packed ones are in memory
constexpr size_t kPage = 4096;

/// What packed weights depend on; ONNX Runtime does not check where they are from.
inline std::string PackedKey(const Package& package, const Ort::SessionOptions& options) {
  struct utsname known;
  Check(::uname(&known) == 0);
  std::set<std::string> about;
  std::ifstream processor("/proc/cpuinfo");
  for (std::string line; std::getline(processor, line);) {
    for (const char* name : {"flags", "Features", "model name", "CPU implementer", "CPU part"})
      if (line.rfind(name, 0) == 0) about.insert(line);
  }
  if (about.empty()) about = {known.version};
  std::string text = Sha256Mapped(Map(package.Folder() + "/manifest.json"));
  text += "\n" + Ort::GetVersionString() + "\n" + known.machine;
  for (const std::string& line : about) text += "\n" + line;
  for (const char* choice : kPackingChoices)
    if (options.HasConfigEntry(choice))
      text += std::string("\n") + choice + "=" + options.GetConfigEntry(choice);
  return Hex(Sha256Bytes(text.data(), text.size())).substr(0, 16);
}

// Fields of onnx.proto, as they begin on the wire.
constexpr char kModelGraph = '\x3A', kNode = '\x0A', kInitializer = '\x2A', kGraphInput = '\x5A',
               kGraphOutput = '\x62', kValueInfo = '\x6A', kExternalData = '\x6A',
               kName = '\x0A';

/// The fields of a message that begin with one of these tags, as they are.
inline std::string Whole(std::string_view message, const std::string& tags) {
  std::string result;
  for (Fields field{message, 0, {}, {}}; field.Next();)
    if (field.tag < 128 && tags.find(static_cast<char>(field.tag)) != std::string::npos)
      result += field.whole;
  return result;
}

/// Packs the weights of a decoder that ONNX Runtime has written into a folder with its weights as
/// they are, behind those in its file.
class PackedParts {
 public:
  PackedParts(const Ort::Env& env, const Ort::SessionOptions& options, const fs::path& stage)
      : env_(env), options_(options), stage_(stage), model_(*Map(stage / "decoder.onnx")),
        graph_(Content(model_, kModelGraph)), weights_(Open(stage / "decoder.weights", "abe")),
        end_(fs::file_size(stage / "decoder.weights")) {
    for (const char tag : {kGraphInput, kValueInfo})
      for (const std::string_view value : Contents(graph_, tag))
        values_.emplace(Content(value, kName), value);
    std::set<std::string> given;  // an adapter's tensors are not constants
    for (const std::string_view value : Contents(graph_, kGraphInput))
      given.insert(Content(value, kName));
    for (const std::string_view tensor : Contents(graph_, kInitializer))
      if (const std::string name = Content(tensor, '\x42'); given.count(name) == 0)
        tensors_.emplace(name, tensor);
  }

  /// Let ONNX Runtime write a model and its weights, packed or as they are.
  static void Save(const Ort::Env& env, const Ort::SessionOptions& like, const fs::path& model,
                   const fs::path& out, bool packed) {
    Ort::SessionOptions options = like.Clone();
    options.SetOptimizedModelFilePath(out.c_str());
    options.SetGraphOptimizationLevel(packed ? ORT_DISABLE_ALL : ORT_ENABLE_EXTENDED);
    const std::string weights = out.stem().string() + ".weights";
    for (const auto& [key, value] : std::map<std::string, std::string>{
             {"session.optimized_model_external_initializers_file_name", weights},
             {"session.optimized_model_external_initializers_min_size_in_bytes", "1024"},
             {"session.save_external_prepacked_constant_initializers", packed ? "1" : "0"},
             {"session.disable_prepacking", packed ? "0" : "1"}})
      options.AddConfigEntry(key.c_str(), value.c_str());
    OpenSession(env, model.string(), options);
    GiveBackFreed();
  }

  void Pack() {
    std::vector<std::string_view> part;
    size_t size = 0;
    for (const std::string_view node : Contents(graph_, kNode)) {
      const size_t more = WeightBytes(node);
      if (more == 0) continue;
      if (size > 0 && size + more > static_cast<size_t>(packed_at_once)) {
        Add(part);
        part.clear();
        size = 0;
      }
      part.push_back(node);
      size += more;
    }
    if (!part.empty()) Add(part);
    std::string graph;
    for (Fields field{graph_, 0, {}, {}}; field.Next();) {
      const std::string name = field.tag == kInitializer ? Content(field.content, '\x42') : "";
      const auto found = entries_.find(name);
      if (found == entries_.end())
        graph += field.whole;
      else
        graph += Field(kInitializer, std::string(field.content) + found->second);
    }
    std::string model;
    for (Fields field{model_, 0, {}, {}}; field.Next();)
      model += field.tag == kModelGraph ? Field(kModelGraph, graph) : std::string(field.whole);
    Write(Open(stage_ / "decoder.onnx", "wbe"), model.data(), model.size());
    Check(std::fflush(weights_.get()) == 0);
  }

 private:
  /// Bytes of weights that a product has in the file.
  size_t WeightBytes(std::string_view node) const {
    const std::string kind = Content(node, '\x22');
    if (kind.find("MatMul") == std::string::npos && kind != "Gemm") return 0;
    size_t total = 0;
    for (const std::string_view input : Contents(node, kName))
      if (const auto found = tensors_.find(std::string(input)); found != tensors_.end())
        for (const std::string_view entry : Contents(found->second, kExternalData))
          if (Content(entry, '\x0A') == "length") total += std::stoull(Content(entry, '\x12'));
    return total;
  }

  /// Pack the weights of some products.
  void Add(const std::vector<std::string_view>& nodes) {
    const fs::path source = stage_ / "part.onnx", packed = stage_ / "packed.onnx",
                   data = stage_ / "packed.weights";
    const std::string model = Model(nodes);
    Write(Open(source, "wbe"), model.data(), model.size());
    Save(env_, options_, source, packed, true);
    const std::string graph = Content(*Map(packed), kModelGraph);
    const auto from = Map(data);
    for (const std::string_view tensor : Contents(graph, kInitializer)) {
      std::string& entries = entries_[Content(tensor, '\x42')];
      if (!entries.empty()) continue;  // it is a weight of another part, too
      for (const std::string_view entry : Contents(tensor, kExternalData)) {
        const std::string key = Content(entry, '\x0A');
        if (key.rfind("prepacked", 0) != 0) continue;
        const std::string moved = Moved(Content(entry, '\x12'), *from);
        entries += Field(kExternalData, Field('\x0A', key) + Field('\x12', moved));
      }
    }
    for (const fs::path& each : {source, packed, data}) fs::remove(each);
  }

  /// A model of some products alone.
  std::string Model(const std::vector<std::string_view>& nodes) const {
    std::set<std::string> made, done;
    for (const std::string_view node : nodes)
      for (const std::string_view output : Contents(node, '\x12')) made.emplace(output);
    std::string graph = Field('\x12', "part");
    for (const std::string_view node : nodes) {
      graph += Field(kNode, node);
      std::string code;  // of float32 or float16: what the weights are, or are scaled by
      for (const std::string_view input : Contents(node, kName)) {
        const auto found = tensors_.find(std::string(input));
        if (found == tensors_.end()) continue;
        const std::string type = Whole(found->second, "\x10").substr(1);
        if (code.empty() || (code != "\x01" && code != "\x0A")) code = type;
        if (done.emplace(input).second) graph += Field(kInitializer, found->second);
      }
      for (const char tag : {kName, '\x12'}) {
        for (const std::string_view each : Contents(node, tag)) {
          const std::string name(each);
          if (name.empty() || tensors_.count(name) > 0 || !done.insert(name).second) continue;
          const auto known = values_.find(name);
          const std::string type = Field('\x12', Field('\x0A', "\x08" + code));
          graph += Field(made.count(name) > 0 ? kGraphOutput : kGraphInput,
                         known != values_.end() ? std::string(known->second)
                                                : Field(kName, name) + type);
        }
      }
    }
    return Whole(model_, "\x08\x42") + Field(kModelGraph, graph);
  }

  /// Append to the file what an entry says is packed, and return the entry of where it is there.
  std::string Moved(const std::string& entry, std::string_view from) {
    std::stringstream places(entry);
    std::string result, place;
    std::getline(places, result, '|');
    while (std::getline(places, place, '|')) {
      const size_t offset = std::stoull(place), semicolon = place.find(';') + 1;
      const size_t length = std::stoull(place.substr(semicolon));
      const std::string fill((kPage - end_ % kPage) % kPage, '\0');
      Write(weights_, fill.data(), fill.size());
      const std::string_view bytes = from.substr(offset, length);
      Write(weights_, bytes.data(), bytes.size());
      result += "|" + std::to_string(end_ + fill.size()) + place.substr(semicolon - 1);
      end_ += fill.size() + bytes.size();
    }
    return result;
  }

  const Ort::Env& env_;
  const Ort::SessionOptions& options_;
  fs::path stage_;
  std::string model_, graph_;
  File weights_;
  uint64_t end_;  // of that file
  std::map<std::string, std::string_view> tensors_, values_;
  std::map<std::string, std::string> entries_;
};

/// The sizes of the model and its weights: ONNX Runtime maps what it does not check.
inline std::string PackedSizes(const fs::path& folder) {
  return std::to_string(fs::file_size(folder / "decoder.onnx")) + " " +
         std::to_string(fs::file_size(folder / "decoder.weights"));
}

/// Write the decoder with its weights packed into a folder, whole or not at all.
inline void PackDecoder(const Ort::Env& env, const Package& package,
                        const Ort::SessionOptions& options, const fs::path& target) {
  fs::create_directories(target.parent_path());
  for (const auto& stale : fs::directory_iterator(target.parent_path()))
    if (stale.path().filename().string().rfind(kPacked, 0) == 0) fs::remove_all(stale.path());
  const fs::path stage = target.string() + ".part";
  fs::create_directory(stage);
  // The optimized decoder first, with its weights as they are: what it folds is there.
  PackedParts::Save(env, options, package.Decoder(), stage / "decoder.onnx", false);
  PackedParts(env, options, stage).Pack();
  const std::string sizes = PackedSizes(stage);
  Write(Open(stage / "sizes", "wbe"), sizes.data(), sizes.size());
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
  const fs::path target = folder / (kPacked + PackedKey(package, options));
  const std::string model = (target / "decoder.onnx").string();
  std::error_code ignored;
  fs::create_directories(folder, ignored);  // packing says what is wrong with it
  // One process at a time, until it is open: whoever packs another decoder removes this one.
  const std::unique_ptr<DIR, int (*)(DIR*)> held(::opendir(folder.c_str()), ::closedir);
  if (held) Lock(::dirfd(held.get()));
  try {
    if (*Map(target / "sizes") == PackedSizes(target)) return OpenSession(env, model, options);
  } catch (const std::exception&) {  // some is missing, or damaged: write it anew
  }
  try {
    PackDecoder(env, package, options, target);
  } catch (const std::exception& error) {
    fs::remove_all(target.string() + ".part", ignored);  // it may have filled the disk
    throw Error("packed-not-written",
                std::string("Packed weights cannot be written: ") + error.what(), folder.string(),
                "name a folder with room for the decoder's weights twice");
  }
  return OpenSession(env, model, options);
}

}  // namespace odtpack::detail
