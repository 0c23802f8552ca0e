// The adapter of a package: ONNX Runtime's file of one, and PEFT's folder
// (docs/guides/language-models.md).
#pragma once

#include "odtpack/inference.hpp"
#include "odtpack/not_finite.hpp"

namespace odtpack {
namespace detail {

constexpr const char* kAdapterSuffix = ".onnx_adapter";
constexpr const char* kPeftTensors = "adapter_model.safetensors";
constexpr const char* kPeftConfig = "adapter_config.json";
using Tensors = std::map<std::string, Tensor>;

/// The places of fields of onnxruntime/lora's tables: Parameter { name: string; dims: [int64];
/// data_type: int32; raw_data: [uint8]; } and Adapter { format_version: int32; adapter_version:
/// int32; model_version: int32; parameters: [Parameter]; }.
constexpr flatbuffers::voffset_t kFirst = 4, kSecond = 6, kThird = 8, kFourth = 10;

/// The tensors' bytes follow the tables, and are written from where they are.
inline void WriteOnnxAdapter(const fs::path& path, const Tensors& tensors) {
  flatbuffers::FlatBufferBuilder to;
  const auto later = to.CreateVector(std::vector<uint8_t>());
  std::vector<flatbuffers::Offset<void>> tables;
  for (const auto& [name, tensor] : tensors) {
    const auto dims = to.CreateVector(tensor.shape);
    const auto text = to.CreateString(name);
    const auto start = to.StartTable();
    to.AddOffset(kFirst, text);
    to.AddOffset(kSecond, dims);
    to.AddElement<int32_t>(kThird, tensor.type, 0);
    to.AddOffset(kFourth, later);
    tables.emplace_back(to.EndTable(start));
  }
  const auto all = to.CreateVector(tables);
  const auto start = to.StartTable();
  for (const auto version : {kFirst, kSecond, kThird}) to.AddElement<int32_t>(version, 1, 0);
  to.AddOffset(kFourth, all);
  to.Finish(flatbuffers::Offset<void>(to.EndTable(start)), "TORT");
  const auto place = [](size_t end) { return (end + 4 + 7) / 8 * 8; };  // after the length
  size_t end = to.GetSize();
  auto table = tables.begin();
  for (const auto& item : tensors) {
    Refer(to, (table++)->o, kFourth, place(end) - 4);
    end = place(end) + item.second.Bytes();
  }
  WriteAtomically(path, [&](const File& file) {
    const uint8_t zeros[8] = {};
    Write(file, to.GetBufferPointer(), to.GetSize());
    size_t written = to.GetSize();
    for (const auto& item : tensors) {
      const Tensor& tensor = item.second;
      const auto size = flatbuffers::EndianScalar(
          static_cast<flatbuffers::uoffset_t>(tensor.Bytes()));
      Write(file, zeros, place(written) - 4 - written);
      Write(file, &size, sizeof size);
      Write(file, tensor.data.get(), tensor.Bytes());
      written = place(written) + tensor.Bytes();
    }
  });
}

/// A copy of bytes as a tensor of that type and shape, if they are as many as it has.
inline std::optional<Tensor> TensorOf(Type type, const Shape& shape, const char* bytes,
                                      int64_t size) {
  auto most = static_cast<int64_t>(TypeInfo(type).second);  // the bytes, if no axis is 0
  for (const int64_t axis : shape) {
    if (most == 0 || axis < 0 || axis > INT64_MAX / most) return {};
    most *= std::max<int64_t>(axis, 1);
  }
  if (most == 0 || shape.size() > 32) return {};
  if (static_cast<int64_t>(Tensor{type, shape, nullptr}.Bytes()) != size) return {};
  Tensor tensor = Zeros(type, shape);
  tensor.CopyFrom(bytes);
  return tensor;
}

inline Tensors ReadOnnxAdapter(const fs::path& path) {
  const auto bytes = Map(path, "adapter-not-found", "pass a file that SaveAdapter wrote");
  FlatBuffer source(*bytes, path.string(), "adapter");
  if (bytes->size() < 8 || bytes->substr(4, 4) != "TORT")
    source.Fail("it does not carry the identifier TORT");
  const FlatTable root(source, source.Number<uint32_t>(0));
  if (root.Number<int32_t>(kFirst) != 1) source.Fail("its format is not 1");
  Tensors tensors;
  int64_t left = source.Size();
  root.Each(kFourth, [&](const FlatTable& table) {
    const FlatVector dims = table.Vector(kSecond, 8), data = table.Vector(kFourth, 1);
    Shape shape;
    if (dims.length > 32 || (left -= data.length) < 0) source.Fail("a parameter is too large");
    for (int64_t i = 0; i < dims.length; ++i)
      shape.push_back(source.Number<int64_t>(dims.position + 8 * i));
    const auto type = static_cast<Type>(std::clamp(table.Number<int32_t>(kThird), 0, 14));
    const auto found = TensorOf(type, shape, source.At(data.position), data.length);
    if (!found || !data.there || !tensors.emplace(table.Text(kFirst), *found).second)
      source.Fail("a parameter is not a tensor of numbers");
  });
  return tensors;
}

inline std::string Quoted(const std::string& text) {
  std::string json = "\"";
  for (const char letter : text) {
    char code[8];
    if (static_cast<unsigned char>(letter) < 0x20) {
      std::snprintf(code, sizeof code, "\\u%04x", letter);
      json += code;
    } else {
      json += (letter == '"' || letter == '\\' ? "\\" : "") + std::string(1, letter);
    }
  }
  return json + "\"";
}

constexpr std::pair<const char*, Type> kSafetensors[] = {
    {"F32", kFloat},
    {"F64", kDouble},
    {"F16", kHalf},
    {"BF16", ONNX_TENSOR_ELEMENT_DATA_TYPE_UINT16}};

inline void WriteSafetensors(const fs::path& path, const Tensors& tensors) {
  std::string header = R"({"__metadata__":{"format":"pt"})";
  size_t end = 0;
  for (const auto& [name, tensor] : tensors) {
    const auto type =
        std::find_if(std::begin(kSafetensors), std::end(kSafetensors),
                     [&of = tensor.type](const auto& each) { return each.second == of; });
    if (type == std::end(kSafetensors))
      throw Error("parameter-type", "'" + name + "' is " + tensor.Description() +
                                        ", which no adapter holds.");
    const size_t start = end;
    end += tensor.Bytes();
    header += "," + Quoted(name) + R"(:{"dtype":")" + type->first + R"(","shape":)" +
              Text(tensor.shape) + R"(,"data_offsets":[)" + std::to_string(start) + "," +
              std::to_string(end) + "]}";
  }
  header += "}";
  header.append((8 - header.size() % 8) % 8, ' ');
  const uint64_t size = flatbuffers::EndianScalar(static_cast<uint64_t>(header.size()));
  WriteAtomically(path, [&](const File& file) {
    Write(file, &size, sizeof size);
    Write(file, header.data(), header.size());
    for (const auto& [name, tensor] : tensors) Write(file, tensor.data.get(), tensor.Bytes());
  });
}

[[noreturn]] inline void ThrowPeft(const fs::path& path, const std::string& reason) {
  throw Error("peft-invalid", path.filename().string() + " cannot be read: " + reason,
              path.string(), "save the adapter again: model.save_pretrained(folder)");
}

/// JSON of a file; what is wrong with it is peft-invalid.
template <class Read>
auto ReadPeftJson(const fs::path& path, std::string_view text, const Read& read) try {
  return read(JsonReader(std::string(text)).Read());
} catch (const Error& error) {
  if (error.Code() != "manifest-invalid") throw;
  ThrowPeft(path, "it is not JSON as it should be");
}

inline std::shared_ptr<const std::string_view> MapPeft(const fs::path& path) {
  return Map(path, "peft-not-found", "pass the folder that model.save_pretrained(folder) wrote");
}

/// All tensors, in float32.
inline Tensors ReadSafetensors(const fs::path& path) {
  const auto bytes = MapPeft(path);
  uint64_t size = 0;
  if (bytes->size() >= 8) std::memcpy(&size, bytes->data(), 8);
  size = flatbuffers::EndianScalar(size);
  if (bytes->size() < 10 || size > bytes->size() - 8) ThrowPeft(path, "its header");
  const std::string_view data = bytes->substr(8 + size);
  return ReadPeftJson(path, bytes->substr(8, size), [&](const Json& header) {
    std::map<int64_t, std::pair<std::string, const Json*>> places;
    Tensors tensors;
    for (const auto& [name, entry] : header.As<Json::Object>("header")) {
      if (name == "__metadata__") continue;
      const auto offsets = entry.Wholes("data_offsets");
      if (offsets.size() != 2 || offsets[0] < 0 || offsets[1] < offsets[0] ||
          static_cast<uint64_t>(offsets[1]) > data.size())
        ThrowPeft(path, "a tensor is not where it should be");
      const int64_t length = offsets[1] - offsets[0];
      if (length > 0 && !places.emplace(offsets[0], std::make_pair(name, &entry)).second)
        ThrowPeft(path, "two tensors are in one place");
      const std::string named = entry.Get<std::string>("dtype");
      const auto type = std::find_if(std::begin(kSafetensors), std::end(kSafetensors),
                                     [&named](const auto& each) { return named == each.first; });
      const auto found = type == std::end(kSafetensors)
                             ? std::nullopt
                             : TensorOf(type->second, entry.Wholes("shape"),
                                        data.data() + offsets[0], length);
      if (!found) ThrowPeft(path, "a tensor has another size or type than is known");
      if (IsFloating(type->second)) {
        tensors[name] = Convert(*found, kFloat);
        continue;
      }
      Tensor& wide = tensors[name] = Zeros(kFloat, found->shape);
      for (size_t i = 0; i < wide.Count(); ++i)
        wide.As<uint32_t>()[i] = static_cast<uint32_t>(found->As<uint16_t>()[i]) << 16;
    }
    int64_t end = 0;
    for (const auto& [start, place] : places) {
      if (start != end) ThrowPeft(path, "its tensors overlap, or have gaps");
      end = place.second->Wholes("data_offsets")[1];
    }
    if (static_cast<uint64_t>(end) != data.size())
      ThrowPeft(path, "it is longer than its tensors");
    return tensors;
  });
}

[[noreturn]] inline void ThrowAdapterMismatch(const std::string& what, const fs::path& where) {
  throw Error("adapter-mismatch", what, where.string(),
              "build the package with the adapter's kind, rank, alpha and layers");
}

/// Settings that change what the tensors mean, unless they are null, false, "none" or empty.
inline constexpr const char* kPeftSettings[] = {
    "alora_invocation_tokens", "bias", "layer_replication", "lora_bias", "megatron_config",
    "rank_pattern", "alpha_pattern", "target_parameters", "trainable_token_indices", "use_qalora",
    "use_bdlora", "arrow_config", "kasa_config", "monteclora_config"};

/// Ways to begin a LoRA that leave the base weights as they are, as true, false and null do.
/// Others, such as "pissa" and "olora", take out of them what the adapter begins with.
inline constexpr const char* kPeftBeginnings[] = {"gaussian", "orthogonal", "eva"};

/// Check that a configuration of PEFT means what the package's does.
inline void CheckPeftConfig(const fs::path& path, const std::string& own) {
  const auto read = [&path](std::string_view text) {
    return ReadPeftJson(path, text, [](const Json& json) {
      const double rank = json["r"] ? json.Get<double>("r") : 1;
      const double alpha = json["lora_alpha"] ? json.Get<double>("lora_alpha") : 1;
      const bool scaled = json.Get<bool>("use_rslora", false);
      const std::string kind = json.Get<std::string>("peft_type") +
                               (json.Get<bool>("use_dora", false) ? " with DoRA" : "");
      for (const char* key : kPeftSettings) {
        const auto& value = json[key].value;
        const auto* object = std::get_if<Json::Object>(&value);
        const auto* text = std::get_if<std::string>(&value);
        const auto* flag = std::get_if<bool>(&value);
        const bool plain =
            (object && object->empty()) || (text && *text == "none") || (flag && !*flag);
        if (json[key] && !plain)
          throw Error("peft-unsupported", std::string("the adapter has ") + key);
      }
      const Json& begun = json["init_lora_weights"];
      const auto* way = std::get_if<std::string>(&begun.value);
      const bool known = way ? std::count(std::begin(kPeftBeginnings), std::end(kPeftBeginnings),
                                          *way) > 0
                             : !begun || std::holds_alternative<bool>(begun.value);
      if (!known)
        throw Error("peft-unsupported", "init_lora_weights='" + (way ? *way : "?") +
                                            "' changes the base weights");
      const double by = alpha / (scaled ? std::sqrt(rank) : rank);
      return std::make_tuple(kind, rank, static_cast<float>(by));
    });
  };
  const auto mine = read(own), theirs = read(*MapPeft(path));
  if (mine != theirs) {
    const auto said = [](const auto& each) {
      return std::get<0>(each) + ", rank " + Repr(std::get<1>(each)) + ", factor " +
             Repr(std::get<2>(each));
    };
    ThrowAdapterMismatch("the adapter is " + said(theirs) + ", the package's " + said(mine), path);
  }
}

/// PEFT's names of the trained parameters, by these.
inline std::map<std::string, std::string> PeftNames(const Package& package,
                                                    const Tensors& trained) {
  const Json& peft = package.Manifest()["adapter"]["peft"];
  if (!peft)
    throw Error("peft-without-kind", "PEFT has no file for what this package trains.",
                package.Folder(), "name a file that ends in .onnx_adapter");
  std::map<std::string, std::string> names;
  const Json none{Json::Object{}};
  const Json& renamed = peft["names"] ? peft["names"] : none;
  for (const auto& each : trained)
    names[each.first] = renamed.Get<std::string>(each.first, each.first);
  return names;
}

/// What a package trains with an adapter, in the memory of the state, as it is now.
inline Tensors TrainedOf(const Package& package, const State& state) {
  if (!package.Manifest()["adapter"])
    throw Error("no-adapter", "The package was built without an adapter.", package.Folder(),
                "build it with --adapter lora --on '*.q_proj'");
  state.RequireValues();
  state.Refresh();
  Tensors trained;
  std::map<std::string, std::string> own, wanted;
  for (const auto& [name, parameter] : state.parameters)
    if (parameter.trainable) own[name] = (trained[name] = parameter.value).Description();
  for (const auto& spec : package.Parameters())
    if (spec.role == "trainable") wanted[spec.name] = spec.Description();
  for (const auto* all : {&own, &wanted})
    for (const auto& [name, _] : *all)
      if (own[name] != wanted[name])
        throw Error("adapter-mismatch", "State and package do not train the same '" + name + "'.",
                    "", "use a checkpoint that was trained with this package");
  return trained;
}

/// The values of a file or folder, by the names of what is trained, in the types of that; its own
/// values are not looked at.
inline Tensors ReadAdapter(const Package& package, const Tensors& trained, const fs::path& source) {
  const bool is_file = source.extension() == kAdapterSuffix;
  Tensors found, values;
  std::map<std::string, std::string> names;
  if (is_file) {
    for (const auto& each : trained) names[each.first] = each.first;
    found = ReadOnnxAdapter(source);
  } else {
    names = PeftNames(package, trained);
    const auto& peft = package.Manifest()["adapter"]["peft"];
    CheckPeftConfig(source / kPeftConfig, peft.Get<std::string>("config"));
    found = ReadSafetensors(source / kPeftTensors);
  }
  for (const auto& [name, peft] : names) {
    const auto value = found.find(peft);
    if (value == found.end())
      ThrowAdapterMismatch("the adapter has no '" + peft + "'", source);
    const Tensor& own = trained.at(name);
    if (value->second.shape != own.shape || !IsFloating(value->second.type))
      ThrowAdapterMismatch("'" + peft + "' is " + value->second.Description() +
                               " in the adapter, and " + own.Description() + " in the package",
                           source);
    Tensor& taken = values[name] = Convert(value->second, own.type);
    if (!AllFinite(taken.type, taken.data.get(), taken.Count()))
      throw Error(is_file ? "adapter-corrupt" : "peft-invalid",
                  "'" + peft + "' holds NaN or infinity.", source.string(),
                  "use an adapter from before its training diverged");
    found.erase(value);
  }
  for (const auto& each : found) {
    const std::string table = ".base_layer.weight";  // beside an embedding's adapter PEFT saves it
    const std::string& name = each.first;
    if (is_file || name.size() < table.size() ||
        name.compare(name.size() - table.size(), table.size(), table) != 0)
      ThrowAdapterMismatch("the adapter has '" + name + "', which the package does not train",
                           source);
  }
  return values;
}

inline bool IsOnnxAdapter(const fs::path& path) try {
  return fs::is_regular_file(path) && Map(path)->substr(4, 4) == "TORT";
} catch (const std::exception&) {
  return false;
}

/// Whether a configuration has no other settings than `own`; PEFT itself writes more.
inline bool IsOwnConfig(const fs::path& path, const std::string& own) try {
  if (!fs::is_regular_file(path)) return false;
  const Json known = JsonReader(own).Read();
  const auto text = MapPeft(path);
  if (text->size() > (1u << 20)) return false;
  return ReadPeftJson(path, *text, [&known](const Json& json) {
    const auto& settings = json.As<Json::Object>();
    const auto is_known = [&](const auto& each) {
      return known.As<Json::Object>().count(each.first) > 0;
    };
    return settings.count("peft_type") > 0 &&
           std::all_of(settings.begin(), settings.end(), is_known);
  });
} catch (const std::exception&) {
  return false;
}

/// Refuse to replace a file, unless it is ours.
inline void CheckReplaced(const fs::path& path, bool ours) {
  std::error_code unseen;  // the write says what is wrong with the name
  if (!ours && fs::is_regular_file(path, unseen))
    throw Error("file-not-written",
                path.string() + " would be replaced, and it is not an adapter of this package.",
                "",
                "move the file, or choose another name or a new folder");
}

}  // namespace detail

/// Write the adapter of a state: to a file whose name ends in `.onnx_adapter`, which ONNX Runtime's
/// own adapters read, or to a folder, made if needed, with PEFT's two files. An adapter that is
/// there is replaced, no other file, nor what PEFT wrote itself.
inline void SaveAdapter(const Package& package, const CheckpointState& state,
                        const std::string& path) {
  const detail::Gate::Call call(*state.Internal()->gate);
  const detail::Tensors trained = detail::TrainedOf(package, *state.Internal());
  const detail::fs::path target = path;
  if (target.extension() == detail::kAdapterSuffix) {
    detail::CheckReplaced(target, detail::IsOnnxAdapter(target));
    return detail::WriteOnnxAdapter(target, trained);
  }
  detail::Tensors renamed;
  for (const auto& [name, peft] : detail::PeftNames(package, trained))
    renamed[peft] = trained.at(name);
  std::error_code failed;
  detail::fs::create_directories(target, failed);
  if (failed) detail::ThrowNotWritten(target, failed.message());
  const std::string& config = package.Manifest()["adapter"]["peft"].Get<std::string>("config");
  const bool ours = detail::IsOwnConfig(target / detail::kPeftConfig, config);
  for (const char* name : {detail::kPeftConfig, detail::kPeftTensors})
    detail::CheckReplaced(target / name, ours);
  // It comes first, as it says to the next save that the values are ours.
  detail::WriteAtomically(target / detail::kPeftConfig, [&config](const detail::File& file) {
    detail::Write(file, config.data(), config.size());
  });
  detail::WriteSafetensors(target / detail::kPeftTensors, renamed);
}

/// Set the trained parameters of a state to those of such a file or folder, all of them or none.
/// What the optimizer carries stays as it is.
inline void LoadAdapter(const Package& package, const CheckpointState& state,
                        const std::string& path) {
  const detail::Gate::Call call(*state.Internal()->gate);
  const detail::Tensors trained = detail::TrainedOf(package, *state.Internal());
  const detail::Tensors values = detail::ReadAdapter(package, trained, path);
  state.Internal()->Refresh(true);
  for (const auto& [name, own] : trained) own.CopyFrom(values.at(name).data.get());
}

}  // namespace odtpack
