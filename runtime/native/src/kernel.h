// What a kernel is: a computation over float tensors whose shapes are checked before it runs.
#ifndef ODTPACK_NATIVE_KERNEL_H_
#define ODTPACK_NATIVE_KERNEL_H_

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

namespace odtpack::native {

using Dims = std::vector<int64_t>;

struct Input {
  const float* data = nullptr;
  Dims dims;
  int64_t size = 0;
};

// One execution of a node. Implemented over ONNX Runtime's C API in library.cpp.
class Call {
 public:
  virtual ~Call() = default;
  virtual const std::vector<Input>& inputs() const = 0;
  virtual size_t output_count() const = 0;
  // Allocates an output. It may lie in the memory of an input that has as many elements.
  virtual float* Output(size_t index, const Dims& dims) = 0;
  // Calls task(i) for all i below count, on the threads of the session.
  virtual void Parallel(size_t count, const std::function<void(size_t)>& task) = 0;
};

class Kernel {
 public:
  virtual ~Kernel() = default;
  // Throws std::invalid_argument, before any output is written, where the inputs do not fit.
  virtual void Run(Call& call) const = 0;
};

// The kernel of a node, by its attributes. Throws std::invalid_argument where they are not valid.
std::unique_ptr<Kernel> MakeKernel(const std::string& name, const std::vector<int64_t>& program);

inline void Require(bool holds, const char* what) {
  if (!holds) throw std::invalid_argument(what);
}

}  // namespace odtpack::native

#endif  // ODTPACK_NATIVE_KERNEL_H_
