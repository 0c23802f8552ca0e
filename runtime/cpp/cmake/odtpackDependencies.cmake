# What the headers need of the app: odtpack_include_dirs and odtpack_libraries.
if(ONNXRUNTIME_LIBRARY)
  set(odtpack_libraries ${ONNXRUNTIME_LIBRARY})
  set(odtpack_include_dirs ${ONNXRUNTIME_INCLUDE_DIR})
else()
  find_package(onnxruntime QUIET)
  if(NOT onnxruntime_FOUND)
    message(FATAL_ERROR "odtpack: ONNX Runtime was not found. Set onnxruntime_DIR to the folder of its "
                        "onnxruntimeConfig.cmake, or ONNXRUNTIME_LIBRARY to the library and "
                        "ONNXRUNTIME_INCLUDE_DIR to the folder of onnxruntime_cxx_api.h.")
  endif()
  set(odtpack_libraries onnxruntime::onnxruntime)
  set(odtpack_include_dirs)
endif()

find_path(FLATBUFFERS_INCLUDE_DIR flatbuffers/flatbuffers.h)
if(NOT FLATBUFFERS_INCLUDE_DIR)
  message(FATAL_ERROR "odtpack: flatbuffers was not found. Set FLATBUFFERS_INCLUDE_DIR to the folder "
                      "that contains flatbuffers/flatbuffers.h.")
endif()
list(APPEND odtpack_include_dirs ${FLATBUFFERS_INCLUDE_DIR})

find_package(Threads REQUIRED)
list(APPEND odtpack_libraries Threads::Threads)
