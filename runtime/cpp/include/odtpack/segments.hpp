// A network that is trained segment by segment (docs/formats/package.md). The segments run one
// after the other and, in training, back. All that are alike share a model, so that neither memory
// nor the time of loading grows with depth.
#pragma once

#include "odtpack/mapped_weights.hpp"
#include "odtpack/model.hpp"

namespace odtpack::detail {

/// An input or output of a segment's model: its name there, in the network, and what it is.
struct End {
  std::string own, name;
  Type type;
  Shape shape;                       // -1 for what may vary
  std::vector<std::string> symbols;  // the names of such sizes
};

/// A model as one segment sees it.
struct Part {
  Ort::Session* session = nullptr;
  std::vector<End> inputs, outputs;
};

/// The sessions of a package's segments. All refer to it.
class Segments {
 public:
  /// Open the models of a package; `training` and `evaluation` end the network.
  Segments(const Ort::Env& env, const Ort::SessionOptions& options, const Package& package,
           const std::string& training, const std::optional<std::string>& evaluation)
      : info_(package.Manifest()["segments"]), weights(WeightsOf(package), info_) {
    const auto open = [&](const std::string& path) {
      const auto found = sessions_.find(path);
      if (found != sessions_.end()) return &found->second;
      return &sessions_.emplace(path, OpenSession(env, path, options)).first->second;
    };
    for (const Json& json : info_.Get<Json::List>("segments")) {
      std::map<std::string, std::string> names;
      for (const auto& [own, name] : json.Get<Json::Object>("names", {}))
        names[own] = name.As<std::string>("names");
      forward.push_back(Make(open(PathOf(package, json.Get<std::string>("forward"))), names));
      backward.emplace_back();
      if (json["backward"])
        backward.back() = Make(open(PathOf(package, json.Get<std::string>("backward"))), names);
    }
    last = Make(open(training), {});
    if (evaluation) last_evaluated = Make(open(*evaluation), {});
  }
  Segments(const Segments&) = delete;
  Segments& operator=(const Segments&) = delete;

  static bool EndsIn(const std::string& name, const std::string& end) {
    return name.size() > end.size() && name.compare(name.size() - end.size(), end.size(), end) == 0;
  }

 private:
  const Json& info_;
  std::map<std::string, Ort::Session> sessions_;

  /// The path of a file of segments, which must be one of those that were checked.
  static std::string PathOf(const Package& package, const std::string& name) {
    for (const Json& file : package.Manifest()["files"].Get<Json::List>("extra", {})) {
      if (file.Get<std::string>("path") == name) return package.Folder() + "/" + name;
    }
    ThrowSegments("'" + name + "' is not a file of the package");
  }
  static std::string WeightsOf(const Package& package) {
    const Json& info = package.Manifest()["segments"];
    return info["weights"] ? PathOf(package, info.Get<std::string>("weights")) : "";
  }
  static Part Make(Ort::Session* session, const std::map<std::string, std::string>& names) {
    Part part{session, {}, {}};
    Ort::AllocatorWithDefaultOptions allocator;
    const auto add = [&names](std::vector<End>& ends, std::string own, const Ort::TypeInfo& found) {
      if (found.GetONNXType() != ONNX_TYPE_TENSOR) ThrowSegments("'" + own + "' is not a tensor");
      const auto info = found.GetTensorTypeAndShapeInfo();
      std::vector<std::string> symbols;
      for (const char* symbol : info.GetSymbolicDimensions()) symbols.emplace_back(symbol);
      const std::string name = NameOf(own, names);
      ends.push_back({std::move(own), name, info.GetElementType(), info.GetShape(), symbols});
    };
    for (size_t i = 0; i < session->GetInputCount(); ++i)
      add(part.inputs, session->GetInputNameAllocated(i, allocator).get(),
          session->GetInputTypeInfo(i));
    for (size_t i = 0; i < session->GetOutputCount(); ++i)
      add(part.outputs, session->GetOutputNameAllocated(i, allocator).get(),
          session->GetOutputTypeInfo(i));
    return part;
  }
  /// What a segment calls an input or output of its model; what belongs to a value goes with it.
  static std::string NameOf(const std::string& own,
                            const std::map<std::string, std::string>& names) {
    const auto named = [&names](const std::string& stem) {
      const auto found = names.find(stem);
      return found == names.end() ? stem : found->second;
    };
    for (const char* end : {kCotangent, "_grad.accumulation.buffer", "_grad.accumulation.out"}) {
      if (EndsIn(own, end)) return named(own.substr(0, own.size() - std::strlen(end))) + end;
    }
    return named(own);
  }

 public:
  static constexpr const char* kCotangent = ".cotangent";

  MappedWeights weights;
  std::vector<Part> forward;
  std::vector<std::optional<Part>> backward;
  Part last;
  std::optional<Part> last_evaluated;
  /// Memory of values between segments by name, which training and evaluation share.
  using Kept = std::map<std::string, std::pair<Tensor, Ort::Value>>;
  Kept kept;
};

/// Segments as one training or evaluation model.
class SegmentedGraph : public Model {
 public:
  /// Refers to the segments, the package, its `outputs` among it, and to the tensors in `bound`.
  SegmentedGraph(Segments& segments, const Package& package, const std::vector<Spec>& outputs,
                 const Bound& bound, const Ending& ending, bool training)
      : segments_(segments),
        ending_(ending),
        inputs_(package.Inputs()),
        outputs_(outputs),
        loss_(Zeros(outputs[0].type, {})),
        loss_value_(loss_.Value()) {
    std::set<std::string> made;
    for (const Spec& spec : inputs_) made.insert(spec.name);
    for (const Part& part : segments.forward) AddRun(part, bound, made, false);
    AddRun(training ? segments.last : *segments.last_evaluated, bound, made, true);
    for (size_t i = segments.backward.size(); training && i-- > 0;) {
      if (segments.backward[i]) AddRun(*segments.backward[i], bound, made, false);
    }
  }

  std::vector<Ort::Value> Run(const std::vector<Ort::Value>& values) override {
    given_.clear();
    for (size_t i = 0; i < inputs_.size(); ++i) {
      given_[inputs_[i].name] = {const_cast<OrtValue*>(static_cast<const OrtValue*>(values[i])),
                                 values[i].GetTensorTypeAndShapeInfo().GetShape()};
    }
    std::vector<Ort::Value> results;
    for (OneRun& run : runs_) Run(run, results);
    // A copy, which the caller may keep while the next step runs.
    Ort::Value loss = Ort::Value::CreateTensor(allocator_, nullptr, 0, loss_.type);
    std::memcpy(loss.GetTensorMutableRawData(), loss_.data.get(), loss_.Bytes());
    results.insert(results.begin(), std::move(loss));
    return results;
  }

 private:
  /// One run of a model: what never changes stands in its arguments.
  struct OneRun {
    const Part& part;
    Arguments arguments;
    std::vector<size_t> taken, made;  // inputs that are given anew, and outputs
    MappedWeights::Pages pages;
    bool last;
  };

  void AddRun(const Part& part, const Bound& bound, std::set<std::string>& made, bool last) {
    runs_.push_back({part, {}, {}, {}, {}, last});
    OneRun& run = runs_.back();
    std::vector<std::string> weights;
    for (size_t i = 0; i < part.inputs.size(); ++i) {
      const End& end = part.inputs[i];
      OrtValue* value = nullptr;
      if (segments_.weights.Has(end.name)) {
        value = segments_.weights.Find(end.name, end.type, end.shape);
        weights.push_back(end.name);
      } else if (made.count(end.name) > 0) {
        run.taken.push_back(i);
      } else {
        value = Own(end, bound);
      }
      run.arguments.input_names.push_back(end.own.c_str());
      run.arguments.inputs.push_back(value);
    }
    size_t returned = 0;
    for (size_t i = 0; i < part.outputs.size(); ++i) {
      const End& end = part.outputs[i];
      OrtValue* value = nullptr;
      if (last && returned < outputs_.size() && end.name == outputs_[returned].name) {
        if (end.type != outputs_[returned].type) ThrowMismatch("the type of '" + end.name + "'");
        if (returned++ == 0)
          value = loss_value_;
        else
          run.made.push_back(i);
      } else if (Segments::EndsIn(end.name, "_grad.accumulation.out")) {
        value = Own(end, bound);
      } else {
        if (segments_.weights.Has(end.name) || !made.insert(end.name).second)
          ThrowSegments("'" + end.name + "' is made twice");
        run.made.push_back(i);
      }
      run.arguments.output_names.push_back(end.own.c_str());
      run.arguments.outputs.push_back(value);
    }
    if (last && returned != outputs_.size())
      ThrowMismatch("a model lacks an output of the manifest");
    run.pages = segments_.weights.PagesOf(weights);
  }

  /// A parameter, its gradient, or what else is bound under that name.
  static OrtValue* Own(const End& end, const Bound& bound) {
    const auto* own = bound.Find(end.name);
    if (own == nullptr) ThrowSegments("nothing gives '" + end.name + "' to a segment");
    Shape shape = end.shape;
    for (size_t i = 0; i < std::min(shape.size(), own->first.shape.size()); ++i) {
      if (shape[i] < 0) shape[i] = own->first.shape[i];
    }
    if (end.type != own->first.type || shape != own->first.shape)
      ThrowMismatch("'" + end.name + "' is " + own->first.Description() + " in the checkpoint");
    return const_cast<OrtValue*>(static_cast<const OrtValue*>(own->second));
  }

  void Run(OneRun& run, std::vector<Ort::Value>& results) {
    std::map<std::string, int64_t> sizes;
    for (const size_t i : run.taken) {
      const End& end = run.part.inputs[i];
      const auto found = given_.find(end.name);
      if (found == given_.end()) ThrowSegments("'" + end.name + "' is read too late");
      const auto& [value, shape] = found->second;
      run.arguments.inputs[i] = value;
      for (size_t axis = 0; axis < std::min(shape.size(), end.symbols.size()); ++axis) {
        if (!end.symbols[axis].empty()) sizes[end.symbols[axis]] = shape[axis];
      }
    }
    for (const size_t i : run.made) {
      const End& end = run.part.outputs[i];
      const auto shape = run.last && Returned(end) ? std::nullopt : ShapeOf(end, sizes);
      run.arguments.outputs[i] = shape ? Place(run, end, *shape) : nullptr;
    }
    segments_.weights.Read(run.pages, [&] {
      run.arguments.Run(*run.part.session, "nothing was changed by it", &ending_);
    });
    for (const size_t i : run.made) {
      const End& end = run.part.outputs[i];
      OrtValue* const value = run.arguments.outputs[i];
      run.arguments.outputs[i] = nullptr;
      const auto known = given_.find(end.name);
      if (known != given_.end() && known->second.first == value) continue;
      Ort::Value found(value);  // ONNX Runtime found memory for it
      if (run.last && Returned(end)) {
        results.push_back(std::move(found));
        continue;
      }
      Place(run, end, found.GetTensorTypeAndShapeInfo().GetShape());
      const Tensor& room = segments_.kept.at(KeyOf(end)).first;
      room.CopyFrom(found.GetTensorRawData());
    }
  }

  bool Returned(const End& end) const {
    return std::any_of(outputs_.begin(), outputs_.end(),
                       [&end](const Spec& spec) { return spec.name == end.name; });
  }

  /// The shape of what a run makes, as far as it follows from those of its inputs.
  std::optional<Shape> ShapeOf(const End& end, const std::map<std::string, int64_t>& sizes) const {
    if (Segments::EndsIn(end.name, Segments::kCotangent)) {
      const size_t stem = end.name.size() - std::strlen(Segments::kCotangent);
      const auto like = given_.find(end.name.substr(0, stem));
      if (like != given_.end()) return like->second.second;
    }
    Shape shape = end.shape;
    for (size_t axis = 0; axis < shape.size(); ++axis) {
      if (shape[axis] >= 0) continue;
      const auto size = sizes.find(end.symbols[axis]);
      if (size == sizes.end()) return {};
      shape[axis] = size->second;
    }
    if (shape.empty()) return {};
    return shape;
  }

  /// Give a value between segments its memory: that of the last time, if it fits.
  OrtValue* Place(const OneRun& run, const End& end, const Shape& shape) {
    if (Segments::EndsIn(end.name, Segments::kCotangent)) turn_ = !turn_;
    const std::string key = KeyOf(end);
    auto found = segments_.kept.find(key);
    if (found == segments_.kept.end() || found->second.first.shape != shape ||
        found->second.first.type != end.type) {
      if (found != segments_.kept.end()) Release(run, found);  // before there is another
      const Tensor tensor = Zeros(end.type, shape);
      found = segments_.kept.emplace(key, std::make_pair(tensor, tensor.Value())).first;
    }
    auto* value = const_cast<OrtValue*>(static_cast<const OrtValue*>(found->second.second));
    given_[end.name] = {value, shape};
    return value;
  }
  /// Free a kept value, which no segment of a package of ours reads any more.
  void Release(const OneRun& run, Segments::Kept::iterator kept) {
    const OrtValue* const value = kept->second.second;
    const auto& read = run.arguments.inputs;
    if (std::find(read.begin(), read.end(), value) != read.end())
      ThrowSegments("a gradient is read when another takes its place");
    for (auto given = given_.begin(); given != given_.end();)
      given = given->second.first == value ? given_.erase(given) : std::next(given);
    segments_.kept.erase(kept);
  }
  /// The next run reads a cotangent, and makes the next one: two take turns.
  std::string KeyOf(const End& end) const {
    if (!Segments::EndsIn(end.name, Segments::kCotangent)) return end.name;
    return Segments::kCotangent + std::to_string(turn_);
  }

  Ort::AllocatorWithDefaultOptions allocator_;
  Segments& segments_;
  const Ending& ending_;
  const std::vector<Spec>& inputs_;
  const std::vector<Spec>& outputs_;
  Tensor loss_;
  Ort::Value loss_value_;
  std::deque<OneRun> runs_;
  std::map<std::string, std::pair<OrtValue*, Shape>> given_;
  bool turn_ = false;
};

}  // namespace odtpack::detail
