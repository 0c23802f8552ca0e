// Elementwise programs: reading them, and running them block by block.
#include "depthwise.h"
#include "elementwise.h"

#include <algorithm>
#include <cstdint>
#include <cstring>

namespace odtpack::native {

extern const Loops kLoops_baseline;
#if defined(ODTPACK_X86)
extern const Loops kLoops_avx2;
extern const Loops kLoops_avx512;
#endif

const Loops& ChooseLoops() {
#if defined(ODTPACK_X86)
  __builtin_cpu_init();
  if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512vl") &&
      __builtin_cpu_supports("avx512dq")) {
    return kLoops_avx512;
  }
  if (__builtin_cpu_supports("avx2")) return kLoops_avx2;
#endif
  return kLoops_baseline;
}

namespace {

constexpr int kMaxInputs = 32, kMaxInstructions = 256;
constexpr int64_t kTask = 1 << 15;  // elements that are worth a task of their own
constexpr int kFields = 4;          // of an instruction: operator, three operands

int Operands(Op op) {
  switch (op) {
    case Op::kSqrt: case Op::kNeg: case Op::kAbs: case Op::kRelu: case Op::kNot: case Op::kCast:
    case Op::kReciprocal: case Op::kHardSigmoid: case Op::kIdentity: case Op::kSign:
      return 1;
    case Op::kWhere: case Op::kClip: case Op::kGemm:
      return 3;
    default:
      return 2;
  }
}

// How a smaller input repeats: it is read as dims says, an axis that repeats has no step.
struct Broadcast {
  int input;
  std::vector<int64_t> dims, steps;
};

class Elementwise final : public Kernel {
 public:
  // program: number of inputs, of outputs, the value of each output, then the instructions. Values
  // are numbered: the inputs, then what each instruction computes.
  explicit Elementwise(const std::vector<int64_t>& program) : loops_(ChooseLoops()) {
    Require(program.size() >= 3, "a program is too short");
    inputs_ = Number(program[0], 1, kMaxInputs);
    const int outputs = Number(program[1], 1, kMaxInputs);
    const size_t start = 2 + static_cast<size_t>(outputs);
    Require(program.size() > start && (program.size() - start) % kFields == 0, "a program is cut");
    const size_t count = (program.size() - start) / kFields;
    Require(count <= kMaxInstructions, "a program is too long");
    for (size_t i = 0; i < count; ++i) {
      const int64_t* const field = program.data() + start + i * kFields;
      const int known = inputs_ + static_cast<int>(i);
      Instruction each{};
      each.op = static_cast<Op>(Number(field[0], 0, static_cast<int>(Op::kCount) - 1));
      const int operands = Operands(each.op);
      each.a = Number(field[1], 0, known - 1);
      each.b = operands > 1 ? Number(field[2], 0, known - 1) : each.a;
      each.c = operands > 2 ? Number(field[3], 0, known - 1) : each.a;
      if (each.op == Op::kHardSigmoid) {
        each.alpha = Bits(field[2]);
        each.beta = Bits(field[3]);
      }
      each.result = known;
      code_.push_back(each);
    }
    for (int i = 0; i < outputs; ++i) {
      const int value = Number(program[2 + i], inputs_, inputs_ + static_cast<int>(count) - 1);
      Require(std::find(results_.begin(), results_.end(), value) == results_.end(),
              "two outputs are the same value");
      results_.push_back(value);
    }
    Allocate();
    for (const KnownProgram* each : kKnown) {
      if (std::equal(program.begin(), program.end(), each->numbers, each->numbers + each->size)) {
        known_ = each;
        known_loop_ = loops_.known[std::find(kKnown.begin(), kKnown.end(), each) - kKnown.begin()];
      }
    }
  }

  void Run(Call& call) const override {
    const std::vector<Input>& inputs = call.inputs();
    Require(static_cast<int>(inputs.size()) == inputs_, "the inputs are not the program's");
    Require(call.output_count() == results_.size(), "the outputs are not the program's");
    const Dims dims = Together(inputs);
    int64_t size = 1;
    for (const int64_t dim : dims) size *= dim;
    std::vector<Broadcast> repeated;
    std::vector<int> scalars;
    for (int i = 0; i < inputs_; ++i) {
      if (inputs[i].dims == dims) continue;
      Broadcast found = Repeat(i, inputs[i], dims);
      if (inputs[i].size == 1) scalars.push_back(i);
      else repeated.push_back(std::move(found));
    }
    std::vector<float*> outputs;
    for (size_t i = 0; i < results_.size(); ++i) outputs.push_back(call.Output(i, dims));
    if (size == 0) return;
    const std::vector<bool> direct = Direct(inputs, outputs);
    // One element after the other is read and written: all outputs may be inputs.
    bool one_loop = known_ != nullptr && scalars.size() == size_t(inputs_ - known_->full);
    for (int i = 0; one_loop && i < known_->full; ++i) one_loop = inputs[i].dims == dims;
    const auto tasks = static_cast<size_t>((size + kTask - 1) / kTask);
    // Scalars are read now: an output of one element may lie in their memory.
    std::vector<float> constants;
    for (const int i : scalars) constants.push_back(inputs[i].data[0]);
    call.Parallel(tasks, [&](size_t task) {
      const int64_t begin = static_cast<int64_t>(task) * kTask;
      const int64_t end = std::min(size, begin + kTask);
      const size_t own = buffers_ + scalars.size() + repeated.size();
      const std::unique_ptr<float[]> memory(new float[own * kBlock + 16]);
      float* const first = Aligned(memory.get());
      std::vector<float*> registers(inputs_ + code_.size());
      float* next = first + static_cast<size_t>(buffers_) * kBlock;
      for (size_t i = 0; i < scalars.size(); ++i, next += kBlock) {
        std::fill_n(next, kBlock, constants[i]);
        registers[scalars[i]] = next;
      }
      for (const Broadcast& each : repeated) {
        registers[each.input] = next;
        next += kBlock;
      }
      for (size_t i = 0; i < code_.size(); ++i) {
        registers[inputs_ + i] = first + static_cast<size_t>(buffer_[i]) * kBlock;
      }
      for (int64_t place = begin; place < end; place += kBlock) {
        const int count = static_cast<int>(std::min<int64_t>(kBlock, end - place));
        for (int i = 0; i < inputs_; ++i) {
          if (inputs[i].dims == dims) registers[i] = const_cast<float*>(inputs[i].data) + place;
        }
        for (const Broadcast& each : repeated) {
          Copy(each, inputs[each.input].data, place, count, registers[each.input]);
        }
        for (size_t i = 0; i < results_.size(); ++i) {
          if (direct[i] || one_loop) registers[results_[i]] = outputs[i] + place;
        }
        if (one_loop) {
          known_loop_(registers.data(), count);
        } else {
          for (const Instruction& each : code_) loops_.step(each, registers.data(), count);
        }
        for (size_t i = 0; i < results_.size(); ++i) {
          if (!direct[i] && !one_loop) {
            std::memcpy(outputs[i] + place, registers[results_[i]], sizeof(float) * count);
          }
        }
      }
    });
  }

 private:
  static int Number(int64_t value, int least, int most) {
    Require(value >= least && value <= most, "a number of a program is out of range");
    return static_cast<int>(value);
  }

  static float Bits(int64_t value) {
    Require(value >= 0 && value <= UINT32_MAX, "a number of a program is out of range");
    const auto bits = static_cast<uint32_t>(value);
    float number;
    std::memcpy(&number, &bits, sizeof number);
    return number;
  }

  static float* Aligned(float* memory) {
    const auto address = reinterpret_cast<uintptr_t>(memory);
    return memory + (64 - address % 64) % 64 / sizeof(float);
  }

  // Gives each value that an instruction computes a buffer; one that is no longer read is free.
  // Outputs keep theirs to the end of a block.
  void Allocate() {
    std::vector<int> last(inputs_ + code_.size(), -1);
    for (size_t i = 0; i < code_.size(); ++i) {
      for (const int value : {code_[i].a, code_[i].b, code_[i].c}) last[value] = static_cast<int>(i);
    }
    for (const int value : results_) last[value] = static_cast<int>(code_.size());
    std::vector<int> free;
    buffer_.resize(code_.size());
    for (size_t i = 0; i < code_.size(); ++i) {
      if (free.empty()) free.push_back(buffers_++);
      buffer_[i] = free.back();
      free.pop_back();
      for (size_t j = 0; j <= i; ++j) {
        const int until = std::max(last[inputs_ + j], static_cast<int>(j));
        if (until == static_cast<int>(i)) free.push_back(buffer_[j]);
      }
    }
    last_ = std::move(last);
  }

  // Whether each output may be written as it is computed: nothing reads its memory afterwards.
  std::vector<bool> Direct(const std::vector<Input>& inputs,
                           const std::vector<float*>& outputs) const {
    std::vector<bool> direct(outputs.size(), true);
    for (size_t i = 0; i < outputs.size(); ++i) {
      const int made = results_[i] - inputs_;
      for (int j = 0; j < inputs_; ++j) {
        if (inputs[j].data == outputs[i] && last_[j] > made) direct[i] = false;
      }
    }
    return direct;
  }

  // The shape of all inputs broadcast together. They exist, so that it is no larger than their product.
  static Dims Together(const std::vector<Input>& inputs) {
    Dims dims;
    for (const Input& input : inputs) {
      if (input.dims.size() > dims.size()) dims.insert(dims.begin(), input.dims.size() - dims.size(), 1);
      const size_t skipped = dims.size() - input.dims.size();
      for (size_t axis = skipped; axis < dims.size(); ++axis) {
        if (dims[axis] == 1) dims[axis] = input.dims[axis - skipped];
      }
    }
    return dims;
  }

  // How an input repeats over an output; throws where it does not fit.
  static Broadcast Repeat(int index, const Input& input, const Dims& dims) {
    Require(input.dims.size() <= dims.size(), "an input has more axes than the first");
    Broadcast found{index, {}, {}};
    const size_t skipped = dims.size() - input.dims.size();
    int64_t step = input.size;
    for (size_t axis = 0; axis < dims.size(); ++axis) {
      const int64_t own = axis < skipped ? 1 : input.dims[axis - skipped];
      Require(own == dims[axis] || own == 1, "the shapes of the inputs do not fit");
      if (axis >= skipped && own > 0) step /= own;
      const int64_t used = own == 1 ? 0 : step;
      if (dims[axis] == 1) continue;
      // Two axes that are read in one go are one.
      if (!found.dims.empty() && found.steps.back() == used * dims[axis]) {
        found.dims.back() *= dims[axis];
        found.steps.back() = used;
      } else {
        found.dims.push_back(dims[axis]);
        found.steps.push_back(used);
      }
    }
    return found;
  }

  // Writes what an input is at `count` elements of the output from `place` on.
  static void Copy(const Broadcast& each, const float* data, int64_t place, int count, float* out) {
    const size_t inner = each.dims.size() - 1;
    const int64_t width = each.dims[inner], step = each.steps[inner];
    int64_t row = place / width, column = place % width;
    for (int done = 0; done < count;) {
      int64_t offset = 0, rest = row;
      for (size_t axis = inner; axis-- > 0;) {
        offset += rest % each.dims[axis] * each.steps[axis];
        rest /= each.dims[axis];
      }
      const int now = static_cast<int>(std::min<int64_t>(width - column, count - done));
      if (step == 0) std::fill_n(out + done, now, data[offset]);
      else std::memcpy(out + done, data + offset + column, sizeof(float) * now);
      done += now;
      column = 0;
      ++row;
    }
  }

  const Loops& loops_;
  const KnownProgram* known_ = nullptr;
  void (*known_loop_)(float* const*, int) = nullptr;
  int inputs_ = 0;
  int buffers_ = 0;
  std::vector<Instruction> code_;
  std::vector<int> results_;  // the value of each output
  std::vector<int> buffer_;   // of what each instruction computes
  std::vector<int> last_;     // the last instruction that reads each value
};

}  // namespace

std::unique_ptr<Kernel> MakeElementwise(const std::vector<int64_t>& program) {
  return std::make_unique<Elementwise>(program);
}

std::unique_ptr<Kernel> MakeKernel(const std::string& name, const std::vector<int64_t>& program) {
  if (name == "elementwise") return MakeElementwise(program);
  if (name == "depthwise") return MakeDepthwise(program);
  throw std::invalid_argument("this library has no kernel '" + name + "'");
}

}  // namespace odtpack::native
