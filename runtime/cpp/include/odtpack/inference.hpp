// An inference model with the parameters of a state: the template's bytes, then a fragment of
// protobuf for each parameter (docs/formats/package.md).
#pragma once

#include "odtpack/checkpoint.hpp"
#include "odtpack/package.hpp"

namespace odtpack::detail {

/// The same values in another floating type.
inline Tensor Convert(const Tensor& tensor, Type type) {
  if (tensor.type == type) return tensor;
  Tensor result = Zeros(type, tensor.shape);
  for (size_t i = 0; i < tensor.Count(); ++i) {
    const double value = Element(tensor.type, tensor.data.get(), i);
    if (type == kDouble)
      result.As<double>()[i] = value;
    else if (type == kFloat)
      result.As<float>()[i] = static_cast<float>(value);
    else
      result.As<Ort::Float16_t>()[i] = Ort::Float16_t(static_cast<float>(value));
    if (type == kHalf && std::isfinite(value) && std::abs(value) >= 65520) {
      throw Error("value-out-of-range", "A parameter's value lies beyond float16.", "",
                  "train with a lower learning rate, or from a float32 model");
    }
  }
  return result;
}

/// A parameter as the model computes with it.
inline Tensor InModelType(const Spec& spec, const State& state, const Tensor& room) {
  const Tensor& value = state.parameters.at(spec.name).value;
  if (spec.scale.empty()) {
    if (spec.model_type == 0) return value;
    if (!IsFloating(value.type) || !IsFloating(spec.model_type)) Json::Fail("a model_dtype");
    return Convert(value, spec.model_type);
  }
  const auto found = state.parameters.find(spec.scale);
  if (found == state.parameters.end() || found->second.value.type != kFloat ||
      value.type != kInt8 || found->second.value.Count() == 0) {
    Json::Fail("the scale of '" + spec.name + "'");
  }
  const Tensor& scale = found->second.value;
  Tensor result = room.From(0, value.shape);
  size_t inner = 1, axis = 0;  // elements that share a scale
  while (axis + 1 < scale.shape.size() && scale.shape[axis] == 1) ++axis;
  for (size_t i = axis + 1; i < value.shape.size(); ++i)
    inner *= static_cast<size_t>(value.shape[i]);
  for (size_t i = 0; i < result.Count(); ++i) {
    const float by = scale.As<float>()[i / inner % scale.Count()];
    result.As<float>()[i] = static_cast<float>(value.As<int8_t>()[i]) * by;
  }
  return result;
}

inline std::string Varint(uint64_t number) {
  std::string bytes;
  for (; number >= 0x80; number >>= 7) bytes += static_cast<char>(number | 0x80);
  return bytes + static_cast<char>(number);
}

/// Reads the fields of a protobuf message one by one.
struct Fields {
  std::string_view rest;
  uint64_t tag = 0;
  std::string_view whole, content;  // of the current field, with tag and length and without

  bool Next() {
    whole = rest;
    if (rest.empty()) return false;
    tag = Number();
    if (tag % 8 == 0) Number();
    const size_t length = tag % 8 == 2 ? Number() : tag % 8 == 1 ? 8 : tag % 8 == 5 ? 4 : 0;
    Require(length <= rest.size());
    content = rest.substr(0, length);
    rest.remove_prefix(length);
    whole.remove_suffix(rest.size());
    return true;
  }

 private:
  static void Require(bool good) {
    if (!good) throw Error("model-not-loadable", "A file of the package is not an ONNX model.");
  }
  uint64_t Number() {
    uint64_t number = 0, byte = 0x80;
    for (int shift = 0; byte >= 0x80; shift += 7) {
      Require(!rest.empty() && shift < 64);
      byte = static_cast<uint8_t>(rest[0]);
      rest.remove_prefix(1);
      number |= (byte & 0x7F) << shift;
    }
    return number;
  }
};

inline std::string Field(char tag, std::string_view content) {
  return tag + Varint(content.size()) + std::string(content);
}

/// The contents of all fields of a message that begin with a tag.
inline std::vector<std::string_view> Contents(std::string_view message, char tag) {
  std::vector<std::string_view> result;
  for (Fields field{message, 0, {}, {}}; field.Next();)
    if (field.tag == static_cast<uint64_t>(tag)) result.push_back(field.content);
  return result;
}

inline std::string Content(std::string_view message, char tag) {
  const auto all = Contents(message, tag);
  return all.empty() ? std::string() : std::string(all.back());
}

/// The template with only the wanted ones of its outputs.
inline std::string WithOutputs(std::string_view model, std::set<std::string> wanted) {
  std::string result;
  for (Fields top{model, 0, {}, {}}; top.Next();) {
    if (top.tag != 0x3A) {
      result += top.whole;
      continue;
    }
    std::string graph;
    for (Fields inside{top.content, 0, {}, {}}; inside.Next();) {
      if (inside.tag != 0x62 || wanted.erase(Content(inside.content, '\x0A')) > 0)
        graph += inside.whole;
    }
    result += Field('\x3A', graph);
  }
  if (wanted.empty()) return result;
  throw Error("unknown-output", "The inference model has no output '" + *wanted.begin() + "'.");
}

/// Hand the bytes of the inference model to `write(const void*, size_t)`, part by part.
template <class Sink>
void WriteInference(const Package& package, const State& state,
                    const std::vector<std::string>& outputs, Sink write) {
  state.RequireValues();
  state.Refresh();
  if (!package.Manifest()["files"]["inference_template"])
    throw Error("no-outputs", "The model has no output but its loss: there is nothing to export.");
  const std::set<std::string> wanted(outputs.begin(), outputs.end());
  if (outputs.empty() || wanted.size() != outputs.size()) {
    throw Error("no-outputs", "An exported model needs outputs, and each only once.");
  }
  const auto file = Map(package.Path("inference_template"), "package-incomplete",
                        "copy the whole folder again");
  const std::string model = WithOutputs(*file, wanted);
  size_t total = model.size(), largest = 0;
  write(model.data(), model.size());
  // One buffer for all that have a scale: the allocator keeps what is freed between them.
  for (const Spec& spec : package.Parameters()) {
    if (!spec.scale.empty())
      largest = std::max(largest, state.parameters.at(spec.name).value.Count());
  }
  const Tensor room = Zeros(kFloat, {static_cast<int64_t>(largest)});
  for (const std::string& name : package.Manifest()["inference"].Texts("parameters")) {
    const auto& specs = package.Parameters();
    const auto spec = std::find_if(specs.begin(), specs.end(),
                                   [&name](const Spec& one) { return one.name == name; });
    if (spec == specs.end()) Json::Fail("'inference' names the parameter '" + name + "'");
    const Tensor tensor = InModelType(*spec, state, room);
    std::string head;
    for (const int64_t size : tensor.shape) head += '\x08' + Varint(static_cast<uint64_t>(size));
    head += '\x10' + Varint(tensor.type) + '\x42' + Varint(name.size()) + name + '\x4A' +
            Varint(tensor.Bytes());
    const std::string outer = '\x2A' + Varint(head.size() + tensor.Bytes());
    head = '\x3A' + Varint(outer.size() + head.size() + tensor.Bytes()) + outer + head;
    total += head.size() + tensor.Bytes();
    if (total > (size_t{1} << 31) - (size_t{1} << 20)) {
      throw Error("model-too-large", "The model exceeds what one ONNX file holds.");
    }
    write(head.data(), head.size());
    write(tensor.data.get(), tensor.Bytes());
  }
}

}  // namespace odtpack::detail
