// Runs a kernel apart from ONNX Runtime: under a sanitizer, or for another processor.
//
//     native_case KERNEL <CASE >RESULT
//
// A case is: the program; for each input whether it has floats, bytes or bytes with a sign (0 to 2), its
// dims and its numbers; how many outputs; whether an output may lie in the memory of the input of the
// same number, as ONNX Runtime may place it. The result is dims and numbers of each output. Lists are
// int64 lengths and what they count. The kernel runs on one thread and on four: results that differ are
// exit code 1, and what it refuses is a message and exit code 3.
#include <atomic>
#include <cstdio>
#include <cstring>
#include <thread>

#include "kernel.h"

namespace {

using namespace odtpack::native;

template <typename T>
T Read() {
  T value;
  if (std::fread(&value, sizeof value, 1, stdin) != 1) std::exit(2);
  return value;
}

Dims ReadList() {
  Dims list(static_cast<size_t>(Read<int64_t>()));
  for (int64_t& each : list) each = Read<int64_t>();
  return list;
}

struct Tensor {
  Dims dims;
  std::unique_ptr<float[]> memory;  // it begins in the middle of a vector, and ends with the tensor
  std::unique_ptr<uint8_t[]> bytes;
  float* data = nullptr;
  int64_t size = 1;
  bool is_signed = false;

  explicit Tensor(const Dims& of, bool of_bytes = false) : dims(of) {
    for (const int64_t dim : dims) size *= dim;
    if (of_bytes) {
      bytes.reset(new uint8_t[static_cast<size_t>(size)]);
    } else {
      memory.reset(new float[static_cast<size_t>(size) + 1]);
      data = memory.get() + 1;
    }
  }
};

class ApartCall final : public Call {
 public:
  ApartCall(const std::vector<Tensor>& tensors, size_t outputs, bool in_place, int threads)
      : outputs(outputs), in_place_(in_place), threads_(threads) {
    for (const Tensor& each : tensors) {
      read_.emplace_back(each.dims, each.bytes != nullptr);
      Tensor& made = read_.back();
      if (made.bytes) std::copy_n(each.bytes.get(), each.size, made.bytes.get());
      else std::copy_n(each.data, each.size, made.data);
      inputs_.push_back({made.data, made.bytes.get(), each.dims, each.size, each.is_signed});
    }
  }
  const std::vector<Input>& inputs() const override { return inputs_; }
  size_t output_count() const override { return outputs.size(); }
  float* Output(size_t index, const Dims& dims) override {
    Tensor made(dims);
    if (in_place_ && index < read_.size() && read_[index].data && read_[index].size == made.size) {
      outputs[index] = {dims, read_[index].data, made.size};
    } else {
      outputs[index] = {dims, made.data, made.size};
      kept_.push_back(std::move(made));
    }
    return const_cast<float*>(outputs[index].data);
  }
  void Parallel(size_t count, const std::function<void(size_t)>& task) override {
    std::atomic<size_t> next{0};
    std::vector<std::thread> threads;
    for (int i = 0; i < threads_; ++i) {
      threads.emplace_back([&] {
        for (size_t each = next++; each < count; each = next++) task(each);
      });
    }
    for (std::thread& each : threads) each.join();
  }

  struct Result {
    Dims dims;
    const float* data = nullptr;
    int64_t size = 0;
  };
  std::vector<Result> outputs;

 private:
  std::vector<Tensor> read_, kept_;
  std::vector<Input> inputs_;
  bool in_place_;
  int threads_;
};

void Write(int64_t number) { std::fwrite(&number, sizeof number, 1, stdout); }

}  // namespace

int main(int, char** words) try {
  const Dims program = ReadList();
  std::vector<Tensor> tensors;
  for (int64_t count = Read<int64_t>(); count > 0; --count) {
    const auto kind = Read<int64_t>();
    const bool of_bytes = kind != 0;
    tensors.emplace_back(ReadList(), of_bytes);
    tensors.back().is_signed = kind == 2;
    for (int64_t i = 0; i < tensors.back().size; ++i) {
      if (of_bytes) tensors.back().bytes[i] = Read<uint8_t>();
      else tensors.back().data[i] = Read<float>();
    }
  }
  const auto outputs = static_cast<size_t>(Read<int64_t>());
  const bool in_place = Read<int64_t>() != 0;
  const auto kernel = MakeKernel(words[1], program);
  ApartCall one(tensors, outputs, in_place, 1), four(tensors, outputs, in_place, 4);
  RunChecked(*kernel, one);
  RunChecked(*kernel, four);
  for (size_t i = 0; i < outputs; ++i) {
    const auto &left = one.outputs[i], &right = four.outputs[i];
    const auto bytes = static_cast<size_t>(left.size) * sizeof(float);
    if (left.dims != right.dims || std::memcmp(left.data, right.data, bytes) != 0) {
      std::fprintf(stderr, "output %zu differs on four threads\n", i);
      return 1;
    }
    Write(static_cast<int64_t>(left.dims.size()));
    for (const int64_t dim : left.dims) Write(dim);
    std::fwrite(left.data, sizeof(float), static_cast<size_t>(left.size), stdout);
  }
  return 0;
} catch (const std::invalid_argument& error) {
  std::fprintf(stderr, "%s\n", error.what());
  return 3;
}
