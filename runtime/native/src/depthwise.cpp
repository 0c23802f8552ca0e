// Depthwise convolutions: y[q, r] = b + sum over i, j of w[i, j] x[q sh + i dh - top, r sw + j dw - left],
// for each sample and channel, where x is 0 outside of its plane; and the gradients of this.
//
// A plane is copied into a buffer with its zeros around it, every sh-th row and every sw-th column
// together. There a tap is the whole plane, moved: one loop over it, whatever its shape, computes
// all windows, and between two rows a few that are not wanted.
#include "depthwise.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "widest.h"

namespace odtpack::native {

ODTPACK_DECLARE(DepthwiseLoops, kDepthwise);

namespace {

constexpr int64_t kTask = 1 << 16;        // elements that are worth a task of their own
constexpr int64_t kMostSize = 1 << 16;    // of an axis
constexpr int64_t kMostBuffer = 1 << 26;  // elements

// One axis of windows.
struct Axis {
  int64_t size, kernel, step, apart, before, out;

  int64_t reach() const { return (kernel - 1) * apart / step; }
};

int64_t Up(int64_t a, int64_t b) { return a <= 0 ? 0 : (a + b - 1) / b; }

class Buffer {
 public:
  explicit Buffer(int64_t size) : memory_(new float[size + 2 * kLanes]()) {}
  float* data() { return memory_.get(); }

 private:
  std::unique_ptr<float[]> memory_;
};

class Depthwise final : public Kernel {
 public:
  // program: what is computed; whether planes lie [C, N, P] in the input's and in the output's
  // tensor, or [N, C, H, W]; how the weight lies, [C, 1, kh, kw], [C, kh kw] or [C kh, kw]; C; for
  // both axes size, kernel, step of windows, distance of taps, zeros before, windows; and whether
  // there is a bias. Inputs that are constants of the body follow, and are not read.
  explicit Depthwise(const std::vector<int64_t>& program) : loops_(ODTPACK_WIDEST(kDepthwise)) {
    Require(program.size() == 18, "a program of a depthwise convolution has 18 numbers");
    const auto number = [&](size_t i, int64_t least, int64_t most) {
      Require(program[i] >= least && program[i] <= most, "a number of a program is out of range");
      return program[i];
    };
    kind_ = static_cast<Kind>(number(0, 0, 2));
    x_first_ = number(1, 0, 1) != 0;
    y_first_ = number(2, 0, 1) != 0;
    channels_ = number(4, 1, kMostSize);
    for (int a = 0; a < 2; ++a) {
      const size_t i = 5 + 6 * a;
      axes_[a] = {number(i, 1, kMostSize),     number(i + 1, 1, 64),
                  number(i + 2, 1, 64),        number(i + 3, 1, 64),
                  number(i + 4, 0, kMostSize), number(i + 5, 1, kMostSize)};
    }
    bias_ = number(17, 0, kind_ == kForward ? 1 : 0) != 0;
    taps_ = rows().kernel * columns().kernel;
    switch (number(3, 0, kind_ == kWeightGradient ? 0 : 2)) {
      case 0: weight_dims_ = {channels_, 1, rows().kernel, columns().kernel}; break;
      case 1: weight_dims_ = {channels_, taps_}; break;
      default: weight_dims_ = {channels_ * rows().kernel, columns().kernel};
    }
    if (kind_ == kInputGradient) {
      height_ = Extent(rows());
      pitch_ = Extent(columns());
      buffer_ = height_ * pitch_;
    } else {
      height_ = rows().reach() + rows().out;
      pitch_ = columns().reach() + columns().out;
      buffer_ = height_ * pitch_ * rows().step * columns().step;
    }
    Require(buffer_ <= kMostBuffer, "the planes of a program are too large");
    for (int64_t q = 0; q < rows().out; ++q) {
      windows_.push_back({q * pitch_, q * columns().out, columns().out});
    }
    if (kind_ == kInputGradient) PlanInputGradient();
    else PlanInput();
  }

  void Run(Call& call) const override {
    const std::vector<Input>& inputs = call.inputs();
    const bool weights = kind_ == kWeightGradient;
    Require(inputs.size() >= (bias_ ? 3 : 2), "the inputs are not those of the program");
    Require(call.output_count() == 1, "the outputs are not those of the program");
    const bool of_input = kind_ != kInputGradient;  // what the planes that are read are shaped like
    const Input& planes_read = inputs[weights ? 0 : 1];
    const int64_t samples = Samples(planes_read, of_input);
    if (weights) {
      Require(Samples(inputs[1], false) == samples, "the numbers of samples differ");
      WeightGradient(call, samples, inputs[0].data, inputs[1].data);
      return;
    }
    Require(inputs[0].dims == weight_dims_, "the shape of the weight is not the program's");
    if (bias_) Require(inputs[2].dims == Dims{channels_}, "the shape of the bias is not the program's");
    // An output may lie in the memory of an input: what is read again is copied before.
    const std::vector<float> weight(inputs[0].data, inputs[0].data + inputs[0].size);
    std::vector<float> bias, kept;
    if (bias_) bias.assign(inputs[2].data, inputs[2].data + channels_);
    float* const out = call.Output(0, Shape(samples, !of_input));
    const float* from = planes_read.data;
    if (from == out) {
      kept.assign(from, from + planes_read.size);
      from = kept.data();
    }
    const int64_t planes = samples * channels_, pixels = rows().out * columns().out;
    const int64_t each = std::max<int64_t>(1, kTask / (pixels + 64));
    call.Parallel(static_cast<size_t>(Up(planes, each)), [&](size_t task) {
      const int64_t begin = static_cast<int64_t>(task) * each;
      Buffer in(buffer_), flat(2 * (height_ * pitch_ + kLanes)), weights(taps_);
      for (int64_t plane = begin; plane < std::min(planes, begin + each); ++plane) {
        // Planes are counted as they lie in the output.
        const bool by_channel = of_input ? y_first_ : x_first_;
        const int64_t c = by_channel ? plane / samples : plane % channels_;
        const int64_t n = by_channel ? plane % samples : plane / channels_;
        const float* const w = weight.data() + c * taps_;
        Lay(from + Place(n, c, samples, of_input), in.data());
        if (of_input) {
          Forward(in.data(), w, bias.empty() ? 0.f : bias[c], flat.data(), out + plane * pixels);
        } else {
          InputGradient(in.data(), w, weights.data(), flat.data(),
                        out + plane * rows().size * columns().size);
        }
      }
    });
  }

 private:
  enum Kind { kForward, kInputGradient, kWeightGradient };

  const Axis& rows() const { return axes_[0]; }
  const Axis& columns() const { return axes_[1]; }

  // Length of an axis of dY with the zeros that the input's windows reach.
  static int64_t Extent(const Axis& axis) {
    return axis.reach() + std::max((axis.size - 1 + axis.before) / axis.step + 1, axis.out);
  }

  Dims Shape(int64_t samples, bool input) const {
    const int64_t h = input ? rows().size : rows().out, w = input ? columns().size : columns().out;
    if (input ? x_first_ : y_first_) return {channels_, samples, h * w};
    return {samples, channels_, h, w};
  }

  // The number of samples of a tensor of inputs or outputs; throws where its shape is not right.
  int64_t Samples(const Input& tensor, bool input) const {
    const size_t axis = (input ? x_first_ : y_first_) ? 1 : 0;
    Require(tensor.dims.size() > axis, "an input has too few axes");
    const int64_t samples = tensor.dims[axis];
    Require(tensor.dims == Shape(samples, input), "the shape of an input is not the program's");
    return samples;
  }

  int64_t Place(int64_t n, int64_t c, int64_t samples, bool input) const {
    const int64_t size = input ? rows().size * columns().size : rows().out * columns().out;
    return ((input ? x_first_ : y_first_) ? c * samples + n : n * channels_ + c) * size;
  }

  // Where the rows of a plane of the input lie in the buffer, and where the taps start.
  void PlanInput() {
    const Axis &v = rows(), &h = columns();
    for (int64_t y = 0; y < v.size; ++y) {
      const int64_t row = (y + v.before) / v.step, a = (y + v.before) % v.step;
      if (row >= height_) continue;
      for (int64_t b = 0; b < h.step; ++b) {
        const int64_t c = Up(h.before - b, h.step), from = c * h.step + b - h.before;
        const int64_t count = std::min(Up(h.size - from, h.step), pitch_ - c);
        const int64_t to = ((a * h.step + b) * height_ + row) * pitch_ + c;
        if (count > 0) laid_.push_back({y * h.size + from, to, count});
      }
    }
    for (int64_t i = 0; i < v.kernel; ++i) {
      for (int64_t j = 0; j < h.kernel; ++j) {
        const int64_t y = i * v.apart, x = j * h.apart;
        const int64_t phase = y % v.step * h.step + x % h.step;
        offsets_.push_back((phase * height_ + y / v.step) * pitch_ + x / h.step);
      }
    }
  }

  // Rows and columns of the input that are sh and sw apart read the same taps.
  void PlanInputGradient() {
    const Axis &v = rows(), &h = columns();
    for (int64_t q = 0; q < v.out; ++q) {
      laid_.push_back({q * h.out, (q + v.reach()) * pitch_ + h.reach(), h.out});
    }
    for (int64_t a = 0; a < v.step; ++a) {
      const int64_t top = Up(v.before - a, v.step), bottom = Up(v.before + v.size - a, v.step);
      if (top >= bottom) continue;
      for (int64_t b = 0; b < h.step; ++b) {
        Phase phase{top * pitch_, 0, {}, {}, {}, false};
        for (int64_t i = 0; i < v.kernel; ++i) {
          for (int64_t j = 0; j < h.kernel; ++j) {
            const int64_t y = i * v.apart - a, x = j * h.apart - b;
            if (y % v.step != 0 || x % h.step != 0) continue;
            phase.offsets.push_back((v.reach() - y / v.step) * pitch_ + h.reach() - x / h.step);
            phase.taps.push_back(i * h.kernel + j);
          }
        }
        const int64_t c = Up(h.before - b, h.step), x = c * h.step + b - h.before;
        const bool pairs = h.step == 2;
        phase.length = (bottom - top - 1) * pitch_ + Up(h.before + h.size - b, h.step);
        phase.pairs = pairs && b == 1;
        for (int64_t r = top; r < bottom && (!pairs || b == 1); ++r) {
          const int64_t from = (r - top) * pitch_, row = (r * v.step + a - v.before) * h.size;
          if (pairs) phase.rows.push_back({from, row, h.size});
          else phase.rows.push_back({from + c, row + x, Up(h.size - x, h.step)});
        }
        phases_.push_back(std::move(phase));
      }
    }
  }

  void Lay(const float* x, float* in) const {
    const int64_t step = kind_ == kInputGradient ? 1 : columns().step;
    loops_.move(laid_.data(), static_cast<int64_t>(laid_.size()), x, step, in, 1);
  }

  void Forward(const float* in, const float* w, float start, float* flat, float* y) const {
    const int64_t length = (rows().out - 1) * pitch_ + columns().out;
    loops_.filter(in, offsets_.data(), w, taps_, start, length, flat);
    loops_.move(windows_.data(), rows().out, flat, 1, y, 1);
  }

  void InputGradient(const float* in, const float* w, float* weights, float* flat, float* dx) const {
    const int64_t before = columns().before, half = height_ * pitch_ + kLanes;
    const float* const first = flat + before % 2 * half + before / 2;
    const float* const second = flat + (before + 1) % 2 * half + (before + 1) / 2;
    for (size_t i = 0; i < phases_.size(); ++i) {
      const Phase& phase = phases_[i];
      const auto count = static_cast<int64_t>(phase.taps.size());
      for (int64_t t = 0; t < count; ++t) weights[t] = w[phase.taps[t]];
      float* const to = flat + (phase.pairs ? half : 0);
      loops_.filter(in + phase.start, phase.offsets.data(), weights, count, 0.f, phase.length, to);
      const auto moved = static_cast<int64_t>(phase.rows.size());
      if (phase.pairs) loops_.interleave(phase.rows.data(), moved, first, second, dx);
      else loops_.move(phase.rows.data(), moved, flat, 1, dx, columns().step);
    }
  }

  void WeightGradient(Call& call, int64_t samples, const float* x, const float* dy) const {
    const int64_t pixels = rows().out * columns().out;
    const int64_t each = std::max<int64_t>(1, kTask / ((pixels + 64) * std::max<int64_t>(1, samples)));
    std::vector<float> weights(channels_ * taps_);
    std::vector<Piece> rows_of_dy;
    for (const Piece& row : windows_) rows_of_dy.push_back({row.to, row.from, row.count});
    call.Parallel(static_cast<size_t>(Up(channels_, each)), [&](size_t task) {
      const int64_t begin = static_cast<int64_t>(task) * each;
      const int64_t length = (rows().out - 1) * pitch_ + columns().out;
      Buffer in(buffer_), flat(length), sums(taps_ * kLanes);
      for (int64_t c = begin; c < std::min(channels_, begin + each); ++c) {
        std::fill_n(sums.data(), taps_ * kLanes, 0.f);
        for (int64_t n = 0; n < samples; ++n) {
          Lay(x + Place(n, c, samples, true), in.data());
          const float* const from = dy + Place(n, c, samples, false);
          loops_.move(rows_of_dy.data(), rows().out, from, 1, flat.data(), 1);
          loops_.dots(in.data(), offsets_.data(), taps_, flat.data(), length, sums.data());
        }
        for (int64_t t = 0; t < taps_; ++t) {
          float sum = 0.f;
          for (int64_t l = 0; l < kLanes; ++l) sum += sums.data()[t * kLanes + l];
          // A zero between two rows times infinity may be why: once more without those.
          weights[c * taps_ + t] = std::isfinite(sum) ? sum : Exactly(t, c, samples, x, dy);
        }
      }
    });
    std::copy(weights.begin(), weights.end(), call.Output(0, weight_dims_));
  }

  // One weight's gradient, one product after the other.
  float Exactly(int64_t tap, int64_t c, int64_t samples, const float* x, const float* dy) const {
    const int64_t i = tap / columns().kernel, j = tap % columns().kernel;
    float sum = 0.f;
    for (int64_t n = 0; n < samples; ++n) {
      const float* const plane = x + Place(n, c, samples, true);
      const float* const from = dy + Place(n, c, samples, false);
      for (int64_t q = 0; q < rows().out; ++q) {
        const int64_t y = q * rows().step + i * rows().apart - rows().before;
        for (int64_t r = 0; r < columns().out; ++r) {
          const int64_t z = r * columns().step + j * columns().apart - columns().before;
          const bool inside = y >= 0 && y < rows().size && z >= 0 && z < columns().size;
          sum += from[q * columns().out + r] * (inside ? plane[y * columns().size + z] : 0.f);
        }
      }
    }
    return sum;
  }

  // What some rows and columns of the input's gradient read, in its buffer of dY.
  struct Phase {
    int64_t start, length;
    std::vector<int64_t> offsets, taps;
    std::vector<Piece> rows;
    bool pairs;  // this and the phase before it are every second column
  };

  const DepthwiseLoops& loops_;
  Kind kind_;
  bool x_first_, y_first_, bias_;
  Dims weight_dims_;
  int64_t channels_, taps_;
  Axis axes_[2];
  int64_t height_, pitch_, buffer_;  // of a phase; of all
  std::vector<int64_t> offsets_;     // of each tap in the buffer of the input
  std::vector<Piece> laid_;          // where a plane lies in its buffer
  std::vector<Piece> windows_;       // where the rows of a result lie
  std::vector<Phase> phases_;
};

}  // namespace

std::unique_ptr<Kernel> MakeDepthwise(const std::vector<int64_t>& program) {
  return std::make_unique<Depthwise>(program);
}

}  // namespace odtpack::native
