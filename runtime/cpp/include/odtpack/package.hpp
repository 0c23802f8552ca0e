// A package: a folder whose files are those that its manifest describes
// (docs/formats/package.md).
#pragma once

#include "odtpack/digest.hpp"
#include "odtpack/json.hpp"

namespace odtpack {

namespace detail {

/// A parameter, or a user's input or output, as the manifest describes it.
struct Spec {
  std::string name, role, scale;
  Type type, model_type;
  Shape shape;                       // -1 for what may vary
  std::vector<std::string> symbols;  // the names of such sizes
  int64_t class_count, offset;
  std::optional<int64_t> ignored;

  explicit Spec(const Json& json)
      : name(json.Get<std::string>("name")),
        role(json.Get<std::string>("role")),
        scale(json.Get<std::string>("scale", "")),
        type(TypeOf(json.Get<std::string>("dtype"))),
        model_type(TypeOf(json.Get<std::string>("model_dtype", "unknown"))),
        class_count(json.Whole("class_count", 0)),
        offset(json.Whole("offset", 0)) {
    for (const Json& size : json.Get<Json::List>("shape")) {
      const auto* symbol = std::get_if<std::string>(&size.value);
      symbols.push_back(symbol == nullptr ? "" : *symbol);
      shape.push_back(symbol != nullptr || !size ? -1 : size.Whole());
      if (shape.back() < -1 || shape.size() > 32) Json::Fail("the shape of '" + name + "'");
    }
    if (json["ignore_index"]) ignored = json["ignore_index"].Whole();
  }
  static Type TypeOf(const std::string& text) {
    for (int type = 0; type < 14; ++type) {
      if (text == TypeInfo(type).first) return static_cast<Type>(type);
    }
    Json::Fail("there is no type '" + text + "'");
  }
  std::string Description() const {
    std::string text;
    for (size_t i = 0; i < shape.size(); ++i) {
      const std::string free = symbols[i].empty() ? "?" : symbols[i];
      text += (i == 0 ? "" : ", ") + (shape[i] < 0 ? free : std::to_string(shape[i]));
    }
    return TypeInfo(type).first + ("[" + text + "]");
  }
  /// Whether a shape agrees; an empty one of its own promises nothing.
  bool Fits(const Shape& other) const {
    return shape.empty() ||
           std::equal(shape.begin(), shape.end(), other.begin(), other.end(),
                      [](int64_t own, int64_t size) { return own < 0 || own == size; });
  }
};

}  // namespace detail

/// A package that is what its manifest says.
class Package {
 public:
  /// Tells whether a signature, 64 bytes of Ed25519, is that of the manifest's bytes. The kit has
  /// no public-key cryptography: call the one that the app ships.
  using SignatureCheck =
      std::function<bool(const std::string& manifest, const std::string& signature)>;

  /// Open a folder and check its files' paths, sizes and hashes, and the signature if asked to.
  static Package Open(const std::string& folder, const SignatureCheck& signature = nullptr) {
    Package package;
    package.folder_ = folder;
    const std::string text = Content(folder + "/manifest.json", "package-not-found");
    if (signature) {
      const std::string mark = Content(folder + "/manifest.sig", "not-signed");
      if (mark.size() != 64 || !signature(text, mark)) {
        throw Error("signature-wrong", "The manifest was not signed with the expected key.",
                    folder);
      }
    }
    package.manifest_ = detail::JsonReader(text).Read();
    if (package.manifest_["schema_version"].Whole() != 1) {
      throw Error("manifest-version", "The manifest has another schema version than 1.", folder,
                  "update the app");
    }
    if (package.manifest_["target"]) {
      throw Error("package-target", "The package was built for onnxruntime-training.", folder,
                  "odtpack build without --target ort-training");
    }
    if (package.manifest_["privacy"]) {
      throw Error("private-training",
                  "The package is trained with private gradients, which this kit does not make.",
                  folder, "train it with Python, or build it without privacy");
    }
    const auto read = [&package](const char* key, std::vector<detail::Spec>& specs) {
      for (const Json& json : package.manifest_.Get<Json::List>(key)) specs.emplace_back(json);
    };
    read("inputs", package.inputs_);
    read("outputs", package.outputs_);
    package.evaluation_outputs_ = package.outputs_;
    if (package.manifest_["evaluation_outputs"]) {
      read("evaluation_outputs", package.evaluation_outputs_);
    }
    read("parameters", package.parameters_);
    if (package.outputs_.empty()) Json::Fail("there are no outputs");
    std::set<std::string> seen = {"manifest.json", "manifest.sig"};
    for (const auto& [name, entry] : package.manifest_.Get<Json::Object>("files")) {
      const auto one = Json::List{entry};
      for (const Json& file : name == "extra" ? entry.As<Json::List>() : one)
        CheckFile(folder, file, seen);
    }
    return package;
  }

  const std::string& Folder() const { return folder_; }
  const detail::Json& Manifest() const { return manifest_; }
  const std::vector<detail::Spec>& Inputs() const { return inputs_; }
  const std::vector<detail::Spec>& Outputs() const { return outputs_; }
  /// Those of the evaluation model: the same and, after them, what it alone returns.
  const std::vector<detail::Spec>& EvaluationOutputs() const { return evaluation_outputs_; }
  const std::vector<detail::Spec>& Parameters() const { return parameters_; }

  /// The path of a file by its key in the manifest: "training_model", "checkpoint" and so on.
  std::string Path(const std::string& key) const {
    if (const Json& file = manifest_["files"][key])
      return folder_ + "/" + file.Get<std::string>("path");
    throw Error("package-incomplete", "The package has no " + key + ".", folder_);
  }
  /// The path of the model that trains and updates at once, of a package that has one and makes
  /// its steps of one batch.
  std::optional<std::string> StepModel() const {
    const bool has = bool(manifest_["files"]["step_model"]);
    if (!has || manifest_.Whole("accumulation_steps", 1) != 1) return {};
    return Path("step_model");
  }
  /// The path of a model in ORT format.
  std::string OrtModel(const std::string& of, const std::string& style = "fixed",
                       const std::string& platform = "") const {
    for (const Json& file : manifest_["files"].Get<Json::List>("extra", {})) {
      if (file.Get<std::string>("role") == "ort_model" && file.Get<std::string>("of", "") == of &&
          file.Get<std::string>("style", "") == style &&
          file.Get<std::string>("platform", "") == platform) {
        return folder_ + "/" + file.Get<std::string>("path");
      }
    }
    throw Error("no-ort-model", "The package holds no such " + of + " in ORT format.", folder_,
                "odtpack ort " + folder_ + " --style " + style);
  }

  /// The session options that the package asks for; `threads` of 0 leave the choice to it. Where
  /// it asks for an arena that sessions share, each TrainingSession has one for all of its own.
  Ort::SessionOptions SessionOptions(const Ort::Env&, int threads = 0) const {
    static const std::string older = R"({"optimization_level": "extended", "memory_pattern": false,
                                         "config": {"session.force_spinning_stop": "1"}})";
    const Json session =
        manifest_["session"] ? manifest_["session"] : detail::JsonReader(older).Read();
    const std::map<std::string, GraphOptimizationLevel> levels = {{"disabled", ORT_DISABLE_ALL},
                                                                  {"basic", ORT_ENABLE_BASIC},
                                                                  {"extended", ORT_ENABLE_EXTENDED},
                                                                  {"all", ORT_ENABLE_ALL}};
    const auto level = levels.find(session.Get<std::string>("optimization_level", "all"));
    if (level == levels.end()) Json::Fail("there is no such optimization level");
    Ort::SessionOptions options;
    options.SetGraphOptimizationLevel(level->second);
    if (!session.Get<bool>("memory_pattern", true)) options.DisableMemPattern();
    if (!session.Get<bool>("arena", true)) options.DisableCpuMemArena();
    if (!session.Get<bool>("prepacking", true))
      options.AddConfigEntry("session.disable_prepacking", "1");
    const int64_t wanted = threads > 0 ? threads : session.Whole("threads", 0);
    options.SetIntraOpNumThreads(static_cast<int>(std::clamp<int64_t>(wanted, 0, 1024)));
    for (const auto& [key, value] : session.Get<Json::Object>("config", {})) {
      try {
        options.AddConfigEntry(key.c_str(), value.As<std::string>("config").c_str());
      } catch (const Ort::Exception& error) {
        Json::Fail(std::string("'session.config': ") + error.what());
      }
    }
    if (session.Get<bool>("shared_allocator", false))
      options.AddConfigEntry("session.use_env_allocators", "1");
    return options;
  }

 private:
  using Json = detail::Json;

  static std::string Content(const std::string& path, const std::string& code) try {
    if (detail::fs::is_symlink(path)) throw Error("package-path", path + " is a link.");
    const auto file = detail::Map(path);
    if (file->size() > 64 << 20) Json::Fail("it has more than 64 MiB");
    return std::string(*file);
  } catch (const std::system_error& error) {
    throw Error(code, path + " cannot be read: " + error.code().message() + ".", "",
                "copy the whole folder of the package");
  }

  static void CheckFile(const std::string& root, const Json& file, std::set<std::string>& seen) {
    const std::string name = file.Get<std::string>("path");
    const auto require = [&](bool good, const std::string& code, const std::string& problem) {
      if (!good)
        throw Error(code, "The package's file '" + name + "' " + problem + ".", root,
                    "copy the whole folder again, or build the package again");
    };
    static const std::string banned("\\:\0<>\"|?*\x7F", 10);
    bool inside = !name.empty() && name.size() <= 255 && seen.insert(name).second &&
                  std::none_of(name.begin(), name.end(), [](char c) {
                    return banned.find(c) != std::string::npos || static_cast<uint8_t>(c) < 0x20;
                  });
    try {
      detail::fs::path path = root;
      std::istringstream parts(name + "/");
      for (std::string part; inside && std::getline(parts, part, '/');) {
        path /= part;
        inside = !part.empty() && part != "." && part != ".." && !detail::fs::is_symlink(path);
      }
      require(inside, "package-path", "does not lie inside the package");
      require(detail::fs::is_regular_file(path), "package-incomplete", "is missing");
      const auto content = detail::Map(path);
      require(content->size() == static_cast<size_t>(file["size_bytes"].Whole()) &&
                  detail::Sha256Mapped(*content) == file.Get<std::string>("sha256"),
              "package-changed", "is not the one that the manifest describes");
    } catch (const std::system_error& error) {
      require(false, "package-incomplete", "cannot be read: " + error.code().message());
    }
  }

  std::string folder_;
  Json manifest_;
  std::vector<detail::Spec> inputs_, outputs_, evaluation_outputs_, parameters_;
};

}  // namespace odtpack
