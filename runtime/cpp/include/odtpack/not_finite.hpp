// Losses and gradients that are not finite: a step that has any changes nothing
// (docs/formats/kits.md).
#pragma once

#include "odtpack/model.hpp"

namespace odtpack {

/// What a session does after a step whose loss or gradient is not finite, once all is put back.
enum class OnNotFinite {
  kSkip,  // it counts the step and goes on
  kStop   // it throws `loss-not-finite` or `gradient-not-finite`
};

/// A step whose loss or gradient was not finite.
struct NotFinite {
  std::string code;  // "loss-not-finite" or "gradient-not-finite"
  int64_t step = 0;  // the optimizer step that it would have been a part of, from 1 on
  std::vector<std::string> parameters;  // the first ten whose gradients are not finite
};

namespace detail {

template <class Bits>
bool AllFinite(const void* data, size_t count, Bits exponent) {
  const auto* bits = static_cast<const Bits*>(data);
  Bits odd = 0;
  for (size_t i = 0; i < count; ++i) odd |= Bits((bits[i] & exponent) == exponent);
  return odd == 0;
}

/// Whether all elements are finite; those of whole numbers are.
inline bool AllFinite(Type type, const void* data, size_t count) {
  if (type == kFloat) return AllFinite<uint32_t>(data, count, 0x7F800000u);
  if (type == kDouble) return AllFinite<uint64_t>(data, count, 0x7FF0000000000000u);
  if (type == kHalf) return AllFinite<uint16_t>(data, count, 0x7C00u);
  return true;
}
inline bool AllFinite(const Ort::Value& value) {
  const auto info = value.GetTensorTypeAndShapeInfo();
  return AllFinite(info.GetElementType(), value.GetTensorRawData(), info.GetElementCount());
}

/// Copies of tensors that are put back after a step that was bad.
class Kept {
 public:
  void Add(const Tensor& tensor) { kept_.emplace_back(tensor, Tensor{}); }
  void Add(const Tensor& tensor, const std::shared_ptr<Twins>& twins, Twins::Role role) {
    if (!twins || tensor.Bytes() == 0) return Add(tensor);
    twins_ = twins;
    for (auto* values : {&there_, &copies_})
      values->push_back(values == &there_ ? twins->Value(tensor, role) : twins->Allocate(tensor));
  }
  /// Copy what they hold now. Without tensors this does nothing.
  void Copy() {
    if (twins_) twins_->Copy({there_.begin(), there_.end()}, {copies_.begin(), copies_.end()});
    for (auto& [tensor, copy] : kept_) {
      if (!copy.data) copy = Zeros(tensor.type, tensor.shape);
      copy.CopyFrom(tensor.data.get());
    }
  }
  void PutBack() {
    if (twins_) twins_->Copy({copies_.begin(), copies_.end()}, {there_.begin(), there_.end()});
    for (const auto& [tensor, copy] : kept_) tensor.CopyFrom(copy.data.get());
  }

 private:
  std::vector<std::pair<Tensor, Tensor>> kept_;
  std::shared_ptr<Twins> twins_;  // of these, and copies beside them
  std::vector<Ort::Value> there_, copies_;
};

}  // namespace detail
}  // namespace odtpack
