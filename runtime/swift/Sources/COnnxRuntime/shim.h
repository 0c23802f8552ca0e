// ONNX Runtime's C API, as the framework for Apple's systems has it or as it lies elsewhere.
#if __has_include(<onnxruntime/onnxruntime_c_api.h>)
#include <onnxruntime/onnxruntime_c_api.h>
#else
#include <onnxruntime_c_api.h>
#endif
