// Digests and recovery, for the tests: "sha256 BYTES" of a pattern, "load PATH",
// "keep FROM TO EXTERNAL_ABOVE" which keeps the save before, and says on stderr that it begins.
#include <iostream>

#include "job.hpp"

int main(int count, char** words) {
  const std::vector<std::string> given(words + 1, words + count);
  using odtpack::detail::Hex;
  using odtpack::detail::Sha256Bytes;
  try {
    if (given.at(0) == "sha256") {
      std::string data(std::stoul(given.at(1)), '\0');
      for (size_t i = 0; i < data.size(); ++i) data[i] = static_cast<char>(i * 7 + i / 251);
      const bool fast = odtpack::detail::HasSha256Instructions();
      std::cout << Hex(Sha256Bytes(data.data(), data.size(), false)) << "\n"
                << Hex(Sha256Bytes(data.data(), data.size(), fast)) << "\n"
                << (fast ? "instructions" : "none") << "\n";
    } else if (given.at(0) == "load") {
      const auto state = odtpack::CheckpointState::LoadCheckpoint(given.at(1));
      std::cout << (state.IsChecked() ? "checked" : "unchecked") << "\n" << state.Recovered();
    } else {
      const auto state = odtpack::CheckpointState::LoadCheckpoint(given.at(1));
      std::cerr << "saving" << std::endl;
      odtpack::detail::WriteCheckpoint(given.at(2), *state.Internal(), true,
                                       std::stoul(given.at(3)), true);
    }
  } catch (const odtpack::Error& error) {
    std::cout << error.Code() << "\n" << error.what();
    return 2;
  }
  return 0;
}
