// Trains a job (see job.hpp) on its first batch, first with StepOn and then as an app that looks
// at gradients does, in turn, and prints the losses and whether the step model is open after each.
// Then it exports, if the job says where to.
//
//     odtpack-steps JOB.json
#include <iostream>

#include "job.hpp"

int main(int count, char** arguments) try {
  if (count != 2) return 2;
  const auto json = job::ReadJson(arguments[1]);
  const auto folder = job::fs::absolute(arguments[1]).parent_path();
  odtpack::DisableTelemetry();
  const Ort::Env env(ORT_LOGGING_LEVEL_ERROR, "steps");
  job::Training training(env, json, folder, 1);
  const job::Batch batch(json.Get<job::Json::List>("steps").at(0)["inputs"], folder);
  auto& session = training.session;
  std::cout.precision(17);
  for (int step = 0; step < 8; ++step) {
    const bool apart = step / 2 % 2 == 1;
    const auto results = apart ? session.TrainStep(batch.values) : session.StepOn(batch.values);
    if (apart) {
      session.OptimizerStep();
      session.LazyResetGrad();
    }
    odtpack::TrainingSession moved(std::move(session));  // which changes nothing
    session = std::move(moved);
    std::cout << odtpack::detail::AsDouble(results[0]) << " " << session.HasStepModel() << "\n";
  }
  odtpack::CheckpointState::SaveCheckpoint(
      training.state, (folder / json.Get<std::string>("save")).string(), true);
  if (json["export"]) session.ExportModelForInferencing(json.Get<std::string>("export"), {});
  return 0;
} catch (const std::exception& error) {
  std::cerr << error.what() << std::endl;
  return 2;
}
