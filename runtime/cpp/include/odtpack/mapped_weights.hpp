// The frozen weights of a network in segments, mapped from their file (docs/formats/package.md).
#pragma once

#include <chrono>
#include <condition_variable>
#include <mutex>
#include <thread>

#include "odtpack/package.hpp"

namespace odtpack::detail {

[[noreturn]] inline void ThrowSegments(const std::string& problem) {
  throw Error("segments-invalid", "The package's segments are not valid: " + problem + ".", "",
              "build the package again");
}

/// Weights where they lie in a file, read-only.
class MappedWeights {
 public:
  /// A part of the file in whole pages, as start and length.
  using Pages = std::pair<size_t, size_t>;

  /// Map the file that `segments` of a manifest names, `path`, and find the tensors in it.
  MappedWeights(const std::string& path, const Json& segments) {
    if (!path.empty()) file_ = Map(path, "model-not-readable", "copy the whole folder again");
    size_t end = 0;
    for (const Json& json : segments.Get<Json::List>("tensors", {})) {
      const auto name = json.Get<std::string>("name");
      const Type type = Spec::TypeOf(json.Get<std::string>("dtype"));
      const Shape shape = json.Wholes("shape");
      if (!file_ || TypeInfo(type).second == 0)
        ThrowSegments("nothing can hold the weight '" + name + "'");
      const auto start = static_cast<uint64_t>(json["offset"].Whole());
      if (start < end || start % kAlignment != 0) ThrowSegments("the place of '" + name + "'");
      const size_t size = Size(shape, TypeInfo(type).second);
      if (start > FileSize() || size > FileSize() - start)
        ThrowSegments("the weight '" + name + "' ends after the file of weights");
      end = start + size;
      auto* data = const_cast<char*>(file_->data()) + start;
      Weight weight{type,
                    shape,
                    {start, size},
                    Ort::Value::CreateTensor(Cpu(), data, size, shape.data(), shape.size(), type)};
      if (!weights_.emplace(name, std::move(weight)).second)
        ThrowSegments("two weights are called '" + name + "'");
    }
  }

  bool Has(const std::string& name) const { return weights_.count(name) > 0; }
  /// A weight as a model takes it, whose type and shape must be these.
  OrtValue* Find(const std::string& name, Type type, const Shape& shape) const {
    const Weight& weight = weights_.at(name);
    if (weight.type != type || weight.shape != shape)
      ThrowSegments("a model takes another '" + name + "' than the file of weights holds");
    return const_cast<OrtValue*>(static_cast<const OrtValue*>(weight.value));
  }
  /// The pages that weights take, with what lies between them.
  Pages PagesOf(const std::vector<std::string>& names) const {
    size_t start = FileSize(), end = 0;
    for (const std::string& name : names) {
      const auto [first, size] = weights_.at(name).place;
      start = std::min(start, first);
      end = std::max(end, first + size);
    }
    static const auto page = static_cast<size_t>(::sysconf(_SC_PAGESIZE));
    start -= start % page;
    return {start, end > start ? end - start : 0};
  }
  /// Do what reads pages, and give them back to the system. Of many, those that were read are given
  /// back meanwhile: the matrix of a large vocabulary is read from one end to the other.
  template <class Body>
  void Read(const Pages& pages, Body body) const {
    const Released whole{*this, pages};
    if (pages.second <= kMostResident) return body();
    const Releasing meanwhile(*this, pages);
    body();
  }

 private:
  struct Weight {
    Type type;
    Shape shape;
    Pages place;
    Ort::Value value;
  };
  struct Released {
    const MappedWeights& weights;
    const Pages pages;
    ~Released() { weights.Release(pages); }
  };
  class Releasing {
   public:
    Releasing(const MappedWeights& weights, const Pages& pages)
        : thread_([this, &weights, pages] {
            std::unique_lock<std::mutex> lock(mutex_);
            while (!wake_.wait_for(lock, std::chrono::milliseconds(5), [this] { return done_; }))
              weights.Release(pages);
          }) {}
    ~Releasing() {
      {
        const std::lock_guard<std::mutex> lock(mutex_);
        done_ = true;
      }
      wake_.notify_one();
      thread_.join();
    }

   private:
    std::mutex mutex_;
    std::condition_variable wake_;
    bool done_ = false;
    std::thread thread_;  // last, so that the others are there when it begins
  };
  static constexpr size_t kMostResident = 16 << 20;

  size_t FileSize() const { return file_ ? file_->size() : 0; }

  /// Bytes of a tensor; more than any file has where the sizes are no tensor's.
  static size_t Size(const Shape& shape, size_t element) {
    constexpr size_t most = size_t{1} << 48;
    size_t count = 1;
    for (const int64_t size : shape) {
      if (size < 0 || static_cast<size_t>(size) > most / std::max<size_t>(count, 1)) return most;
      count *= static_cast<size_t>(size);
    }
    return count * element;
  }

  void Release(const Pages& pages) const {
    if (pages.second > 0)
      ::madvise(const_cast<char*>(file_->data()) + pages.first, pages.second, MADV_DONTNEED);
  }

  std::shared_ptr<const std::string_view> file_;
  std::map<std::string, Weight> weights_;
};

}  // namespace odtpack::detail
