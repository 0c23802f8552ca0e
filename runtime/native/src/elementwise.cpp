// Elementwise programs: reading them, and running them block by block.
#include "elementwise.h"

#include <algorithm>
#include <array>
#include <cstdint>
#include <cstring>

#include "depthwise.h"
#include "normalization.h"
#include "product.h"
#include "widest.h"

namespace odtpack::native {

ODTPACK_DECLARE(Loops, kLoops);

const Loops& ChooseLoops() {
  return ODTPACK_WIDEST(kLoops);
}

namespace {

constexpr int kMaxInputs = 32, kMaxInstructions = 256;
constexpr int64_t kTask = 1 << 15;  // elements that are worth a task of their own
constexpr int64_t kWidest = 1 << 14;   // of rows that are taken as a whole where they need not be
constexpr size_t kColumnTasks = 16;    // that each have sums of their own
constexpr int kMaxAxes = 8, kPad = 80;
constexpr int kFields = 4;          // of an instruction: operator, three operands

int Operands(Op op) {
  switch (op) {
    case Op::kSqrt: case Op::kNeg: case Op::kAbs: case Op::kRelu: case Op::kNot: case Op::kCast:
    case Op::kReciprocal: case Op::kHardSigmoid: case Op::kIdentity: case Op::kSign: case Op::kExp:
    case Op::kErf: case Op::kTanh: case Op::kSigmoid: case Op::kLog:
    case Op::kRowSum: case Op::kRowMean: case Op::kRowMax: case Op::kColumnSum:
      return 1;
    case Op::kWhere: case Op::kClip: case Op::kGemm:
      return 3;
    default:
      return 2;
  }
}

bool OfRows(Op op) { return op == Op::kRowSum || op == Op::kRowMean || op == Op::kRowMax; }

// What a value has: one number, one for each row, all of the whole shape, or one for each column.
enum class Kind { kScalar, kRow, kFull, kColumn };

// How a smaller input repeats: it is read as dims says, an axis that repeats has no step.
struct Broadcast {
  int input;
  std::vector<int64_t> dims, steps;
};

// A known program among the instructions of another.
struct KnownRun {
  const KnownProgram* what;
  KnownLoop loop;
  size_t begin;                        // instruction
  std::array<int, kKnownValues> values;  // by what the known program calls them; -1 if not kept
  float alpha, beta;
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
      if (OfRows(each.op)) each.axis = Number(field[2], 0, kMaxAxes);
      if (each.op == Op::kColumnSum) each.axis = Number(field[2], 1, kMaxAxes);
      of_rows_ = of_rows_ || each.op >= Op::kExp;
      reduces_ = reduces_ || OfRows(each.op) || each.op == Op::kColumnSum;
      for (const int read : {each.a, each.b, each.c}) {
        Require(read < inputs_ || code_[read - inputs_].op != Op::kColumnSum,
                "a sum over rows is read by its own program");
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
    last_.assign(inputs_ + code_.size(), -1);
    for (size_t i = 0; i < code_.size(); ++i) {
      const Instruction& each = code_[i];
      for (const int value : {each.a, each.b, each.c}) last_[value] = static_cast<int>(i);
    }
    for (const int value : results_) last_[value] = static_cast<int>(code_.size());
    for (size_t i = 0, known = 0; i < code_.size();) {
      if (FindRun(*kKnown[known], i)) {
        runs_.back().loop = loops_.known[known];
        i += kKnown[known]->length;
        known = 0;
      } else if (++known == kKnown.size()) {
        ++i;
        known = 0;
      }
    }
    for (size_t i = 0; i + 1 < code_.size(); ++i) {
      Instruction &product = code_[i], &next = code_[i + 1];
      const bool reduces = OfRows(next.op) || next.op == Op::kColumnSum;
      if (product.op != Op::kMul || !reduces || next.a != product.result || InRun(i) ||
          last_[product.result] > static_cast<int>(i) + 1) {
        continue;
      }
      product.merged = true;
      const int later = static_cast<int>(i) + 1;
      for (const int value : {product.a, product.b}) last_[value] = std::max(last_[value], later);
    }
    Allocate();
  }

  void Run(Call& call) const override {
    const std::vector<Input>& inputs = call.inputs();
    Require(static_cast<int>(inputs.size()) == inputs_, "the inputs are not the program's");
    Require(call.output_count() == results_.size(), "the outputs are not the program's");
    const Dims dims = Together(inputs);
    int64_t size = 1;
    for (const int64_t dim : dims) size *= dim;
    const int64_t width = dims.empty() ? 1 : dims.back();
    Dims row_dims = dims;
    if (!dims.empty()) row_dims.back() = 1;
    std::vector<Broadcast> repeated;
    std::vector<int> scalars, rowed;
    std::vector<Kind> kinds(inputs_, Kind::kFull);
    for (int i = 0; i < inputs_; ++i) {
      if (inputs[i].dims == dims) continue;
      Broadcast found = Repeat(i, inputs[i], dims);
      // What a group of rows computes has the shape that its model says only of such inputs.
      Require(!of_rows_ || inputs[i].dims == row_dims ||
                  (inputs[i].dims.size() < dims.size() &&
                   (inputs[i].size == 1 || inputs[i].size == inputs[i].dims.back())),
              "the shapes of the inputs are not those of rows");
      if (inputs[i].size == 1) {
        scalars.push_back(i);
        kinds[i] = Kind::kScalar;
      } else if (inputs[i].dims == row_dims && (reduces_ || width <= kWidest)) {
        rowed.push_back(i);
        kinds[i] = Kind::kRow;
      } else {
        repeated.push_back(std::move(found));
      }
    }
    Classify(dims, kinds);
    // A block is whole rows where a row has numbers of its own.
    const bool by_rows = std::find(kinds.begin(), kinds.end(), Kind::kRow) != kinds.end();
    Require(!reduces_ || width <= INT32_MAX / 8, "rows are too long");
    const int64_t rows_of_block = width > 0 ? std::max<int64_t>(1, kBlock / width) : 1;
    const int block = by_rows ? static_cast<int>(width * rows_of_block) : kBlock;
    // Buffers whose addresses differ by 4096 bytes would share few places of the first cache.
    const size_t stride = static_cast<size_t>(block) + kPad;
    std::vector<float*> outputs;
    std::vector<int> columns;  // outputs
    for (size_t i = 0; i < results_.size(); ++i) {
      const Kind kind = kinds[results_[i]];
      if (kind == Kind::kColumn) columns.push_back(static_cast<int>(i));
      outputs.push_back(call.Output(
          i, kind == Kind::kColumn ? Dims{width} : kind == Kind::kRow ? row_dims : dims));
    }
    if (size == 0) {  // no rows, whose sum is 0: Classify refuses rows without numbers
      for (const int i : columns) std::fill_n(outputs[i], width, 0.f);
      return;
    }
    const std::vector<bool> direct = Direct(inputs, outputs, kinds);
    std::vector<const KnownRun*> runs(code_.size());
    for (const KnownRun& each : runs_) {
      if (Fits(each, kinds)) runs[each.begin] = &each;
    }
    // One element after the other is read and written: all outputs may be inputs.
    const bool one_loop = runs[0] != nullptr && runs[0]->what->length == code_.size() && !by_rows;
    int64_t share = std::max<int64_t>(1, kTask / block);  // blocks of a task
    if (!columns.empty()) {
      const int64_t blocks = (size + block - 1) / block, most = kColumnTasks;
      share = std::max(share, (blocks + most - 1) / most);
    }
    share *= block;
    const auto tasks = static_cast<size_t>((size + share - 1) / share);
    // Of one task after the other, and so the same on any number of threads.
    std::vector<float> sums(tasks * columns.size() * static_cast<size_t>(width));
    // Scalars are read now: an output of one element may lie in their memory.
    std::vector<float> constants;
    for (const int i : scalars) constants.push_back(inputs[i].data[0]);
    call.Parallel(tasks, [&](size_t task) {
      const int64_t begin = static_cast<int64_t>(task) * share;
      const int64_t end = std::min(size, begin + share);
      const size_t expanded = by_rows ? kFields - 1 : 0;
      const size_t own = buffers_ + scalars.size() + repeated.size() + expanded;
      const std::unique_ptr<float[]> memory(new float[own * stride + 16]);
      float* const first = Aligned(memory.get());
      const int values = inputs_ + static_cast<int>(code_.size());
      std::vector<float*> registers(values + expanded);
      float* next = first + buffers_ * stride;
      for (size_t i = 0; i < scalars.size(); ++i, next += stride) {
        std::fill_n(next, block, constants[i]);
        registers[scalars[i]] = next;
      }
      for (const Broadcast& each : repeated) {
        registers[each.input] = next;
        next += stride;
      }
      for (size_t i = 0; i < expanded; ++i, next += stride) registers[values + i] = next;
      for (size_t i = 0; i < code_.size(); ++i) {
        registers[inputs_ + i] = first + buffer_[i] * stride;
      }
      for (size_t i = 0; i < columns.size(); ++i) {
        registers[results_[columns[i]]] = sums.data() + (task * columns.size() + i) * width;
      }
      for (int64_t place = begin; place < end; place += block) {
        const int count = static_cast<int>(std::min<int64_t>(block, end - place));
        const int rows = by_rows ? static_cast<int>(count / width) : 0;
        for (int i = 0; i < inputs_; ++i) {
          if (inputs[i].dims == dims) registers[i] = const_cast<float*>(inputs[i].data) + place;
        }
        for (const int i : rowed) registers[i] = const_cast<float*>(inputs[i].data) + place / width;
        for (const Broadcast& each : repeated) {
          Copy(each, inputs[each.input].data, place, count, registers[each.input]);
        }
        for (size_t i = 0; i < results_.size(); ++i) {
          if (direct[i] || one_loop) registers[results_[i]] = outputs[i] + place;
        }
        for (size_t i = 0; i < code_.size(); ++i) {
          const Instruction& each = code_[i];
          if (each.merged && Merges(each, kinds)) continue;
          const bool merged = i > 0 && code_[i - 1].merged && Merges(code_[i - 1], kinds);
          const float* const in = registers[merged ? code_[i - 1].a : each.a];
          const float* const by = merged ? registers[code_[i - 1].b] : nullptr;
          if (runs[i] != nullptr) {
            RunKnown(*runs[i], kinds, registers.data(), count, rows, static_cast<int>(width));
            i += runs[i]->what->length - 1;
          } else if (each.op == Op::kColumnSum) {
            AddColumns(in, by, place, count, width, registers[each.result]);
          } else if (OfRows(each.op)) {
            loops_.reduce(each.op, in, by, registers[each.result], rows, static_cast<int>(width));
          } else if (by_rows) {
            Step(each, kinds, registers.data(), values, count, rows, static_cast<int>(width));
          } else {
            loops_.step(each, registers.data(), count);
          }
        }
        for (size_t i = 0; i < results_.size(); ++i) {
          if (direct[i] || one_loop || kinds[results_[i]] == Kind::kColumn) continue;
          const bool row = kinds[results_[i]] == Kind::kRow;
          std::memcpy(outputs[i] + (row ? place / width : place), registers[results_[i]],
                      sizeof(float) * (row ? rows : count));
        }
      }
    });
    for (size_t i = 0; i < columns.size(); ++i) {
      std::copy_n(sums.data() + i * width, width, outputs[columns[i]]);
      for (size_t task = 1; task < tasks; ++task) {
        loops_.reduce(Op::kColumnSum, sums.data() + (task * columns.size() + i) * width, nullptr,
                      outputs[columns[i]], 1, static_cast<int>(width));
      }
    }
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
    std::vector<int> last = last_;
    for (const KnownRun& run : runs_) {  // it reads all of a row before the next
      const int end = static_cast<int>(run.begin + run.what->length) - 1;
      for (int i = 0; i < run.what->inputs; ++i) {
        last[run.values[i]] = std::max(last[run.values[i]], end);
      }
    }
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
  }

  // Adds the kind of what each instruction computes; throws where a reduction does not fit.
  void Classify(const Dims& dims, std::vector<Kind>& kinds) const {
    const auto rank = static_cast<int>(dims.size());
    Require(!reduces_ || (rank > 0 && dims.back() > 0), "there are no rows to reduce");
    for (const Instruction& each : code_) {
      const Kind a = kinds[each.a];
      if (OfRows(each.op)) {
        Require(a == Kind::kFull && (each.axis == 0 || each.axis == rank), "not a row is reduced");
        kinds.push_back(Kind::kRow);
      } else if (each.op == Op::kColumnSum) {
        Require(a == Kind::kFull && each.axis == rank - 1, "not rows are summed");
        kinds.push_back(Kind::kColumn);
      } else {
        kinds.push_back(std::max({a, kinds[each.b], kinds[each.c]}));
      }
    }
  }

  // Adds a run where the instructions from `begin` on are those of a known program.
  bool FindRun(const KnownProgram& known, size_t begin) {
    if (known.length > code_.size() - begin) return false;
    KnownRun run{&known, nullptr, begin, {}, 0.f, 0.f};
    run.values.fill(-1);
    const auto bind = [&](int own, int value) {
      if (run.values[own] < 0 && own < known.inputs) run.values[own] = value;
      return run.values[own] == value;
    };
    for (size_t i = 0; i < known.length; ++i) {
      const KnownStep& step = known.code[i];
      const Instruction& each = code_[begin + i];
      const int operands = Operands(step.op);
      if (each.op != step.op || !bind(step.a, each.a) || (operands > 1 && !bind(step.b, each.b)) ||
          (operands > 2 && !bind(step.c, each.c))) {
        return false;
      }
      run.values[known.inputs + static_cast<int>(i)] = each.result;
      if (each.op == Op::kHardSigmoid) {
        run.alpha = each.alpha;
        run.beta = each.beta;
      }
    }
    for (size_t i = 0; i < known.length; ++i) {  // what is not kept, nothing else reads
      const int own = known.inputs + static_cast<int>(i);
      const int* const end = known.results + known.outputs;
      const bool kept = std::find(known.results, end, own) != end;
      if (!kept && last_[run.values[own]] >= static_cast<int>(begin + known.length)) return false;
    }
    runs_.push_back(run);
    return true;
  }

  bool InRun(size_t place) const {
    return std::any_of(runs_.begin(), runs_.end(), [&](const KnownRun& run) {
      return place >= run.begin && place < run.begin + run.what->length;
    });
  }

  // Whether the reduction behind a product takes the factors: both are of the whole shape.
  static bool Merges(const Instruction& each, const std::vector<Kind>& kinds) {
    return kinds[each.a] == Kind::kFull && kinds[each.b] == Kind::kFull;
  }

  // Whether the values of a run have the kinds that its loop reads.
  bool Fits(const KnownRun& run, const std::vector<Kind>& kinds) const {
    for (int i = 0; i < run.what->inputs; ++i) {
      const Kind kind = kinds[run.values[i]];
      if ((kind == Kind::kFull) != (i < run.what->full)) return false;
    }
    return true;
  }

  static void RunKnown(const KnownRun& run, const std::vector<Kind>& kinds, float* const* registers,
                       int count, int rows, int width) {
    float* own[kKnownValues] = {};
    const int all = run.what->inputs + static_cast<int>(run.what->length);
    bool by_rows = false;
    for (int i = 0; i < all; ++i) {
      own[i] = registers[run.values[i]];
      by_rows = by_rows || kinds[run.values[i]] == Kind::kRow;
    }
    if (!by_rows) return run.loop(own, count, run.alpha, run.beta);
    for (int row = 0; row < rows; ++row) {
      run.loop(own, width, run.alpha, run.beta);
      for (int i = 0; i < all; ++i) {
        const Kind kind = kinds[run.values[i]];
        if (kind != Kind::kScalar) own[i] += kind == Kind::kRow ? 1 : width;
      }
    }
  }

  // Adds numbers from a place of the whole on to the sums of their columns.
  void AddColumns(const float* in, const float* by, int64_t place, int count, int64_t width,
                  float* sums) const {
    int64_t column = place % width;
    while (count > 0) {
      const bool whole = column == 0 && count >= width;
      const auto rows = static_cast<int>(whole ? count / width : 1);
      const auto now = static_cast<int>(whole ? width : std::min<int64_t>(width - column, count));
      loops_.reduce(Op::kColumnSum, in, by, sums + column, rows, now);
      in += rows * now;
      if (by != nullptr) by += rows * now;
      count -= rows * now;
      column = (column + now) % width;
    }
  }

  // Runs an instruction on a block of whole rows.
  void Step(const Instruction& each, const std::vector<Kind>& kinds, float* const* registers,
            int values, int count, int rows, int width) const {
    if (kinds[each.result] == Kind::kRow) {
      loops_.step(each, registers, rows);
    } else {
      Instruction whole = each;
      int spare = values;
      for (int* const read : {&whole.a, &whole.b, &whole.c}) {
        if (kinds[*read] != Kind::kRow) continue;
        loops_.expand(registers[*read], registers[spare], rows, width);
        *read = spare++;
      }
      loops_.step(whole, registers, count);
    }
  }

  // Whether each output may be written as it is computed: nothing reads its memory afterwards.
  std::vector<bool> Direct(const std::vector<Input>& inputs, const std::vector<float*>& outputs,
                           const std::vector<Kind>& kinds) const {
    std::vector<bool> direct(outputs.size(), true);
    for (size_t i = 0; i < outputs.size(); ++i) {
      const Kind kind = kinds[results_[i]];
      if (kind == Kind::kRow || kind == Kind::kColumn) direct[i] = false;
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
  std::vector<KnownRun> runs_;
  bool reduces_ = false;
  bool of_rows_ = false;  // and not an update
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
  if (name == "normalization") return MakeNormalization(program);
  if (name == "product") return MakeProduct(program);
  if (name == "transposed") return MakeTransposed(program);
  throw std::invalid_argument("this library has no kernel '" + name + "'");
}

}  // namespace odtpack::native
