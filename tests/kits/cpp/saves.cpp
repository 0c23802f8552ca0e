// Saves for ever: every element of every parameter is the property "number", which counts up.
// Or exports the model of FOLDER/package with the parameters of FOLDER/1.ckpt as FOLDER/m.onnx.
//
//     odtpack-saves CHECKPOINT EXTERNAL_ABOVE keep|replace
//     odtpack-saves export FOLDER
#include <iostream>

#include "odtpack/odtpack.hpp"

int main(int count, char** arguments) {
  if (count == 3) {
    const std::string folder = arguments[2];
    odtpack::DisableTelemetry();
    const Ort::Env env(ORT_LOGGING_LEVEL_ERROR, "saves");
    const auto package = odtpack::Package::Open(folder + "/package");
    const auto state = odtpack::CheckpointState::LoadCheckpoint(folder + "/1.ckpt");
    odtpack::TrainingSession session(env, package, state, 1);
    try {
      session.ExportModelForInferencing(folder + "/m.onnx", {"output"});
    } catch (const odtpack::Error& error) {
      std::cerr << error.what();
      return 2;
    }
    std::cout << 1 << std::endl;
    return 0;
  }
  if (count != 4) return 2;
  const std::string path = arguments[1];
  const auto external = static_cast<size_t>(std::atoll(arguments[2]));
  const bool keeps = std::string(arguments[3]) == "keep";
  auto state = odtpack::CheckpointState::LoadCheckpoint(path);
  for (auto number = std::get<int64_t>(state.GetProperty("number")) + 1;; ++number) {
    state.AddProperty("number", number);
    for (const auto& item : state.Internal()->parameters) {
      auto* values = item.second.value.As<float>();
      std::fill_n(values, item.second.value.Count(), static_cast<float>(number));
    }
    odtpack::detail::WriteCheckpoint(path, *state.Internal(), true, external, keeps);
    std::cout << number << std::endl;
  }
}
