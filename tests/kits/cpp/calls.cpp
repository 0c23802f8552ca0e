// What an app may rely on in a session, on a job (see job.hpp); TIMES is how often it is tried.
//
//     odtpack-calls close JOB.json TIMES      the session is closed while another thread trains
//     odtpack-calls end JOB.json TIMES        a call that takes long is ended by Close
//     odtpack-calls threads JOB.json TIMES    two threads train at once
//     odtpack-calls closed JOB.json TIMES     every call after Close
//     odtpack-calls nan JOB.json TIMES        a batch with a NaN among others
//     odtpack-calls void JOB.json TIMES       steps on gradients of a training step that was skipped
//     odtpack-calls broken_off JOB.json TIMES the same of one that failed
//     odtpack-calls gradient JOB.json TIMES   parameters with which a gradient overflows
//     odtpack-calls fails JOB.json TIMES      a step that ONNX Runtime does not complete
//     odtpack-calls rates JOB.json TIMES      learning rates that are refused
//     odtpack-calls taken JOB.json TIMES      a parameter that was taken before there is a session
//     odtpack-calls reads JOB.json TIMES      the state is read while another thread trains
//     odtpack-calls shared JOB.json TIMES     a second session of a state takes its moments over
//     odtpack-calls misuse JOB.json TIMES     what is refused changes nothing
//     odtpack-calls moved JOB.json TIMES      the app moves its Ort::Env
//     odtpack-calls pending JOB.json TIMES    a reset in the middle of an accumulation
//     odtpack-calls buffer JOB.json TIMES     a buffer with a value beyond float16
//     odtpack-calls carry JOB.json TIMES      what is carried over, also to other/package
//     odtpack-calls free JOB.json TIMES       a state with which no session could be made: other/package
//                                             has another optimizer, third/package another layout
//     odtpack-calls broken JOB.json TIMES     an inference template that does not load, or went
#include <algorithm>
#include <chrono>
#include <limits>
#include <thread>

#include "readers.hpp"

namespace {

void Require(bool good, const std::string& what) {
  if (!good) throw std::runtime_error(what);
}

/// The code of the error that an action throws, empty if it throws none.
template <class Action>
std::string CodeOf(Action action) {
  try {
    action();
    return "";
  } catch (const odtpack::Error& error) {
    return error.Code();
  }
}

struct Job {
  explicit Job(const std::string& path)
      : json(job::ReadJson(path)),
        folder(job::fs::absolute(path).parent_path()),
        batch(json.Get<job::Json::List>("steps").at(0)["inputs"], folder) {}

  std::unique_ptr<job::Training> Start() const {
    return std::make_unique<job::Training>(env, json, folder, 1);
  }

  job::Json json;
  job::fs::path folder;
  job::Batch batch;
  Ort::Env env{ORT_LOGGING_LEVEL_FATAL, "calls"};
};

std::string DigestOf(const job::Training& training) {
  return readers::Digest(*training.state.Internal());
}
std::string WithGradients(const job::Training& training) {
  const auto& gradients = training.state.Internal()->gradients;
  return DigestOf(training) + readers::Sha256(gradients.data.get(), gradients.Bytes());
}

/// The digest after so many batches in one thread.
std::string After(const Job& job, int64_t batches) {
  static std::map<int64_t, std::string> known;
  if (const auto found = known.find(batches); found != known.end()) return found->second;
  const auto training = job.Start();
  for (int64_t i = 0; i < batches; ++i) training->session.TrainBatch(job.batch.values);
  return known[batches] = DigestOf(*training);
}

void Close(const Job& job, int times) {
  int64_t most = 0;
  for (int i = 0; i < times; ++i) {
    const auto training = job.Start();
    std::atomic<int64_t> batches{0};
    std::string code;
    std::thread thread([&] {
      code = CodeOf([&] {
        for (;;) {
          training->session.TrainBatch(job.batch.values);
          ++batches;
        }
      });
    });
    while (batches < i % 3) std::this_thread::yield();
    std::this_thread::sleep_for(std::chrono::microseconds(997 * i % 5000));
    training->session.Close();
    training->session.Close();
    thread.join();
    Require(code == "closed", "the thread that trains ended with '" + code + "'");
    Require(DigestOf(*training) == After(job, batches), "a step was cut off");
    most = std::max(most, batches.load());
  }
  Require(most > 0, "the session was closed before it trained");
}

/// The code with which an action ends in another thread if the session is closed as soon as it runs.
std::string CodeIfClosed(odtpack::TrainingSession& session, const std::function<void()>& action) {
  std::string code;
  std::atomic<bool> done{false};
  std::thread thread([&] {
    while ((code = CodeOf(action)) == "busy") {  // the other thread asks whether it runs
    }
    done = true;
  });
  while (!done && CodeOf([&] { session.SetOnNotFinite(odtpack::OnNotFinite::kSkip); }) != "busy") {
  }
  session.Close();
  thread.join();
  return code;
}

/// The batch of the job must take long. A step in the step model is waited for: it writes over
/// parameters and moments from its beginning on.
void End(const Job& job, int times) {
  int ended = 0;
  bool could_end = false;
  for (int i = 0; i < times; ++i) {
    const auto training = job.Start();
    auto& session = training->session;
    const bool whole = session.HasStepModel(), evaluates = i % 3 == 1, adds = i % 3 == 2 && !whole;
    if (adds) session.TrainStep(job.batch.values);  // the next one adds to its gradients
    const auto before = WithGradients(*training), state = DigestOf(*training);
    const auto code = CodeIfClosed(session, [&] {
      if (evaluates)
        session.EvalStep(job.batch.values);
      else if (adds)
        session.TrainStep(job.batch.values);
      else
        session.TrainBatch(job.batch.values);
    });
    const bool waits = whole && !evaluates;
    Require(code.empty() || (code == "closed" && !waits), "the call ended with '" + code + "'");
    const bool made = code.empty() && !evaluates && !adds;
    Require(DigestOf(*training) == (made ? After(job, 1) : state),
            "the state is neither that before nor after");
    Require(!adds || code.empty() || WithGradients(*training) == before, "the gradients changed");
    Require(session.StepCount() == made && session.SkippedSteps() == 0, "the counts");
    ended += code.empty() ? 0 : 1;
    could_end = could_end || !waits;
  }
  Require(ended > 0 || !could_end, "no call was ended");
}

/// The step model of the job fails once it has updated the running statistics.
void Fails(const Job& job, int times) {
  const auto training = job.Start();
  const auto statistics = [&training] {
    std::string text;
    for (const auto& spec : training->package.Parameters()) {
      const auto& value = training->state.Internal()->parameters.at(spec.name).value;
      if (spec.role == "state") text += readers::Sha256(value.data.get(), value.Bytes());
    }
    return text;
  };
  const auto before = statistics();
  Require(!before.empty(), "the package has no running statistics");
  for (int i = 0; i < times; ++i) {
    const auto code = CodeOf([&] { training->session.StepOn(job.batch.values); });
    Require(code == "run-failed", "the step ended with '" + code + "'");
    Require(statistics() == before, "running statistics are those of a step that was not made");
    Require(training->session.StepCount() == 0, "it was counted");
  }
}

void Threads(const Job& job, int times) {
  const auto training = job.Start();
  int64_t done[2] = {}, busy[2] = {};
  std::string other;
  std::mutex mutex;
  std::vector<std::thread> threads;
  for (int me : {0, 1}) {
    threads.emplace_back([&, me] {
      while (done[me] + busy[me] < 50 * times) {
        const auto code =
            CodeOf([&] { training->session.TrainBatch(job.batch.values); });
        ++(code.empty() ? done : busy)[me];
        if (code.empty() || code == "busy") continue;
        const std::lock_guard<std::mutex> lock(mutex);
        other = code;
      }
    });
  }
  for (auto& thread : threads) thread.join();
  Require(other.empty(), "a call ended with " + other);
  Require(busy[0] + busy[1] > 0, "no call met another one");
  Require(DigestOf(*training) == After(job, done[0] + done[1]), "two steps ran at once");
  // A save is a call as well.
  std::atomic<bool> stop{false};
  std::thread trains([&] {
    while (!stop) CodeOf([&] { training->session.StepOn(job.batch.values); });
  });
  std::set<std::string> codes;
  const std::string path = (job.folder / "busy.ckpt").string();
  for (int i = 0; i < 20 * times || codes.count("busy") == 0; ++i)
    codes.insert(CodeOf(
        [&] { odtpack::CheckpointState::SaveCheckpoint(training->state, path, true); }));
  stop = true;
  trains.join();
  codes.erase("");
  Require(codes == std::set<std::string>{"busy"}, "a save during a step");
}

void Closed(const Job& job) {
  const auto training = job.Start();
  auto& session = training->session;
  std::deque<std::vector<Ort::Value>> batches(3);
  for (auto& batch : batches) {
    for (const auto& tensor : job.batch.tensors) batch.push_back(tensor.Value());
  }
  int asked = 0;
  Require(session.Fit(batches, [&asked] { return ++asked < 3; }) == 2, "how far Fit went");
  Require(DigestOf(*training) == After(job, 2), "what Fit trained");
  const Ort::Value buffer = session.ToBuffer(true);
  session.Close();
  session.Close();
  const std::string path = (job.folder / "closed").string();
  const std::vector<std::function<void()>> calls = {
      [&] { session.TrainStep(job.batch.values); },
      [&] { session.StepOn(job.batch.values); },
      [&] { session.TrainBatch(job.batch.values); },
      [&] { session.EvalStep(job.batch.values); },
      [&] { session.OptimizerStep(); },
      [&] { session.LazyResetGrad(); },
      [&] { session.SetLearningRate(0.1f); },
      [&] { session.RegisterLinearLRScheduler(1, 10, 0.1); },
      [&] { session.SchedulerStep(); },
      [&] { session.RestoreSchedule(); },
      [&] { session.SetOnNotFinite(odtpack::OnNotFinite::kStop); },
      [&] { session.ToBuffer(true); },
      [&] { session.FromBuffer(buffer); },
      [&] { session.ExportModelForInferencing(path, {"output"}); },
      [&] { session.InferenceSession(job.env, {"output"}); }};
  for (size_t i = 0; i < calls.size(); ++i)
    Require(CodeOf(calls[i]) == "closed", "call " + std::to_string(i) + " after Close");
  Require(session.StepCount() == 2 && session.GetLearningRate() > 0 && session.SkippedSteps() == 0 &&
              session.InputNames().size() == job.batch.values.size(),
          "numbers and names after Close");
  odtpack::CheckpointState::SaveCheckpoint(training->state, path, true);
  Require(readers::Digest(odtpack::detail::ReadCheckpoint(path)) == DigestOf(*training), "the save");
}

void Closed(const Job& job, int times) {
  for (int i = 0; i < times; ++i) Closed(job);
}

/// The batch with a NaN as its first number.
job::Batch Bad(const Job& job) {
  job::Batch batch(job.json.Get<job::Json::List>("steps").at(0)["inputs"], job.folder);
  for (const auto& tensor : batch.tensors) {
    if (tensor.type != odtpack::detail::kFloat) continue;
    *tensor.As<float>() = std::numeric_limits<float>::quiet_NaN();
    return batch;
  }
  throw std::runtime_error("no input can hold a NaN");
}

void Nan(const Job& job, int times) {
  const job::Batch bad = Bad(job);
  const auto training = job.Start(), plain = job.Start();
  auto& session = training->session;
  const int64_t steps = session.AccumulationSteps();
  for (int i = 0; i < times; ++i) {
    // The last of the batches of a step at first, then the one before, and so on.
    for (int64_t k = 0; k < steps; ++k) {
      const bool odd = steps > 1 && k == (steps - 1 - i % steps + steps) % steps;
      const auto before = WithGradients(*training);
      const double loss = session.TrainBatch(odd ? bad.values : job.batch.values);
      Require(std::isnan(loss) == odd, "the loss of a batch");
      if (odd && k > 0 && k + 1 < steps)
        Require(WithGradients(*training) == before, "a bad batch changed something");
      if (!odd) plain->session.TrainStep(job.batch.values);
    }
    plain->session.OptimizerStep();
    plain->session.LazyResetGrad();
    Require(DigestOf(*training) == DigestOf(*plain), "a step without the bad batch is another one");
    const auto before = DigestOf(*training);
    for (int64_t k = 0; k < steps; ++k)  // all batches of a step
      Require(std::isnan(session.TrainBatch(bad.values)), "the loss of a bad batch");
    Require(DigestOf(*training) == before, "bad batches changed something");
    const int64_t skipped = (steps > 1 ? 1 + steps : 1) * (i + 1);
    Require(session.SkippedSteps() == skipped && session.StepCount() == i + 1, "the counts");
    Require(session.LastNotFinite()->code == "loss-not-finite" &&
                session.LastNotFinite()->step == i + 2,
            "the reason");
  }
  if (steps > 1) {
    const int64_t made = session.StepCount();
    session.TrainBatch(job.batch.values);
    training->state.Internal()->spoiled = true;  // as another session does
    for (int64_t k = 1; k < steps; ++k) session.TrainBatch(job.batch.values);
    Require(session.StepCount() == made, "a batch whose gradients are spoilt counts");
    session.LazyResetGrad();
  }
  session.SetOnNotFinite(odtpack::OnNotFinite::kStop);
  const auto before = DigestOf(*training);
  const auto stopped = CodeOf(
      [&] { steps > 1 ? session.TrainStep(bad.values) : session.StepOn(bad.values); });
  Require(stopped == "loss-not-finite", "the policy to stop");
  Require(DigestOf(*training) == before, "a step that stopped changed something");
  if (session.HasStepModel())  // it is no training step: none of these was made, good or bad
    Require(CodeOf([&] { session.TrainStep(bad.values); }) == "loss-not-finite", "a training step");
  session.OptimizerStep();
  Require(DigestOf(*training) == before, "an optimizer step on nothing");
}

/// Training steps that came to nothing, and optimizer steps after them. `act` makes one with a session.
void AfterVoid(const Job& job, const std::function<void(odtpack::TrainingSession&)>& act) {
  const auto training = job.Start(), plain = job.Start();
  auto& session = training->session;
  const auto both = [&](const std::function<void(odtpack::TrainingSession&)>& each) {
    for (auto* one : {&session, &plain->session}) each(*one);
  };
  both([&](auto& one) {
    one.TrainStep(job.batch.values);
    one.OptimizerStep();
    one.LazyResetGrad();
  });
  const auto before = DigestOf(*training);
  const auto nothing = [&](odtpack::TrainingSession& steps) {
    steps.OptimizerStep();
    Require(DigestOf(*training) == before && steps.StepCount() == 1, "a step on nothing");
    const auto& gradients = training->state.Internal()->gradients;
    Require(std::all_of(gradients.data.get(), gradients.data.get() + gradients.Bytes(),
                        [](uint8_t byte) { return byte == 0; }), "something is left of the step");
  };
  for (int resets = 0; resets < 3; ++resets) {
    act(session);
    for (int i = 0; i < resets; ++i) session.LazyResetGrad();
    nothing(session);
  }
  // One among others leaves what they accumulated.
  both([&](auto& one) { one.TrainStep(job.batch.values); });
  const auto accumulated = WithGradients(*training);
  act(session);
  Require(WithGradients(*training) == accumulated, "what was accumulated changed");
  both([&](auto& one) {
    one.TrainStep(job.batch.values);
    one.OptimizerStep();
    one.LazyResetGrad();
  });
  Require(DigestOf(*training) == DigestOf(*plain), "a step without the one that came to nothing");
  // Sessions of a state have its gradients together.
  odtpack::TrainingSession second(job.env, training->package, training->state, 1);
  const auto then = DigestOf(*training);
  act(session);
  second.OptimizerStep();
  second.LazyResetGrad();
  second.OptimizerStep();
  Require(DigestOf(*training) == then && second.StepCount() == 2, "a step of the other session");
  session.TrainStep(job.batch.values);
  act(second);
  second.OptimizerStep();
  Require(DigestOf(*training) == then, "the other session's step replaces what was accumulated");
  for (auto* one : {&session, &plain->session}) one->TrainStep(job.batch.values);
  second.OptimizerStep();
  plain->session.OptimizerStep();
  Require(DigestOf(*training) == DigestOf(*plain), "the next step begins anew");
}

void Void(const Job& job, int) {
  const job::Batch bad = Bad(job);
  AfterVoid(job, [&bad](auto& session) {
    const int64_t skipped = session.SkippedSteps();
    session.TrainStep(bad.values);
    Require(session.SkippedSteps() == skipped + 1, "it is not skipped");
  });
}

/// The first input of the job is of indices, of which a model takes no large ones.
void BrokenOff(const Job& job, int) {
  const job::Batch bad(job.json.Get<job::Json::List>("steps").at(0)["inputs"], job.folder);
  bad.tensors.front().As<int64_t>()[0] = 1'000'000;
  AfterVoid(job, [&bad](auto& session) {
    Require(CodeOf([&] { session.TrainStep(bad.values); }) == "run-failed", "it did not fail");
  });
}

/// Of two layers, `fc1.weight` tiny and `fc2.weight` huge: the loss is finite, and the gradient of the
/// first, the product of the second and the input, is not.
void Gradient(const Job& job, int) {
  const auto training = job.Start();
  auto& session = training->session;
  for (const auto& tensor : job.batch.tensors) {
    if (tensor.type != odtpack::detail::kFloat) continue;
    for (size_t i = 0; i < tensor.Count(); ++i) tensor.As<float>()[i] = 1e25f;
  }
  const auto& parameters = training->state.Internal()->parameters;
  const auto fill = [&](const char* name, float value) {
    const auto& tensor = parameters.at(name).value;
    for (size_t i = 0; i < tensor.Count(); ++i)
      tensor.As<float>()[i] = i * 7 % 3 == 0 ? value : value / 2;
  };
  const auto fill_all = [&fill] {
    fill("fc1.weight", 1e-30f);
    fill("fc1.bias", 0);  // its gradient is finite, and after a step with it the loss is not
    fill("fc2.weight", 1e25f);
  };
  fill_all();
  const auto before = DigestOf(*training);
  const bool whole = session.HasStepModel();
  const double loss = session.TrainBatch(job.batch.values);
  Require(std::isfinite(loss), "the loss is not finite");
  Require(session.LastNotFinite() && session.LastNotFinite()->code == "gradient-not-finite",
          "the reason");
  const auto& names = session.LastNotFinite()->parameters;
  Require(std::count(names.begin(), names.end(), "fc1.weight") == 1, "the names");
  Require(std::count(names.begin(), names.end(), "fc2.bias") == 0, "the names of others");
  std::cout << session.SkippedSteps() << ' ' << session.StepCount() << ' '
            << session.LastNotFinite()->code << ' ' << session.LastNotFinite()->step;
  for (const auto& name : names) std::cout << ' ' << name;
  std::cout << std::endl;
  if (whole) {
    Require(session.StepCount() == 1 && session.SkippedSteps() == 1, "the step counts");
    Require(DigestOf(*training) != before, "the others were not updated");
    const auto& kept = parameters.at("fc1.weight").value;
    Require(kept.As<float>()[0] == 1e-30f, "a parameter was updated by what is not finite");
  } else {
    Require(session.StepCount() == 0 && session.SkippedSteps() == 1, "the step counts");
    Require(DigestOf(*training) == before, "a bad step changed something");
  }
  session.SetOnNotFinite(odtpack::OnNotFinite::kStop);
  session.RegisterLinearLRScheduler(0, 4, 1);
  fill_all();
  Require(CodeOf([&] { session.TrainBatch(job.batch.values); }) == "gradient-not-finite", "stop");
  Require(session.StepCount() == (whole ? 2 : 0), "the step count after a stop");
  Require(session.GetLearningRate() == (whole ? 0.5f : 1.0f), "the rate after a stop");
}

void Rates(const Job& job, int) {
  const auto training = job.Start();
  auto& session = training->session;
  const float rate = session.GetLearningRate();
  for (const float bad : {-1.0f, -1e-30f, std::numeric_limits<float>::infinity(),
                          std::numeric_limits<float>::quiet_NaN()}) {
    Require(CodeOf([&] { session.SetLearningRate(bad); }) == "bad-learning-rate", "a rate");
    Require(CodeOf([&] { session.RegisterLinearLRScheduler(1, 9, bad); }) == "bad-learning-rate",
            "a schedule's rate");
  }
  for (const double bad : {1e39, -1e300})
    Require(CodeOf([&] { session.RegisterLinearLRScheduler(1, 9, bad); }) == "bad-learning-rate",
            "a rate that is not a float32");
  // The groups of the job's package multiply by 10.
  Require(CodeOf([&] { session.SetLearningRate(1e38f); }) == "bad-learning-rate", "a scaled rate");
  Require(session.GetLearningRate() == rate, "a refused rate was set");
  Require(CodeOf([&] { session.SchedulerStep(); }) == "bad-schedule", "a refused schedule was set");
  session.SetLearningRate(0);
  const auto before = DigestOf(*training);
  Require(session.GetLearningRate() == 0 && !before.empty(), "a rate of 0");
}

void Taken(const Job& job, int) {
  const auto package =
      odtpack::Package::Open((job.folder / job.json.Get<std::string>("package")).string());
  auto state = odtpack::CheckpointState::LoadCheckpoint(package.Path("checkpoint"));
  const auto& parameters = state.Internal()->parameters;
  const auto name = std::find_if(parameters.begin(), parameters.end(), [](const auto& each) {
                      return each.second.trainable;
                    })->first;
  const Ort::Value before = state.GetParameter(name);
  const float first = *before.GetTensorData<float>();
  odtpack::TrainingSession session(job.env, package, state, 1);
  session.SetLearningRate(0.01f);
  const Ort::Value now = state.GetParameter(name);
  session.TrainBatch(job.batch.values);
  Require(*before.GetTensorData<float>() == first, "what was taken before is of then");
  Require(*now.GetTensorData<float>() != first, "what was taken after shows the training");
  Require(parameters.at(name).value.As<float>() == now.GetTensorData<float>(), "it is a copy");
}

void Reads(const Job& job, int times) {
  const auto training = job.Start();
  auto& state = training->state;
  state.AddProperty("app", std::string(40, 'a'));
  std::atomic<bool> stop{false};
  std::thread trains([&] {
    while (!stop) CodeOf([&] { training->session.StepOn(job.batch.values); });
  });
  const std::string name = training->package.Parameters().front().name;
  const std::vector<std::function<void()>> calls = {
      [&] { Require(std::get<std::string>(state.GetProperty("app")).size() == 40, "it reads"); },
      [&] { Require(state.HasProperty("app"), "it is there"); },
      [&] { Require(!state.IsNominal(), "it has values"); },
      [&] { state.GetParameter(name); }};
  std::vector<std::set<std::string>> codes(calls.size());
  for (size_t i = 0; i < calls.size(); ++i) {
    for (int k = 0; k < times || codes[i].count("busy") == 0; ++k)
      codes[i].insert(CodeOf(calls[i]));
    codes[i].erase("");
  }
  stop = true;
  trains.join();
  for (const auto& each : codes)
    Require(each == std::set<std::string>{"busy"}, "a call that reads during a step");
}

void Shared(const Job& job, int) {
  const auto training = job.Start();
  auto& first = training->session;
  first.TrainStep(job.batch.values);
  const auto before = WithGradients(*training);
  odtpack::TrainingSession second(job.env, training->package, training->state, 1);
  Require(WithGradients(*training) == before, "a second session changed the state");
  const std::vector<std::function<void()>> calls = {
      [&] { first.StepOn(job.batch.values); }, [&] { first.TrainBatch(job.batch.values); },
      [&] { first.OptimizerStep(); }};
  for (const auto& call : calls)
    Require(CodeOf(call) == "optimizer-mismatch", "a step without moments");
  first.SetLearningRate(0.5f);
  first.EvalStep(job.batch.values);
  Require(WithGradients(*training) == before, "a session without moments changed the state");
  second.OptimizerStep();
  Require(first.StepCount() == 0 && second.StepCount() == 1, "the step counts");
  second.LazyResetGrad();
  const auto once = job.Start();
  once->session.TrainStep(job.batch.values);
  once->session.OptimizerStep();
  Require(DigestOf(*training) == DigestOf(*once), "a step on what the first accumulated");
}

void Misuse(const Job& job, int) {
  using odtpack::CheckpointState;
  using odtpack::Schedule;
  const auto training = job.Start();
  auto& [package, state, session, scheduled] = *training;
  const std::vector<Ort::Value> none;
  Require(CodeOf([&session = session, &none] { session.TrainStep(none); }) == "input-count" &&
              session.HasStepModel(), "a wrong batch closes the step model");
  std::vector<Ort::Value> far;
  for (const auto& tensor : job.batch.tensors) {
    const char* place = far.empty() ? "Cpu" : "Cuda";
    const Ort::MemoryInfo memory(place, OrtDeviceAllocator, 0, OrtMemTypeDefault);
    far.push_back(Ort::Value::CreateTensor(memory, tensor.data.get(), tensor.Bytes(),
                                           tensor.shape.data(), tensor.shape.size(), tensor.type));
  }
  Require(CodeOf([&session = session, &far] { session.StepOn(far); }) == "input-type",
          "labels in the memory of a device");
  const int64_t late = int64_t{1} << 53;
  for (const Schedule& bad : {Schedule{"linear", 0, late, 0, 0, 0.1, {}},
                              Schedule{"constant", late, 0, 0, 0, 0.1, {}},
                              Schedule{"step", 0, 0, late, 0, 0.1, {}},
                              Schedule{"multistep", 0, 0, 0, 0, 0.1, {1, late}}})
    Require(CodeOf([&bad] { bad.Check(); }) == "bad-schedule", "a schedule is not restored");
  Require(CodeOf([] { Schedule{"step"}.Factor(3); }) == "bad-schedule", "a step without a period");
  Require(CodeOf([&, &own = package] { own.SessionOptions(job.env, 257); }) == "bad-argument",
          "more threads than a manifest may ask for");
  try {
    odtpack::Package::Open("");
    Require(false, "the working folder is a package");
  } catch (const odtpack::Error& error) {
    Require(std::string(error.what()).rfind("./manifest.json", 0) == 0, error.what());
  }
  Require(CodeOf([&state = state] { state.AddProperty("odtpack.optimizer", std::string("a")); }) ==
              "property-type", "a reserved name");
  std::vector<Ort::Value> parts;
  parts.push_back(session.ToBuffer(true));
  const std::string name = package.Parameters().front().name;
  for (const Ort::Value& bad : {Ort::Value(nullptr), Ort::Value::CreateSequence(parts)})
    Require(CodeOf([&, &own = session] { own.FromBuffer(bad); }) == "buffer-type" &&
                CodeOf([&, &own = state] { own.UpdateParameter(name, bad); }) == "parameter-type",
            "a value that is no tensor");
  session.RegisterLinearLRScheduler(1, late - 1, 0.1);
  const auto followed = std::get<std::string>(state.GetProperty("odtpack.schedule"));
  for (const char* more : {"\"power\": 2, ", "\"floor\": 0.5, ", "\"period\": null, "}) {
    state.AddProperty("odtpack.schedule", "{" + (more + followed.substr(1)));
    Require(CodeOf([&own = session] { own.RestoreSchedule(); }) == "bad-schedule",
            "a setting that the schedule does not have");
  }
  state.AddProperty("odtpack.schedule", followed);
  Require(session.RestoreSchedule(), "a schedule");
  const std::string path = (job.folder / "saved").string(), cut = path + std::string("\0x", 2);
  for (const bool external : {false, true}) {
    Require(CodeOf([&, &own = state] {
              odtpack::detail::WriteCheckpoint(cut, *own.Internal(), true, external ? 0 : SIZE_MAX);
            }) == "file-not-written" && !odtpack::detail::fs::exists(path), "a path with a zero");
  }
  odtpack::detail::WriteCheckpoint(path, *state.Internal(), true, 0);
  Require(CodeOf([&] { CheckpointState::LoadCheckpoint(cut); }) == "checkpoint-unreadable",
          "a path with a zero is read");
  auto loaded = CheckpointState::LoadCheckpoint(path);
  odtpack::TrainingSession bare(job.env, package.SessionOptions(job.env), loaded,
                                package.Path("training_model"));
  Require(CodeOf([&] { bare.RestoreSchedule(); }) == "no-optimizer-model", "there is no optimizer");
  bare.Close();
  std::weak_ptr<odtpack::detail::State> held = std::exchange(loaded, state).Internal();
  Require(held.expired(), "a closed session keeps its state");
  odtpack::detail::fs::remove(path + ".data");
  std::string said;
  try {
    CheckpointState::LoadCheckpoint(path);
  } catch (const odtpack::Error& error) {
    said = error.what();
  }
  Require(said.find(path + ".data") != said.npos, "the missing file is not named: " + said);
  auto options = package.SessionOptions(job.env);
  options.EnableProfiling((job.folder / "profile").c_str());
  const auto profiles = [&job] {
    size_t count = 0;
    for (const auto& entry : odtpack::detail::fs::directory_iterator(job.folder))
      count += entry.path().filename().string().rfind("profile", 0) == 0;
    return count;
  };
  odtpack::TrainingSession profiled(job.env, options, package,
                                    CheckpointState::LoadCheckpoint(package.Path("checkpoint")));
  const size_t before = profiles();
  profiled.InferenceSession(job.env, {"output"});
  Require(profiles() > before, "a predictor has other options than its session");
}

void Moved(const Job& job, int) {
  const auto package = odtpack::Package::Open((job.folder / "package").string());
  Ort::Env first(ORT_LOGGING_LEVEL_FATAL, "moved");
  odtpack::TrainingSession session(
      first, package, odtpack::CheckpointState::LoadCheckpoint(package.Path("checkpoint")));
  const Ort::Env second(std::move(first));
  session.StepOn(job.batch.values);
  session.TrainStep(job.batch.values);  // which opens models
}

void Pending(const Job& job, int) {
  const auto training = job.Start();
  auto& session = training->session;
  const int64_t steps = session.AccumulationSteps();
  for (const bool whole : {false, true}) {
    const int64_t before = session.StepCount() + whole;
    session.TrainBatch(job.batch.values);
    const auto digest = DigestOf(*training);
    Require(CodeOf([&] { session.StepOn(job.batch.values); }) == "step-of-several" &&
                DigestOf(*training) == digest,
            "a step of one batch of several");
    if (whole) session.OptimizerStep();
    session.LazyResetGrad();
    for (int64_t i = 1; i < steps; ++i) session.TrainBatch(job.batch.values);
    Require(steps > 1 && session.StepCount() == before, "batches before a reset count");
    session.TrainBatch(job.batch.values);
    Require(session.StepCount() == before + 1, "a whole step");
  }
}

void Buffer(const Job& job, int) {
  const auto training = job.Start();
  auto buffer = training->session.ToBuffer(false);
  size_t end = 0, last = 0;
  for (const auto& spec : training->package.Parameters()) {
    end += training->state.Internal()->parameters.at(spec.name).value.Count();
    if (spec.type == odtpack::detail::kHalf) last = end - 1;
  }
  auto* values = buffer.GetTensorMutableData<float>();
  values[0] += 1;
  values[last] = 1e6f;
  const auto before = DigestOf(*training);
  Require(last > 0 && CodeOf([&] { training->session.FromBuffer(buffer, false); }) ==
                          "value-out-of-range", "a value beyond float16");
  Require(DigestOf(*training) == before, "a refused buffer changed something");
}

void Carry(const Job& job, int) {
  using odtpack::CheckpointState;
  const auto training = job.Start();
  training->session.TrainBatch(job.batch.values);
  training->state.AddProperty("app", int64_t{3});
  const auto other = odtpack::Package::Open((job.folder / "other" / "package").string());
  const auto load = [](const odtpack::Package& package) {
    return CheckpointState::LoadCheckpoint(package.Path("checkpoint"));
  };
  for (const bool optimizer : {false, true}) {
    auto fresh = load(other);
    const auto& parameters = fresh.Internal()->parameters;
    const float first = *parameters.begin()->second.value.As<float>();
    odtpack::CarryOver(training->state, fresh, std::vector<std::string>(), optimizer);
    Require(*parameters.begin()->second.value.As<float>() == first && fresh.HasProperty("app") &&
                (fresh.Internal()->optimizer != nullptr) == optimizer, "an empty list");
    const auto code = CodeOf([&] { odtpack::TrainingSession(job.env, other, fresh); });
    Require(code == (optimizer ? "optimizer-mismatch" : ""), "moments of another optimizer");
  }
  auto fresh = load(training->package);
  odtpack::CarryOver(training->state, fresh);
  Require(readers::Digest(*fresh.Internal()) == DigestOf(*training), "all that was trained");
  const auto before = DigestOf(*training);
  Require(CodeOf([&] { odtpack::CarryOver(load(training->package), training->state); }) == "busy" &&
              DigestOf(*training) == before, "a state that a session trains");
}

void Free(const Job& job, int) {
  using odtpack::CheckpointState;
  const auto training = job.Start();
  training->session.TrainBatch(job.batch.values);
  const std::string path = (job.folder / "trained").string();
  CheckpointState::SaveCheckpoint(training->state, path, true);
  const auto open = [&job](const char* name) {
    return odtpack::Package::Open((job.folder / name / "package").string());
  };
  const auto other = open("other"), third = open("third");
  const auto state = CheckpointState::LoadCheckpoint(path);
  const auto& own = *state.Internal();
  const auto kept = own.optimizer;
  const auto first = [&own] { return own.parameters.begin()->second.value.data.get(); };
  const auto* place = first();
  const auto before = readers::Digest(own);
  Require(CodeOf([&] { odtpack::TrainingSession(job.env, other, state); }) == "optimizer-mismatch",
          "another optimizer");
  Require(!own.flat.data && !own.gradients.data && own.optimizer == kept && first() == place &&
              readers::Digest(own) == before, "the state is not as it was");
  odtpack::TrainingSession session(job.env, third, state, 1);
  Require(session.StepCount() == 1, "what was trained");
  odtpack::TrainingSession same(job.env, third, CheckpointState::LoadCheckpoint(path), 1);
  Require(session.TrainBatch(job.batch.values) == same.TrainBatch(job.batch.values) &&
              session.TrainBatch(job.batch.values) == same.TrainBatch(job.batch.values), "a loss");
  // What lives in a session's place stays there.
  Require(CodeOf([&] { odtpack::TrainingSession(job.env, training->package, state); }) ==
              "model-mismatch", "another layout");
  Require(CodeOf([&] { odtpack::TrainingSession(job.env, other, training->state); }) ==
              "optimizer-mismatch", "another optimizer beside a session");
  training->session.TrainBatch(job.batch.values);
  Require(training->session.StepCount() == 2, "the session goes on");
}

void Broken(const Job& job, int) {
  const auto training = job.Start();
  const auto predict = [&] { training->session.InferenceSession(job.env, {"output"}); };
  const auto path = (job.folder / "personal.onnx").string();
  Require(CodeOf(predict) == "model-not-loadable", "the template");
  job::fs::remove(training->package.Path("inference_template"));
  Require(CodeOf(predict) == "package-incomplete" &&
              CodeOf([&] { training->session.ExportModelForInferencing(path, {"output"}); }) ==
                  "package-incomplete", "a template that went");
}

}  // namespace

int main(int count, char** words) try {
  if (count != 4) return 2;
  odtpack::DisableTelemetry();
  const std::map<std::string, void (*)(const Job&, int)> commands = {
      {"close", Close}, {"end", End},           {"threads", Threads}, {"closed", Closed},
      {"nan", Nan},     {"gradient", Gradient}, {"fails", Fails},     {"rates", Rates},
      {"taken", Taken}, {"reads", Reads},       {"misuse", Misuse},   {"moved", Moved},
      {"buffer", Buffer}, {"carry", Carry},     {"pending", Pending}, {"broken", Broken},
      {"shared", Shared}, {"void", Void},       {"broken_off", BrokenOff}, {"free", Free}};
  commands.at(words[1])(Job(words[2]), std::atoi(words[3]));
  std::cout << "done" << std::endl;
  return 0;
} catch (const std::exception& error) {
  std::cerr << error.what() << std::endl;
  return 1;
}
