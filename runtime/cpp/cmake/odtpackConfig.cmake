include("${CMAKE_CURRENT_LIST_DIR}/odtpackTargets.cmake")
include("${CMAKE_CURRENT_LIST_DIR}/odtpackDependencies.cmake")
target_include_directories(odtpack::odtpack SYSTEM INTERFACE ${odtpack_include_dirs})
target_link_libraries(odtpack::odtpack INTERFACE ${odtpack_libraries})
