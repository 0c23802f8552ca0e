// ONNX Runtime's C API, as the framework for Apple's systems has it or as it lies elsewhere, and
// malloc_trim.
#if __has_include(<onnxruntime/onnxruntime_c_api.h>)
#include <onnxruntime/onnxruntime_c_api.h>
#else
#include <onnxruntime_c_api.h>
#endif
#if defined(__linux__)
#include <malloc.h>
#endif
