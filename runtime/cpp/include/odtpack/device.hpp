// A device beside the processor: a plug-in of ONNX Runtime, and the memory in which a training
// lives there.
#pragma once

#include "odtpack/base.hpp"

namespace odtpack {

/// Let the sessions of these options run on a plug-in of ONNX Runtime 1.23 or newer, a WebGPU
/// library for example: its path, and the number of the device among those that it finds. Tensors
/// of a batch are made with OrtMemTypeDefault.
inline void AddDevice(const Ort::Env& env, Ort::SessionOptions& options, const std::string& library,
                      size_t index = 0);

namespace detail {

#if ORT_API_VERSION >= 23
/// Whether the library in use has what plug-ins need; the API of an older one ends before that.
inline bool TakesDevices() {
  int minor = 0;
  return std::sscanf(Ort::GetVersionString().c_str(), "%*d.%d", &minor) == 1 && minor >= 23;
}
#else
inline bool TakesDevices() { return false; }
#endif

[[noreturn]] inline void ThrowNoDevice(const std::string& problem, const std::string& hint) {
  throw Error("unsupported-device", problem, "", hint);
}

/// The twins of tensors in a device's memory, which models read and write in place. The tensors are
/// brought up to date when someone reads them, and the twins before a run after someone wrote.
class Twins {
 public:
  /// Where a session wants its inputs; nothing if that is the processor's memory.
  static std::shared_ptr<Twins> Of(const Ort::Env& env, const Ort::Session& session) {
#if ORT_API_VERSION >= 23
    std::vector<const OrtMemoryInfo*> places(TakesDevices() ? session.GetInputCount() : 0);
    if (!places.empty())
      Ort::ThrowOnError(Ort::GetApi().SessionGetMemoryInfoForInputs(session, places.data(),
                                                                    places.size()));
    for (const OrtMemoryInfo* place : places) {
      OrtMemoryInfoDeviceType type = OrtMemoryInfoDeviceType_CPU;
      if (place != nullptr) Ort::GetApi().MemoryInfoGetDeviceType(place, &type);
      OrtAllocator* memory = nullptr;
      if (type == OrtMemoryInfoDeviceType_CPU) continue;
      Ort::ThrowOnError(Ort::GetApi().GetSharedAllocator(const_cast<OrtEnv*>(ToRaw(env)), place,
                                                         &memory));
      if (memory != nullptr) return std::shared_ptr<Twins>(new Twins(env, memory));
    }
#endif
    static_cast<void>(env), static_cast<void>(session);
    return nullptr;
  }

  /// The twin of a tensor, in its shape; `role` tells what becomes of it.
  enum Role { kRead, kWritten, kGradient };
  Ort::Value Value(const Tensor& tensor, Role role) {
    if (tensor.Bytes() == 0) return tensor.Value();
    auto& [twin, host, part] = twins_[{tensor.data.get(), tensor.Bytes()}];
    if (!host.data) {
      host = tensor, part = role;
      twin = Allocate(tensor);
    }
    if (role == kWritten) part = role;
    const OrtMemoryInfo* info = nullptr;
    Ort::ThrowOnError(Ort::GetApi().AllocatorGetInfo(memory_, &info));
    OrtValue* value = nullptr;
    Ort::ThrowOnError(Ort::GetApi().CreateTensorWithDataAsOrtValue(
        info, twin.GetTensorMutableRawData(), tensor.Bytes(), tensor.shape.data(),
        tensor.shape.size(), tensor.type, &value));
    changed_ = true;
    return Ort::Value(value);
  }
  Ort::Value Allocate(const Tensor& tensor) const {
    return Ort::Value::CreateTensor(memory_, tensor.shape.data(), tensor.shape.size(), tensor.type);
  }

  /// Before a run: let twins hold what was written to tensors.
  void Push() {
    if (changed_) {
      Lists lists;
      for (auto& [key, each] : twins_) lists.Add(each.host.Value(), each.twin);
      Copy(lists.from, lists.to);
    }
    changed_ = false;
    ran_ = true;
  }
  /// Before a tensor is read: let it hold what runs have written.
  void Pull() {
    if (ran_) PullThose(kWritten);
    ran_ = false;
  }
  void PullGradients() { PullThose(kGradient); }
  void PushGradients() {
    Lists lists;
    for (auto& [key, each] : twins_) {
      if (each.role == kGradient) lists.Add(each.host.Value(), each.twin);
    }
    Copy(lists.from, lists.to);
  }
  /// Before a tensor is written.
  void Change() {
    Pull();
    changed_ = true;
  }

  void Copy(const std::vector<const OrtValue*>& from, const std::vector<OrtValue*>& to) const {
#if ORT_API_VERSION >= 23
    if (!to.empty())
      Ort::ThrowOnError(
          Ort::GetApi().CopyTensors(env_, from.data(), to.data(), nullptr, to.size()));
#else
    static_cast<void>(from), static_cast<void>(to);
#endif
  }

 private:
  struct Twin {
    Ort::Value twin{nullptr};
    Tensor host;
    Role role = kRead;
  };
  struct Lists {
    std::deque<Ort::Value> hosts;
    std::vector<const OrtValue*> from;
    std::vector<OrtValue*> to;
    void Add(Ort::Value host, Ort::Value& twin) {
      hosts.push_back(std::move(host));
      from.push_back(hosts.back());
      to.push_back(twin);
    }
  };

  Twins(const Ort::Env& env, OrtAllocator* memory) : env_(ToRaw(env)), memory_(memory) {}
  static const OrtEnv* ToRaw(const Ort::Env& env) { return env; }

  void PullThose(Role role) {
    Lists lists;
    for (auto& [key, each] : twins_) {
      if (each.role == role) lists.Add(each.host.Value(), each.twin);
    }
    const std::vector<const OrtValue*> from(lists.to.begin(), lists.to.end());
    const std::vector<OrtValue*> to(lists.hosts.begin(), lists.hosts.end());
    Copy(from, to);
  }

  const OrtEnv* env_;
  OrtAllocator* memory_;
  std::map<std::pair<const void*, size_t>, Twin> twins_;
  bool changed_ = false, ran_ = false;  // whether tensors, or twins, may be newer than the others
};

}  // namespace detail

inline void AddDevice(const Ort::Env& env, Ort::SessionOptions& options, const std::string& library,
                      size_t index) {
#if ORT_API_VERSION >= 23
  if (detail::TakesDevices()) {
    const OrtApi& api = Ort::GetApi();
    auto* own = const_cast<OrtEnv*>(static_cast<const OrtEnv*>(env));
    std::vector<const OrtEpDevice*> found;
    const auto look = [&] {
      const OrtEpDevice* const* all = nullptr;
      size_t count = 0;
      Ort::ThrowOnError(api.GetEpDevices(own, &all, &count));
      for (size_t i = 0; i < count; ++i) {
        const OrtKeyValuePairs* known = api.EpDevice_EpMetadata(all[i]);
        const char* path = api.GetKeyValue(known, "library_path");
        if (path != nullptr && path == library) found.push_back(all[i]);
      }
    };
    look();
    if (found.empty()) {
      const Ort::Status status(
          api.RegisterExecutionProviderLibrary(own, library.c_str(), library.c_str()));
      if (!status.IsOK())
        detail::ThrowNoDevice("The plug-in cannot be loaded: " + status.GetErrorMessage(),
                              "pass the path of a plug-in for this ONNX Runtime");
      look();
    }
    if (index >= found.size())
      detail::ThrowNoDevice("The plug-in has found " + std::to_string(found.size()) + " devices, " +
                                "and none of number " + std::to_string(index) + ".",
                            "check that a driver for the device is installed");
    Ort::ThrowOnError(api.SessionOptionsAppendExecutionProvider_V2(
        options, own, &found[index], 1, nullptr, nullptr, 0));
    return;
  }
#endif
  static_cast<void>(env), static_cast<void>(options), static_cast<void>(index);
  detail::ThrowNoDevice(
      "ONNX Runtime " + Ort::GetVersionString() + " takes no plug-in " + library + ".",
      "use 1.23 or newer");
}

}  // namespace odtpack
