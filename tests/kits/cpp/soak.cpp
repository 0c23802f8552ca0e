// Trains for as many steps as months of an app have: saves with the save before kept, evaluates,
// and moves to another package of the same training, going on from its checkpoint. After each
// twentieth it prints what the process holds; benchmarks/soak.py compares.
//
//     odtpack-soak PACKAGE OTHER_PACKAGE SAMPLES LABELS CHECKPOINT STEPS SAVES EVALUATIONS UPDATES
//
// SAMPLES and LABELS are files of batches of 8, taken in turn. With UPDATES of 0 it only trains.
#include <unistd.h>

#include <iostream>
#include <memory>

#include "job.hpp"

namespace {

namespace fs = std::filesystem;
constexpr int64_t kBatch = 8;

template <class T>
std::vector<T> Read(const std::string& path) {
  const std::string bytes = job::ReadFile(path);
  std::vector<T> values(bytes.size() / sizeof(T));
  std::memcpy(values.data(), bytes.data(), bytes.size());
  return values;
}

/// True at each of `count` equal parts of the steps.
bool Due(int64_t step, int64_t steps, int64_t count) {
  return step * count / steps != (step - 1) * count / steps;
}

struct App {
  App(const Ort::Env& env, const std::string& folder, const std::string& checkpoint)
      : package(odtpack::Package::Open(folder)),
        state(odtpack::CheckpointState::LoadCheckpoint(
            checkpoint.empty() ? package.Path("checkpoint") : checkpoint)),
        session(env, package, state, 1) {}

  odtpack::Package package;
  odtpack::CheckpointState state;
  odtpack::TrainingSession session;
};

}  // namespace

int main(int count, char** arguments) {
  if (count != 10) return 2;
  odtpack::DisableTelemetry();
  const Ort::Env env(ORT_LOGGING_LEVEL_WARNING, "soak");
  const std::string packages[] = {arguments[1], arguments[2]}, saved = arguments[5];
  auto samples = Read<float>(arguments[3]);
  auto labels = Read<int64_t>(arguments[4]);
  int64_t numbers[4];
  for (int i = 0; i < 4; ++i) numbers[i] = std::atoll(arguments[6 + i]);
  const auto [steps, saves, evaluations, updates] = numbers;
  const auto batches = static_cast<int64_t>(labels.size()) / kBatch;
  const auto width = static_cast<int64_t>(samples.size() / labels.size());
  const auto memory = Ort::MemoryInfo::CreateCpu(OrtArenaAllocator, OrtMemTypeDefault);
  const int64_t shape[] = {kBatch, width};
  const auto batch = [&](int64_t step) {
    const int64_t at = step % batches * kBatch;
    std::vector<Ort::Value> values;
    values.push_back(Ort::Value::CreateTensor<float>(memory, samples.data() + at * width,
                                                     kBatch * width, shape, 2));
    values.push_back(
        Ort::Value::CreateTensor<int64_t>(memory, labels.data() + at, kBatch, shape, 1));
    return values;
  };
  try {
    auto app = std::make_unique<App>(env, packages[0], "");
    double loss = 0;
    int64_t moved = 0;
    for (int64_t step = 1; step <= steps; ++step) {
      auto inputs = batch(app->session.StepCount());
      app->session.StepOn(inputs);
      const bool update = Due(step, steps, updates);
      if (update || Due(step, steps, saves))
        odtpack::CheckpointState::SaveCheckpoint(app->state, saved, true, true);
      if (Due(step, steps, evaluations)) {
        loss = 0;
        for (int64_t i = 0; i < 20; ++i) {
          auto inputs = batch(i);
          loss += static_cast<double>(
                      *app->session.EvalStep(inputs).front().GetTensorData<float>()) / 20;
        }
      }
      if (update) {
        app.reset();
        app = std::make_unique<App>(env, packages[++moved % 2], saved);
      }
      if (updates > 0 && Due(step, steps, 20)) {
        std::ifstream statm("/proc/self/statm");
        int64_t pages = 0, resident = 0;
        statm >> pages >> resident;
        const auto entries = [](const std::string& folder) {
          return std::distance(fs::directory_iterator(folder), fs::directory_iterator());
        };
        std::cout << step << " " << resident * sysconf(_SC_PAGESIZE) << " "
                  << entries("/proc/self/fd") << " "
                  << entries(fs::path(saved).parent_path().string()) << " " << loss << std::endl;
      }
    }
    odtpack::CheckpointState::SaveCheckpoint(app->state, saved, true);
  } catch (const std::exception& error) {
    std::cerr << error.what() << std::endl;
    return 2;
  }
}
