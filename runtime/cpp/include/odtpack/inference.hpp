// An inference model with the parameters of a state: the template's bytes, then a fragment of
// protobuf for each parameter (docs/formats/package.md).
#pragma once

#include "odtpack/checkpoint.hpp"
#include "odtpack/package.hpp"

namespace odtpack::detail {

constexpr size_t kMostModelBytes = (size_t{1} << 31) - (size_t{1} << 20);

inline std::string Varint(uint64_t number) {
  std::string bytes;
  for (; number >= 0x80; number >>= 7) bytes += static_cast<char>(number | 0x80);
  return bytes + static_cast<char>(number);
}

inline std::string Field(char tag, std::string_view content) {
  return tag + Varint(content.size()) + std::string(content);
}

/// Reads the fields of a protobuf message one by one; content without the tag and length.
class Fields {
 public:
  explicit Fields(std::string_view message) : rest_(message) {}

  bool Next(uint64_t& tag, std::string_view& whole, std::string_view& content) {
    if (rest_.empty()) return false;
    const std::string_view start = rest_;
    tag = Number();
    content = {};
    if (tag % 8 == 0) Number();
    const size_t length = tag % 8 == 2 ? Number() : tag % 8 == 1 ? 8 : tag % 8 == 5 ? 4 : 0;
    if (length > rest_.size()) throw Error("model-not-loadable", "The inference template is cut.");
    content = rest_.substr(0, length);
    rest_.remove_prefix(length);
    whole = start.substr(0, start.size() - rest_.size());
    return true;
  }

 private:
  uint64_t Number() {
    uint64_t number = 0;
    for (int shift = 0; shift < 64 && !rest_.empty(); shift += 7) {
      const auto byte = static_cast<uint8_t>(rest_[0]);
      rest_.remove_prefix(1);
      number |= uint64_t{byte & 0x7Fu} << shift;
      if (byte < 0x80) return number;
    }
    throw Error("model-not-loadable", "The inference template is cut.");
  }
  std::string_view rest_;
};

/// The template with only the wanted ones of its outputs.
inline std::string WithOutputs(std::string_view model, std::set<std::string> wanted) {
  std::string result, graph;
  uint64_t tag = 0;
  std::string_view whole, content;
  for (Fields top(model); top.Next(tag, whole, content);) {
    if (tag != 0x3A) {
      result += whole;
      continue;
    }
    for (Fields inside(content); inside.Next(tag, whole, content);) {
      std::string name;
      const std::string_view kept = whole;
      if (tag == 0x62) {
        for (Fields value(content); value.Next(tag, whole, content);) {
          if (tag == 0x0A) name = content;
        }
        if (wanted.erase(name) == 0) continue;
      }
      graph += kept;
    }
    result += Field('\x3A', graph);
  }
  if (wanted.empty()) return result;
  throw Error("unknown-output", "The inference model has no output '" + *wanted.begin() + "'.");
}

/// A parameter as the model computes with it.
inline Tensor InModelType(const Spec& spec, const State& state) {
  const Tensor& value = state.parameters.at(spec.name).value;
  const auto type = static_cast<ONNXTensorElementDataType>(spec.model_type);
  if (!spec.scale.empty()) {
    const auto found = state.parameters.find(spec.scale);
    const bool known = found != state.parameters.end() && found->second.value.Count() > 0 &&
                       found->second.value.type == ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT;
    if (!known || value.type != ONNX_TENSOR_ELEMENT_DATA_TYPE_INT8) Json::Fail("a scale");
    const Tensor& scale = found->second.value;
    Tensor result = Zeros(ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT, value.shape);
    size_t inner = 1, axis = 0;  // elements that share a scale
    while (axis + 1 < scale.shape.size() && scale.shape[axis] == 1) ++axis;
    for (size_t i = axis + 1; i < value.shape.size(); ++i) inner *= static_cast<size_t>(value.shape[i]);
    for (size_t i = 0; i < result.Count(); ++i) {
      result.As<float>()[i] = static_cast<float>(value.As<int8_t>()[i]) *
                              scale.As<float>()[i / inner % scale.Count()];
    }
    return result;
  }
  if (type == 0 || type == value.type) return value;
  const bool widen = type == ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT;
  if (value.type != (widen ? ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT16
                           : ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT) ||
      (!widen && type != ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT16)) {
    Json::Fail("the model_dtype of '" + spec.name + "'");
  }
  Tensor result = Zeros(type, value.shape);
  for (size_t i = 0; i < result.Count(); ++i) {
    if (widen) {
      result.As<float>()[i] = value.As<Ort::Float16_t>()[i].ToFloat();
      continue;
    }
    const float wide = value.As<float>()[i];
    result.As<Ort::Float16_t>()[i] = Ort::Float16_t(wide);
    if (std::isfinite(wide) && std::isinf(result.As<Ort::Float16_t>()[i].ToFloat())) {
      throw Error("value-out-of-range", "Parameter '" + spec.name + "' has grown beyond float16.",
                  {}, "train with a lower learning rate, or from a float32 model");
    }
  }
  return result;
}

/// Hand the bytes of the inference model to `write(const void*, size_t)`, part by part.
template <class Write>
void WriteInference(const Package& package, const State& state, const std::vector<Spec>& specs,
                    const std::vector<std::string>& outputs, Write write) {
  state.RequireValues();
  const MappedFile file(package.Path("inference_template"));
  const std::set<std::string> wanted(outputs.begin(), outputs.end());
  if (outputs.empty() || wanted.size() != outputs.size()) {
    throw Error("no-outputs", "An exported model needs outputs, and each only once.");
  }
  const std::string model = WithOutputs(file.View(), wanted);
  size_t total = model.size();
  write(model.data(), model.size());
  for (const std::string& name : package.Manifest()["inference"].Texts("parameters")) {
    const auto spec = std::find_if(specs.begin(), specs.end(),
                                   [&name](const Spec& one) { return one.name == name; });
    if (spec == specs.end()) Json::Fail("'inference' names the parameter '" + name + "'");
    const Tensor tensor = InModelType(*spec, state);
    std::string head;
    for (const int64_t size : tensor.shape) head += '\x08' + Varint(static_cast<uint64_t>(size));
    head += '\x10' + Varint(tensor.type) + Field('\x42', name) + '\x4A' + Varint(tensor.Bytes());
    const size_t size = head.size() + tensor.Bytes();
    const std::string inner = '\x2A' + Varint(size);
    head = '\x3A' + Varint(inner.size() + size) + inner + head;
    total += head.size() + tensor.Bytes();
    if (total > kMostModelBytes) {
      throw Error("model-too-large", "The model exceeds what one ONNX file holds.");
    }
    write(head.data(), head.size());
    write(tensor.data.get(), tensor.Bytes());
  }
}

}  // namespace odtpack::detail
