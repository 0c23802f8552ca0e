// Runs the cases of a folder of conformance vectors and prints one line for each:
// "passed NAME" or "FAILED NAME: why". The exit code is 1 if one failed.
//
//     odtpack-conformance FOLDER [--tolerance] [NAME...]
//     odtpack-conformance hostile FOLDER
//     odtpack-conformance read FOLDER
//
// The others print what becomes of hostile files, see readers.hpp. With --tolerance every
// comparison is within the case's tolerance, for other processors.
#include <iostream>

#include "job.hpp"
#include "readers.hpp"

namespace {

using job::Json;
using odtpack::CheckpointState;
using odtpack::detail::Tensor;
namespace fs = std::filesystem;

bool tolerant = false;
int threads = 0;  // with which the vectors were made

struct Failure : std::runtime_error {
  using std::runtime_error::runtime_error;
};

void Require(bool good, const std::string& what) {
  if (!good) throw Failure(what);
}

double Element(const Tensor& tensor, size_t i) {
  switch (tensor.type) {
    case ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT:
      return tensor.As<float>()[i];
    case ONNX_TENSOR_ELEMENT_DATA_TYPE_DOUBLE:
      return tensor.As<double>()[i];
    case ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT16:
      return tensor.As<Ort::Float16_t>()[i].ToFloat();
    default:
      return std::nan("");
  }
}

struct Comparison {
  bool exact;
  double tolerance;

  void Loss(double found, double wanted, const std::string& what) const {
    const bool same = exact
                          ? found == wanted
                          : std::abs(found - wanted) <= tolerance * std::max(1.0, std::abs(wanted));
    std::ostringstream text;
    text.precision(17);
    text << what << " is " << found << " and should be " << wanted;
    Require(same, text.str());
  }

  void Same(const Tensor& found, const Tensor& wanted, const std::string& what) const {
    Require(found.type == wanted.type && found.shape == wanted.shape,
            what + " is " + found.Description() + " and not " + wanted.Description());
    const bool equal = std::memcmp(found.data.get(), wanted.data.get(), found.Bytes()) == 0;
    if (equal) return;
    Require(!exact, what + " differs");
    double largest = 1e-30, worst = 0;
    for (size_t i = 0; i < found.Count(); ++i) {
      largest = std::max(largest, std::abs(Element(wanted, i)));
      worst = std::max(worst, std::abs(Element(found, i) - Element(wanted, i)));
    }
    Require(worst <= tolerance * std::max(largest, 1.0),
            what + " differs by " + std::to_string(worst / largest));
  }

  void Same(const odtpack::detail::State& found, const odtpack::detail::State& wanted) const {
    Require(found.parameters.size() == wanted.parameters.size(), "other parameters");
    for (const auto& [name, parameter] : wanted.parameters) {
      Require(found.parameters.count(name) == 1, "there is no " + name);
      const auto& own = found.parameters.at(name);
      Require(own.trainable == parameter.trainable, name + " is trainable in one of them");
      Same(own.value, parameter.value, "'" + name + "'");
    }
    Require(found.properties == wanted.properties, "the properties differ");
    Require(!found.optimizer == !wanted.optimizer, "the optimizer's state");
    if (!wanted.optimizer) return;
    const auto &one = *found.optimizer, &two = *wanted.optimizer;
    Require(one.step == two.step && one.rate == two.rate && one.kind == two.kind,
            "the optimizer stands elsewhere");
    Require(one.groups == two.groups, "the optimizer's groups differ");
    Require(one.moments.size() == two.moments.size(), "other moments");
    for (size_t i = 0; i < one.moments.size(); ++i) {
      Require(one.moments[i].first == two.moments[i].first, "the order of the moments");
      for (size_t k = 0; k < one.moments[i].second.size(); ++k) {
        Same(one.moments[i].second[k], two.moments[i].second[k],
             "a moment of " + one.moments[i].first);
      }
    }
  }
};

Tensor Copy(const Ort::Value& value) {
  const auto info = value.GetTensorTypeAndShapeInfo();
  Tensor tensor = odtpack::detail::Zeros(info.GetElementType(), info.GetShape());
  std::memcpy(tensor.data.get(), value.GetTensorRawData(), tensor.Bytes());
  return tensor;
}

void CompareOutputs(const Comparison& compare, const std::vector<Ort::Value>& found, size_t first,
                    const Json& wanted, const fs::path& folder) {
  if (!wanted) return;
  const auto& list = wanted.As<Json::List>();
  Require(found.size() == list.size() + first, "another number of outputs");
  for (size_t i = 0; i < list.size(); ++i) {
    compare.Same(Copy(found[i + first]), job::ReadTensor(list[i], folder),
                 "output " + list[i].Get<std::string>("name"));
  }
}

void Steps(odtpack::TrainingSession& session, const Json& test, const fs::path& folder,
           const Comparison& compare, bool scheduled) {
  size_t number = 0;
  for (const Json& step : test.Get<Json::List>("steps")) {
    const std::string where = "step " + std::to_string(++number);
    const job::Batch batch(step["inputs"], folder);
    const bool update = step.Get<bool>("update", true);
    if (update && step["rate"]) {
      Require(session.GetLearningRate() == static_cast<float>(step.Get<double>("rate")),
              where + ": the learning rate is " + std::to_string(session.GetLearningRate()));
    }
    const bool whole = session.HasStepModel();
    const auto results = whole ? session.StepOn(batch.values) : session.TrainStep(batch.values);
    const double loss = odtpack::detail::AsDouble(results[0]);
    if (step["not_finite"]) {
      Require(!std::isfinite(loss), where + ": the loss is finite");
      Require(session.LastNotFinite() &&
                  session.LastNotFinite()->code == step.Get<std::string>("not_finite"),
              where + ": it is not reported");
    } else {
      compare.Loss(loss, step.Get<double>("loss"), where);
      CompareOutputs(compare, results, 1, step["outputs"], folder);
    }
    if (update && !whole) session.OptimizerStep();
    if (update && scheduled) session.SchedulerStep();
    if (!whole && step.Get<bool>("reset", true)) session.LazyResetGrad();
  }
}

void Train(const Ort::Env& env, const Json& test, const fs::path& folder, const fs::path& scratch) {
  const Comparison compare{test.Get<bool>("exact", true) && !tolerant,
                           test.Get<double>("tolerance", 2e-6)};
  job::Training training(env, test, folder, threads);
  Require(training.session.HasStepModel() == test.Get<bool>("step_model", false),
          "the step model: it is used where there is none, or the other way round");
  Steps(training.session, test, folder, compare, training.scheduled);
  Require(training.session.SkippedSteps() == test.Whole("skipped_steps", 0), "the skipped steps");
  if (test["evaluation"]) {
    const job::Batch batch(test["evaluation"]["inputs"], folder);
    compare.Loss(odtpack::detail::AsDouble(training.session.EvalStep(batch.values)[0]),
                 test["evaluation"].Get<double>("loss"), "the evaluation's loss");
    const auto found = training.session.Evaluate(std::deque{std::cref(batch.values)}).Accuracy();
    const auto wanted = test["evaluation"]["accuracy"];
    Require(!compare.exact || (wanted ? found == wanted.As<double>() : !found), "the accuracy");
  }
  for (const auto& [name, value] : test.Get<Json::Object>("properties", {})) {
    const auto* number = std::get_if<double>(&value.value);
    if (number == nullptr)
      training.state.AddProperty(name, value.As<std::string>());
    else if (*number == std::floor(*number))
      training.state.AddProperty(name, value.Whole());
    else
      training.state.AddProperty(name, static_cast<float>(*number));
  }
  if (test["after"]) {
    const std::string saved = (scratch / (test.Get<std::string>("name") + ".ckpt")).string();
    CheckpointState::SaveCheckpoint(training.state, saved, true);
    const auto wanted =
        odtpack::detail::ReadCheckpoint((folder / test.Get<std::string>("after")).string());
    compare.Same(odtpack::detail::ReadCheckpoint(saved), wanted);
  }
  const Json& exported = test["export"];
  if (!exported) return;
  std::vector<std::string> names;
  for (const Json& output : exported.Get<Json::List>("outputs")) {
    names.push_back(output.Get<std::string>("name"));
  }
  const fs::path file = scratch / (test.Get<std::string>("name") + ".onnx");
  training.session.ExportModelForInferencing(file.string(), names);
  Require(!compare.exact ||
              job::ReadFile(file) == job::ReadFile(folder / exported.Get<std::string>("file")),
          "the exported model has other bytes");
  const job::Batch batch(exported["inputs"], folder);
  std::vector<const char*> inputs, outputs;
  for (const Json& input : exported.Get<Json::List>("inputs")) {
    inputs.push_back(input.Get<std::string>("name").c_str());
  }
  for (const auto& name : names) outputs.push_back(name.c_str());
  Ort::Session predictor = training.session.InferenceSession(env, names);
  const auto results = predictor.Run(Ort::RunOptions{nullptr}, inputs.data(), batch.values.data(),
                                     inputs.size(), outputs.data(), outputs.size());
  const Comparison close{false, 1e-5};  // the predictor has its own session options
  CompareOutputs(close, results, 0, exported["outputs"], folder);
}

void Nominal(const Ort::Env& env, const Json& test, const fs::path& folder) {
  job::Training training(env, test, folder, threads);
  const auto& steps = test.Get<Json::List>("steps");
  const job::Batch batch(steps.at(0)["inputs"], folder);
  try {
    training.session.TrainStep(batch.values);
    throw Failure("a step works without values");
  } catch (const odtpack::Error& error) {
    Require(error.Code() == "nominal-state", "the code is " + error.Code());
  }
  const Tensor values = job::ReadTensor(test["values"], folder);
  training.session.FromBuffer(values.Value(), false);
  Steps(training.session, test, folder,
        {test.Get<bool>("exact", true) && !tolerant, test.Get<double>("tolerance", 2e-6)},
        training.scheduled);
}

void Refused(const Ort::Env& env, const Json& test, const fs::path& folder) {
  const auto action = test.Get<std::string>("action");
  const auto code = test.Get<std::string>("code");
  try {
    if (action == "open") {
      odtpack::Package::Open((folder / test.Get<std::string>("package")).string());
    } else if (action == "load_checkpoint") {
      CheckpointState::LoadCheckpoint((folder / test.Get<std::string>("checkpoint")).string());
    } else {
      job::Training training(env, test, folder, threads);
      if (action == "export") {
        const fs::path file = fs::temp_directory_path() / "odtpack-refused.onnx";
        training.session.ExportModelForInferencing(file.string(), test.Texts("outputs"));
      }
      if (action == "step") training.session.TrainStep(job::Batch(test["inputs"], folder).values);
    }
  } catch (const odtpack::Error& error) {
    Require(error.Code() == code,
            "the code is " + error.Code() + " and not " + code + ": " + error.what());
    return;
  }
  throw Failure("it is accepted, and should be refused with " + code);
}

void Recover(const Json& test, const fs::path& folder, const fs::path& scratch) {
  using odtpack::detail::ReadCheckpoint;
  const fs::path path = scratch / test.Get<std::string>("checkpoint");
  const fs::path before = scratch / test.Get<std::string>("previous");
  for (const fs::path& file : {path, before}) {
    fs::remove(file);
    if (fs::exists(folder / file.filename())) fs::copy_file(folder / file.filename(), file);
  }
  auto state = CheckpointState::LoadCheckpoint(path.string());
  const auto says = [&state](const std::string& words) {
    Require(state.Recovered().find(words) != std::string::npos, "it says " + state.Recovered());
  };
  says("of optimizer step " + std::to_string(test["step"].Whole()) + ":");
  if (test["lost"]) says(std::to_string(test["lost"].Whole()) + " optimizer steps made since");
  Comparison{true, 0}.Same(*state.Internal(), ReadCheckpoint(before.string()));
  // The first save stands in for the damaged file; only the next moves it on.
  const std::string good = job::ReadFile(before);
  CheckpointState::SaveCheckpoint(state, path.string(), true, true);
  Require(job::ReadFile(before) == good, "the save before is another one");
  const std::string first = job::ReadFile(path);
  state.AddProperty("again", int64_t{1});
  CheckpointState::SaveCheckpoint(state, path.string(), true, true);
  Require(job::ReadFile(before) == first, "the save before was not kept");
  Require(CheckpointState::LoadCheckpoint(path.string()).Recovered().empty(), "it is damaged");
}

void Run(const Ort::Env& env, const fs::path& folder, const fs::path& scratch) {
  const Json test = job::ReadJson(folder / "case.json");
  const auto kind = test.Get<std::string>("kind");
  if (kind == "train" || kind == "resume" || kind == "not_finite")
    return Train(env, test, folder, scratch);
  if (kind == "nominal") return Nominal(env, test, folder);
  if (kind == "error") return Refused(env, test, folder);
  if (kind == "recover") return Recover(test, folder, scratch);
  if (kind == "buffer") {
    job::Training training(env, test, folder, threads);
    return Comparison{true, 0}.Same(Copy(training.session.ToBuffer(false)),
                                    job::ReadTensor(test["values"], folder), "the buffer");
  }
  Require(kind == "self_check", "there is no kind " + kind);
  const auto package = odtpack::Package::Open((folder / test.Get<std::string>("package")).string());
  const auto code = test.Get<std::string>("code", "");
  try {
    odtpack::SelfCheck(env, package);
    Require(code.empty(), "the self-check passes, and should fail");
  } catch (const odtpack::Error& error) {
    Require(error.Code() == code, std::string("the self-check: ") + error.what());
  }
}

}  // namespace

int main(int count, char** arguments) {
  const std::string command = count == 3 ? arguments[1] : "";
  if (command == "hostile") return readers::Hostile(arguments[2]);
  if (command == "read") return readers::Read(arguments[2]);
  std::set<std::string> chosen;
  for (int i = 2; i < count; ++i) {
    if (std::string(arguments[i]) == "--tolerance")
      tolerant = true;
    else
      chosen.insert(arguments[i]);
  }
  const Ort::Env env(ORT_LOGGING_LEVEL_FATAL, "conformance");
  const fs::path folder(count > 1 ? arguments[1] : "");
  const fs::path scratch = fs::temp_directory_path() / ("odtpack-" + std::to_string(::getpid()));
  fs::create_directories(scratch);
  bool failed = false;
  const Json index = job::ReadJson(folder / "index.json");
  threads = static_cast<int>(index.Whole("threads", 0));
  for (const Json& test : index.Get<Json::List>("cases")) {
    const auto name = test.Get<std::string>("name");
    if (!chosen.empty() && chosen.count(name) == 0) continue;
    try {
      Run(env, folder / name, scratch);
      std::cout << "passed " << name << std::endl;
    } catch (const std::exception& error) {
      failed = true;
      std::cout << "FAILED " << name << ": " << error.what() << std::endl;
    }
  }
  fs::remove_all(scratch);
  return failed ? 1 : 0;
}
