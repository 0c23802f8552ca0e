// The programs of the tests in one, since the kit's headers take long to compile: PROGRAM ARGUMENTS.
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <cstdlib>
#include <ctime>
#include <fstream>
#include <iomanip>
#include <iostream>
#include <iterator>
#include <limits>
#include <thread>

// What the programs include, before their namespaces.
#include "odtpack/benchmark.hpp"
#include "readers.hpp"

namespace benchmark {
#include "benchmark.cpp"
}
namespace calls {
#include "calls.cpp"
}
namespace conformance {
#include "conformance.cpp"
}
namespace decoder {
#include "decoder.cpp"
}
namespace fuzz {
#include "fuzz.cpp"
}
namespace hostile {
#include "hostile.cpp"
}
namespace measure {
#include "measure.cpp"
}
namespace saves {
#include "saves.cpp"
}
namespace steps {
#include "steps.cpp"
}
namespace trust {
#include "trust.cpp"
}

int main(int count, char** words) {
  const std::map<std::string, int (*)(int, char**)> programs = {
      {"benchmark", benchmark::main}, {"calls", calls::main},
      {"conformance", conformance::main}, {"decoder", decoder::main},
      {"fuzz", fuzz::main}, {"hostile", hostile::main}, {"measure", measure::main},
      {"saves", saves::main}, {"steps", steps::main}, {"trust", trust::main}};
  return count < 2 ? 2 : programs.at(words[1])(count - 1, words + 1);
}
