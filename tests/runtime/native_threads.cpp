// Runs a kernel on one thread and on four, under ThreadSanitizer: the same bits, and no race.
//
//     native_threads KERNEL KINDS NUMBER...
//
// KINDS has a letter for each input: w (the whole shape), r (a number for each row), v (for each
// column), s (one number). The numbers are the program.
#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <thread>

#include "kernel.h"

namespace {

using namespace odtpack::native;
constexpr int64_t kRows = 3001, kWidth = 100;

class ThreadCall final : public Call {
 public:
  ThreadCall(const std::vector<Input>& inputs, size_t outputs, int threads)
      : outputs(outputs), inputs_(inputs), threads_(threads) {}
  const std::vector<Input>& inputs() const override { return inputs_; }
  size_t output_count() const override { return outputs.size(); }
  float* Output(size_t index, const Dims& dims) override {
    int64_t size = 1;
    for (const int64_t dim : dims) size *= dim;
    outputs[index].resize(static_cast<size_t>(size));
    return outputs[index].data();
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

  std::vector<std::vector<float>> outputs;

 private:
  const std::vector<Input>& inputs_;
  int threads_;
};

}  // namespace

int main(int count, char** words) {
  std::vector<int64_t> program;
  for (int i = 3; i < count; ++i) program.push_back(std::atoll(words[i]));
  std::vector<std::vector<float>> memory;
  std::vector<Input> inputs;
  for (const char* kind = words[2]; *kind != '\0'; ++kind) {
    const Dims dims = *kind == 'w'   ? Dims{kRows, kWidth}
                      : *kind == 'r' ? Dims{kRows, 1}
                      : *kind == 'v' ? Dims{kWidth}
                                     : Dims{};
    int64_t size = 1;
    for (const int64_t dim : dims) size *= dim;
    memory.emplace_back();
    for (int64_t i = 0; i < size; ++i) memory.back().push_back(0.25f + static_cast<float>(i * 7 % 31) / 16);
    inputs.push_back({memory.back().data(), dims, size});
  }
  const auto kernel = MakeKernel(words[1], program);
  ThreadCall one(inputs, static_cast<size_t>(program[1]), 1), four(inputs, one.outputs.size(), 4);
  kernel->Run(one);
  kernel->Run(four);
  for (size_t i = 0; i < one.outputs.size(); ++i) {
    const auto &left = one.outputs[i], &right = four.outputs[i];
    if (left.size() != right.size() ||
        std::memcmp(left.data(), right.data(), left.size() * sizeof(float)) != 0) {
      std::printf("output %zu differs\n", i);
      return 1;
    }
  }
  return 0;
}
