# The native kernels, compiled before (tests/kits/cpp_kit.py), in the place of their sources.
if(NOT TARGET odtpack-kernels AND NOT (DEFINED ODTPACK_KERNELS AND NOT ODTPACK_KERNELS))
  add_library(odtpack-kernels STATIC IMPORTED GLOBAL)
  set_target_properties(odtpack-kernels PROPERTIES IMPORTED_LOCATION ${ODTPACK_TEST_KERNELS}
                                                   INTERFACE_COMPILE_DEFINITIONS ODTPACK_KERNELS)
endif()
