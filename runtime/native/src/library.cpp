// The library as ONNX Runtime sees it: RegisterCustomOps, on the C API alone.
//
// Each operator "KernelN" of the domain odtpack.native, or "CodesN" or "SignedCodesN" where its first
// input is uint8 or int8, is a function of the model that has it: its
// body, in plain operators, is what a session computes that does not know this library. Names say
// nothing else: which kernel it is, and of what, is in the attributes "kernel" and "program".
#if __has_include(<onnxruntime_c_api.h>)
#include <onnxruntime_c_api.h>
#else
#include <onnxruntime/onnxruntime_c_api.h>  // as the framework for Apple's systems has it
#endif

#include <algorithm>
#include <array>
#include <cstdio>
#include <cstring>
#include <exception>
#include <map>
#include <memory>
#include <mutex>
#include <new>
#include <vector>

#include "kernel.h"

namespace odtpack::native {
namespace {

// Since which KernelContext_ParallelFor and callbacks that return a status are there.
constexpr uint32_t kOldestApi = 17;
constexpr size_t kSlots = 64, kCodesSlots = 20, kSignedCodesSlots = 4;
constexpr size_t kInPlace = 8;  // inputs whose memory the output of the same number may take over
constexpr const char* kCounts = "odtpack.native.operators";  // of session options
constexpr size_t kMaxTensors = 64;
constexpr size_t kMaxProgram = 4096;

struct Slot : OrtCustomOp {
  char name[16];
  ONNXTensorElementDataType codes;  // of the first input, where it is not float32
};

using Counts = std::array<size_t, 3>;  // of "Kernel", "Codes" and "SignedCodes"
constexpr Counts kAll = {kSlots, kCodesSlots, kSignedCodesSlots};

struct Domain {
  OrtCustomOpDomain* handle = nullptr;
  std::vector<Slot> slots;
};

const OrtApi* api = nullptr;

void Check(OrtStatus* status) {
  if (status == nullptr) return;
  const std::string message = api->GetErrorMessage(status);
  api->ReleaseStatus(status);
  throw std::runtime_error(message);
}

// Runs a function; what it throws becomes a status.
template <typename Function>
OrtStatus* Guarded(Function&& function) noexcept {
  try {
    function();
    return nullptr;
  } catch (const std::invalid_argument& error) {
    return api->CreateStatus(ORT_INVALID_ARGUMENT, error.what());
  } catch (const std::exception& error) {
    return api->CreateStatus(ORT_FAIL, error.what());
  } catch (...) {
    return api->CreateStatus(ORT_FAIL, "unknown error in an odtpack.native kernel");
  }
}

class OrtCall final : public Call {
 public:
  explicit OrtCall(OrtKernelContext* context) : context_(context) {
    size_t count = 0;
    Check(api->KernelContext_GetInputCount(context, &count));
    Require(count >= 1 && count <= kMaxTensors, "too many or no inputs");
    inputs_.resize(count);
    for (size_t i = 0; i < count; ++i) {
      const OrtValue* value = nullptr;
      Check(api->KernelContext_GetInput(context, i, &value));
      Require(value != nullptr, "an input is missing");
      OrtTensorTypeAndShapeInfo* info = nullptr;
      Check(api->GetTensorTypeAndShape(value, &info));
      const std::unique_ptr<OrtTensorTypeAndShapeInfo, void (*)(OrtTensorTypeAndShapeInfo*)> owner(
          info, api->ReleaseTensorTypeAndShapeInfo);
      ONNXTensorElementDataType type = ONNX_TENSOR_ELEMENT_DATA_TYPE_UNDEFINED;
      Check(api->GetTensorElementType(info, &type));
      inputs_[i].is_signed = type == ONNX_TENSOR_ELEMENT_DATA_TYPE_INT8;
      const bool bytes = inputs_[i].is_signed || type == ONNX_TENSOR_ELEMENT_DATA_TYPE_UINT8;
      Require(bytes || type == ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT, "an input has another type");
      size_t rank = 0;
      Check(api->GetDimensionsCount(info, &rank));
      inputs_[i].dims.resize(rank);
      Check(api->GetDimensions(info, inputs_[i].dims.data(), rank));
      size_t size = 0;
      Check(api->GetTensorShapeElementCount(info, &size));
      inputs_[i].size = static_cast<int64_t>(size);
      void* data = nullptr;
      Check(api->GetTensorMutableData(const_cast<OrtValue*>(value), &data));
      if (bytes) inputs_[i].bytes = static_cast<const uint8_t*>(data);
      else inputs_[i].data = static_cast<const float*>(data);
    }
    Check(api->KernelContext_GetOutputCount(context, &outputs_));
    Require(outputs_ >= 1 && outputs_ <= kMaxTensors, "too many or no outputs");
  }

  const std::vector<Input>& inputs() const override { return inputs_; }
  size_t output_count() const override { return outputs_; }

  float* Output(size_t index, const Dims& dims) override {
    OrtValue* value = nullptr;
    Check(api->KernelContext_GetOutput(context_, index, dims.data(), dims.size(), &value));
    Require(value != nullptr, "an output is missing");
    void* data = nullptr;
    Check(api->GetTensorMutableData(value, &data));
    return static_cast<float*>(data);
  }

  void Parallel(size_t count, const std::function<void(size_t)>& task) override {
    if (count <= 1) {
      if (count == 1) task(0);
      return;
    }
    const auto run = [](void* data, size_t index) {
      (*static_cast<const std::function<void(size_t)>*>(data))(index);
    };
    auto* data = const_cast<std::function<void(size_t)>*>(&task);
    Check(api->KernelContext_ParallelFor(context_, run, count, 0, data));
  }

 private:
  OrtKernelContext* context_;
  std::vector<Input> inputs_;
  size_t outputs_ = 0;
};

std::string TextAttribute(const OrtKernelInfo* info, const char* name) {
  size_t size = 0;
  Check(api->KernelInfoGetAttribute_string(info, name, nullptr, &size));
  Require(size >= 1 && size <= 64, "the attribute 'kernel' is not valid");
  std::string text(size, '\0');
  Check(api->KernelInfoGetAttribute_string(info, name, text.data(), &size));
  text.resize(std::strlen(text.c_str()));
  return text;
}

std::vector<int64_t> NumbersAttribute(const OrtKernelInfo* info, const char* name) {
  size_t size = 0;
  Check(api->KernelInfoGetAttributeArray_int64(info, name, nullptr, &size));
  Require(size <= kMaxProgram, "the attribute 'program' is too long");
  std::vector<int64_t> numbers(size);
  Check(api->KernelInfoGetAttributeArray_int64(info, name, numbers.data(), &size));
  return numbers;
}

OrtStatusPtr ORT_API_CALL Create(const OrtCustomOp*, const OrtApi*, const OrtKernelInfo* info,
                                 void** kernel) {
  return Guarded([&] {
    *kernel =
        MakeKernel(TextAttribute(info, "kernel"), NumbersAttribute(info, "program")).release();
  });
}

OrtStatusPtr ORT_API_CALL Compute(void* kernel, OrtKernelContext* context) {
  return Guarded([&] {
    OrtCall call(context);
    RunChecked(*static_cast<const Kernel*>(kernel), call);
  });
}

size_t ORT_API_CALL InPlace(int** inputs, int** outputs) {
  *inputs = new (std::nothrow) int[kInPlace];
  *outputs = new (std::nothrow) int[kInPlace];
  if (*inputs == nullptr || *outputs == nullptr) return 0;
  for (size_t i = 0; i < kInPlace; ++i) (*inputs)[i] = (*outputs)[i] = static_cast<int>(i);
  return kInPlace;
}

void ORT_API_CALL ReleaseInPlace(int* inputs, int* outputs) {
  delete[] inputs;
  delete[] outputs;
}

void Fill(Slot& slot, const char* kind, size_t number, uint32_t version) {
  static_cast<OrtCustomOp&>(slot) = OrtCustomOp{};
  std::snprintf(slot.name, sizeof slot.name, "%s%zu", kind, number);
  slot.version = version;
  slot.GetName = [](const OrtCustomOp* op) { return static_cast<const char*>(static_cast<const Slot*>(op)->name); };
  slot.GetExecutionProviderType = [](const OrtCustomOp*) -> const char* { return nullptr; };
  slot.GetInputTypeCount = slot.GetOutputTypeCount = [](const OrtCustomOp*) -> size_t { return 1; };
  slot.GetInputType = slot.GetOutputType = [](const OrtCustomOp*, size_t) {
    return ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT;
  };
  slot.GetInputCharacteristic = slot.GetOutputCharacteristic = [](const OrtCustomOp*, size_t) {
    return INPUT_OUTPUT_VARIADIC;
  };
  slot.GetInputMemoryType = [](const OrtCustomOp*, size_t) { return OrtMemTypeDefault; };
  slot.GetVariadicInputMinArity = slot.GetVariadicOutputMinArity = [](const OrtCustomOp*) { return 1; };
  slot.GetVariadicInputHomogeneity = slot.GetVariadicOutputHomogeneity =
      [](const OrtCustomOp*) { return 1; };
  slot.CreateKernelV2 = Create;
  slot.KernelComputeV2 = Compute;
  slot.KernelDestroy = [](void* kernel) { delete static_cast<Kernel*>(kernel); };
  slot.GetMayInplace = InPlace;
  slot.ReleaseMayInplace = ReleaseInPlace;
}

// An operator whose first input are codes, and others float32. A session keeps more for each input of
// its own than for one that is variadic.
void FillOfCodes(Slot& slot, const char* kind, size_t number, ONNXTensorElementDataType codes,
                 uint32_t version) {
  Fill(slot, kind, number, version);
  slot.codes = codes;
  slot.GetInputTypeCount = [](const OrtCustomOp*) -> size_t { return 2; };
  slot.GetInputType = [](const OrtCustomOp* op, size_t index) {
    return index == 0 ? static_cast<const Slot*>(op)->codes : ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT;
  };
  slot.GetInputCharacteristic = [](const OrtCustomOp*, size_t index) {
    return index == 0 ? INPUT_OUTPUT_REQUIRED : INPUT_OUTPUT_VARIADIC;
  };
  slot.GetOutputCharacteristic = [](const OrtCustomOp*, size_t) { return INPUT_OUTPUT_REQUIRED; };
  slot.GetMayInplace = [](int** inputs, int** outputs) -> size_t {
    *inputs = *outputs = nullptr;
    return 0;
  };
}

// How many operators of each kind the models of a session's package have, as who registers them says:
// a session keeps some kilobytes of each. All of them where nobody does, or says what cannot be.
Counts Wanted(const OrtSessionOptions* options) {
  std::array<char, 32> text{};
  int has = 0;
  Check(api->HasSessionConfigEntry(options, kCounts, &has));
  size_t size = text.size();
  if (has == 0) return kAll;
  if (OrtStatus* status = api->GetSessionConfigEntry(options, kCounts, text.data(), &size)) {
    api->ReleaseStatus(status);
    return kAll;
  }
  Counts found{};
  char rest = 0;
  const int read = std::sscanf(text.data(), "%zu %zu %zu%c", &found[0], &found[1], &found[2], &rest);
  for (size_t i = 0; i < found.size(); ++i) {
    if (read != 3 || found[i] > kAll[i]) return kAll;
  }
  return found;
}

// The domain with so many operators, made once. It lives as long as the process.
OrtCustomOpDomain* DomainOf(const Counts& counts, uint32_t version) {
  static std::mutex mutex;  // apps open sessions on several threads
  static auto& made = *new std::map<Counts, std::unique_ptr<Domain>>;
  const std::lock_guard<std::mutex> lock(mutex);
  std::unique_ptr<Domain>& domain = made[counts];
  if (domain == nullptr) {
    auto fresh = std::make_unique<Domain>();
    fresh->slots.resize(counts[0] + counts[1] + counts[2]);
    Check(api->CreateCustomOpDomain("odtpack.native", &fresh->handle));
    Slot* slot = fresh->slots.data();
    for (size_t i = 0; i < counts[0]; ++i) Fill(*slot++, "Kernel", i, version);
    for (size_t i = 0; i < counts[1]; ++i) {
      FillOfCodes(*slot++, "Codes", i, ONNX_TENSOR_ELEMENT_DATA_TYPE_UINT8, version);
    }
    for (size_t i = 0; i < counts[2]; ++i) {
      FillOfCodes(*slot++, "SignedCodes", i, ONNX_TENSOR_ELEMENT_DATA_TYPE_INT8, version);
    }
    for (Slot& each : fresh->slots) Check(api->CustomOpDomain_Add(fresh->handle, &each));
    domain = std::move(fresh);
  }
  return domain->handle;
}

}  // namespace
}  // namespace odtpack::native

#if defined(ODTPACK_KERNELS)  // inside of a kit's core, which calls it for each of its sessions
#define ODTPACK_EXPORT extern "C"
#define RegisterCustomOps odtpack_register_kernels
ODTPACK_EXPORT OrtStatus* ORT_API_CALL RegisterCustomOps(OrtSessionOptions*, const OrtApiBase*);
#elif defined(_WIN32)
#define ODTPACK_EXPORT extern "C" __declspec(dllexport)
#else
#define ODTPACK_EXPORT extern "C" __attribute__((visibility("default")))
#endif

// Adds the kernels to the options of a session. What it registers lives as long as the process.
ODTPACK_EXPORT OrtStatus* ORT_API_CALL RegisterCustomOps(OrtSessionOptions* options,
                                                         const OrtApiBase* base) {
  using namespace odtpack::native;
  // The release that runs may be older than the header that this was built with, or newer.
  unsigned major = 0, minor = 0;
  if (std::sscanf(base->GetVersionString(), "%u.%u", &major, &minor) != 2 || major != 1) minor = 0;
  const uint32_t version = std::min<uint32_t>(minor, ORT_API_VERSION);
  const OrtApi* found = base->GetApi(version < kOldestApi ? 1 : version);
  if (version < kOldestApi) {
    return found->CreateStatus(ORT_NOT_IMPLEMENTED,
                               "odtpack.native kernels need ONNX Runtime 1.17 or newer");
  }
  static std::once_flag once;  // apps open sessions on several threads
  std::call_once(once, [found] { api = found; });
  return Guarded([&] {
    Check(api->AddCustomOpDomain(options, DomainOf(Wanted(options), version)));
  });
}
