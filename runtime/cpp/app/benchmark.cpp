// Measures this device and prints JSON for `odtpack devices import`.
//
//     odtpack-benchmark FOLDER THREADS [MEMORY_LIMIT_BYTES [LOAD_MINUTES]]
//
// FOLDER is on the storage to be measured; nothing stays in it. A limit of 0 is unknown.
// Ten minutes of load show how the device throttles.
#include "odtpack/benchmark.hpp"

#include <iostream>

int main(int count, char** arguments) {
  if (count < 3 || std::atoi(arguments[2]) < 1) {
    std::cerr << "usage: odtpack-benchmark FOLDER THREADS [MEMORY_LIMIT_BYTES [LOAD_MINUTES]]\n";
    return 2;
  }
  try {
    odtpack::DisableTelemetry();
    const Ort::Env env(ORT_LOGGING_LEVEL_ERROR, "benchmark");
    const size_t limit = count > 3 ? std::strtoull(arguments[3], nullptr, 10) : 0;
    const double minutes = count > 4 ? std::strtod(arguments[4], nullptr) : 0;
    std::cout << odtpack::Benchmark(env, arguments[1], std::atoi(arguments[2]), limit,
                                    size_t{64} << 20, minutes)
              << std::endl;
  } catch (const odtpack::Error& error) {
    std::cerr << "error: " << error.what() << "\n  code: " << error.Code() << "\n";
    return 2;
  }
  return 0;
}
