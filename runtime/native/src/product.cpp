// Products y = x W^T and their gradients dx = dy W, where W [N, K] is frozen and has few bits.
//
// W is unpacked a panel at a time: some columns of the second operand, as deep as fit the first caches,
// which many rows of x then meet. So no part of W exists in float32 but that panel.
//
// And products a^T b, as gradients of weights are, which ONNX Runtime computes slower than a b.
#include "product.h"

#include <algorithm>

#include "widest.h"

namespace odtpack::native {

ODTPACK_DECLARE(ProductLoops, kProduct);

namespace {

constexpr int64_t kPanel = 14336;     // numbers: 896 rows with AVX2
constexpr int64_t kRows = 256;         // of x, which stay in the second cache
constexpr int64_t kPanels = 8;         // of a task
constexpr int64_t kMostSize = 1 << 24;

class Product final : public Kernel {
 public:
  // program: whether x is multiplied by the transpose of W; N; K; the rows and the columns that share a
  // scale, one of them 1; bits of a code; whether codes have a sign; and the code of 0, counted from
  // the lowest. Inputs: codes, scales, x [..., K or N]; of another one the body reads the size, to
  // have its W apart from that of other nodes.
  explicit Product(const std::vector<int64_t>& program) : loops_(ODTPACK_WIDEST(kProduct)) {
    Require(program.size() == 8, "a program of a product has 8 numbers");
    const auto number = [&](size_t i, int64_t least, int64_t most) {
      Require(program[i] >= least && program[i] <= most, "a number of a program is out of range");
      return program[i];
    };
    transposed_ = number(0, 0, 1) != 0;
    w_.rows = number(1, 1, kMostSize);
    w_.columns = number(2, 1, kMostSize);
    w_.high = number(3, 1, kMostSize);
    w_.wide = number(4, 1, kMostSize);
    w_.across = (w_.columns + w_.wide - 1) / w_.wide;
    w_.bits = number(5, 4, 8);
    Require(w_.high == 1 || w_.wide == 1, "a program's scales are those of parts of rows or columns");
    Require(w_.bits == 8 || (w_.bits == 4 && w_.columns % 2 == 0), "a program has 4 or 8 bits");
    w_.flipped = number(6, 0, w_.bits == 8 ? 1 : 0) != 0 ? 0x80 : 0;
    w_.zero = static_cast<float>(number(7, 0, (1 << w_.bits) - 1));
  }

  size_t byte_inputs() const override { return 1; }

  void Run(Call& call) const override {
    const std::vector<Input>& inputs = call.inputs();
    Require(inputs.size() >= 3 && call.output_count() == 1, "a product has 3 inputs and 1 output");
    const Input& x = inputs[2];
    const int64_t depth = transposed_ ? w_.columns : w_.rows;
    const int64_t width = transposed_ ? w_.rows : w_.columns;
    Require(inputs[0].size == w_.rows * w_.columns * w_.bits / 8, "not as many codes as W has");
    Require(inputs[0].is_signed == (w_.flipped != 0), "codes have another type");
    const int64_t high = (w_.rows + w_.high - 1) / w_.high;
    Require(inputs[1].size == high * w_.across, "not as many scales as W has blocks");
    Require(!x.dims.empty() && x.dims.back() == depth, "rows of x do not fit W");
    Codes w = w_;
    w.codes = inputs[0].bytes;
    w.scales = inputs[1].data;
    const int64_t rows = x.size / depth;
    Dims dims = x.dims;
    dims.back() = width;
    float* const out = call.Output(0, dims);
    const float* const end = out + rows * width;
    Require(x.size == 0 || out >= x.data + x.size || end <= x.data, "a product is not made in place");
    const int64_t strip = kPanels * loops_.width, most = kPanel / loops_.width;
    call.Parallel(static_cast<size_t>((width + strip - 1) / strip), [&](size_t task) {
      const int64_t first = static_cast<int64_t>(task) * strip, last = std::min(width, first + strip);
      const std::unique_ptr<float[]> panel(new float[std::min(most, depth) * loops_.width]);
      for (int64_t row = 0; row < rows; row += kRows) {
        for (int64_t start = 0; start < depth; start += most) {
          const int64_t deep = std::min(most, depth - start);
          for (int64_t from = first; from < last; from += loops_.width) {
            const int64_t count = std::min(loops_.width, last - from);
            loops_.unpack(w, transposed_, from, count, start, deep, panel.get());
            loops_.multiply(x.data + row * depth + start, depth, panel.get(), deep,
                            out + row * width + from, width, std::min(kRows, rows - row), count,
                            start > 0);
          }
        }
      }
    });
  }

 private:
  const ProductLoops& loops_;
  bool transposed_;
  Codes w_{};
};

constexpr int64_t kDeep = 192, kHigh = 156;  // of a part of a, which stays in the second cache
constexpr int64_t kStrip = 1024;              // columns of b in a task
constexpr int64_t kPacked = 24576;            // numbers of them at a time

class Transposed final : public Kernel {
 public:
  // Inputs: a [M, K] and b [M, N]; output: a^T b [K, N]. The program says nothing.
  explicit Transposed(const std::vector<int64_t>& program) : loops_(ODTPACK_WIDEST(kProduct)) {
    Require(program.size() == 1 && program[0] == 0, "a program of a transposed product is 0");
  }

  void Run(Call& call) const override {
    const std::vector<Input>& inputs = call.inputs();
    Require(inputs.size() == 2 && call.output_count() == 1, "a product has 2 inputs and 1 output");
    const Input &a = inputs[0], &b = inputs[1];
    Require(a.dims.size() == 2 && b.dims.size() == 2, "an input of a product is not a matrix");
    Require(a.dims[0] == b.dims[0], "the matrices of a product have not as many rows");
    const int64_t depth = a.dims[0], rows = a.dims[1], columns = b.dims[1];
    float* const out = call.Output(0, {rows, columns});
    if (depth == 0 || rows * columns == 0) {
      std::fill(out, out + rows * columns, 0.f);
      return;
    }
    const std::vector<float> first = Saved(a, out), second = Saved(b, out);
    const float* const left = first.empty() ? a.data : first.data();
    const float* const right = second.empty() ? b.data : second.data();
    const int64_t high = Part(rows, kHigh, loops_.high), strip = Part(columns, kStrip, loops_.width);
    const int64_t down = (rows + high - 1) / high, across = (columns + strip - 1) / strip;
    call.Parallel(static_cast<size_t>(down * across), [&](size_t task) {
      const int64_t top = static_cast<int64_t>(task) / across * high;
      const int64_t begin = static_cast<int64_t>(task) % across * strip;
      const int64_t end = std::min(columns, begin + strip), count = std::min(high, rows - top);
      const int64_t most = std::min(kDeep, depth);
      const int64_t wide = std::min(strip, kPacked / most / loops_.width * loops_.width);
      const std::unique_ptr<float[]> packed(new float[most * (high + wide)]);
      float* const panels = packed.get() + most * high;
      for (int64_t start = 0; start < depth; start += kDeep) {
        const int64_t deep = std::min(kDeep, depth - start);
        loops_.pack_high(left + start * rows + top, rows, deep, count, packed.get());
        for (int64_t from = begin; from < end; from += wide) {
          const int64_t last = std::min(end, from + wide);
          loops_.pack_panels(right + start * columns + from, columns, deep, last - from, panels);
          for (int64_t i = 0; i < count; i += loops_.high) {
            for (int64_t j = from; j < last; j += loops_.width) {
              loops_.multiply_packed(packed.get() + i * deep, 0, panels + (j - from) * deep, deep,
                                     out + (top + i) * columns + j, columns,
                                     std::min(loops_.high, count - i),
                                     std::min(loops_.width, last - j), start > 0);
            }
          }
        }
      }
    });
  }

 private:
  // How much of a length each of the least number of parts has, of at most `most`: a multiple of step.
  static int64_t Part(int64_t length, int64_t most, int64_t step) {
    const int64_t parts = (length + most - 1) / most, each = (length + parts - 1) / parts;
    return (each + step - 1) / step * step;
  }

  // A copy of an input whose memory the output has taken over.
  static std::vector<float> Saved(const Input& input, const float* out) {
    return input.data == out ? std::vector<float>(out, out + input.size) : std::vector<float>();
  }

  const ProductLoops& loops_;
};

}  // namespace

std::unique_ptr<Kernel> MakeProduct(const std::vector<int64_t>& program) {
  return std::make_unique<Product>(program);
}

std::unique_ptr<Kernel> MakeTransposed(const std::vector<int64_t>& program) {
  return std::make_unique<Transposed>(program);
}

}  // namespace odtpack::native
