// Batch normalization in training mode, written out as odtpack does it: [N, C, ...] is centered by
// the means of its channels, scaled by their variances, and activated; its gradient; and the scaled
// and activated result once more, of what is centered.
//
// A task takes channels whose planes fit a core's cache, sample by sample, in stretches that are
// long enough for the processor to see the next one coming: so each pass but the first reads the
// cache. Planes of a few elements are passed through together, as one.
#include "normalization.h"

#include <algorithm>
#include <cmath>
#include <cstring>

#include "widest.h"

namespace odtpack::native {

ODTPACK_DECLARE(NormalizationLoops, kNormalization);

namespace {

constexpr int64_t kStretch = 1 << 13;  // elements of a sample that a task passes through at least,
constexpr int64_t kCached = 1 << 16;   // as long as those of all samples are not more than these

class Normalization final : public Kernel {
 public:
  // program: what is computed; the number of axes of [N, C, ...], or 0 for [C, N, P]; the
  // activation; the bits of epsilon.
  explicit Normalization(const std::vector<int64_t>& program)
      : loops_(ODTPACK_WIDEST(kNormalization)) {
    Require(program.size() == 4, "a program of a normalization has 4 numbers");
    Require(program[0] >= 0 && program[0] <= 2, "a number of a program is out of range");
    Require(program[1] == 0 || (program[1] >= 3 && program[1] <= 8), "a number of a program is out of range");
    Require(program[2] >= 0 && program[2] <= 2, "a number of a program is out of range");
    Require(program[3] >= 0 && program[3] <= UINT32_MAX, "a number of a program is out of range");
    kind_ = static_cast<Kind>(program[0]);
    rank_ = static_cast<size_t>(program[1]);
    activation_ = static_cast<Activation>(program[2]);
    const auto bits = static_cast<uint32_t>(program[3]);
    std::memcpy(&epsilon_, &bits, sizeof bits);
  }

  void Run(Call& call) const override {
    const std::vector<Input>& inputs = call.inputs();
    const bool clip = activation_ == Activation::kClip, any = activation_ != Activation::kNone;
    const size_t wanted = kind_ == kGradient ? size_t{8} + any + clip : size_t{5} + 2 * clip;
    const size_t results = kind_ == kForward ? 4 : kind_ == kActivated ? 1 : 3;
    Require(inputs.size() == wanted && call.output_count() == results, "another number of tensors");
    if (kind_ == kForward) Forward(call);
    else if (kind_ == kActivated) Activated(call);
    else Gradient(call);
  }

 private:
  enum Kind { kForward, kActivated, kGradient };

  using Numbers = std::vector<float>;

  // The sizes of a tensor of planes.
  struct Shape {
    int64_t samples, channels, plane;
  };

  Shape Sizes(const Input& input) const {
    Require(input.dims.size() == (rank_ == 0 ? 3 : rank_), "the input has another number of axes");
    const size_t first = rank_ == 0 ? 0 : 1;  // the axis of channels
    Shape shape{first == 0 ? 1 : input.dims[0], input.dims[first], 1};
    if (input.size == 0) return {0, shape.channels, 0};  // other sizes may be any
    for (size_t axis = first + 1; axis < input.dims.size(); ++axis) shape.plane *= input.dims[axis];
    return shape;
  }

  // One number for each channel, away from memory that an output may take over.
  static Numbers OfChannels(const Input& input, const Shape& shape) {
    Require(input.dims == Dims{shape.channels}, "an input has not one number for each channel");
    return Numbers(input.data, input.data + input.size);
  }

  static float Scalar(const Input& input) {
    Require(input.size == 1 && input.dims.size() <= 1, "an input is not one number");
    return input.data[0];
  }

  // Runs a function on parts of the channels: their planes, the first one, and its place.
  template <typename Function>
  void EachPart(Call& call, const Shape& shape, Function&& function) const {
    const int64_t all = std::max<int64_t>(1, shape.samples * shape.plane);
    const int64_t together = std::min(kStretch / std::max<int64_t>(1, shape.plane), kCached / all);
    const int64_t each = std::max<int64_t>(1, together);
    call.Parallel(static_cast<size_t>((shape.channels + each - 1) / each), [&](size_t task) {
      const int64_t first = static_cast<int64_t>(task) * each;
      Planes planes{shape.samples, shape.channels * shape.plane,
                    std::min(each, shape.channels - first), shape.plane, nullptr};
      const int64_t spare = planes.together() ? Planes::kSpare * planes.channels * planes.size : 0;
      const std::unique_ptr<float[]> memory(new float[spare]);
      planes.spare = memory.get();
      function(planes, first, first * shape.plane);
    });
  }

  // What a channel is multiplied by and what is added: (x - mean) scale / sqrt(variance + epsilon) + bias
  static void Affine(const Numbers& scale, const Numbers& bias, const Numbers& mean,
                     const Numbers& variance, float epsilon, int64_t first, int64_t count,
                     Numbers& slope, Numbers& shift) {
    slope.resize(count);
    shift.resize(count);
    for (int64_t i = 0; i < count; ++i) {
      const int64_t c = first + i;
      slope[i] = scale[c] / std::sqrt(variance[c] + epsilon);
      shift[i] = bias[c] - mean[c] * slope[i];
    }
  }

  // The last inputs of a clip are its bounds; its gradient reads the upper one alone.
  Bounds BoundsOf(const std::vector<Input>& inputs) const {
    Bounds bounds;
    bounds.activation = activation_;
    if (activation_ != Activation::kClip) return bounds;
    if (kind_ != kGradient) bounds.low = Scalar(inputs[inputs.size() - 2]);
    bounds.high = Scalar(inputs.back());
    return bounds;
  }

  // Inputs: x, scale, bias, what is subtracted once more, how many elements a channel has, and the
  // bounds. Outputs: x - mean, y, mean, variance.
  void Forward(Call& call) const {
    const std::vector<Input>& inputs = call.inputs();
    const Shape shape = Sizes(inputs[0]);
    const Numbers scale = OfChannels(inputs[1], shape), bias = OfChannels(inputs[2], shape);
    const Numbers zeros = OfChannels(inputs[3], shape);
    const float count = Scalar(inputs[4]);
    const Bounds bounds = BoundsOf(inputs);
    const float* const x = inputs[0].data;
    float* const centered = call.Output(0, inputs[0].dims);
    float* const y = call.Output(1, inputs[0].dims);
    Numbers mean(shape.channels), variance(shape.channels);
    EachPart(call, shape, [&](const Planes& planes, int64_t first, int64_t place) {
      std::vector<double> sums(planes.channels);
      loops_.sum(planes, x + place, sums.data());
      for (int64_t i = 0; i < planes.channels; ++i) mean[first + i] = static_cast<float>(sums[i]) / count;
      loops_.center(planes, x + place, mean.data() + first, centered + place, sums.data());
      for (int64_t i = 0; i < planes.channels; ++i) {
        variance[first + i] = static_cast<float>(sums[i]) / count;
      }
      Numbers slope, shift;
      Affine(scale, bias, zeros, variance, epsilon_, first, planes.channels, slope, shift);
      loops_.activate(planes, centered + place, slope.data(), shift.data(), bounds, y + place);
    });
    std::copy(mean.begin(), mean.end(), call.Output(2, {shape.channels}));
    std::copy(variance.begin(), variance.end(), call.Output(3, {shape.channels}));
  }

  // Inputs: x - mean, scale, bias, what is subtracted once more, variance, and the bounds. Output: y.
  void Activated(Call& call) const {
    const std::vector<Input>& inputs = call.inputs();
    const Shape shape = Sizes(inputs[0]);
    const Numbers scale = OfChannels(inputs[1], shape), bias = OfChannels(inputs[2], shape);
    const Numbers zeros = OfChannels(inputs[3], shape), variance = OfChannels(inputs[4], shape);
    const Bounds bounds = BoundsOf(inputs);
    const float* const centered = inputs[0].data;
    float* const y = call.Output(0, inputs[0].dims);
    EachPart(call, shape, [&](const Planes& planes, int64_t first, int64_t place) {
      Numbers slope, shift;
      Affine(scale, bias, zeros, variance, epsilon_, first, planes.channels, slope, shift);
      loops_.activate(planes, centered + place, slope.data(), shift.data(), bounds, y + place);
    });
  }

  // Inputs: dy, x - mean, scale, variance, count and epsilon, the mean and the variance that the
  // gradient along x - mean is normalized by, y where there is an activation, and its upper bound.
  // Outputs: dx, dscale, dbias.
  void Gradient(Call& call) const {
    const std::vector<Input>& inputs = call.inputs();
    const Shape shape = Sizes(inputs[0]);
    const bool any = activation_ != Activation::kNone;
    Require(inputs[1].dims == inputs[0].dims, "planes of different shapes");
    Require(!any || inputs[8].dims == inputs[0].dims, "planes of different shapes");
    const Numbers scale = OfChannels(inputs[2], shape), variance = OfChannels(inputs[3], shape);
    const float count = Scalar(inputs[4]), epsilon = Scalar(inputs[5]);
    const Numbers zeros = OfChannels(inputs[6], shape), ones = OfChannels(inputs[7], shape);
    const Bounds bounds = BoundsOf(inputs);
    const float *const dy = inputs[0].data, *const centered = inputs[1].data;
    const float* const y = any ? inputs[8].data : dy;
    float* const dx = call.Output(0, inputs[0].dims);
    Numbers dscale(shape.channels), dbias(shape.channels);
    Numbers along(shape.channels), beside(shape.channels);  // each task has channels of its own
    EachPart(call, shape, [&](const Planes& planes, int64_t first, int64_t place) {
      std::vector<double> sums(planes.channels), products(planes.channels);
      loops_.moments(planes, dy + place, centered + place, y + place, bounds, sums.data(),
                     products.data());
      Numbers gain(planes.channels), slope, shift;
      for (int64_t i = 0; i < planes.channels; ++i) {
        const int64_t c = first + i;
        const float inverse = 1.f / std::sqrt(variance[c] + epsilon);
        dbias[c] = static_cast<float>(sums[i]);
        dscale[c] = static_cast<float>(products[i]) * inverse;
        gain[i] = scale[c] * inverse;
        const float share = gain[i] / count;
        along[c] = share * inverse * dscale[c];
        beside[c] = share * dbias[c];
      }
      Affine(along, beside, zeros, ones, epsilon_, first, planes.channels, slope, shift);
      loops_.gradient(planes, dy + place, centered + place, y + place, bounds, gain.data(),
                      slope.data(), shift.data(), dx + place);
    });
    std::copy(dscale.begin(), dscale.end(), call.Output(1, {shape.channels}));
    std::copy(dbias.begin(), dbias.end(), call.Output(2, {shape.channels}));
  }

  const NormalizationLoops& loops_;
  Kind kind_;
  size_t rank_;
  Activation activation_;
  float epsilon_;
};

}  // namespace

std::unique_ptr<Kernel> MakeNormalization(const std::vector<int64_t>& program) {
  return std::make_unique<Normalization>(program);
}

}  // namespace odtpack::native
