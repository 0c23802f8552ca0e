// A package: a folder whose files are those that its manifest describes
// (docs/formats/package.md).
#pragma once

#include <functional>
#include <set>

#include "odtpack/json.hpp"

namespace odtpack {

namespace detail {

/// SHA-256 (FIPS 180-4) in hex.
inline std::string Sha256(std::string_view data) {
  // The fractions of the cube roots of the first 64 primes, and of the square roots of 8.
  static const auto constants = [] {
    std::pair<std::vector<uint32_t>, std::vector<uint32_t>> made;
    for (int n = 2; made.first.size() < 64; ++n) {
      bool prime = true;
      for (int d = 2; d * d <= n; ++d) prime = prime && n % d != 0;
      const auto fraction = [](long double root) {
        return static_cast<uint32_t>((root - std::floor(root)) * 4294967296.0L);
      };
      if (prime) made.first.push_back(fraction(std::cbrt(static_cast<long double>(n))));
      if (prime) made.second.push_back(fraction(std::sqrt(static_cast<long double>(n))));
    }
    return made;
  }();
  uint32_t state[8];
  std::copy_n(constants.second.begin(), 8, state);
  const auto rotate = [](uint32_t x, int n) { return x >> n | x << (32 - n); };
  const auto block = [&](const uint8_t* bytes) {
    uint32_t w[64], v[8];
    for (int i = 0; i < 16; ++i) {
      w[i] = uint32_t{bytes[4 * i]} << 24 | bytes[4 * i + 1] << 16 | bytes[4 * i + 2] << 8 |
             bytes[4 * i + 3];
    }
    for (int i = 16; i < 64; ++i) {
      const uint32_t a = w[i - 15], b = w[i - 2];
      w[i] = w[i - 16] + (rotate(a, 7) ^ rotate(a, 18) ^ a >> 3) + w[i - 7] +
             (rotate(b, 17) ^ rotate(b, 19) ^ b >> 10);
    }
    std::copy_n(state, 8, v);
    for (int i = 0; i < 64; ++i) {
      const uint32_t e = v[4], a = v[0];
      const uint32_t one = v[7] + (rotate(e, 6) ^ rotate(e, 11) ^ rotate(e, 25)) +
                           ((e & v[5]) ^ (~e & v[6])) + constants.first[i] + w[i];
      const uint32_t two = (rotate(a, 2) ^ rotate(a, 13) ^ rotate(a, 22)) +
                           ((a & v[1]) ^ (a & v[2]) ^ (v[1] & v[2]));
      std::copy_backward(v, v + 7, v + 8);
      v[4] += one;
      v[0] = one + two;
    }
    for (int i = 0; i < 8; ++i) state[i] += v[i];
  };
  const auto* bytes = reinterpret_cast<const uint8_t*>(data.data());
  size_t at = 0;
  for (; data.size() - at >= 64; at += 64) block(bytes + at);
  std::string tail(data.substr(at));
  tail += '\x80';
  tail.resize(tail.size() <= 56 ? 56 : 120);
  for (int i = 7; i >= 0; --i) tail += static_cast<char>(uint64_t{data.size()} * 8 >> 8 * i);
  for (at = 0; at < tail.size(); at += 64) block(reinterpret_cast<const uint8_t*>(&tail[at]));
  char hex[65];
  for (int i = 0; i < 8; ++i) std::snprintf(hex + 8 * i, 9, "%08x", state[i]);
  return hex;
}

/// A parameter, or a user's input or output, as the manifest describes it.
struct Spec {
  std::string name, role, scale;
  int64_t type = 0, model_type = 0;
  Shape shape;                       // -1 for what may vary
  std::vector<std::string> symbols;  // the names of such sizes
  int64_t class_count = 0, offset = 0;
  std::optional<int64_t> ignored;

  explicit Spec(const Json& json)
      : name(json.Get<std::string>("name")), role(json.Get<std::string>("role")),
        scale(json.Get<std::string>("scale", "")), type(TypeOf(json, "dtype")),
        model_type(json["model_dtype"].IsNull() ? 0 : TypeOf(json, "model_dtype")),
        class_count(json.Whole("class_count", 0)), offset(json.Whole("offset", 0)) {
    for (const Json& size : json.Get<Json::List>("shape")) {
      const auto* symbol = std::get_if<std::string>(&size.value);
      symbols.push_back(symbol == nullptr ? "" : *symbol);
      shape.push_back(symbol != nullptr || size.IsNull() ? -1 : size.Whole("a size"));
      if (shape.back() < -1 || shape.size() > 32) Json::Fail("the shape of '" + name + "'");
    }
    if (!json["ignore_index"].IsNull()) ignored = json.Whole("ignore_index", 0);
  }
  static int64_t TypeOf(const Json& json, const std::string& key) {
    const std::string text = json.Get<std::string>(key);
    for (int64_t type = 1; type < 14; ++type) {
      if (text == (type == 8 ? "string" : TypeName(type))) return type;
    }
    Json::Fail("there is no type '" + text + "'");
  }
  std::string Description() const {
    std::string text;
    for (size_t i = 0; i < shape.size(); ++i) {
      const std::string free = symbols[i].empty() ? "?" : symbols[i];
      text += (i == 0 ? "" : ", ") + (shape[i] < 0 ? free : std::to_string(shape[i]));
    }
    return TypeName(type) + ("[" + text + "]");
  }
  bool Fits(int64_t other_type, const Shape& other) const {
    bool fits = type == other_type && (shape.empty() || shape.size() == other.size());
    for (size_t i = 0; fits && i < shape.size(); ++i) fits = shape[i] < 0 || shape[i] == other[i];
    return fits;
  }
};

}  // namespace detail

/// A package that is what its manifest says.
class Package {
 public:
  /// Tells whether a signature, 64 bytes of Ed25519, is that of the manifest's bytes. The kit has
  /// no cryptography of its own: call the one that the app ships.
  using SignatureCheck = std::function<bool(const std::string& manifest, const std::string& signature)>;

  /// Open a folder and check its files' paths, sizes and hashes, and the signature if asked to.
  static Package Open(const std::string& folder, const SignatureCheck& signature = nullptr) {
    Package package;
    package.folder_ = folder;
    const detail::fs::path root(folder);
    const std::string text = Content(root / "manifest.json", "package-not-found");
    if (signature) {
      const std::string signed_with = Content(root / "manifest.sig", "not-signed");
      if (signed_with.size() != 64 || !signature(text, signed_with)) {
        throw Error("signature-wrong", "The manifest was not signed with the expected key.", folder,
                    "do not use this package");
      }
    }
    package.manifest_ = detail::JsonReader(text).Read();
    const int64_t version = package.manifest_["schema_version"].Whole("'schema_version'");
    if (version != 1) {
      throw Error("manifest-version", "The manifest has schema version " +
                  std::to_string(version) + ", and 1 can be read.", folder, "update the app");
    }
    if (!package.manifest_["target"].IsNull()) {
      throw Error("package-target", "The package was built for onnxruntime-training.", folder,
                  "odtpack build without --target ort-training");
    }
    std::set<std::string> seen;
    for (const auto& [name, entry] : package.manifest_.Get<detail::Json::Object>("files")) {
      if (name == "extra") {
        for (const detail::Json& file : entry.As<detail::Json::List>()) CheckFile(root, file, seen);
      } else {
        CheckFile(root, entry, seen);
      }
    }
    return package;
  }

  const std::string& Folder() const { return folder_; }
  const detail::Json& Manifest() const { return manifest_; }

  /// The path of a file by its key in the manifest: "training_model", "checkpoint" and so on.
  std::string Path(const std::string& key) const {
    const detail::Json& file = manifest_["files"][key];
    if (file.IsNull()) throw Error("package-incomplete", "The package has no " + key + ".", folder_);
    return folder_ + "/" + file.Get<std::string>("path");
  }

  /// The path of a model in ORT format.
  std::string OrtModel(const std::string& of, const std::string& style = "fixed",
                       const std::string& platform = "") const {
    for (const detail::Json& file : manifest_["files"].Get<detail::Json::List>("extra", {})) {
      if (file.Get<std::string>("role") == "ort_model" && file.Get<std::string>("of", "") == of &&
          file.Get<std::string>("style", "") == style &&
          file.Get<std::string>("platform", "") == platform) {
        return folder_ + "/" + file.Get<std::string>("path");
      }
    }
    throw Error("no-ort-model", "The package holds no such " + of + " in ORT format.", folder_,
                "odtpack ort " + folder_ + " --style " + style);
  }

  /// The session options that the package asks for; `threads` of 0 leave the choice to it.
  Ort::SessionOptions SessionOptions(const Ort::Env& env, int threads = 0) const {
    using detail::Json;
    const Json session = manifest_["session"].IsNull() ? Json{Json::Object{
        {"optimization_level", Json{std::string("extended")}}, {"memory_pattern", Json{false}},
        {"config", Json{Json::Object{{"session.force_spinning_stop", Json{std::string("1")}}}}}}}
        : manifest_["session"];
    const std::map<std::string, GraphOptimizationLevel> levels = {
        {"disabled", ORT_DISABLE_ALL}, {"basic", ORT_ENABLE_BASIC},
        {"extended", ORT_ENABLE_EXTENDED}, {"all", ORT_ENABLE_ALL}};
    const auto level = levels.find(session.Get<std::string>("optimization_level", "all"));
    if (level == levels.end()) Json::Fail("there is no such optimization level");
    Ort::SessionOptions options;
    options.SetGraphOptimizationLevel(level->second);
    if (!session.Get<bool>("memory_pattern", true)) options.DisableMemPattern();
    if (!session.Get<bool>("arena", true)) options.DisableCpuMemArena();
    if (!session.Get<bool>("prepacking", true)) {
      options.AddConfigEntry("session.disable_prepacking", "1");
    }
    const int64_t wanted = threads > 0 ? threads : session.Whole("threads", 0);
    options.SetIntraOpNumThreads(static_cast<int>(std::clamp<int64_t>(wanted, 0, 1024)));
    for (const auto& [key, value] : session.Get<Json::Object>("config", {})) {
      options.AddConfigEntry(key.c_str(), value.As<std::string>("'config'").c_str());
    }
    if (session.Get<bool>("shared_allocator", false)) {
      static const bool once = [&env] {  // the environment is the process's
        const auto memory = Ort::MemoryInfo::CreateCpu(OrtArenaAllocator, OrtMemTypeDefault);
        Ort::ThrowOnError(Ort::GetApi().CreateAndRegisterAllocator(
            const_cast<OrtEnv*>(static_cast<const OrtEnv*>(env)), memory, nullptr));
        return true;
      }();
      if (once) options.AddConfigEntry("session.use_env_allocators", "1");
    }
    return options;
  }

 private:
  static std::string Content(const detail::fs::path& path, const std::string& code) {
    try {
      if (detail::fs::is_symlink(path)) throw Error("package-path", path.string() + " is a link.");
      const detail::MappedFile file(path.string());
      if (file.View().size() > 64 << 20) detail::Json::Fail("it has more than 64 MiB");
      return std::string(file.View());
    } catch (const std::system_error& error) {
      throw Error(code, path.string() + " cannot be read: " + error.code().message() + ".", {},
                  "copy the whole folder of the package");
    }
  }

  static void CheckFile(const detail::fs::path& root, const detail::Json& file,
                        std::set<std::string>& seen) {
    const std::string name = file.Get<std::string>("path");
    const auto require = [&](bool good, const std::string& code, const std::string& problem) {
      if (good) return;
      throw Error(code, "The package's file '" + name + "' " + problem + ".", root.string(),
                  "copy the whole folder again, or build the package again");
    };
    bool inside = !name.empty() && seen.insert(name).second && name != "manifest.json" &&
                  name.find_first_of(std::string("\\:\0<>\"|?*", 9)) == std::string::npos &&
                  std::none_of(name.begin(), name.end(),
                               [](char c) { return static_cast<uint8_t>(c) < 0x20 || c == 0x7F; });
    detail::fs::path path = root;
    std::istringstream parts(name + "/");
    for (std::string part; inside && std::getline(parts, part, '/');) {
      path /= part;
      inside = !part.empty() && part != "." && part != ".." && !detail::fs::is_symlink(path);
    }
    require(inside, "package-path", "does not lie inside the package");
    require(detail::fs::is_regular_file(path), "package-incomplete", "is missing");
    try {
      const detail::MappedFile content(path.string());
      require(content.View().size() == static_cast<size_t>(file["size_bytes"].Whole("size_bytes")),
              "package-changed", "has another size than the manifest says");
      require(detail::Sha256(content.View()) == file.Get<std::string>("sha256"),
              "package-changed", "is not the one that the manifest describes");
    } catch (const std::system_error& error) {
      require(false, "package-incomplete", "cannot be read: " + error.code().message());
    }
  }

  std::string folder_;
  detail::Json manifest_;
};

}  // namespace odtpack
