// Kills a process that saves without a pause, again and again, and looks at what is left. Every
// save writes its number into a property and into every element of every parameter: a file that
// is whole holds one number. Every second process keeps the save before.
//
//     odtpack-killed CHECKPOINT FILE KILLS EXTERNAL_ABOVE
//
// Prints how many kills there were, how many different saves survived one, and how many kills
// left a temporary file: those hit a save in the middle.
#include <sys/wait.h>

#include <iostream>
#include <thread>

#include "odtpack/checkpoint.hpp"

namespace {

using odtpack::CheckpointState;
namespace fs = std::filesystem;

void SaveForever(CheckpointState state, const std::string& file, int64_t number, size_t external,
                 int ready, odtpack::detail::Previous previous) {
  for (;; ++number) {
    state.AddProperty("number", number);
    for (const auto& item : state.Internal()->parameters) {
      auto* values = item.second.value.As<float>();
      std::fill_n(values, item.second.value.Count(), static_cast<float>(number));
    }
    odtpack::detail::WriteCheckpoint(file, *state.Internal(), true, external, previous);
    if (::write(ready, "s", 1) != 1) std::abort();
  }
}

int64_t NumberIn(const std::string& file) {
  const auto state = CheckpointState::LoadCheckpoint(file);
  const auto number = std::get<int64_t>(state.GetProperty("number"));
  for (const auto& item : state.Internal()->parameters) {
    const auto* values = item.second.value.As<float>();
    for (size_t i = 0; i < item.second.value.Count(); ++i) {
      if (values[i] != static_cast<float>(number))
        throw std::runtime_error("two saves in one file");
    }
  }
  return number;
}

}  // namespace

int main(int count, char** arguments) {
  if (count != 5) return 2;
  const auto state = CheckpointState::LoadCheckpoint(arguments[1]);
  const std::string file = arguments[2];
  const int kills = std::atoi(arguments[3]);
  const auto external = static_cast<size_t>(std::atoll(arguments[4]));
  std::mt19937 random(7);
  std::set<int64_t> survived;
  int torn = 0;
  int64_t number = 1;
  for (int kill = 0; kill < kills; ++kill) {
    int channel[2];
    if (::pipe(channel) != 0) return 3;
    const pid_t child = ::fork();
    using odtpack::detail::Previous;
    if (child == 0) {
      const auto previous = kill % 2 == 0 ? Previous::kReplaced : Previous::kNone;
      SaveForever(state, file, number, external, channel[1], previous);
    }
    char byte = 0;
    if (::read(channel[0], &byte, 1) != 1) return 3;  // one save is done: the next has begun
    std::this_thread::sleep_for(std::chrono::microseconds(random() % 4000));
    ::kill(child, SIGKILL);
    ::waitpid(child, nullptr, 0);
    ::close(channel[0]);
    ::close(channel[1]);
    const int64_t found = NumberIn(file);
    if (found < number) throw std::runtime_error("a save that was done is lost");
    survived.insert(found);
    number = found + 1;
    for (const auto& entry : fs::directory_iterator(fs::path(file).parent_path())) {
      if (entry.path().extension() == ".tmp") {
        ++torn;
        break;
      }
    }
  }
  std::cout << kills << " kills, " << survived.size() << " saves, " << torn << " torn\n";
}
