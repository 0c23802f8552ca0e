// What the rest is built of: errors, tensors in memory of our own, files written whole.
#pragma once

#include <fcntl.h>
#include <flatbuffers/util.h>
#include <onnxruntime_cxx_api.h>
#include <signal.h>
#include <sys/mman.h>
#include <unistd.h>
#if defined(__GLIBC__) || defined(__ANDROID__)
#include <malloc.h>
#elif defined(__APPLE__)
#include <malloc/malloc.h>
#endif

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <deque>
#include <filesystem>
#include <functional>
#include <map>
#include <numeric>
#include <optional>
#include <random>
#include <set>
#include <system_error>
#include <variant>

namespace odtpack {

/// Whether ONNX Runtime sends telemetry, as its official builds do from 1.29 on. An app that wants
/// that sets it to 0.
constexpr char kNoTelemetry[] = "ORT_DISABLE_TELEMETRY";

/// Keep ONNX Runtime from sending anything. Call it before the first `Ort::Env` is made: of one that
/// exists, a training session can only stop what comes later.
inline void DisableTelemetry() { setenv(kNoTelemetry, "1", 0); }

/// Bad input or usage, for the person who must correct it. Codes are those of the Python runtime.
class Error : public Ort::Exception {
 public:
  Error(const std::string& code, const std::string& what, const std::string& where = "",
        const std::string& hint = "")
      : Ort::Exception(what + (where.empty() ? "" : "\n  in: " + where) +
                           (hint.empty() ? "" : "\n  help: " + hint),
                       ORT_FAIL),
        code_(code) {}
  /// Stable kebab-case identifier, such as "checkpoint-corrupt".
  const std::string& Code() const { return code_; }

 private:
  std::string code_;
};

namespace detail {

/// Let the C allocator give pages back to the system that hold nothing any more.
inline void GiveBackFreed() {
#if defined(__GLIBC__)
  ::malloc_trim(0);
#elif defined(__ANDROID__) && defined(M_PURGE)
  ::mallopt(M_PURGE, 0);
#elif defined(__APPLE__)
  ::malloc_zone_pressure_relief(nullptr, 0);
#endif
}

namespace fs = std::filesystem;
using Memory = std::shared_ptr<uint8_t>;
using Shape = std::vector<int64_t>;
using Type = ONNXTensorElementDataType;
constexpr Type kFloat = ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT,
               kHalf = ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT16,
               kDouble = ONNX_TENSOR_ELEMENT_DATA_TYPE_DOUBLE,
               kInt64 = ONNX_TENSOR_ELEMENT_DATA_TYPE_INT64,
               kInt8 = ONNX_TENSOR_ELEMENT_DATA_TYPE_INT8,
               kBool = ONNX_TENSOR_ELEMENT_DATA_TYPE_BOOL;
constexpr size_t kAlignment = 64;  // a cache line, and the widest vector load

/// Name and bytes of an element type, 0 for text and for what numpy has no type for.
inline std::pair<const char*, size_t> TypeInfo(int64_t type) {
  constexpr std::pair<const char*, size_t> known[] = {
      {"unknown", 0}, {"float32", 4}, {"uint8", 1},  {"int8", 1},   {"uint16", 2},
      {"int16", 2},   {"int32", 4},   {"int64", 8},  {"string", 0}, {"bool", 1},
      {"float16", 2}, {"float64", 8}, {"uint32", 4}, {"uint64", 8}};
  return known[type < 0 || type > 13 ? 0 : type];
}

inline std::string Text(const Shape& shape) {
  std::string text;
  for (const int64_t size : shape) text += (text.empty() ? "" : ", ") + std::to_string(size);
  return "[" + text + "]";
}

/// An array in row-major order whose memory is shared with others.
struct Tensor {
  Type type = kFloat;
  Shape shape;
  Memory data;

  size_t Count() const {
    return static_cast<size_t>(
        std::accumulate(shape.begin(), shape.end(), int64_t{1}, std::multiplies<int64_t>()));
  }
  size_t Bytes() const { return Count() * TypeInfo(type).second; }
  std::string Description() const { return TypeInfo(type).first + Text(shape); }
  template <class T>
  T* As() const {
    return reinterpret_cast<T*>(data.get());
  }
  /// A part of the same memory, from an element on.
  Tensor From(int64_t offset, Shape part) const {
    return {type,
            std::move(part),
            {data, data.get() + static_cast<size_t>(offset) * TypeInfo(type).second}};
  }
  void CopyFrom(const void* source) const {
    if (Bytes() > 0) std::memcpy(data.get(), source, Bytes());
  }
  /// The same memory as ONNX Runtime sees it.
  Ort::Value Value() const {
    static const auto cpu = Ort::MemoryInfo::CreateCpu(OrtDeviceAllocator, OrtMemTypeCPU);
    return Ort::Value::CreateTensor(cpu, data.get(), Bytes(), shape.data(), shape.size(), type);
  }
};

/// Zeros that start at a multiple of 64 bytes; pages that are never touched are never resident.
inline Tensor Zeros(Type type, Shape shape) {
  Tensor tensor{type, std::move(shape), nullptr};
  void* raw = std::calloc(tensor.Bytes() + kAlignment, 1);
  if (raw == nullptr) throw std::bad_alloc();
  const size_t past = reinterpret_cast<uintptr_t>(raw) % kAlignment;
  tensor.data = Memory(static_cast<uint8_t*>(raw) + (kAlignment - past) % kAlignment,
                       [raw](uint8_t*) { std::free(raw); });
  return tensor;
}

inline bool IsUtf8(const std::string& text) {
  for (const char* at = text.c_str(); at < text.c_str() + text.size();) {
    if (flatbuffers::FromUTF8(&at) < 0) return false;
  }
  return true;
}

/// Throw what the system refused.
inline void Check(bool done) {
  if (!done) throw std::system_error(errno, std::generic_category());
}

using File = std::unique_ptr<FILE, int (*)(FILE*)>;

inline File Open(const fs::path& path, const char* mode) {
  if (fs::exists(path) && !fs::is_regular_file(path))
    errno = EISDIR;  // a pipe would block
  else if (FILE* file = std::fopen(path.c_str(), mode))
    return File(file, std::fclose);
  throw std::system_error(errno, std::generic_category());
}
inline void Write(const File& file, const void* data, size_t size) {
  Check(size == 0 || std::fwrite(data, 1, size, file.get()) == size);
}
/// Let the disk write what a file got since `start`, and wait for nothing: left alone, a system
/// keeps it in memory until fsync. Returns where that ends.
inline off_t StartWriting(const File& file, off_t start) {
  Check(std::fflush(file.get()) == 0);
  const off_t end = ::ftello(file.get());
#if defined(POSIX_FADV_DONTNEED)
  ::posix_fadvise(::fileno(file.get()), start, end - start, POSIX_FADV_DONTNEED);  // a hint
#endif
  return end;
}
inline void Sync(const File& file) {
  Check(std::fflush(file.get()) == 0 && ::fsync(::fileno(file.get())) == 0);
}
/// Make renames inside the folder of a file durable.
inline void SyncFolder(const fs::path& path) {
  const int folder = ::open(fs::absolute(path).parent_path().c_str(), O_RDONLY | O_CLOEXEC);
  const bool done = folder >= 0 && ::fsync(folder) == 0;
  ::close(folder);
  Check(done);
}

/// The bytes of a file, as pages of the file's own: they take no memory of the process.
inline std::shared_ptr<const std::string_view> Map(const fs::path& path) {
  const File file = Open(path, "rbe");
  const size_t size = fs::file_size(path);
  void* data =
      size == 0 ? nullptr : ::mmap(nullptr, size, PROT_READ, MAP_PRIVATE, ::fileno(file.get()), 0);
  Check(data != MAP_FAILED);
  const auto unmap = [data, size](const std::string_view* view) {
    if (size > 0) ::munmap(data, size);
    delete view;
  };
  return {new std::string_view(static_cast<const char*>(data), size), unmap};
}

/// Remove temporary files that processes which no longer run left behind.
inline void RemoveStale(const fs::path& folder, const std::string& start) {
  std::error_code ignored;
  for (const auto& entry : fs::directory_iterator(folder, ignored)) {
    const std::string name = entry.path().filename().string();
    int pid = 0, end = 0;
    if (name.compare(0, start.size(), start) == 0 &&
        std::sscanf(name.c_str() + start.size(), "%9d-%*12[0-9a-f].tmp%n", &pid, &end) == 1 &&
        start.size() + static_cast<size_t>(end) == name.size() && pid > 0 && ::kill(pid, 0) != 0 &&
        errno == ESRCH) {
      fs::remove(entry.path(), ignored);
    }
  }
}

[[noreturn]] inline void ThrowNotWritten(const fs::path& path, const std::system_error& error) {
  throw Error("file-not-written",
              path.string() + " could not be written: " + error.code().message(), "",
              "check that the folder exists, is writable and has space left");
}

/// Give a file, if there is one, a second name, so that one of the two always exists. Without hard
/// links it is renamed.
inline void KeepAs(const fs::path& target, const fs::path& temporary, const fs::path& previous) {
  std::error_code refused;
  if (!fs::exists(target)) return;
  fs::create_hard_link(target, temporary, refused);
  fs::rename(refused ? target : temporary, previous);
  fs::remove(temporary, refused);  // two names of one file: the rename did nothing
}

/// Write a file whole or not at all: temporary, fsync, rename. `body` gets the open File. The file
/// that is replaced is kept as `previous`, if that has a name.
template <class Body>
void WriteAtomically(const fs::path& target, Body body, const fs::path& previous = {}) {
  try {
    if (fs::is_directory(target))
      throw Error("path-is-a-folder", target.string() + " is a folder.");
    const std::string start = "." + target.filename().string() + ".";
    RemoveStale(fs::absolute(target).parent_path(), start);
    char mark[40];
    std::random_device random;
    std::snprintf(mark, sizeof mark, "%d-%06x%06x.tmp", static_cast<int>(::getpid()),
                  random() & 0xFFFFFFu, random() & 0xFFFFFFu);
    const fs::path temporary = target.parent_path() / (start + mark);
    try {
      const File file = Open(temporary, "wbxe");
      body(file);
      Sync(file);
      if (!previous.empty()) KeepAs(target, target.parent_path() / (start + "k" + mark), previous);
      fs::rename(temporary, target);
    } catch (...) {
      ::unlink(temporary.c_str());
      throw;
    }
    SyncFolder(target);
  } catch (const std::system_error& error) {  // fs::filesystem_error is one
    ThrowNotWritten(target, error);
  }
}

}  // namespace detail
}  // namespace odtpack
