// Files, read as pages of their own and written whole or not at all.
import COnnxRuntime
import Foundation

func systemMessage(_ code: Int32 = errno) -> String { String(cString: strerror(code)) }

/// Return memory that was freed to the system.
func giveBackFreed() {
  #if canImport(Darwin)
  malloc_zone_pressure_relief(nil, 0)
  #elseif canImport(Glibc)
  malloc_trim(0)
  #endif
}

struct SystemError: Error {
  let code = errno
}

func isLink(_ path: String) -> Bool {
  var info = stat()
  return lstat(path, &info) == 0 && info.st_mode & S_IFMT == S_IFLNK
}

func isRegularFile(_ path: String) -> Bool {
  var info = stat()
  return stat(path, &info) == 0 && info.st_mode & S_IFMT == S_IFREG
}

/// The bytes of a file, mapped: they take no memory of the process.
func map(_ path: String) throws -> Data {
  let pages = try mapPages(path)
  guard let start = pages.baseAddress else { return Data() }
  return Data(bytesNoCopy: start, count: pages.count, deallocator: .unmap)
}

/// The same, for the caller to unmap.
func mapPages(_ path: String) throws -> UnsafeMutableRawBufferPointer {
  var info = stat()
  guard stat(path, &info) == 0 else { throw SystemError() }
  guard info.st_mode & S_IFMT == S_IFREG else {  // a pipe would block
    errno = EISDIR
    throw SystemError()
  }
  if info.st_size == 0 { return UnsafeMutableRawBufferPointer(start: nil, count: 0) }
  let file = open(path, O_RDONLY | O_CLOEXEC)
  guard file >= 0 else { throw SystemError() }
  defer { close(file) }
  let size = Int(info.st_size)
  guard let pages = mmap(nil, size, PROT_READ, MAP_PRIVATE, file, 0), pages != MAP_FAILED else {
    throw SystemError()
  }
  return UnsafeMutableRawBufferPointer(start: pages, count: size)
}

/// A file that is being written.
final class OutputFile {
  let descriptor: Int32

  init(_ path: String, _ flags: Int32) throws {
    descriptor = open(path, flags | O_RDWR | O_CLOEXEC, 0o666)
    if descriptor < 0 { throw SystemError() }
  }
  deinit { close(descriptor) }

  func write(_ start: UnsafeRawPointer, _ count: Int) throws {
    var done = 0
    while done < count {
      // At most 1 GiB: Darwin refuses more than 2^31 - 1 bytes at once.
      let written = Foundation.write(descriptor, start + done, min(count - done, 1 << 30))
      if written < 0 && errno != EINTR { throw SystemError() }
      done += max(written, 0)
    }
  }
  func write(_ value: ORTValue) throws {
    try withExtendedLifetime(value) { try write(value.bytes, value.byteCount) }
  }
  func write(_ bytes: [UInt8]) throws {
    try bytes.withUnsafeBytes { if let start = $0.baseAddress { try write(start, $0.count) } }
  }
  func move(to position: Int) throws {
    if lseek(descriptor, off_t(position), SEEK_SET) < 0 { throw SystemError() }
  }
  func sync() throws { if fsync(descriptor) != 0 { throw SystemError() } }
}

private func folder(of path: String) -> String {
  let folder = (path as NSString).deletingLastPathComponent
  return folder.isEmpty ? "." : folder
}

/// Make renames inside the folder of a file durable.
func syncFolder(of path: String) throws {
  let descriptor = open(folder(of: path), O_RDONLY | O_CLOEXEC)
  guard descriptor >= 0 else { throw SystemError() }
  defer { close(descriptor) }
  if fsync(descriptor) != 0 { throw SystemError() }
}

/// Remove temporary files whose processes no longer run.
private func removeStale(in folder: String, start: String) {
  for name in (try? FileManager.default.contentsOfDirectory(atPath: folder)) ?? []
  where name.hasPrefix(start) && name.hasSuffix(".tmp") {
    let parts = name.dropFirst(start.count).dropLast(4).split(separator: "-")
    guard parts.count == 2, parts[1].count == 12, let process = Int32(parts[0]), process > 0 else {
      continue
    }
    if kill(process, 0) != 0 && errno == ESRCH { unlink("\(folder)/\(name)") }
  }
}

func notWritten(_ path: String, _ error: SystemError) -> OdtpackError {
  OdtpackError(
    "file-not-written", "\(path) could not be written: \(systemMessage(error.code)).",
    hint: "check that the folder exists, is writable and has space left")
}

/// Give a file a second name, so that one of the two always exists.
private func keep(_ path: String, as previous: String, through second: String) throws {
  if link(path, second) != 0 {  // a file system without hard links, such as FAT
    if rename(path, previous) != 0 { throw SystemError() }
    return
  }
  if rename(second, previous) != 0 { throw SystemError() }
  unlink(second)  // two names of one file: the rename did nothing
}

/// Whether two paths are names of one file.
func isSame(_ one: String, _ other: String) -> Bool {
  var (first, second) = (stat(), stat())
  return stat(one, &first) == 0 && stat(other, &second) == 0 && first.st_ino == second.st_ino
    && first.st_dev == second.st_dev
}

/// Write a file whole or not at all: temporary, fsync, rename. The file that is replaced is kept
/// as `previous`, if that is given.
func writeAtomically(
  _ path: String, previous: String? = nil, _ body: (OutputFile) throws -> Void
) throws {
  var isFolder: ObjCBool = false
  if FileManager.default.fileExists(atPath: path, isDirectory: &isFolder), isFolder.boolValue {
    throw OdtpackError("path-is-a-folder", "\(path) is a folder.")
  }
  let start = ".\((path as NSString).lastPathComponent)."
  removeStale(in: folder(of: path), start: start)
  func newName() -> String {
    let mark = String(format: "%012llx", UInt64.random(in: 0..<1 << 48))
    return "\(folder(of: path))/\(start)\(getpid())-\(mark).tmp"
  }
  let temporary = newName()
  do {
    let file = try OutputFile(temporary, O_CREAT | O_EXCL)
    do {
      try body(file)
      try file.sync()
      if let previous, access(path, F_OK) == 0 {
        try keep(path, as: previous, through: newName())
      }
      if rename(temporary, path) != 0 { throw SystemError() }
    } catch {
      unlink(temporary)
      throw error
    }
    try syncFolder(of: path)
  } catch let error as SystemError {
    throw notWritten(path, error)
  }
}
