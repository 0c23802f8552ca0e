// Products y = x W^T and their gradients dx = dy W, where W [N, K] is frozen and has few bits.
//
// W is unpacked a panel at a time: some columns of the second operand, as deep as fit the first caches,
// which many rows of x then meet. So no part of W exists in float32 but that panel.
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

}  // namespace

std::unique_ptr<Kernel> MakeProduct(const std::vector<int64_t>& program) {
  return std::make_unique<Product>(program);
}

}  // namespace odtpack::native
