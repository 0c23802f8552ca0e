// A package: a folder whose files are those that its manifest describes
// (docs/formats/package.md).
#pragma once

#include "odtpack/digest.hpp"
#include "odtpack/manifest_check.hpp"

namespace odtpack {

/// A package that is what its manifest says.
class Package {
 public:
  /// Tells whether a signature, 64 bytes of Ed25519, is that of the manifest's bytes. The kit has
  /// no public-key cryptography: call the one that the app ships.
  using SignatureCheck =
      std::function<bool(const std::string& manifest, const std::string& signature)>;

  /// Open a folder and check its files' paths, sizes and hashes, and the signature if asked to.
  static Package Open(const std::string& folder, const SignatureCheck& signature = nullptr) {
    if (folder.empty()) return Open(".", signature);
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
    std::tie(package.manifest_, package.specs_) = detail::ReadManifest(text, folder);
    const Json& manifest = package.manifest_;
    if (manifest["target"]) {
      throw Error("package-target", "The package was built for onnxruntime-training.", folder,
                  "odtpack build without --target ort-training");
    }
    if (manifest["privacy"]) {
      throw Error("private-training",
                  "The package is trained with private gradients, which this kit does not make.",
                  folder, "train it with Python, or build it without privacy");
    }
    std::set<std::string> seen = {"manifest.json", "manifest.sig"};
    std::vector<const Json*> files;
    for (const char* key : detail::kFiles) {
      if (const Json& file = manifest["files"][key]) files.push_back(&file);
    }
    for (const Json& file : detail::ManifestCheck::ListOf(manifest["files"], "extra", 100'000))
      files.push_back(&file);
    for (const Json* file : files) CheckPath(folder, file->Get<std::string>("path"), seen);
    for (const Json* file : files) CheckFile(folder, *file);
    return package;
  }

  const std::string& Folder() const { return folder_; }
  const detail::Json& Manifest() const { return manifest_; }
  const std::vector<detail::Spec>& Inputs() const { return specs_.inputs; }
  const std::vector<detail::Spec>& Outputs() const { return specs_.outputs; }
  /// Those of the evaluation model: the same and, after them, what it alone returns.
  const std::vector<detail::Spec>& EvaluationOutputs() const { return specs_.evaluation_outputs; }
  const std::vector<detail::Spec>& Parameters() const { return specs_.parameters; }
  /// The parameters of the adapter; none without one.
  const std::vector<detail::Spec>& Adapter() const { return specs_.adapter; }

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
  /// The operators of a domain that its models have.
  std::set<std::string> OperatorsOf(const std::string& domain) const {
    std::set<std::string> found;
    for (const auto& [model, domains] : manifest_.Get<Json::Object>("operators", {})) {
      if (!domains || !domains[domain.c_str()]) continue;
      for (const auto& [name, version] : domains.Get<Json::Object>(domain)) found.insert(name);
    }
    return found;
  }
  /// The path of the model that a Generator runs.
  std::string Decoder() const {
    for (const Json& file : manifest_["files"].Get<Json::List>("extra", {})) {
      if (file.Get<std::string>("role") == "decoder_model")
        return folder_ + "/" + file.Get<std::string>("path");
    }
    throw Error("no-decoder", "The package has no model for generation.", folder_,
                "build it with --segments and --adapter lora, of a decoder that was exported with "
                "its key-value cache");
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

  /// The session options that the package asks for; `threads`: at most 256, or 0 for its choice.
  /// Where it asks for an arena that sessions share, each TrainingSession has one for all of its own.
  Ort::SessionOptions SessionOptions(const Ort::Env&, int threads = 0) const {
    static const std::string older = R"({"optimization_level": "extended", "memory_pattern": false,
                                         "config": {"session.force_spinning_stop": "1"}})";
    const Json session =
        manifest_["session"] ? manifest_["session"] : detail::JsonReader(older).Read();
    static const std::map<std::string, GraphOptimizationLevel> levels = {
        {"disabled", ORT_DISABLE_ALL},
        {"basic", ORT_ENABLE_BASIC},
        {"extended", ORT_ENABLE_EXTENDED},
        {"all", ORT_ENABLE_ALL}};
    Ort::SessionOptions options;
    options.SetGraphOptimizationLevel(
        levels.at(session.Get<std::string>("optimization_level")));
    if (!session.Get<bool>("memory_pattern", true)) options.DisableMemPattern();
    if (!session.Get<bool>("arena", true)) options.DisableCpuMemArena();
    if (!session.Get<bool>("prepacking", true))
      options.AddConfigEntry("session.disable_prepacking", "1");
    if (threads > 256)
      throw Error("bad-argument", "A session has at most 256 threads, not " +
                                      std::to_string(threads) + ".", "",
                  "pass 0, and the package or ONNX Runtime chooses");
    options.SetIntraOpNumThreads(threads > 0 ? threads
                                             : static_cast<int>(session.Whole("threads", 0)));
    for (const auto& [key, value] : session.Get<Json::Object>("config", {}))  // of those allowed
      options.AddConfigEntry(key.c_str(), value.As<std::string>("config").c_str());
    if (session.Get<bool>("shared_allocator", false))
      options.AddConfigEntry("session.use_env_allocators", "1");
    return options;
  }

 private:
  using Json = detail::Json;

  static std::string Content(const std::string& path, const std::string& code) try {
    if (detail::fs::is_symlink(path)) throw Error("package-path", path + " is a link.");
    const auto file = detail::Map(path);
    if (file->size() > 4 << 20) Json::Fail("it has more than 4 MiB");
    return std::string(*file);
  } catch (const std::system_error& error) {
    throw Error(code, path + " cannot be read: " + error.code().message() + ".", "",
                "copy the whole folder of the package");
  }

  static void Require(bool good, const std::string& code, const std::string& root,
                      const std::string& name, const std::string& problem) {
    if (!good)
      throw Error(code, "The package's file '" + name + "' " + problem + ".", root,
                  "copy the whole folder again, or build the package again");
  }

  /// Check that a path is one of this package alone; `seen` has those before, ignoring case.
  static void CheckPath(const std::string& root, const std::string& name,
                        std::set<std::string>& seen) {
    Require(detail::IsPortable(name) && seen.insert(detail::IgnoringCase(name)).second,
            "package-path", root, name, "does not lie inside the package");
  }

  static void CheckFile(const std::string& root, const Json& file) {
    const std::string name = file.Get<std::string>("path");
    try {
      detail::fs::path path = root;
      std::istringstream parts(name);
      for (std::string part; std::getline(parts, part, '/');) {
        path /= part;
        Require(!detail::fs::is_symlink(path), "package-path", root, name, "is a link");
      }
      Require(detail::fs::is_regular_file(path), "package-incomplete", root, name, "is missing");
      const auto content = detail::Map(path);
      Require(content->size() == static_cast<size_t>(file["size_bytes"].Whole()) &&
                  detail::Sha256Mapped(content) == file.Get<std::string>("sha256"),
              "package-changed", root, name, "is not the one that the manifest describes");
    } catch (const std::system_error& error) {
      Require(false, "package-incomplete", root, name,
              "cannot be read: " + error.code().message());
    }
  }

  std::string folder_;
  Json manifest_;
  detail::Specs specs_;
};

}  // namespace odtpack
