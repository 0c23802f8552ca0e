// A training as it was written for ONNX Runtime 1.19, whose names come from the kit by two lines.
//
//     odtpack-former PACKAGE NEWER_PACKAGE IMAGES LABELS FOLDER
#include <fstream>
#include <iostream>
#include <iterator>

#include "odtpack/odtpack.hpp"

namespace Ort {
using odtpack::CheckpointState;
using odtpack::TrainingSession;
}  // namespace Ort

template <class T>
std::vector<T> Read(const std::string& path) {
  std::ifstream stream(path, std::ios::binary);
  const std::string bytes((std::istreambuf_iterator<char>(stream)), {});
  std::vector<T> values(bytes.size() / sizeof(T));
  std::memcpy(values.data(), bytes.data(), bytes.size());
  return values;
}

int main(int, char** arguments) {
  const std::string package = arguments[1], newer = arguments[2], folder = arguments[5];
  try {
    Ort::Env env(ORT_LOGGING_LEVEL_WARNING, "training");
    Ort::SessionOptions options;
    options.SetIntraOpNumThreads(1);
    options.SetGraphOptimizationLevel(ORT_ENABLE_EXTENDED);
    auto state = Ort::CheckpointState::LoadCheckpoint(package + "/checkpoint");
    Ort::TrainingSession session(env, options, state, package + "/training_model.onnx",
                                 package + "/eval_model.onnx", package + "/optimizer_model.onnx");
    session.SetLearningRate(0.01f);
    auto images = Read<float>(folder + "/" + arguments[3] + ".bin");
    auto labels = Read<int64_t>(folder + "/" + arguments[4] + ".bin");
    const auto samples = static_cast<int64_t>(labels.size());
    const std::vector<int64_t> image_shape = {samples, 1, 8, 8}, label_shape = {samples};
    const auto memory = Ort::MemoryInfo::CreateCpu(OrtArenaAllocator, OrtMemTypeDefault);
    std::vector<Ort::Value> inputs;
    inputs.push_back(Ort::Value::CreateTensor<float>(memory, images.data(), images.size(),
                                                     image_shape.data(), image_shape.size()));
    inputs.push_back(Ort::Value::CreateTensor<int64_t>(memory, labels.data(), labels.size(),
                                                       label_shape.data(), label_shape.size()));
    std::cout.precision(17);
    for (int step = 0; step < 12; ++step) {
      std::vector<Ort::Value> outputs = session.TrainStep(inputs);
      session.OptimizerStep();
      session.LazyResetGrad();
      std::cout << static_cast<double>(*outputs.front().GetTensorData<float>()) << "\n";
    }
    if (session.InputNames(true).size() != 2 || session.OutputNames(false).at(0) != "loss")
      return 3;
    session.EvalStep(inputs);
    Ort::Value buffer = session.ToBuffer(true);
    session.FromBuffer(buffer);
    state.AddProperty("epoch", int64_t{3});
    state.AddProperty("share", 0.25f);
    state.AddProperty("note", std::string("one training"));
    if (std::get<int64_t>(state.GetProperty("epoch")) != 3) return 4;
    Ort::CheckpointState::SaveCheckpoint(state, folder + "/former.ckpt", true);

    const auto fresh = Ort::CheckpointState::LoadCheckpoint(newer + "/checkpoint");
    odtpack::CarryOver(Ort::CheckpointState::LoadCheckpoint(folder + "/former.ckpt"), fresh);
    Ort::CheckpointState::SaveCheckpoint(fresh, folder + "/carried.ckpt", true);
  } catch (const Ort::Exception& error) {
    std::cerr << error.what() << "\n";
    return 2;
  }
}
