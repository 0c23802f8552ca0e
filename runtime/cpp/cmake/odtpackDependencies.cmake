# What the headers need: odtpack_include_dirs and odtpack_libraries, and of the app ONNX Runtime and
# flatbuffers. Where one of those is missing, odtpack_NOT_FOUND_MESSAGE says so.
unset(odtpack_NOT_FOUND_MESSAGE)
option(ODTPACK_KERNELS "Build the native kernels into the kit (docs/native.md)" ON)

if(ONNXRUNTIME_LIBRARY)
  set(odtpack_libraries ${ONNXRUNTIME_LIBRARY})
  set(odtpack_include_dirs ${ONNXRUNTIME_INCLUDE_DIR})
else()
  find_package(onnxruntime QUIET)
  if(NOT onnxruntime_FOUND)
    string(CONCAT odtpack_NOT_FOUND_MESSAGE
           "ONNX Runtime was not found. Set onnxruntime_DIR to the folder of its "
           "onnxruntimeConfig.cmake, or ONNXRUNTIME_LIBRARY to the library and "
           "ONNXRUNTIME_INCLUDE_DIR to the folder of onnxruntime_cxx_api.h.")
    return()
  endif()
  set(odtpack_libraries onnxruntime::onnxruntime)
  set(odtpack_include_dirs)
  get_target_property(ONNXRUNTIME_INCLUDE_DIR onnxruntime::onnxruntime INTERFACE_INCLUDE_DIRECTORIES)
endif()

find_path(FLATBUFFERS_INCLUDE_DIR flatbuffers/flatbuffers.h)
if(NOT FLATBUFFERS_INCLUDE_DIR)
  string(CONCAT odtpack_NOT_FOUND_MESSAGE
         "flatbuffers was not found. Set FLATBUFFERS_INCLUDE_DIR to the folder that contains "
         "flatbuffers/flatbuffers.h.")
  return()
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

# The kit behind its C interface, for C and other languages: libodtpack, which links no ONNX Runtime. It
# is built when a target links it, or is asked for: cmake --build FOLDER --target odtpack-native
if(NOT TARGET odtpack-native)
  add_library(odtpack-native SHARED EXCLUDE_FROM_ALL ${odtpack_source}/odtpack.cpp)
  set_target_properties(odtpack-native PROPERTIES OUTPUT_NAME odtpack CXX_VISIBILITY_PRESET hidden
                                                  VISIBILITY_INLINES_HIDDEN ON)
  target_compile_features(odtpack-native PRIVATE cxx_std_17)
  target_include_directories(odtpack-native SYSTEM PRIVATE ${odtpack_include_dirs}
                                                   PUBLIC ${ONNXRUNTIME_INCLUDE_DIR})
  target_include_directories(
    odtpack-native PUBLIC $<TARGET_PROPERTY:odtpack::odtpack,INTERFACE_INCLUDE_DIRECTORIES>)
  target_compile_options(odtpack-native PRIVATE -Wall -Wextra)
  target_link_libraries(odtpack-native PRIVATE Threads::Threads $<TARGET_NAME_IF_EXISTS:odtpack-kernels>)
  if(NOT APPLE)
    target_link_options(odtpack-native PRIVATE -Wl,--no-undefined)
  endif()
endif()
