// Programs over channels: values of [N, C, ...] beside numbers for each channel, such as batch
// normalization and its gradient. A channel is passed through once for the sums that wait for each
// other, and once more for the outputs, block by block; what is elementwise is computed again in
// each pass, so that no result between them is stored.
#include <algorithm>
#include <cstdint>
#include <cstring>
#include <functional>
#include <numeric>

#include "elementwise.h"

namespace odtpack::native {
namespace {

constexpr int kPiece = 1024;  // elements of a register
constexpr int kShort = 64;  // elements of a channel of a sample, below which samples are gathered

// What a value is: numbers for each channel [C], or a tensor that [N, C, ...] broadcasts with.
enum class Form { kUnknown, kChannel, kWhole };

// What one pass computes, in order, and the buffer of each result.
struct Pass {
  std::vector<int> channel;     // instructions on numbers of channels, before the blocks
  std::vector<int> block;       // instructions on blocks
  std::vector<int> buffer;      // of each of them
  std::vector<int> sums;        // instructions that add up what the blocks have
  std::vector<int> read;        // inputs that the blocks read
};

// A part of a tensor of which a register holds all elements: whole samples, or a part of one.
struct Piece {
  int64_t sample, offset;
  int samples, length;  // of a channel
};

class Channels final : public Kernel {
 public:
  // program: number of inputs, of outputs, the rank of whole values, 0 for any from 3 on, the value
  // of each output, then the instructions.
  explicit Channels(const std::vector<int64_t>& program) : loops_(ChooseLoops()) {
    Require(program.size() >= 4, "a program is too short");
    inputs_ = Number(program[0], 1, kMaxInputs);
    const int outputs = Number(program[1], 1, kMaxInputs);
    rank_ = Number(program[2], 0, 8);
    Require(program.size() > static_cast<size_t>(3 + outputs), "a program is cut");
    code_ = ReadCode(program, 3 + static_cast<size_t>(outputs), inputs_);
    results_ = ReadResults(program, 3, outputs, inputs_, code_.size());
    for (const Instruction& each : code_) {
      Require(each.op < Op::kRowSum || each.op >= Op::kChannelSum, "an operator is of rows");
    }
    FindForms();
    std::vector<int> depth(inputs_);
    for (const Instruction& each : code_) {
      depth.push_back(std::max({depth[each.a], depth[each.b], depth[each.c]}) +
                      (each.op == Op::kChannelSum ? 1 : 0));
    }
    passes_.resize(*std::max_element(depth.begin(), depth.end()) + 1);
    for (size_t i = 0; i < code_.size(); ++i) {
      const int at = depth[code_[i].result];
      if (code_[i].op == Op::kChannelSum) passes_[at - 1].sums.push_back(static_cast<int>(i));
      else if (OfChannels(static_cast<int>(i))) passes_[at].channel.push_back(static_cast<int>(i));
    }
    for (size_t i = 0; i < results_.size(); ++i) {
      if (IsWhole(results_[i])) whole_results_.push_back(i);
    }
    for (Pass& pass : passes_) Schedule(pass, &pass == &passes_.back());
  }

  void Run(Call& call) const override {
    Job job{call.inputs(), {}, {}, {}, {}, {}, {}};
    const std::vector<Input>& inputs = job.inputs;
    Require(static_cast<int>(inputs.size()) == inputs_, "the inputs are not the program's");
    Require(call.output_count() == results_.size(), "the outputs are not the program's");
    const Dims dims = Whole(inputs);
    job.full = Check(inputs, dims);
    job.samples = dims[0];
    job.channels = dims[1];
    // Also of a value without elements, whose other axes may be of any length.
    const auto fits = [](int64_t a, int64_t b) { return b == 0 || a <= INT32_MAX / b; };
    for (size_t axis = 2; axis < dims.size(); ++axis) {
      Require(fits(job.plane, dims[axis]), "channels are too long");
      job.plane *= dims[axis];
    }
    Require(fits(job.samples, job.plane) && job.channels <= INT32_MAX, "channels are too long");
    const int64_t width = job.samples * job.plane;
    for (size_t i = 0; i < results_.size(); ++i) {
      Dims own = IsWhole(results_[i]) ? dims : Dims{job.channels};
      if (IsSpread(results_[i])) own.resize(dims.size() - 1, 1);
      job.outputs.push_back(call.Output(i, own));
    }
    // Scalars are read now: an output of one element may lie in their memory.
    for (const Input& each : inputs) job.constants.push_back(each.size == 1 ? each.data[0] : 0.f);
    const int64_t fitting = kPiece / std::max<int64_t>(1, width);
    if (fitting > 1) job.together = static_cast<int>(std::clamp<int64_t>(job.channels, 1, fitting));
    job.pieces = Cut(job.samples, job.plane, job.together);
    job.gathers = !job.pieces.empty() && (job.together > 1 || job.pieces[0].samples > 1);
    job.direct = job.gathers ? std::vector<bool>(results_.size()) : Direct(inputs, job.outputs);
    job.places = Places(job);
    const int64_t groups = std::max<int64_t>(1, kTask / std::max<int64_t>(1, width * job.together));
    const int64_t share = groups * job.together;
    call.Parallel(static_cast<size_t>((job.channels + share - 1) / share), [&](size_t task) {
      const int64_t begin = static_cast<int64_t>(task) * share;
      RunChannels(job, begin, std::min(job.channels, begin + share));
    });
  }

 private:
  // One execution: the tensors, and how they are cut.
  struct Job {
    const std::vector<Input>& inputs;
    std::vector<float*> outputs;
    std::vector<bool> full;        // inputs of the whole shape
    std::vector<bool> direct;      // outputs that are written as they are computed
    std::vector<float> constants;  // inputs of one number
    std::vector<Piece> pieces;     // of a channel
    std::vector<size_t> places;    // of the registers that stay while channels are worked on
    int64_t samples = 0, channels = 0, plane = 1;
    int together = 1;              // channels that are worked on at once
    bool gathers = false;          // whether a register holds copies of planes
  };

  static constexpr size_t kStride = kPiece + kPad;  // of the buffers that results of blocks share

  // Where each value has a register of its own, and where the last one ends.
  std::vector<size_t> Places(const Job& job) const {
    std::vector<size_t> places{0};
    for (int i = 0; i < static_cast<int>(forms_.size()); ++i) {
      const bool elsewhere = i < inputs_ ? job.full[i] && !job.gathers : IsWhole(i);
      const size_t numbers = (static_cast<size_t>(job.together) + 15) / 16 * 16;
      const size_t own = forms_[i] == Form::kWhole ? kStride : numbers;
      places.push_back(places.back() + (elsewhere ? 0 : own));
    }
    return places;
  }

  void RunChannels(const Job& job, int64_t begin, int64_t end) const {
    const std::unique_ptr<float[]> memory(new float[buffers_ * kStride + job.places.back() + 16]);
    float* const buffers = Aligned(memory.get());
    float* const own = buffers + buffers_ * kStride;
    std::vector<float*> registers;
    for (size_t i = 0; i < forms_.size(); ++i) registers.push_back(own + job.places[i]);
    for (int i = 0; i < inputs_; ++i) {
      if (job.inputs[i].size != 1 || job.full[i]) continue;
      std::fill_n(registers[i], forms_[i] == Form::kWhole ? kPiece : job.together, job.constants[i]);
    }
    for (int64_t channel = begin; channel < end; channel += job.together) {
      const int rows = static_cast<int>(std::min<int64_t>(job.together, end - channel));
      const int spread = job.together > 1 ? static_cast<int>(job.samples * job.plane) : kPiece;
      for (int i = 0; i < inputs_; ++i) {
        const float* const data = job.inputs[i].data + channel;
        if (job.inputs[i].size == 1 || job.full[i]) continue;
        if (forms_[i] == Form::kWhole) loops_.expand(data, registers[i], rows, spread);
        else std::copy_n(data, rows, registers[i]);
      }
      for (const Pass& pass : passes_) {
        for (const int i : pass.channel) {
          const Instruction& each = code_[i];
          if (each.op == Op::kSpread) {
            loops_.expand(registers[each.a], registers[each.result], rows, spread);
          } else {
            loops_.step(each, registers.data(), rows);
          }
        }
        for (size_t i = 0; i < pass.block.size(); ++i) {
          registers[code_[pass.block[i]].result] = buffers + pass.buffer[i] * kStride;
        }
        RunBlocks(job, pass, channel, rows, registers);
      }
      for (size_t i = 0; i < results_.size(); ++i) {
        const int value = results_[i];
        if (IsWhole(value)) continue;
        const int from = IsSpread(value) ? code_[value - inputs_].a : value;
        std::copy_n(registers[from], rows, job.outputs[i] + channel);
      }
    }
  }

  // Passes through some channels once, block by block.
  void RunBlocks(const Job& job, const Pass& pass, int64_t channel, int rows,
                 std::vector<float*>& registers) const {
    const bool last = &pass == &passes_.back();
    std::vector<double> sums(pass.sums.size() * rows);
    float found[kPiece];
    for (size_t at = 0; at < job.pieces.size(); ++at) {
      const Piece& piece = job.pieces[at];
      const int length = piece.samples * piece.length;  // of a row
      const int64_t place = Place(job, piece, channel);
      for (const int i : pass.read) {
        if (!job.full[i]) continue;
        if (job.gathers) Copy<true>(job, piece, rows, job.inputs[i].data + place, registers[i]);
        else registers[i] = const_cast<float*>(job.inputs[i].data) + place;
      }
      if (!job.gathers) FetchAhead(job, pass, channel, at + 2);
      for (size_t i = 0; last && i < whole_results_.size(); ++i) {
        const size_t output = whole_results_[i];
        if (job.direct[output]) registers[results_[output]] = job.outputs[output] + place;
      }
      for (const int i : pass.block) loops_.step(code_[i], registers.data(), rows * length);
      for (size_t i = 0; i < pass.sums.size(); ++i) {
        const Instruction& each = code_[pass.sums[i]];
        const bool merged = each.a >= inputs_ && code_[each.a - inputs_].merged;
        const Instruction& product = merged ? code_[each.a - inputs_] : each;
        const float* const by = merged ? registers[product.b] : nullptr;
        loops_.reduce(Op::kRowSum, registers[product.a], by, found, rows, length);
        for (int row = 0; row < rows; ++row) sums[i * rows + row] += found[row];
      }
      for (size_t i = 0; last && i < whole_results_.size(); ++i) {
        const size_t output = whole_results_[i];
        float* const result = registers[results_[output]];
        float* const to = job.outputs[output] + place;
        if (job.direct[output]) continue;
        if (job.gathers) Copy<false>(job, piece, rows, result, to);
        else std::memcpy(to, result, sizeof(float) * length);
      }
    }
    for (size_t i = 0; i < pass.sums.size(); ++i) {
      float* const to = registers[code_[pass.sums[i]].result];
      for (int row = 0; row < rows; ++row) to[row] = static_cast<float>(sums[i * rows + row]);
    }
  }

  static int64_t Place(const Job& job, const Piece& piece, int64_t channel) {
    return (piece.sample * job.channels + channel) * job.plane + piece.offset;
  }

  // Brings a piece that is worked on soon into a cache: planes of a channel are far from each other,
  // and the processor does not see the next one coming. After the last one comes the next channel's.
  void FetchAhead(const Job& job, const Pass& pass, int64_t channel, size_t at) const {
#if defined(__GNUC__)
    const bool last = &pass == &passes_.back();
    channel += at < job.pieces.size() ? 0 : 1;
    if (at >= job.pieces.size() && (!last || channel >= job.channels)) return;
    const Piece& piece = job.pieces[at % job.pieces.size()];
    const int64_t place = Place(job, piece, channel);
    const auto fetch = [&](const float* from) {
      for (int i = 0; i < piece.length; i += 16) __builtin_prefetch(from + place + i, 0, 2);
    };
    for (const int i : pass.read) {
      if (job.full[i]) fetch(job.inputs[i].data);
    }
    for (size_t i = 0; last && i < whole_results_.size(); ++i) fetch(job.outputs[whole_results_[i]]);
    asm volatile("");  // GCC takes a function that only fetches for one that does nothing
#endif
  }

  // Copies the planes of a piece into a register, one after the other, or from there.
  template <bool gathers>
  static void Copy(const Job& job, const Piece& piece, int rows, const float* from, float* to) {
    for (int row = 0; row < rows; ++row) {
      for (int sample = 0; sample < piece.samples; ++sample) {
        const int64_t place = (sample * job.channels + row) * job.plane;
        const int64_t packed = (int64_t{row} * piece.samples + sample) * piece.length;
        std::memcpy(to + (gathers ? packed : place), from + (gathers ? place : packed),
                    sizeof(float) * piece.length);
      }
    }
  }

  bool OfChannels(int i) const {
    return code_[i].op == Op::kSpread || forms_[code_[i].result] == Form::kChannel;
  }

  // Whether a value that an instruction computes is [C, 1, ...], or has the whole shape.
  bool IsSpread(int value) const { return code_[value - inputs_].op == Op::kSpread; }
  bool IsWhole(int value) const { return forms_[value] == Form::kWhole && !IsSpread(value); }

  // Says of each value what it is; throws where an instruction has both.
  void FindForms() {
    std::vector<int> same(inputs_ + code_.size());  // values of one form, as a tree
    std::iota(same.begin(), same.end(), 0);
    const auto root = [&](int value) {
      while (same[value] != value) value = same[value];
      return value;
    };
    for (const Instruction& each : code_) {
      if (each.op == Op::kChannelSum || each.op == Op::kSpread) continue;
      for (const int read : {each.a, each.b, each.c}) same[root(read)] = root(each.result);
    }
    std::vector<Form> known(same.size(), Form::kUnknown);
    const auto is = [&](int value, Form form) {
      Form& found = known[root(value)];
      Require(found == Form::kUnknown || found == form, "a value is of channels and of the whole");
      found = form;
    };
    for (const Instruction& each : code_) {
      if (each.op == Op::kChannelSum) {
        is(each.a, Form::kWhole);
        is(each.result, Form::kChannel);
      } else if (each.op == Op::kSpread) {
        is(each.a, Form::kChannel);
        is(each.result, Form::kWhole);
      }
    }
    for (size_t i = 0; i < same.size(); ++i) {
      const Form form = known[root(static_cast<int>(i))];
      forms_.push_back(form == Form::kUnknown ? Form::kChannel : form);
    }
  }

  // Lists what a pass computes in blocks for its sums, or for the outputs, and shares out buffers.
  void Schedule(Pass& pass, bool last) {
    std::vector<bool> needed(inputs_ + code_.size());
    std::vector<int> readers(needed.size());
    const auto read = [&](int value) {
      needed[value] = true;
      ++readers[value];
    };
    for (const int i : pass.sums) read(code_[i].a);
    for (const int value : results_) {
      if (last && IsWhole(value)) read(value);
    }
    for (size_t i = code_.size(); i-- > 0;) {
      const Instruction& each = code_[i];
      if (!needed[each.result] || OfChannels(static_cast<int>(i))) continue;
      // A product that only a sum reads: the sum takes its factors.
      const bool summed = std::any_of(pass.sums.begin(), pass.sums.end(),
                                      [&](int sum) { return code_[sum].a == each.result; });
      if (each.op == Op::kMul && summed && readers[each.result] == 1) code_[i].merged = true;
      else pass.block.insert(pass.block.begin(), static_cast<int>(i));
      for (const int value : {each.a, each.b, each.c}) read(value);
    }
    for (int i = 0; i < inputs_; ++i) {
      if (needed[i]) pass.read.push_back(i);
    }
    std::vector<size_t> until(needed.size());  // the place in the block after which a value is free
    for (size_t i = 0; i < pass.block.size(); ++i) {
      const Instruction& each = code_[pass.block[i]];
      for (const int value : {each.a, each.b, each.c}) until[value] = i;
    }
    for (const int value : results_) until[value] = pass.block.size();
    for (const int i : pass.sums) {
      const int value = code_[i].a;
      const bool merged = value >= inputs_ && code_[value - inputs_].merged;
      for (const int each : {value, merged ? code_[value - inputs_].a : value,
                             merged ? code_[value - inputs_].b : value}) {
        until[each] = pass.block.size();
      }
    }
    std::vector<int> free;
    for (size_t i = 0; i < pass.block.size(); ++i) {
      if (free.empty()) free.push_back(buffers_++);
      pass.buffer.push_back(free.back());
      free.pop_back();
      for (size_t j = 0; j <= i; ++j) {
        if (until[code_[pass.block[j]].result] == i) free.push_back(pass.buffer[j]);
      }
    }
  }

  // The shape that others broadcast to: that of the largest value that may have it.
  Dims Whole(const std::vector<Input>& inputs) const {
    int found = -1;
    for (int i = 0; i < inputs_; ++i) {
      if (forms_[i] == Form::kWhole && (found < 0 || inputs[i].dims.size() > inputs[found].dims.size() ||
                                        (inputs[i].dims.size() == inputs[found].dims.size() &&
                                         inputs[i].size > inputs[found].size))) {
        found = i;
      }
    }
    Require(found >= 0 && inputs[found].dims.size() > 2, "there are no channels");
    Require(rank_ == 0 || static_cast<int>(inputs[found].dims.size()) == rank_, "another rank");
    return inputs[found].dims;
  }

  // Whether each input has the whole shape; throws where one has a shape that does not fit.
  std::vector<bool> Check(const std::vector<Input>& inputs, const Dims& dims) const {
    std::vector<bool> full, whole, numbers;  // numbers: one for each channel, and not one alone
    Dims spread(dims.size(), 1);
    spread[1] = dims[1];
    for (int i = 0; i < inputs_; ++i) {
      const Input& each = inputs[i];
      const bool of_channels = forms_[i] == Form::kChannel;
      const bool same = !of_channels && each.dims == dims;
      const bool alone = each.size == 1 && each.dims.size() <= (of_channels ? 1 : dims.size());
      const bool fits = of_channels ? each.dims == Dims{dims[1]}
                                    : each.dims == spread || each.dims == Dims(spread.begin() + 1, spread.end());
      Require(same || alone || fits, "the shapes of the inputs are not those of channels");
      full.push_back(same);
      whole.push_back(same);
      numbers.push_back(fits);
    }
    for (const Instruction& each : code_) {
      const bool sum = each.op == Op::kChannelSum;
      Require(!sum || whole[each.a], "what is summed has another shape");
      whole.push_back(!sum && each.op != Op::kSpread && (whole[each.a] || whole[each.b] || whole[each.c]));
      numbers.push_back(sum || numbers[each.a] || numbers[each.b] || numbers[each.c]);
    }
    for (const int value : results_) {
      Require(IsWhole(value) ? whole[value] : numbers[value],
              "an output has another shape");
    }
    return full;
  }

  static std::vector<Piece> Cut(int64_t samples, int64_t plane, int together) {
    std::vector<Piece> pieces;
    if (plane == 0) return pieces;
    // Parts of about one size, which begin where a cache line does if the plane does.
    const int64_t parts = (plane + kPiece - 1) / kPiece;
    const int64_t length = std::min(plane, ((plane + parts - 1) / parts + 15) / 16 * 16);
    const int64_t gathered = plane < kShort ? kPiece / plane : 1;
    const int64_t step = together > 1 ? std::max<int64_t>(1, samples) : gathered;
    for (int64_t sample = 0; sample < samples; sample += step) {
      for (int64_t offset = 0; offset < plane; offset += length) {
        pieces.push_back({sample, offset, static_cast<int>(std::min(step, samples - sample)),
                          static_cast<int>(std::min(length, plane - offset))});
      }
    }
    return pieces;
  }

  // Whether each output may be written as it is computed: nothing reads its memory afterwards.
  std::vector<bool> Direct(const std::vector<Input>& inputs, const std::vector<float*>& outputs) const {
    std::vector<bool> direct(outputs.size(), true);
    for (size_t i = 0; i < outputs.size(); ++i) {
      for (const int place : passes_.back().block) {
        const Instruction& each = code_[place];
        for (const int value : {each.a, each.b, each.c}) {
          if (each.result > results_[i] && value < inputs_ && inputs[value].data == outputs[i]) direct[i] = false;
        }
      }
    }
    return direct;
  }

  const Loops& loops_;
  int inputs_ = 0, rank_ = 0, buffers_ = 0;
  std::vector<Instruction> code_;
  std::vector<int> results_;  // the value of each output
  std::vector<size_t> whole_results_;  // outputs of the whole shape
  std::vector<Form> forms_;   // of each value
  std::vector<Pass> passes_;
};

}  // namespace

std::unique_ptr<Kernel> MakeChannels(const std::vector<int64_t>& program) {
  return std::make_unique<Channels>(program);
}

}  // namespace odtpack::native
