# What the headers need: odtpack_include_dirs and odtpack_libraries, and of the app ONNX Runtime and
# flatbuffers.
option(ODTPACK_KERNELS "Build the native kernels into the kit (docs/native.md)" ON)

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
  get_target_property(ONNXRUNTIME_INCLUDE_DIR onnxruntime::onnxruntime INTERFACE_INCLUDE_DIRECTORIES)
endif()

find_path(FLATBUFFERS_INCLUDE_DIR flatbuffers/flatbuffers.h)
if(NOT FLATBUFFERS_INCLUDE_DIR)
  message(FATAL_ERROR "odtpack: flatbuffers was not found. Set FLATBUFFERS_INCLUDE_DIR to the folder "
                      "that contains flatbuffers/flatbuffers.h.")
endif()
list(APPEND odtpack_include_dirs ${FLATBUFFERS_INCLUDE_DIR})

find_package(Threads REQUIRED)
list(APPEND odtpack_libraries Threads::Threads)

# Built with the app, as the headers are: an installed kit is the same for all.
if(ODTPACK_KERNELS)
  if(NOT TARGET odtpack-kernels)
    add_subdirectory(${odtpack_kernels} ${CMAKE_BINARY_DIR}/odtpack-kernels EXCLUDE_FROM_ALL)
  endif()
  list(APPEND odtpack_libraries odtpack-kernels)
endif()
