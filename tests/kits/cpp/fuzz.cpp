// What the kit's readers do with any bytes: an odtpack::Error or a value, and nothing else, which
// the sanitizers see to. ODTPACK_FUZZ names the reader, ODTPACK_FUZZ_FOLDER the folder whose
// manifest.json a manifest becomes. Linked with libFuzzer it makes inputs; without, it reads the
// files of its arguments.
#include <cstdlib>
#include <fstream>
#include <iostream>

#include "odtpack/odtpack.hpp"

namespace {

using odtpack::detail::Json;
using odtpack::detail::JsonReader;

std::string Environment(const char* name) {
  const char* value = std::getenv(name);
  return value == nullptr ? "" : value;
}

/// Read every byte that a reader returned, so that one that is not there is noticed.
void Touch(const odtpack::detail::Tensor& tensor) {
  volatile uint8_t sum = 0;
  for (size_t i = 0; tensor.data && i < tensor.Bytes(); ++i) {
    sum = static_cast<uint8_t>(sum + tensor.data.get()[i]);
  }
}

void ReadCheckpoint(const std::string& bytes) {
  const auto state =
      odtpack::CheckpointState::LoadCheckpointFromBuffer({bytes.begin(), bytes.end()});
  for (const auto& item : state.Internal()->parameters) Touch(item.second.value);
  if (!state.Internal()->optimizer) return;
  for (const auto& moments : state.Internal()->optimizer->moments) {
    for (const auto& tensor : moments.second) Touch(tensor);
  }
}

void ReadManifest(const std::string& bytes) {
  static const std::string folder = Environment("ODTPACK_FUZZ_FOLDER");
  static const Ort::Env env(ORT_LOGGING_LEVEL_FATAL, "fuzz");
  std::ofstream(folder + "/manifest.json", std::ios::binary) << bytes;
  const auto package = odtpack::Package::Open(folder);
  package.SessionOptions(env);
  package.Path("training_model");
  package.OrtModel("training_model");
}

void ReadSchedule(const std::string& bytes) {
  const Json json = JsonReader(bytes).Read();
  const auto schedule = odtpack::Schedule::FromJson(json.Get<std::string>("kind"), json, 100);
  for (const int64_t step : {int64_t{0}, int64_t{7}, int64_t{1} << 53}) schedule.Factor(step);
  const std::string text = schedule.ToJson(json.Get<double>("initial_lr"));
  const Json again = JsonReader(text).Read();
  const auto same = odtpack::Schedule::FromJson(again.Get<std::string>("kind"), again, 0);
  if (same.ToJson(again.Get<double>("initial_lr")) != text) std::abort();
}

void ReadTemplate(const std::string& bytes) {
  const std::string made = odtpack::detail::WithOutputs(bytes, {"output"});
  if (odtpack::detail::WithOutputs(made, {"output"}) != made) std::abort();
}

void ReadInput(const std::string& bytes) {
  static const std::string reader = Environment("ODTPACK_FUZZ");
  try {
    if (reader == "checkpoint") return ReadCheckpoint(bytes);
    if (reader == "manifest") return ReadManifest(bytes);
    if (reader == "schedule") return ReadSchedule(bytes);
    if (reader == "template") return ReadTemplate(bytes);
    std::cerr << "ODTPACK_FUZZ names no reader" << std::endl;
    std::exit(2);
  } catch (const odtpack::Error&) {
  }
}

}  // namespace

#ifdef ODTPACK_LIBFUZZER
extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  ReadInput(std::string(reinterpret_cast<const char*>(data), size));
  return 0;
}
#else
int main(int count, char** arguments) {
  for (int i = 1; i < count; ++i) {
    std::ifstream stream(arguments[i], std::ios::binary);
    ReadInput({std::istreambuf_iterator<char>(stream), {}});
  }
  std::cout << count - 1 << " inputs" << std::endl;
  return 0;
}
#endif
