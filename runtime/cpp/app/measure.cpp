// Lives the life of an app that trains: loads a package, evaluates, trains, evaluates, saves,
// exports, is killed, and resumes; prints one line of JSON with the losses, the time of every step
// and, for each phase, the resident anonymous memory at its peak and at its end.
//
//     odtpack-measure JOB.json
//
// A job is that of a training (see job.hpp; its "checkpoint" may be one that was saved) and
//     "steps": [{"inputs": [tensors]}, ...]   batches, taken in turn
//     "threads": 1                            by default the package's choice
//     "count": 100                            training steps; by default one for each batch
//     "plain": false                          steps with the training and the optimizer model
//     "accumulate": 1                         batches for each optimizer step
//     "evaluate_first": true                  evaluate the first batch before the training
//     "evaluation": {"inputs": [tensors]}     evaluated after the training, if given; or true for
//                                             the first batch
//     "save": "trained.ckpt"                  saved with the optimizer's state, if given
//     "export": "trained.onnx"                the model to predict with, if given, after the save
//     "generate": {"adapter": "mine.onnx_adapter", "prompt": [3, 1, 4], "max_tokens": 8}
//                                             the adapter is written, the training closed, and the
//                                             decoder runs with it: with its weights from a file of
//                                             packed ones, read in place, and packed anew
//     "wait": "saved"                         a file to make at last; then wait for the end, with
//                                             everything still open
//     "resume": 10                            steps to make from the saved file, in a new session
//     "limit_bytes": 50000000                 end with exit code 3 as soon as memory stands so far
//                                             above where it stood at first
#include <array>
#include <atomic>
#include <chrono>
#include <ctime>
#include <iostream>
#include <thread>

#include "job.hpp"

namespace {

using Clock = std::chrono::steady_clock;

/// Resident anonymous memory of this process in bytes: what is resident less what is of files.
size_t ResidentNow(int statm) {
  char text[128] = {};
  unsigned long size = 0, resident = 0, shared = 0;
  if (::pread(statm, text, sizeof text - 1, 0) <= 0 ||
      std::sscanf(text, "%lu %lu %lu", &size, &resident, &shared) != 3) {
    return 0;
  }
  return (resident - shared) * static_cast<size_t>(::sysconf(_SC_PAGESIZE));
}

/// The same, exactly: the kernel counts pages. Too slow to be asked all the time.
size_t Anonymous() {
  std::ifstream stream("/proc/self/smaps_rollup");
  for (std::string line; std::getline(stream, line);) {
    unsigned long kilobytes = 0;
    if (std::sscanf(line.c_str(), "Anonymous: %lu kB", &kilobytes) == 1) return kilobytes * 1024;
  }
  return 0;
}

double Seconds(clockid_t clock) {
  timespec time{};
  ::clock_gettime(clock, &time);
  return static_cast<double>(time.tv_sec) + static_cast<double>(time.tv_nsec) * 1e-9;
}

/// Looks at the memory every 200 microseconds and keeps the highest figure of a phase.
class Phases {
 public:
  Phases() : statm_(::open("/proc/self/statm", O_RDONLY)), thread_([this] { Watch(); }) {}
  ~Phases() {
    done_ = true;
    thread_.join();
    ::close(statm_);
  }
  /// End the process as soon as memory goes beyond `bytes`; 0 for never.
  void Limit(size_t bytes) { limit_ = bytes; }
  template <class Body>
  void Run(const std::string& name, Body body) {
    peak_ = 0;
    name_ = name.c_str();
    const auto start = Clock::now();
    body();
    const std::chrono::duration<double> seconds = Clock::now() - start;
    const size_t end = Anonymous();
    Hold(end);
    std::ostringstream json;
    json << (json_.empty() ? "" : ", ") << "\"" << name
         << "\": {\"peak_anonymous_bytes\": " << std::max(peak_.load(), end)
         << ", \"end_anonymous_bytes\": " << end << ", \"seconds\": " << seconds.count() << "}";
    json_ += json.str();
  }
  const std::string& Json() const { return json_; }
  /// Processor time that the watching itself has taken.
  double OwnSeconds() {
    clockid_t clock{};
    return ::pthread_getcpuclockid(thread_.native_handle(), &clock) == 0 ? Seconds(clock) : 0;
  }

 private:
  void Watch() {
    while (!done_) {
      const size_t now = ResidentNow(statm_);
      if (now > peak_) peak_ = now;
      if (limit_ > 0 && now > limit_) Hold(Anonymous());
      std::this_thread::sleep_for(std::chrono::microseconds(200));
    }
  }
  void Hold(size_t now) {
    if (limit_ == 0 || now <= limit_) return;
    std::fprintf(stderr, "error: %zu bytes, the limit is %zu (%s)\n", now, limit_.load(),
                 name_.load());
    std::_Exit(3);
  }
  const int statm_;
  std::atomic<bool> done_{false};
  std::atomic<size_t> peak_{0}, limit_{0};
  std::atomic<const char*> name_{"begin"};
  std::string json_;
  std::thread thread_;
};

template <class T>
std::string List(const std::vector<T>& values) {
  std::ostringstream text;
  text.precision(17);
  for (size_t i = 0; i < values.size(); ++i) text << (i == 0 ? "" : ", ") << values[i];
  return "[" + text.str() + "]";
}

int Measure(const std::string& path) {
  using job::Json;
  const Json json = job::ReadJson(path);
  const auto folder = job::fs::absolute(path).parent_path();
  odtpack::DisableTelemetry();
  const Ort::Env env(ORT_LOGGING_LEVEL_ERROR, "odtpack");
  Phases phases;
  const size_t before = Anonymous();
  if (json["limit_bytes"]) phases.Limit(before + static_cast<size_t>(json.Whole("limit_bytes", 0)));
  std::vector<job::Batch> batches;
  for (const Json& step : json.Get<Json::List>("steps"))
    batches.emplace_back(step["inputs"], folder);
  const auto count = static_cast<size_t>(json.Whole("count", static_cast<int64_t>(batches.size())));
  const auto threads = static_cast<int>(json.Whole("threads", 0));
  const auto accumulate = static_cast<size_t>(json.Whole("accumulate", 1));
  std::optional<job::Training> training;
  std::vector<double> losses, seconds, evaluation;
  std::vector<size_t> resident;
  double processor = 0;
  const bool plain = json.Get<bool>("plain", false) || accumulate > 1;
  const auto train = [&](size_t steps) {
    const double watching = phases.OwnSeconds();
    for (size_t step = 0; step < steps; ++step) {
      const auto start = Clock::now();
      const double begin = Seconds(CLOCK_PROCESS_CPUTIME_ID);
      const auto& batch = batches[step % batches.size()].values;
      auto& session = training->session;
      const auto results = plain ? session.TrainStep(batch) : session.StepOn(batch);
      if ((step + 1) % accumulate == 0) {
        if (plain) {
          session.OptimizerStep();
          session.LazyResetGrad();
        }
        if (training->scheduled) session.SchedulerStep();
      }
      processor += Seconds(CLOCK_PROCESS_CPUTIME_ID) - begin;
      losses.push_back(odtpack::detail::AsDouble(results[0]));
      seconds.push_back(std::chrono::duration<double>(Clock::now() - start).count());
      if ((step + 1) % std::max<size_t>(steps / 10, 1) == 0) resident.push_back(Anonymous());
    }
    processor -= phases.OwnSeconds() - watching;
  };
  for (auto* list : {&losses, &seconds}) {  // its pages are touched before anything is measured
    list->assign(2 * count, 0);
    list->clear();
  }
  const auto evaluate = [&](const std::string& name, const std::vector<Ort::Value>& values) {
    phases.Run(name, [&] {
      evaluation.push_back(odtpack::detail::AsDouble(training->session.EvalStep(values)[0]));
    });
  };
  phases.Run("load", [&] { training.emplace(env, json, folder, threads); });
  const bool kernels = training->session.HasKernels();
  if (json.Get<bool>("evaluate_first", false)) evaluate("evaluate first", batches[0].values);
  phases.Run("train", [&] { train(count); });
  if (const Json& held_out = json["evaluation"]; std::holds_alternative<Json::Object>(held_out.value)) {
    evaluate("evaluate", job::Batch(held_out["inputs"], folder).values);
  } else if (held_out) {
    evaluate("evaluate", batches[0].values);
  }
  std::string saved;
  if (json["save"]) {
    saved = (folder / json.Get<std::string>("save")).string();
    phases.Run("save",
               [&] { odtpack::CheckpointState::SaveCheckpoint(training->state, saved, true); });
  }
  if (json["export"]) {
    const std::string target = (folder / json.Get<std::string>("export")).string();
    const std::vector<std::string> outputs = training->package.Manifest()["inference"].Texts("outputs");
    phases.Run("export", [&] { training->session.ExportModelForInferencing(target, outputs); });
  }
  std::vector<int64_t> tokens;
  if (const Json& job = json["generate"]) {
    const std::string adapter = (folder / job.Get<std::string>("adapter")).string();
    phases.Run("save adapter",
               [&] { odtpack::SaveAdapter(training->package, training->state, adapter); });
    const odtpack::Package package = training->package;
    training.reset();
    const std::string packed = (folder / "packed").string();
    const std::vector<std::array<std::string, 3>> ways = {
        {"pack", "odtpack.packed_weights", packed},  // they are written
        {"generate packed", "odtpack.packed_weights", packed},
        {"generate in place", "session.disable_prepacking", "1"},
        {"generate", "session.disable_prepacking", "0"}};
    for (const auto& way : ways) {
      odtpack::detail::GiveBackFreed();  // what the way before left
      phases.Run(way[0], [&] {
        auto options = package.SessionOptions(env, threads);
        options.AddConfigEntry(way[1].c_str(), way[2].c_str());
        odtpack::Generator generator(env, package, options);
        generator.AddAdapter("mine", adapter);
        odtpack::GenerateOptions choice;
        choice.adapter = "mine";
        choice.max_tokens = job.Whole("max_tokens", 8);
        tokens = generator.Generate(job.Wholes("prompt"), choice);
      });
    }
  }
  if (json["resume"] && !saved.empty()) {
    training.reset();
    phases.Run("resume", [&] {
      training.emplace(env, json, folder, threads, saved);
      train(static_cast<size_t>(json.Whole("resume", 0)));
    });
  }
  std::cout.precision(17);
  std::cout << "{\"before_anonymous_bytes\": " << before << ", \"phases\": {" << phases.Json()
            << "}, \"losses\": " << List(losses) << ", \"evaluation\": " << List(evaluation)
            << ", \"step_seconds\": " << List(seconds) << ", \"processor_seconds\": " << processor
            << ", \"kernels\": " << (kernels ? "true" : "false") << ", \"tokens\": " << List(tokens)
            << ", \"anonymous_bytes_by_tenth\": " << List(resident) << "}" << std::endl;
  if (json["wait"]) {
    std::ofstream(folder / json.Get<std::string>("wait")) << "saved\n";
    for (;;) ::pause();
  }
  return 0;
}

}  // namespace

int main(int count, char** arguments) {
  if (count != 2) {
    std::cerr << "usage: odtpack-measure JOB.json\n";
    return 2;
  }
  try {
    return Measure(arguments[1]);
  } catch (const odtpack::Error& error) {
    std::cerr << "error: " << error.what() << "\n  code: " << error.Code() << "\n";
  } catch (const std::exception& error) {
    std::cerr << "error: " << error.what() << "\n";
  }
  return 2;
}
