// Reads from standard input lines "checkpoint PATH" or "package PATH", tries what an app would do
// with that, and prints for each "accepted" or "refused CODE". Nothing else may happen, which the
// sanitizers see to.
#include <iostream>

#include "job.hpp"

namespace {

/// Open, load, and train a step on zeros, two samples wherever a size may vary.
void UsePackage(const Ort::Env& env, const std::string& path) {
  const auto package = odtpack::Package::Open(path);
  const auto state = odtpack::CheckpointState::LoadCheckpoint(package.Path("checkpoint"));
  odtpack::TrainingSession session(env, package, state, 1);
  std::vector<odtpack::detail::Tensor> tensors;
  std::vector<Ort::Value> values;
  for (const auto& json : package.Manifest().Get<odtpack::detail::Json::List>("inputs")) {
    const odtpack::detail::Spec spec(json);
    odtpack::detail::Shape shape = spec.shape;
    int64_t count = 1;
    for (int64_t& size : shape) count *= std::min<int64_t>(size = size < 0 ? 2 : size, 1 << 20);
    if (count > 1 << 20) throw odtpack::Error("input-shape", "too large for a test");
    tensors.push_back(odtpack::detail::Zeros(spec.type, shape));
    values.push_back(tensors.back().Value());
  }
  session.TrainStep(values);
  session.OptimizerStep();
  const auto proposed = session.ProposedSchedule(10);
  if (proposed) session.SetSchedule(proposed->first, proposed->second);
  session.FromBuffer(session.ToBuffer(true));
  try {
    odtpack::SelfCheck(env, package);
  } catch (const odtpack::Error&) {
  }
}

}  // namespace

int main(int, char**) {
  const Ort::Env env(ORT_LOGGING_LEVEL_FATAL, "hostile");
  for (std::string line; std::getline(std::cin, line);) {
    const size_t space = line.find(' ');
    const std::string path = line.substr(space + 1);
    try {
      if (line.substr(0, space) == "checkpoint") {
        const auto state = odtpack::CheckpointState::LoadCheckpoint(path);
        odtpack::CheckpointState::SaveCheckpoint(state, path + ".again", true);
      } else {
        UsePackage(env, path);
      }
      std::cout << "accepted" << std::endl;
    } catch (const odtpack::Error& error) {
      std::cout << "refused " << error.Code() << std::endl;
    }
  }
  return 0;
}
