// What a kernel is: a computation over tensors whose types and shapes are checked before it runs.
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
  const float* data = nullptr;     // of float32
  const uint8_t* bytes = nullptr;  // of uint8 and int8
  Dims dims;
  int64_t size = 0;
  bool is_signed = false;  // int8
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
  // How many inputs, the first ones, are uint8 or int8; all others are float32.
  virtual size_t byte_inputs() const { return 0; }
  // Throws std::invalid_argument, before any output is written, where the inputs do not fit.
  virtual void Run(Call& call) const = 0;
};

// The kernel of a node, by its attributes. Throws std::invalid_argument where they are not valid.
std::unique_ptr<Kernel> MakeKernel(const std::string& name, const std::vector<int64_t>& program);

inline void Require(bool holds, const char* what) {
  if (!holds) throw std::invalid_argument(what);
}

// Runs a kernel on inputs of the types that it reads.
inline void RunChecked(const Kernel& kernel, Call& call) {
  for (size_t i = 0; i < call.inputs().size(); ++i) {
    const Input& each = call.inputs()[i];
    Require((each.bytes != nullptr) == (i < kernel.byte_inputs()), "an input has another type");
  }
  kernel.Run(call);
}

}  // namespace odtpack::native

#endif  // ODTPACK_NATIVE_KERNEL_H_
