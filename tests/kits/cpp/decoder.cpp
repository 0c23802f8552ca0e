// Trains a job (see job.hpp) on its batches for "count" steps, and then does in one process what an
// app does with an adapter.
//
//     odtpack-decoder JOB.json
//
//     "tries": [ADAPTER, ...]    loaded at first; what becomes of each is printed in a line
//     "others": [CHECKPOINT, ...] states whose adapter is saved, loaded and generated with; what
//                                becomes of each is printed in a line
//     "load": ADAPTER            set the parameters first
//     "adapters": [ADAPTER, ...] saved after the steps
//     "save": CHECKPOINT         saved at last
//     "again": ADAPTER           loaded then; the first batch's loss is printed before and after
//     "prompt": [tokens]         what follows is printed, a line for each saved adapter, for the
//                                state, for one that is trained so only once it was added, and for
//                                no adapter: greedily, and then drawn. Before that, what becomes of
//                                an adapter without a name and of a token beyond the vocabulary
//     "packed": FOLDER           keeps the decoder's weights as ONNX Runtime packs them
//     "packed_at_once": BYTES    packs no more of them together
#include <iostream>

#include "job.hpp"

int main(int count, char** arguments) try {
  if (count != 2) return 2;
  using job::Json;
  const auto json = job::ReadJson(arguments[1]);
  const auto folder = job::fs::absolute(arguments[1]).parent_path();
  odtpack::DisableTelemetry();
  const Ort::Env env(ORT_LOGGING_LEVEL_ERROR, "decoder");
  job::Training training(env, json, folder, 1);
  const auto load = [&training](const Json& path) {
    odtpack::LoadAdapter(training.package, training.state, path.As<std::string>());
  };
  const auto attempt = [](const std::function<void()>& work) {
    try {
      work();
      std::cout << "accepted" << std::endl;
    } catch (const odtpack::Error& error) {
      std::cout << error.Code() << std::endl;
    }
  };
  for (const Json& path : json.Get<Json::List>("tries", {})) attempt([&] { load(path); });
  for (const Json& path : json.Get<Json::List>("saves", {}))
    attempt([&] {
      odtpack::SaveAdapter(training.package, training.state, path.As<std::string>());
    });
  for (const Json& path : json.Get<Json::List>("others", {})) {
    const auto other = odtpack::CheckpointState::LoadCheckpoint(path.As<std::string>());
    const std::string adapter = (folder / "of_others.onnx_adapter").string();
    attempt([&] { odtpack::SaveAdapter(training.package, other, adapter); });
    odtpack::SaveAdapter(training.package, training.state, adapter);
    attempt([&] { odtpack::LoadAdapter(training.package, other, adapter); });
    odtpack::Generator generator(env, training.package, 1);
    attempt([&] { generator.AddAdapter("other", other); });
  }
  if (json["load"]) load(json["load"]);
  const auto batch = [&json, &folder](size_t step) {
    const auto& steps = json.Get<Json::List>("steps");
    return job::Batch(steps[step % steps.size()]["inputs"], folder);
  };
  const auto train = [&json, &batch](odtpack::TrainingSession& session) {
    for (int64_t step = 0; step < json.Whole("count", 0); ++step)
      session.TrainBatch(batch(static_cast<size_t>(step)).values);
  };
  train(training.session);
  for (const Json& path : json.Get<Json::List>("adapters", {}))
    odtpack::SaveAdapter(training.package, training.state, path.As<std::string>());
  if (json["save"])
    odtpack::CheckpointState::SaveCheckpoint(training.state, json.Get<std::string>("save"));
  if (json["again"]) {
    const job::Batch first = batch(0);
    for (const bool loaded : {false, true}) {
      if (loaded) load(json["again"]);
      std::cout << odtpack::detail::AsDouble(training.session.EvalStep(first.values)[0]) << "\n";
    }
  }
  if (!json["prompt"]) return 0;
  auto choice = training.package.SessionOptions(env, 1);
  odtpack::detail::packed_at_once = json.Whole("packed_at_once", 32 << 20);
  if (json["packed"])
    choice.AddConfigEntry("odtpack.packed_weights", json.Get<std::string>("packed").c_str());
  odtpack::Generator generator(env, training.package, choice);
  std::vector<std::string> names;
  for (const Json& path : json.Get<Json::List>("adapters")) {
    names.push_back(path.As<std::string>());
    generator.AddAdapter(names.back(), names.back());
  }
  names.insert(names.end(), {"state", "late", ""});
  generator.AddAdapter("state", training.state);
  attempt([&] { generator.AddAdapter("", training.state); });  // it would be the name of none
  attempt([&] { generator.Logits({3, 128}); });
  auto late = odtpack::CheckpointState::LoadCheckpoint(training.package.Path("checkpoint"));
  generator.AddAdapter("late", late);
  odtpack::TrainingSession session(env, training.package, late, 1);
  session.SetLearningRate(training.session.GetLearningRate());
  train(session);
  for (const std::string& name : names) {
    for (const double temperature : {0.0, 1.5}) {
      odtpack::GenerateOptions options;
      options.adapter = name;
      options.max_tokens = 9;
      options.temperature = temperature;
      options.top_p = 0.95;
      options.seed = 7;
      size_t streamed = 0;
      const auto found = generator.Generate(json.Wholes("prompt"), options,
                                            [&streamed](int64_t) { return ++streamed < 9; });
      for (const int64_t token : found) std::cout << token << " ";
    }
    std::cout.precision(9);
    for (const float logit : generator.Logits(json.Wholes("prompt"), name))
      std::cout << logit << " ";
    std::cout << "\n";
  }
  return 0;
} catch (const odtpack::Error& error) {
  std::cerr << error.what() << "\n  code: " << error.Code() << std::endl;
  return 2;
} catch (const std::exception& error) {
  std::cerr << error.what() << std::endl;
  return 2;
}
