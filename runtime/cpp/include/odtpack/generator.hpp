// Tokens that follow a prompt: the decoder of a package, with adapters that were trained for it.
#pragma once

#include "odtpack/adapter.hpp"
#include "odtpack/packed.hpp"

namespace odtpack {

/// How tokens are chosen, and when a sequence ends.
struct GenerateOptions {
  std::string adapter;         // its name; empty for the decoder as it was exported
  int64_t max_tokens = 256;    // how many follow at most
  std::set<int64_t> stop;      // tokens that end the sequence, and are not in it
  double temperature = 0;      // 0 for the likeliest token; otherwise the logits are divided by it
  size_t top_k = 0;            // one of that many likeliest tokens is drawn; 0 for all
  double top_p = 1;            // of the likeliest that have this probability together
  uint64_t seed = 0;           // the same one draws the same tokens, as in Python
};

/// The inference model of a decoder that was trained in segments, loaded once: its weights are
/// those of the training, in the same file. Any number of adapters may be beside it, and each call
/// says which one counts. One call at a time: a second one is the error `busy`.
class Generator {
  /// What the decoder has read of one sequence.
  class Sequence {
   public:
    Generator& of;

    Sequence(Generator& from, const std::string& adapter) : of(from) {
      for (const auto& [name, tensor] : of.states_) Give(name, tensor.Value());
      if (adapter.empty()) return;
      const auto found = of.adapters_.find(adapter);
      if (found == of.adapters_.end())
        throw Error("unknown-adapter", "There is no adapter '" + adapter + "'.", "",
                    "add it first: AddAdapter(name, path)");
      adapter_ = found->second();
      for (const auto& [name, tensor] : adapter_) Give(name, tensor.Value());
    }

    /// Read further tokens, some at a time: the logits of each take as many numbers as there are
    /// words. Returns those of the last.
    std::vector<float> Read(const std::vector<int64_t>& tokens) {
      constexpr size_t at_once = 32;
      std::vector<float> last;
      for (size_t start = 0; start < tokens.size(); start += at_once) {
        const size_t size = std::min(at_once, tokens.size() - start);
        last = Part(tokens.data() + start, static_cast<int64_t>(size));
      }
      return last;
    }

    /// How many tokens were read.
    int64_t Count() const { return count_; }

   private:
    void Give(const std::string& name, Ort::Value value) {
      values_.insert_or_assign(name, std::move(value));
    }

    std::vector<float> Part(const int64_t* tokens, int64_t size) {
      const detail::Tensor ids = detail::Zeros(detail::kInt64, {1, size});
      const detail::Tensor places = detail::Zeros(detail::kInt64, {1, size});
      const detail::Tensor mask = detail::Zeros(detail::kInt64, {1, count_ + size});
      ids.CopyFrom(tokens);
      std::iota(places.As<int64_t>(), places.As<int64_t>() + size, count_);
      std::fill_n(mask.As<int64_t>(), count_ + size, 1);
      const std::map<std::string, const detail::Tensor*> own = {
          {"input_ids", &ids}, {"position_ids", &places}, {"attention_mask", &mask}};
      for (const auto& [name, tensor] : own)
        if (of.given_.count(name) > 0) Give(name, tensor->Value());
      detail::Arguments arguments;
      for (const auto& [name, value] : values_) {
        arguments.input_names.push_back(name.c_str());
        arguments.inputs.push_back(value);
      }
      for (const std::string& name : of.outputs_) arguments.output_names.push_back(name.c_str());
      arguments.outputs.resize(of.outputs_.size());
      arguments.Run(of.session_, "pass fewer tokens, of those that the decoder knows");
      std::vector<Ort::Value> results;
      for (OrtValue* output : arguments.outputs) results.emplace_back(output);
      size_t next = 1;
      for (const auto& state : of.states_) Give(state.first, std::move(results[next++]));
      count_ += size;
      const auto info = results[0].GetTensorTypeAndShapeInfo();
      const detail::Shape shape = info.GetShape();
      const detail::Tensor logits{info.GetElementType(), {shape.back()}, nullptr};
      detail::Tensor last = detail::Zeros(logits.type, logits.shape);
      last.CopyFrom(static_cast<const uint8_t*>(results[0].GetTensorRawData()) +
                    static_cast<size_t>(size - 1) * logits.Bytes());
      last = detail::Convert(last, detail::kFloat);
      return {last.As<float>(), last.As<float>() + last.Count()};
    }

    detail::Tensors adapter_;  // whose memory the values are in
    std::map<std::string, Ort::Value> values_;
    int64_t count_ = 0;
  };

 public:
  Generator(const Ort::Env& env, const Package& package, int threads = 0)
      : Generator(env, package, Options(env, package, threads)) {}
  /// With options of the caller's choice, such as those of a device. Their entry
  /// "odtpack.packed_weights" names a folder for the weights as ONNX Runtime packs them: they are
  /// written once, and mapped from then on.
  Generator(const Ort::Env& env, const Package& package, const Ort::SessionOptions& options)
      : package_(package), session_(detail::OpenDecoder(env, package, options)) {
    const Ort::AllocatorWithDefaultOptions allocator;
    outputs_.push_back("logits");
    for (size_t i = 0; i < session_.GetInputCount(); ++i) {
      const std::string name = session_.GetInputNameAllocated(i, allocator).get();
      const std::string past = "past_key_values.";
      if (name.rfind(past, 0) != 0) {
        given_.insert(name);
        continue;
      }
      const auto type = session_.GetInputTypeInfo(i);
      const auto info = type.GetTensorTypeAndShapeInfo();
      const auto shape = info.GetShape();
      if (shape.size() != 4 || shape[1] < 1 || shape[3] < 1)
        detail::ThrowMismatch("the cache '" + name + "' has no size");
      states_[name] = detail::Zeros(info.GetElementType(), {1, shape[1], 0, shape[3]});
    }
    for (const auto& state : states_)
      outputs_.push_back("present" + state.first.substr(state.first.find('.')));
  }

  /// Put an adapter beside the decoder: a state, as it is at each later call, which is `busy` if a
  /// call of the state runs when it begins. Do not train it during one. The state is kept.
  void AddAdapter(const std::string& name, const CheckpointState& state) {
    const auto read = [this, state] {
      const detail::Gate::Call call(*state.Internal()->gate);
      return OfDecoder(detail::TrainedOf(package_, *state.Internal()));
    };
    read();  // says what is wrong with it
    Add(name, read);
  }
  /// Put one beside it that SaveAdapter or PEFT wrote.
  void AddAdapter(const std::string& name, const std::string& path) {
    detail::Tensors shapes;
    for (const auto& spec : package_.Parameters())
      if (spec.role == "trainable") shapes[spec.name] = {spec.type, spec.shape, nullptr};
    const detail::Tensors values = OfDecoder(detail::ReadAdapter(package_, shapes, path));
    Add(name, [values] { return values; });
  }
  /// Forget an adapter, if it is there.
  void RemoveAdapter(const std::string& name) {
    const detail::Gate::Call call(gate_);
    adapters_.erase(name);
  }

  /// The tokens that follow a prompt, one by one. The generator must outlive them; any number of
  /// them may take turns.
  class Tokens {
   public:
    /// The next token; none at the end, which an error is as well.
    std::optional<int64_t> Next() {
      const detail::Gate::Call call(sequence_.of.gate_);
      const int64_t left = std::exchange(left_, 0);
      if (left == 0) return std::nullopt;
      const std::vector<float> logits = sequence_.Read(next_);
      const auto odd = [](float logit) { return std::isnan(logit); };
      if (std::any_of(logits.begin(), logits.end(), odd) ||
          !std::isfinite(*std::max_element(logits.begin(), logits.end())))
        throw Error("run-failed",
                    "The decoder's logits after " + std::to_string(sequence_.Count()) +
                        " tokens are not finite.",
                    "", "use an adapter from before its training diverged");
      const int64_t token = Choose(logits, options_, options_.seed);
      if (options_.stop.count(token) > 0) return std::nullopt;
      left_ = left - 1;
      next_ = {token};
      return token;
    }

   private:
    friend class Generator;
    Tokens(Generator& of, std::vector<int64_t> prompt, const GenerateOptions& options)
        : sequence_(of, options.adapter), options_(options), left_(options.max_tokens),
          next_(std::move(prompt)) {}

    Sequence sequence_;
    GenerateOptions options_;  // the seed is the state of the drawing
    int64_t left_;
    std::vector<int64_t> next_;
  };

  Tokens Begin(std::vector<int64_t> prompt, const GenerateOptions& options = {}) {
    if (!(options.temperature >= 0) || !(options.top_p > 0 && options.top_p <= 1) ||
        options.max_tokens < 0)
      throw Error("bad-argument",
                  "temperature and max_tokens must be 0 or more, top_p above 0 and at most 1.");
    Check(prompt);
    const detail::Gate::Call call(gate_);
    return {*this, std::move(prompt), options};
  }
  /// Call `take` with each token that follows a prompt, as soon as it is there, until it returns
  /// false. Returns all of them.
  std::vector<int64_t> Generate(const std::vector<int64_t>& prompt, const GenerateOptions& options,
                                const std::function<bool(int64_t)>& take = nullptr) {
    Tokens tokens = Begin(prompt, options);
    std::vector<int64_t> found;
    while (const auto token = tokens.Next()) {
      found.push_back(*token);
      if (take && !take(*token)) break;
    }
    return found;
  }

  /// The logits of the token after a sequence, one for each word.
  std::vector<float> Logits(const std::vector<int64_t>& tokens, const std::string& adapter = "") {
    Check(tokens);
    const detail::Gate::Call call(gate_);
    return Sequence(*this, adapter).Read(tokens);
  }

 private:
  void Add(const std::string& name, std::function<detail::Tensors()> values) {
    if (name.empty())
      throw Error("bad-argument", "An adapter needs a name: the empty one stands for none.");
    const detail::Gate::Call call(gate_);
    adapters_[name] = std::move(values);
  }

  static Ort::SessionOptions Options(const Ort::Env& env, const Package& package, int threads) {
    Ort::SessionOptions options = package.SessionOptions(env, threads);
    options.SetLogSeverityLevel(3);  // an adapter's inputs have values, which is meant
    return options;
  }

  void Check(const std::vector<int64_t>& tokens) const {
    if (tokens.empty() || *std::min_element(tokens.begin(), tokens.end()) < 0)
      throw Error("bad-prompt", "A prompt is one token or more, as whole numbers from 0 on.");
    // Some kernels take a token beyond the vocabulary for a vector of zeros.
    const int64_t most = *std::max_element(tokens.begin(), tokens.end());
    for (const auto& spec : package_.Inputs())
      if (spec.class_count > 0 && most >= spec.class_count)
        throw Error("bad-prompt", "The token " + std::to_string(most) + " is not below the " +
                                      std::to_string(spec.class_count) + " of the vocabulary.");
  }

  /// Those of what was trained that the decoder takes.
  detail::Tensors OfDecoder(const detail::Tensors& trained) const {
    detail::Tensors own;
    for (const auto& spec : package_.Adapter()) own[spec.name] = trained.at(spec.name);
    return own;
  }

  static int64_t Choose(const std::vector<float>& logits, const GenerateOptions& options,
                        uint64_t& state) {
    if (options.temperature == 0)
      return std::max_element(logits.begin(), logits.end()) - logits.begin();
    std::vector<int64_t> order(logits.size());
    std::iota(order.begin(), order.end(), 0);
    std::stable_sort(order.begin(), order.end(), [&logits](int64_t one, int64_t two) {
      return logits[static_cast<size_t>(one)] > logits[static_cast<size_t>(two)];
    });
    if (options.top_k > 0) order.resize(std::min(order.size(), options.top_k));
    const auto logit = [&](int64_t token) -> double { return logits[static_cast<size_t>(token)]; };
    std::vector<double> total;
    for (const int64_t token : order)
      total.push_back((total.empty() ? 0 : total.back()) +
                      std::exp((logit(token) - logit(order[0])) / options.temperature));
    const auto kept = std::lower_bound(total.begin(), total.end(), options.top_p * total.back());
    if (kept != total.end()) total.erase(kept + 1, total.end());
    const double place = Uniform(state) * total.back();
    const auto found = std::upper_bound(total.begin(), total.end() - 1, place);
    return order[static_cast<size_t>(found - total.begin())];
  }

  /// The next number of SplitMix64, from 0 to below 1.
  static double Uniform(uint64_t& state) {
    uint64_t mixed = state += 0x9E3779B97F4A7C15;
    mixed = (mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9;
    mixed = (mixed ^ (mixed >> 27)) * 0x94D049BB133111EB;
    return static_cast<double>((mixed ^ (mixed >> 31)) >> 11) / 9007199254740992.0;
  }

  detail::Gate gate_;
  Package package_;
  Ort::Session session_;
  std::set<std::string> given_;
  std::map<std::string, detail::Tensor> states_;
  std::vector<std::string> outputs_;
  std::map<std::string, std::function<detail::Tensors()>> adapters_;  // as each is now
};

}  // namespace odtpack
