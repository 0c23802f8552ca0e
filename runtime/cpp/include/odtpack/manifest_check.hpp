// What a manifest may say (docs/formats/kits.md): every size that only the manifest states is bounded
// before anything is allocated or run.
#pragma once

#include "odtpack/schedule.hpp"

namespace odtpack::detail {

/// Sizes of a tensor in a manifest, -1 for what may vary.
inline Shape ReadShape(const Json& json, const std::string& of, bool fixed, double most,
                       std::vector<std::string>* symbols = nullptr) {
  Shape shape;
  double product = 1;
  for (const Json& size : json.Get<Json::List>("shape")) {
    const auto* symbol = std::get_if<std::string>(&size.value);
    const bool varies = symbol != nullptr || !size;
    if (shape.size() == 32 || (varies && fixed) || (symbol != nullptr && symbol->empty()))
      Json::Fail("the shape of '" + of + "'");
    shape.push_back(varies ? -1 : size.Whole());
    if (!varies && shape.back() < 0) Json::Fail("the shape of '" + of + "'");
    if (!varies) product *= static_cast<double>(std::max<int64_t>(shape.back(), 1));
    if (symbols != nullptr) symbols->push_back(symbol == nullptr ? "" : *symbol);
  }
  if (product > most) Json::Fail("'" + of + "' has too many elements");
  return shape;
}

/// A parameter, or a user's input or output, as the manifest describes it.
struct Spec {
  std::string name, role, scale;
  Type type, model_type;
  std::vector<std::string> symbols;  // the names of sizes that may vary
  Shape shape;                       // -1 for those
  int64_t class_count, offset;
  std::optional<int64_t> ignored;

  explicit Spec(const Json& json)
      : name(json.Get<std::string>("name")),
        role(json.Get<std::string>("role")),
        scale(json.Get<std::string>("scale", "")),
        type(TypeOf(json.Get<std::string>("dtype"))),
        model_type(json["model_dtype"] ? TypeOf(json.Get<std::string>("model_dtype"))
                                       : ONNX_TENSOR_ELEMENT_DATA_TYPE_UNDEFINED),
        shape(ReadShape(json, name, false, 1099511627776.0, &symbols)),
        class_count(json.Whole("class_count", 0)),
        offset(json.Whole("offset", 0)) {
    if (name.empty()) Json::Fail("a name is empty");
    if (json["class_count"] && (class_count < 1 || class_count > INT32_MAX))
      Json::Fail("the class_count of '" + name + "'");
    if (json["ignore_index"]) ignored = json["ignore_index"].Whole();
  }
  static Type TypeOf(const std::string& text) {
    for (int type = 1; type < 14; ++type) {
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

/// Inputs, outputs and parameters of a manifest.
struct Specs {
  std::vector<Spec> inputs, outputs, evaluation_outputs, parameters, adapter;
};

/// The files of a package that have a key of their own.
constexpr const char* kFiles[] = {"training_model",  "eval_model",         "optimizer_model",
                                  "checkpoint",      "checkpoint_data",    "step_model",
                                  "inference_template", "nominal_checkpoint"};

/// Checks a manifest, whose specs were read. What it finds wrong is manifest-invalid.
class ManifestCheck {
 public:
  ManifestCheck(const Json& manifest, const Specs& specs) : manifest_(manifest), specs_(specs) {
    Names();
    Parameters();
    if (manifest["session"]) Session(manifest["session"]);
    if (manifest["layout"]) Layout(manifest["layout"]);
    Training();
    if (manifest["self_check"]) SelfCheck(manifest["self_check"]);
    Files();
  }

  /// The list of a key that may be left out, with no more entries than `most`.
  static const Json::List& ListOf(const Json& json, const std::string& key, size_t most) {
    static const Json::List none;
    if (!json.Has(key)) return none;
    const auto& list = json.Get<Json::List>(key);
    Require(list.size() <= most, "'" + key + "' has too many entries");
    return list;
  }

 private:
  static void Require(bool good, const std::string& problem) {
    if (!good) Json::Fail(problem);
  }
  static int64_t Between(const Json& json, const std::string& key, int64_t least, int64_t most) {
    const int64_t number = json[key].Whole();
    Require(number >= least && number <= most, "'" + key + "' is not between " +
                                                   std::to_string(least) + " and " +
                                                   std::to_string(most));
    return number;
  }
  /// A learning rate or a factor of one: as float32 it is finite and above 0.
  static void Positive(const Json& json, const std::string& key) {
    const auto number = static_cast<float>(json.Get<double>(key));
    Require(std::isfinite(number) && number > 0, "'" + key + "' is not above 0 in float32");
  }
  static void Flag(const Json& json, const std::string& key) {
    if (json.Has(key)) json.Get<bool>(key);
  }
  static std::vector<std::string> Texts(const Json& json, const std::string& key) {
    auto texts = json.Texts(key);
    Require(std::find(texts.begin(), texts.end(), "") == texts.end(), "a name of '" + key + "'");
    return texts;
  }

  void Names() const {
    const auto check = [](const std::vector<Spec>& specs, const std::set<std::string>& roles) {
      std::set<std::string> names;
      for (const Spec& spec : specs) {
        Require(roles.count(spec.role) > 0, "the role of '" + spec.name + "'");
        Require(names.insert(spec.name).second, "'" + spec.name + "' occurs twice");
      }
    };
    check(specs_.inputs, {"data", "labels", "target"});
    check(specs_.evaluation_outputs, {"loss", "additional", "prediction"});  // all outputs
    check(specs_.parameters, {"trainable", "frozen", "state"});
    Require(!specs_.outputs.empty() && specs_.outputs[0].role == "loss",
            "the first output is not the loss");
  }

  void Parameters() {
    std::set<std::string> known;
    for (const Spec& spec : specs_.parameters) known.insert(spec.name);
    const auto& listed = manifest_.Get<Json::List>("parameters");
    for (size_t i = 0; i < listed.size(); ++i) {
      const Spec& spec = specs_.parameters[i];
      Require(std::count(spec.shape.begin(), spec.shape.end(), -1) == 0,
              "the shape of '" + spec.name + "'");
      const auto count = std::accumulate(spec.shape.begin(), spec.shape.end(), 1.0,
                                         std::multiplies<double>());
      const size_t item = TypeInfo(spec.type).second == 0 ? 8 : TypeInfo(spec.type).second;
      Require(!listed[i]["size_bytes"] ||
                  static_cast<double>(listed[i]["size_bytes"].Whole()) ==
                      count * static_cast<double>(item),
              "the size_bytes of '" + spec.name + "'");
      Require(!listed[i]["scale"] || known.count(spec.scale) > 0, "the scale of '" + spec.name + "'");
      Require(spec.offset >= 0, "the offset of '" + spec.name + "'");
      if (spec.role != "trainable") continue;
      trained_.insert(spec.name);
      placed_.emplace_back(listed[i]["offset"] ? spec.offset : -1, static_cast<int64_t>(count));
    }
  }

  static void Session(const Json& session) {
    static const std::set<std::string> known = {
        "optimization_level", "memory_pattern",           "arena",
        "shared_allocator",   "initial_chunk_size_bytes", "max_dead_bytes_per_chunk",
        "prepacking",         "threads",                  "config"};
    static const std::set<std::string> levels = {"disabled", "basic", "extended", "all"};
    for (const auto& entry : session.As<Json::Object>("session"))
      Require(known.count(entry.first) > 0, "'session' has the unknown key '" + entry.first + "'");
    Require(levels.count(session.Get<std::string>("optimization_level")) > 0,
            "there is no such optimization level");
    for (const char* key : {"memory_pattern", "arena", "shared_allocator", "prepacking"})
      Flag(session, key);
    for (const char* key : {"initial_chunk_size_bytes", "max_dead_bytes_per_chunk"})
      if (session[key]) Between(session, key, 256, 1 << 30);
    if (session["threads"]) Between(session, "threads", 1, 256);
    if (!session.Has("config")) return;
    for (const auto& [key, value] : session.Get<Json::Object>("config"))  // what odtpack writes
      Require(key == "session.force_spinning_stop" && value.As<std::string>(key) == "1",
              "'session.config' has an entry that a package must not have, '" + key + "'");
  }

  void Layout(const Json& layout) {
    const auto dtype = layout.Get<std::string>("dtype"), run = layout.Get<std::string>("run");
    Require(dtype == "float32" || dtype == "float64", "the dtype of 'layout'");
    Require(run == "chunks" || run == "whole" || run == "parameters", "the run of 'layout'");
    Between(layout, "chunk_elements", 1024, 1 << 30);
    Texts(layout, "inputs");
    for (const Json& entry : ListOf(layout, "state", 1024)) {
      Require(!entry.Get<std::string>("name").empty(), "a name of 'layout.state'");
      const auto axes = entry.Wholes("axes");
      Require(axes.size() <= 2 && std::all_of(axes.begin(), axes.end(),
                                              [](int64_t axis) { return axis == 0 || axis == 1; }),
              "the axes of 'layout.state'");
    }
    const int64_t line = dtype == "float64" ? 8 : 16;  // elements of 64 bytes
    std::sort(placed_.begin(), placed_.end());
    int64_t end = 0;
    for (const auto& [offset, count] : placed_) {
      Require(offset >= end && offset % line == 0, "two parameters overlap, or one is not aligned");
      end = std::max(end, offset + count);
    }
    Require(layout["elements"].Whole() == (end + line - 1) / line * line,
            "the elements of 'layout' are not those of the parameters");
  }

  void Training() const {
    if (manifest_.Has("accumulation_steps")) Between(manifest_, "accumulation_steps", 1, 1 << 20);
    const Json& optimizer = manifest_["optimizer"];
    Require(!optimizer.Get<std::string>("kind").empty(), "the kind of 'optimizer'");
    for (const auto& [key, value] : optimizer.As<Json::Object>())
      Require(value.value.index() > 0 && value.value.index() < 4, "'optimizer." + key + "'");
    if (optimizer["learning_rate"]) Positive(optimizer, "learning_rate");
    std::multiset<std::string> grouped;
    for (const Json& group : ListOf(manifest_, "groups", 100'000)) {
      Positive(group, "learning_rate_scale");
      group.Get<double>("weight_decay");
      for (const auto& name : Texts(group, "parameters")) grouped.insert(name);
    }
    Require(grouped.empty() ||
                std::equal(grouped.begin(), grouped.end(), trained_.begin(), trained_.end()),
            "the groups do not hold each trainable parameter once");
    const Json& schedule = manifest_["schedule"];
    if (!schedule) return;
    if (schedule["learning_rate"]) Positive(schedule, "learning_rate");
    const Json none{Json::Object{}};
    const Json& settings = schedule.Has("settings") ? schedule["settings"] : none;
    try {
      Schedule::FromJson(schedule.Get<std::string>("kind"), settings, (int64_t{1} << 53) - 1);
    } catch (const Error& error) {
      Json::Fail(std::string("the schedule: ") + error.what());
    }
  }

  void SelfCheck(const Json& check) const {
    if (check["reason"]) {
      Require(!check.Get<std::string>("reason").empty(), "the reason of 'self_check'");
      for (const auto& [key, value] : check.As<Json::Object>()) {
        const auto* list = std::get_if<Json::List>(&value.value);
        Require(key == "reason" || !value || (list != nullptr && list->empty()),
                "'self_check' has a reason and a check");
      }
      return;
    }
    for (const Json& input : ListOf(check, "inputs", 1024)) {
      const auto& name = input.Get<std::string>("name");
      ReadShape(input, name, true, 67108864.0);
      if (input["bound"]) Between(input, "bound", 1, INT64_MAX);
      Require(std::any_of(specs_.inputs.begin(), specs_.inputs.end(),
                          [&name](const Spec& spec) { return spec.name == name; }),
              "'self_check' has an input that is none, '" + name + "'");
    }
    Positive(check, "learning_rate");
    check.Get<double>("evaluation_loss");
    const auto numbers = [&check](const char* key) {
      const auto& list = ListOf(check, key, 1024);
      for (const Json& number : list) number.As<double>(key);
      return list.size();
    };
    Require(numbers("losses") == 5 && numbers("tolerances") == 6 &&
                !check.Get<Json::List>("inputs").empty(),
            "'self_check' is not complete");
  }

  static void File(const Json& file) {
    const auto& digest = file.Get<std::string>("sha256");
    Require(!file.Get<std::string>("path").empty() && file["size_bytes"].Whole() >= 0 &&
                digest.size() == 64 &&
                digest.find_first_not_of("0123456789abcdef") == std::string::npos,
            "the path, size_bytes or sha256 of a file");
  }

  void Files() const {
    const Json& files = manifest_["files"];
    for (const char* key : {"training_model", "eval_model", "optimizer_model", "checkpoint"})
      Require(bool(files[key]), std::string("'files' has no ") + key);
    if (files["checkpoint_data"]) {
      Require(files["checkpoint_data"].Get<std::string>("path") ==
                  files["checkpoint"].Get<std::string>("path") + ".data",
              "checkpoint_data is not named after the checkpoint");
    }
    for (const char* key : kFiles) {
      if (files[key]) File(files[key]);
    }
    for (const Json& file : ListOf(files, "extra", 100'000)) {
      File(file);
      static const std::set<std::string> roles = {
          "ort_model", "inference_model", "operators_config", "operators_and_types_config",
          "recipe",    "segment_model",   "segment_weights",  "decoder_model",
          "decoder_weights"};
      Require(roles.count(file.Get<std::string>("role")) > 0, "the role of a file");
    }
    Require(bool(files["inference_template"]) == bool(manifest_["inference"]),
            "an inference template needs both its file and the key inference");
    if (manifest_["inference"]) {
      for (const char* key : {"inputs", "outputs"}) Texts(manifest_["inference"], key);
      for (const auto& name : Texts(manifest_["inference"], "parameters"))
        Require(std::any_of(specs_.parameters.begin(), specs_.parameters.end(),
                            [&name](const Spec& spec) { return spec.name == name; }),
                "'inference' names the parameter '" + name + "', which there is not");
    }
    if (manifest_["adapter"]) {
      for (const auto& name : Texts(manifest_["adapter"], "parameters"))
        Require(trained_.count(name) > 0, "'adapter' names '" + name + "', which is not trained");
    }
  }

  const Json& manifest_;
  const Specs& specs_;
  std::set<std::string> trained_;
  std::vector<std::pair<int64_t, int64_t>> placed_;  // offsets and sizes of those
};

/// Read and check the text of a manifest.
inline std::pair<Json, Specs> ReadManifest(const std::string& text, const std::string& where) {
  if (text.size() > 4 << 20) Json::Fail("it has more than 4 MiB");
  std::pair<Json, Specs> found{JsonReader(text).Read(), {}};
  auto& [manifest, specs] = found;
  if (manifest.Get<double>("schema_version") != 1) {
    throw Error("manifest-version", "The manifest has another schema version than 1.", where,
                "update the app");
  }
  const auto read = [&json = manifest](const char* key, size_t most, std::vector<Spec>& into) {
    for (const Json& entry : ManifestCheck::ListOf(json, key, most)) into.emplace_back(entry);
  };
  for (const char* key : {"inputs", "outputs", "parameters"}) manifest.Get<Json::List>(key);
  read("inputs", 1024, specs.inputs);
  read("outputs", 1024, specs.outputs);
  specs.evaluation_outputs = specs.outputs;
  read("evaluation_outputs", 1024, specs.evaluation_outputs);
  read("parameters", 100'000, specs.parameters);
  ManifestCheck(manifest, specs);
  if (manifest["adapter"]) {
    const auto names = manifest["adapter"].Texts("parameters");
    const std::set<std::string> adapter(names.begin(), names.end());
    for (const Spec& spec : specs.parameters)
      if (adapter.count(spec.name) > 0) specs.adapter.push_back(spec);
  }
  return found;
}

/// The letters of a path as most file systems compare them.
inline std::string IgnoringCase(const std::string& path) {
  std::string text;
  for (const char* at = path.c_str(); at < path.c_str() + path.size();) {
    auto code = static_cast<uint32_t>(flatbuffers::FromUTF8(&at));
    const auto within = [&code](uint32_t first, uint32_t last) {
      return code >= first && code <= last;
    };
    if (within('A', 'Z') || (within(0xC0, 0xDE) && code != 0xD7) || within(0x391, 0x3A9) ||
        within(0x410, 0x42F))
      code += 32;
    else if (within(0x400, 0x40F))
      code += 80;
    else if ((within(0x100, 0x137) || within(0x14A, 0x177)) && code != 0x130 && code != 0x131)
      code |= 1;
    else if ((within(0x139, 0x148) || within(0x179, 0x17E)) && code % 2 == 1)
      code += 1;
    flatbuffers::ToUTF8(code, &text);
  }
  return text;
}

/// Whether the path of a file leads to one place inside the package on every system.
inline bool IsPortable(const std::string& path) {
  if (path.empty() || path.size() > 1024 || !IsUtf8(path) || path.back() == '/') return false;
  for (const char* at = path.c_str(); at < path.c_str() + path.size();) {
    const auto code = static_cast<uint32_t>(flatbuffers::FromUTF8(&at));
    if (code < 0x20 || (code >= 0x7F && code < 0xA0) ||
        (code < 0x80 && std::string_view("\\:*?\"<>|").find(static_cast<char>(code)) !=
                            std::string_view::npos) ||
        code == 0x200E || code == 0x200F || (code >= 0x202A && code <= 0x202E) ||
        (code >= 0x2066 && code <= 0x2069))
      return false;
  }
  std::istringstream parts(path);
  for (std::string part; std::getline(parts, part, '/');) {
    if (part.empty() || part.size() > 255 || part.front() == ' ' || part.back() == ' ' ||
        part.back() == '.')
      return false;
    std::string device = IgnoringCase(part.substr(0, part.find('.')));
    device.erase(device.find_last_not_of(' ') + 1);
    if (device == "con" || device == "prn" || device == "aux" || device == "nul") return false;
    const bool numbered = device.rfind("com", 0) == 0 || device.rfind("lpt", 0) == 0;
    if (numbered && device.size() == 4 && std::isdigit(static_cast<unsigned char>(device[3])))
      return false;
  }
  return true;
}

}  // namespace odtpack::detail
