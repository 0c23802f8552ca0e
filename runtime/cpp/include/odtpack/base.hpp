// What the rest is built of: errors, tensors in memory of our own, files written whole.
#pragma once

#include <fcntl.h>
#include <flatbuffers/util.h>
#include <onnxruntime_cxx_api.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <memory>
#include <random>
#include <string>
#include <string_view>
#include <system_error>
#include <vector>

namespace odtpack {

/// Bad input or usage, for the person who must correct it. Codes are those of the Python runtime.
class Error : public Ort::Exception {
 public:
  Error(const std::string& code, const std::string& what, const std::string& where = {},
        const std::string& hint = {})
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

namespace fs = std::filesystem;

constexpr size_t kAlignment = 64;  // a cache line, and the widest vector load
constexpr size_t kItemSizes[] = {0, 4, 1, 1, 2, 2, 4, 8, 0, 1, 2, 8, 4, 8};
constexpr const char* kTypeNames[] = {"unknown", "float32", "uint8",  "int8",    "uint16",
                                      "int16",   "int32",   "int64",  "text",    "bool",
                                      "float16", "float64", "uint32", "uint64"};

/// Bytes of an element; 0 for text and for what numpy has no type for.
inline size_t ItemSize(int64_t type) { return type < 0 || type > 13 ? 0 : kItemSizes[type]; }

inline const char* TypeName(int64_t type) { return kTypeNames[type < 0 || type > 13 ? 0 : type]; }

using Memory = std::shared_ptr<uint8_t>;
using Shape = std::vector<int64_t>;

/// Zero bytes that start at a multiple of 64; pages that are never touched are never resident.
inline Memory Allocate(size_t bytes) {
  void* raw = std::calloc(bytes + kAlignment, 1);
  if (raw == nullptr) throw std::bad_alloc();
  const auto address = reinterpret_cast<uintptr_t>(raw);
  auto* start = static_cast<uint8_t*>(raw) + (kAlignment - address % kAlignment) % kAlignment;
  return Memory(start, [raw](uint8_t*) { std::free(raw); });
}

inline std::string Text(const Shape& shape) {
  std::string text;
  for (const int64_t size : shape) text += (text.empty() ? "" : ", ") + std::to_string(size);
  return "[" + text + "]";
}

/// An array in row-major order whose memory is shared with others.
struct Tensor {
  ONNXTensorElementDataType type = ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT;
  Shape shape;
  Memory data;

  size_t Count() const {
    size_t count = 1;
    for (const int64_t size : shape) count *= static_cast<size_t>(size);
    return count;
  }
  size_t Bytes() const { return Count() * ItemSize(type); }
  std::string Description() const { return TypeName(type) + Text(shape); }

  template <class T>
  T* As() const {
    return reinterpret_cast<T*>(data.get());
  }
  /// The same memory as ONNX Runtime sees it.
  Ort::Value Value() const {
    static const auto cpu = Ort::MemoryInfo::CreateCpu(OrtDeviceAllocator, OrtMemTypeCPU);
    return Ort::Value::CreateTensor(cpu, data.get(), Bytes(), shape.data(), shape.size(), type);
  }
};

inline Tensor Zeros(ONNXTensorElementDataType type, Shape shape) {
  Tensor tensor{type, std::move(shape), nullptr};
  tensor.data = Allocate(tensor.Bytes());
  return tensor;
}

/// Tell whether text is UTF-8 without surrogates.
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

/// An open file; every call throws std::system_error if the system refuses.
class File {
 public:
  File(const std::string& path, int flags) : handle(::open(path.c_str(), flags | O_CLOEXEC, 0666)) {
    Check(handle >= 0);
  }
  File(const File&) = delete;
  File& operator=(const File&) = delete;
  ~File() { ::close(handle); }

  size_t Size() const {
    struct stat status {};
    Check(::fstat(handle, &status) == 0);
    if (!S_ISREG(status.st_mode)) throw std::system_error(EISDIR, std::generic_category());
    return static_cast<size_t>(status.st_size);
  }
  void Write(const void* data, size_t size) {
    const auto* bytes = static_cast<const uint8_t*>(data);
    for (ssize_t done = 0; size > 0; bytes += done, size -= static_cast<size_t>(done)) {
      done = ::write(handle, bytes, std::min(size, kMostAtOnce));
      if (done < 0 && errno == EINTR) done = 0;
      Check(done >= 0);
    }
  }
  /// Read bytes from `position` on; false if the file ends before.
  bool Read(uint8_t* data, size_t size, size_t position) const {
    for (ssize_t done = 0; size > 0; data += done, size -= static_cast<size_t>(done)) {
      done = ::pread(handle, data, std::min(size, kMostAtOnce), static_cast<off_t>(position));
      if (done == 0) return false;
      if (done < 0 && errno == EINTR) done = 0;
      Check(done >= 0);
      position += static_cast<size_t>(done);
    }
    return true;
  }

  const int handle;

 private:
  static constexpr size_t kMostAtOnce = size_t{1} << 30;
};

/// The bytes of a file, as pages of the file's own: they take no memory of the process.
class MappedFile {
 public:
  explicit MappedFile(const std::string& path) {
    const File file(path, O_RDONLY | O_NONBLOCK);  // opening a pipe would wait for a writer
    size_ = file.Size();
    if (size_ > 0) data_ = ::mmap(nullptr, size_, PROT_READ, MAP_PRIVATE, file.handle, 0);
    Check(data_ != MAP_FAILED);
  }
  MappedFile(const MappedFile&) = delete;
  MappedFile& operator=(const MappedFile&) = delete;
  ~MappedFile() {
    if (size_ > 0) ::munmap(data_, size_);
  }
  std::string_view View() const { return {static_cast<const char*>(data_), size_}; }

 private:
  void* data_ = nullptr;
  size_t size_ = 0;
};

/// Make renames inside the folder of a file durable.
inline void SyncFolder(const fs::path& path) {
  const File folder(path.has_parent_path() ? path.parent_path().string() : ".", O_RDONLY);
  Check(::fsync(folder.handle) == 0);
}

/// Remove temporary files that processes which no longer run left for `target`.
inline void RemoveStale(const fs::path& target, const std::string& start) {
  std::error_code ignored;
  for (const auto& entry : fs::directory_iterator(fs::absolute(target).parent_path(), ignored)) {
    const std::string name = entry.path().filename().string();
    int pid = 0, end = 0;
    if (name.compare(0, start.size(), start) == 0 &&
        std::sscanf(name.c_str() + start.size(), "%9d-%*12[0-9a-f].tmp%n", &pid, &end) == 1 &&
        end > 0 && start.size() + static_cast<size_t>(end) == name.size() && pid > 0 &&
        ::kill(pid, 0) != 0 && errno == ESRCH) {
      fs::remove(entry.path(), ignored);
    }
  }
}

[[noreturn]] inline void ThrowNotWritten(const std::string& path, const std::system_error& error) {
  throw Error("file-not-written", path + " could not be written: " + error.code().message() + ".",
              path, "check that the folder exists, is writable and has space left");
}

/// Write a file whole or not at all: temporary, fsync, rename. `body` gets the open File.
template <class Body>
void WriteAtomically(const fs::path& target, Body body) {
  if (fs::is_directory(target)) {
    throw Error("path-is-a-folder", target.string() + " is a folder and not a file.");
  }
  const std::string start = "." + target.filename().string() + ".";
  RemoveStale(target, start);
  std::random_device random;
  char mark[40];
  std::snprintf(mark, sizeof mark, "%d-%06x%06x.tmp", static_cast<int>(::getpid()),
                random() & 0xFFFFFFu, random() & 0xFFFFFFu);
  const fs::path temporary = target.parent_path() / (start + mark);
  try {
    try {
      File file(temporary.string(), O_WRONLY | O_CREAT | O_EXCL);
      body(file);
      Check(::fsync(file.handle) == 0);
      fs::rename(temporary, target);
    } catch (...) {
      ::unlink(temporary.c_str());
      throw;
    }
    SyncFolder(target);
  } catch (const std::system_error& error) {  // fs::filesystem_error is one
    ThrowNotWritten(target.string(), error);
  }
}

}  // namespace detail
}  // namespace odtpack
