// What a device reaches through ONNX Runtime, for `odtpack devices import`
// (docs/formats/measurements.md).
#pragma once

#include <chrono>
#if defined(__APPLE__)
#include <TargetConditionals.h>
#endif

#include "odtpack/odtpack.hpp"

namespace odtpack {

namespace detail {

/// Seconds that a piece of work takes.
template <class Work>
double Seconds(Work work) {
  const auto start = std::chrono::steady_clock::now();
  work();
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

/// A model of one operator without attributes on float32 tensors, the last of which is its result.
inline std::string OneOperator(const std::string& kind, const std::vector<Shape>& shapes) {
  const auto field = [](int number, const std::string& content) {
    return Field(static_cast<char>(number * 8 + 2), content);
  };
  std::string node, values;
  for (size_t i = 0; i < shapes.size(); ++i) {
    const bool result = i + 1 == shapes.size();
    std::string dims;
    for (const int64_t size : shapes[i])
      dims += field(1, '\x08' + Varint(static_cast<uint64_t>(size)));
    const std::string name = "t" + std::to_string(i), type = field(1, "\x08\x01" + field(2, dims));
    node += field(result ? 2 : 1, name);
    values += field(result ? 12 : 11, field(1, name) + field(2, type));
  }
  const std::string graph = field(1, node + field(4, kind)) + field(2, "operator") + values;
  return "\x08\x08" + field(8, "\x10\x11") + field(7, graph);  // IR version 8, opset 17
}

/// Seconds of one run of an operator: the best of at least five in 0.3 seconds.
inline double OperatorSeconds(const Ort::Env& env, const std::string& kind,
                              const std::vector<Shape>& shapes, int threads) {
  Ort::SessionOptions options;
  options.SetIntraOpNumThreads(threads);
  const std::string model = OneOperator(kind, shapes);
  Ort::Session session(env, model.data(), model.size(), options);
  std::vector<Tensor> tensors;
  std::vector<Ort::Value> values;
  for (const Shape& shape : shapes) {
    tensors.push_back(Zeros(kFloat, shape));
    std::fill_n(tensors.back().As<float>(), tensors.back().Count(), 0.5f);
    values.push_back(tensors.back().Value());
  }
  const char* names[] = {"t0", "t1", "t2"};
  const size_t inputs = shapes.size() - 1;
  double best = 1e300, total = 0;
  for (int run = 0; run < 5 || total < 0.3; ++run) {
    const double seconds = Seconds([&] {
      session.Run(Ort::RunOptions{nullptr}, names, values.data(), inputs, names + inputs,
                  values.data() + inputs, 1);
    });
    best = std::min(best, seconds);
    total += seconds;
  }
  return best;
}

inline std::string List(const std::vector<double>& values) {
  std::string text;
  for (const double value : values) text += (text.empty() ? "" : ", ") + Repr(value);
  return "[" + text + "]";
}

/// The system this was compiled for, as device profiles name it.
inline std::string System() {
#if defined(__ANDROID__)
  return "android";
#elif defined(__APPLE__)
#if TARGET_OS_IPHONE
  return "ios";
#else
  return "macos";
#endif
#elif defined(_WIN32)
  return "windows";
#else
  return "linux";
#endif
}

}  // namespace detail

/// Measure matrix products, convolutions, copies and storage, each five times: about half a
/// minute. Returns JSON. `memory_limit` is what the system grants this app, if it tells: its bytes
/// from ActivityManager on Android, os_proc_available_memory on iOS; 0 if it does not. With
/// `load_minutes`, matrix products run for so long afterwards and show how the device throttles.
inline std::string Benchmark(const Ort::Env& env, const std::string& folder, int threads,
                             size_t memory_limit = 0, size_t file_bytes = size_t{64} << 20,
                             double load_minutes = 0) {
  std::vector<double> gemm, single, convolution, copy, write, read, sync;
  const auto products = [&env](int count) {
    double best = 0;
    for (const int64_t size : {256, 512, 1024}) {
      const detail::Shape square = {size, size};
      const double work = 2.0 * static_cast<double>(size * size * size);
      best = std::max(
          best, work / detail::OperatorSeconds(env, "MatMul", {square, square, square}, count));
    }
    return best;
  };
  const detail::fs::path path = detail::fs::path(folder) / ".odtpack-benchmark";
  const std::vector<char> block(size_t{1} << 20, 'x');
  const auto timed_write = [&](const detail::File& file, size_t bytes) {
    return detail::Seconds([&] {
      for (size_t done = 0; done < bytes; done += block.size()) {
        detail::Write(file, block.data(), std::min(block.size(), bytes - done));
      }
      detail::Sync(file);
    });
  };
  try {
    for (int round = 0; round < 5; ++round) {  // in turns: a slow minute shows in each
      gemm.push_back(products(threads));
      single.push_back(threads == 1 ? gemm.back() : products(1));
      const double filters = 2.0 * 4 * 64 * 56 * 56 * 64 * 9;
      convolution.push_back(
          filters / detail::OperatorSeconds(
                        env, "Conv", {{4, 64, 58, 58}, {64, 64, 3, 3}, {4, 64, 56, 56}}, threads));
      const int64_t elements = 16 << 20;
      copy.push_back(4.0 * elements /
                     detail::OperatorSeconds(env, "Neg", {{elements}, {elements}}, 1));
      const auto file = detail::Open(path, "w+be");
      ::unlink(path.c_str());  // nothing stays, however this ends
      write.push_back(static_cast<double>(file_bytes) / timed_write(file, file_bytes));
      for (int i = 0; i < 8; ++i) sync.push_back(timed_write(file, 4096));
#if defined(POSIX_FADV_DONTNEED) || defined(F_NOCACHE)
#if defined(POSIX_FADV_DONTNEED)
      detail::Check(::posix_fadvise(::fileno(file.get()), 0, 0, POSIX_FADV_DONTNEED) == 0);
#else
      detail::Check(::fcntl(::fileno(file.get()), F_NOCACHE, 1) == 0);
#endif
      std::rewind(file.get());
      std::vector<char> buffer(block.size());
      read.push_back(static_cast<double>(file_bytes) / detail::Seconds([&] {
                       while (std::fread(buffer.data(), 1, buffer.size(), file.get()) ==
                              buffer.size()) {
                       }
                     }));
#endif
    }
  } catch (const std::system_error& error) {
    detail::ThrowNotWritten(path, error.code().message());
  }
  std::vector<double> seconds, sustained;
  const auto start = std::chrono::steady_clock::now();
  const auto elapsed = [&start] {
    return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  };
  while (elapsed() < 60 * load_minutes) {
    const double second = elapsed();
    const detail::Shape square = {512, 512};
    sustained.push_back(
        2.0 * 512 * 512 * 512 /
        detail::OperatorSeconds(env, "MatMul", {square, square, square}, threads));
    seconds.push_back(second);
  }
  const std::string load = sustained.empty()
                               ? ""
                               : "\"sustained\": {\"seconds\": " + detail::List(seconds) +
                                     ", \"gemm_flops\": " + detail::List(sustained) + "}, ";
  const auto ram =
      static_cast<double>(::sysconf(_SC_PHYS_PAGES)) * static_cast<double>(::sysconf(_SC_PAGESIZE));
  return "{\"format\": 1, \"kit\": \"cpp\", \"onnxruntime\": \"" + Ort::GetVersionString() +
         "\", \"system\": \"" + detail::System() + "\", " + load +
         "\"threads\": " + std::to_string(threads) + ", \"gemm_flops\": " + detail::List(gemm) +
         ", \"gemm_single_flops\": " + detail::List(single) +
         ", \"convolution_flops\": " + detail::List(convolution) +
         ", \"copy_bytes_per_second\": " + detail::List(copy) +
         ", \"file_bytes\": " + std::to_string(file_bytes) +
         ", \"write_bytes_per_second\": " + detail::List(write) +
         ", \"read_bytes_per_second\": " + detail::List(read) +
         ", \"sync_seconds\": " + detail::List(sync) + ", \"memory_bytes\": " + detail::Repr(ram) +
         ", \"memory_limit_bytes\": " + (memory_limit > 0 ? std::to_string(memory_limit) : "null") +
         "}";
}

}  // namespace odtpack
