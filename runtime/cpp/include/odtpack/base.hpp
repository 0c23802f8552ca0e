// What the rest is built of: errors, tensors in memory of our own, files written whole.
#pragma once

#include <fcntl.h>
#include <flatbuffers/util.h>
#include <signal.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>
#if __has_include(<onnxruntime_cxx_api.h>)
#include <onnxruntime_cxx_api.h>
#else
#include <onnxruntime/onnxruntime_cxx_api.h>  // as the framework for Apple's systems has it
#endif
#if defined(__GLIBC__) || defined(__ANDROID__)
#include <malloc.h>
#elif defined(__APPLE__)
#include <malloc/malloc.h>
#endif

#include <algorithm>
#include <atomic>
#include <cmath>
#include <condition_variable>
#include <cstdlib>
#include <deque>
#include <filesystem>
#include <functional>
#include <map>
#include <mutex>
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

inline bool IsFloating(Type type) { return type == kFloat || type == kDouble || type == kHalf; }

/// Whether a value of the caller, which may be empty, is a tensor of a type.
inline bool IsTensorOf(Type type, const Ort::Value& value) {
  return value && value.IsTensor() && value.GetTensorTypeAndShapeInfo().GetElementType() == type;
}

/// An element of a floating tensor.
inline double Element(Type type, const void* data, size_t i) {
  if (type == kDouble) return static_cast<const double*>(data)[i];
  if (type == kFloat) return static_cast<const float*>(data)[i];
  return static_cast<const Ort::Float16_t*>(data)[i].ToFloat();
}

/// Is never freed: a program may close the library of ONNX Runtime before it ends.
inline const Ort::MemoryInfo& Cpu() {
  static const auto& cpu =
      *new Ort::MemoryInfo(Ort::MemoryInfo::CreateCpu(OrtDeviceAllocator, OrtMemTypeDefault));
  return cpu;
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
    return Ort::Value::CreateTensor(Cpu(), data.get(), Bytes(), shape.data(), shape.size(), type);
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
  if (path.native().find('\0') != path.native().npos)
    errno = EINVAL;  // the system would take what stands before it
  else if (fs::exists(path) && !fs::is_regular_file(path))
    errno = fs::is_directory(path) ? EISDIR : EINVAL;  // a pipe would block
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
  Check(folder >= 0);
  const int error = ::fsync(folder) == 0 ? 0 : errno;
  ::close(folder);
  if (error != 0) throw std::system_error(error, std::generic_category());
}

/// What tells one version of a file from another, whatever path leads to it.
struct FileIdentity {
  uint64_t device = 0, inode = 0;
  int64_t size = 0, seconds = 0, nanoseconds = 0;

  explicit FileIdentity(const struct stat& found)
      : device(static_cast<uint64_t>(found.st_dev)),
        inode(static_cast<uint64_t>(found.st_ino)),
        size(found.st_size),
#if defined(__APPLE__)
        seconds(found.st_mtimespec.tv_sec),
        nanoseconds(found.st_mtimespec.tv_nsec)
#else
        seconds(found.st_mtim.tv_sec),
        nanoseconds(found.st_mtim.tv_nsec)
#endif
  {
  }
  bool operator==(const FileIdentity& other) const {
    return device == other.device && inode == other.inode && size == other.size &&
           seconds == other.seconds && nanoseconds == other.nanoseconds;
  }
};

/// The identity of a file, if there is one.
inline std::optional<FileIdentity> IdentityOf(const fs::path& path) {
  struct stat found;
  if (::stat(path.c_str(), &found) != 0) return {};
  return FileIdentity(found);
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
/// The same, where what the system refuses is an error of the kit.
inline std::shared_ptr<const std::string_view> Map(const fs::path& path, const char* code,
                                                   const char* hint) try {
  return Map(path);
} catch (const std::system_error& error) {
  throw Error(code, path.string() + " cannot be read: " + error.code().message() + ".", "", hint);
}

/// Fill memory with the bytes of a file from a place on; false if it ends before. What another
/// process cuts off meanwhile is missing; of a mapped file, reading it would end this process.
inline bool ReadAt(const File& file, uint8_t* to, size_t size, size_t from) {
  while (size > 0) {
    const ssize_t got = ::pread(::fileno(file.get()), to, std::min(size, size_t{1} << 30),
                                static_cast<off_t>(from));
    if (got == 0) return false;
    if (got < 0 && errno == EINTR) continue;
    Check(got > 0);
    to += got;
    from += static_cast<size_t>(got);
    size -= static_cast<size_t>(got);
  }
  return true;
}

/// Wait until no other process or thread has the lock (flock) of a file or folder. It ends when the
/// descriptor is closed, or the process ends; a file system without locks has none.
inline void Lock(int descriptor) {
  while (::flock(descriptor, LOCK_EX) != 0 && errno == EINTR) continue;
}
/// Lock an open file. False if its name no longer leads to it: who had the lock removed the file.
inline bool LockNamed(const File& file, const fs::path& path) {
  Lock(::fileno(file.get()));
  struct stat own;
  Check(::fstat(::fileno(file.get()), &own) == 0);
  const auto found = IdentityOf(path);
  return found && found->inode == static_cast<uint64_t>(own.st_ino);
}

/// Remove the temporary files of a target that processes which no longer run left behind.
inline void RemoveStale(const fs::path& target) {
  const std::string start = "." + target.filename().string() + ".";
  std::error_code ignored;
  for (const auto& entry : fs::directory_iterator(fs::absolute(target).parent_path(), ignored)) {
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

/// A new name beside a target, which RemoveStale knows.
inline fs::path TemporaryName(const fs::path& target) {
  char mark[40];
  std::random_device random;
  std::snprintf(mark, sizeof mark, "%d-%06x%06x.tmp", static_cast<int>(::getpid()),
                random() & 0xFFFFFFu, random() & 0xFFFFFFu);
  return target.parent_path() / ("." + target.filename().string() + "." + mark);
}

/// Give a new file the permissions of the one that it replaces or belongs to, if there is one, and
/// `more`; there are file systems without permissions.
inline void TakeMode(const File& file, const fs::path& of, mode_t more = 0) {
  struct stat found;
  if (::stat(of.c_str(), &found) == 0)
    static_cast<void>(::fchmod(::fileno(file.get()), (found.st_mode & 0666) | more));
}

[[noreturn]] inline void ThrowNotWritten(const fs::path& path, const std::string& problem) {
  throw Error("file-not-written", path.string() + " could not be written: " + problem, "",
              "check that the folder exists, is writable and has space left");
}

/// Refuse to save to a link: it would be replaced, and what it leads to stay as it is.
inline void RefuseLink(const fs::path& path) {
  std::error_code unseen;  // the write says what is wrong with the name
  if (!fs::is_symlink(path, unseen)) return;
  throw Error("file-not-written",
              path.string() + " is a link, and nothing is saved through a link or in its place.", "",
              "remove the link, or name the file that it leads to");
}

/// Write a file whole or not at all: temporary, fsync, rename, fsync of the folder. `body` gets the
/// open File; `last` is called when that is on the disk, before it takes its name. Returns the
/// identity of the new file, which is also stored in `placed` as soon as it has its name.
template <class Body, class Last>
FileIdentity WriteAtomically(const fs::path& target, Body body, Last last,
                             std::optional<FileIdentity>* placed = nullptr) {
  std::optional<FileIdentity> identity;
  try {
    if (fs::is_directory(target))
      throw Error("path-is-a-folder", target.string() + " is a folder.");
    if (fs::exists(target) && !fs::is_regular_file(target))
      ThrowNotWritten(target, "it is a device, a pipe or a socket");
    RefuseLink(target);
    RemoveStale(target);
    const fs::path temporary = TemporaryName(target);
    try {
      const File file = Open(temporary, "wbxe");
      TakeMode(file, target);
      body(file);
      Sync(file);
      struct stat found;
      Check(::fstat(::fileno(file.get()), &found) == 0);
      last();
      fs::rename(temporary, target);
      identity = FileIdentity(found);
      if (placed != nullptr) *placed = identity;
    } catch (...) {
      ::unlink(temporary.c_str());
      throw;
    }
    SyncFolder(target);
    return *identity;
  } catch (const std::system_error& error) {  // fs::filesystem_error is one
    if (!identity) ThrowNotWritten(target, error.code().message());
    throw Error("file-not-written", target.string() +
                                        " was written, but it may not survive a power cut: " +
                                        error.code().message());
  }
}
template <class Body>
void WriteAtomically(const fs::path& target, Body body) {
  WriteAtomically(target, body, [] {});
}

/// Lets one call at a time use a state: another one is the error `busy`, at once.
class Gate {
 public:
  /// A call, as long as it exists.
  class Call {
   public:
    /// `closed` is that of the session that is called, if one is.
    explicit Call(Gate& gate, const bool* closed = nullptr) : gate_(gate) {
      const std::lock_guard<std::mutex> lock(gate.mutex_);
      if (closed != nullptr) RequireOpen(*closed);
      if (gate.busy_)
        throw Error("busy", "A call of this session is still running.", "",
                    "wait for it, or keep one thread for all calls of a session");
      gate.busy_ = true;
    }
    ~Call() { gate_.Leave(); }
    Call(const Call&) = delete;
    Call& operator=(const Call&) = delete;

   private:
    Gate& gate_;
  };

  /// Let no further call of a session begin, `end` the running one or wait for it, and then `free`
  /// what it has.
  template <class End, class Free>
  void Close(bool& closed, End end, Free free) {
    std::unique_lock<std::mutex> lock(mutex_);
    const bool before = closed;
    closed = true;
    end();
    left_.wait(lock, [this] { return !busy_; });
    if (before) return;
    busy_ = true;
    lock.unlock();
    free();
    Leave();
  }

  /// Do something in turn, where there is no error to return: this waits for the running call.
  template <class Body>
  void Await(Body body) {
    bool closed = false;
    Close(closed, [] {}, body);
  }

  /// Let no further call of a session begin, from within the running one.
  void Shut(bool& closed) {
    const std::lock_guard<std::mutex> lock(mutex_);
    closed = true;
  }

 private:
  static void RequireOpen(const bool& closed) {
    if (closed) throw Error("closed", "The session is closed.", "", "make a new one");
  }
  void Leave() {
    const std::lock_guard<std::mutex> lock(mutex_);  // who waits may free this once it is free
    busy_ = false;
    left_.notify_all();
  }

  std::mutex mutex_;
  std::condition_variable left_;
  bool busy_ = false;
};

}  // namespace detail
}  // namespace odtpack
