// What a device reaches through ONNX Runtime, for `odtpack devices import`
// (docs/formats/measurements.md).
import Foundation

/// A model of one operator without attributes on float32 tensors, the last of which is its result.
private func oneOperator(_ kind: String, _ shapes: [[Int]]) -> [UInt8] {
  func field(_ number: Int, _ content: [UInt8]) -> [UInt8] {
    varint(number * 8 + 2) + varint(content.count) + content
  }
  var node: [UInt8] = [], values: [UInt8] = []
  for (i, shape) in shapes.enumerated() {
    let isResult = i == shapes.count - 1, name = [UInt8]("t\(i)".utf8)
    let dims = shape.flatMap { field(1, [0x08] + varint($0)) }
    node += field(isResult ? 2 : 1, name)
    values += field(
      isResult ? 12 : 11, field(1, name) + field(2, field(1, [0x08, 0x01] + field(2, dims))))
  }
  let graph = field(1, node + field(4, [UInt8](kind.utf8))) + field(2, [0x67]) + values
  return [0x08, 0x08] + field(8, [0x10, 0x11]) + field(7, graph)  // IR version 8, opset 17
}

#if os(Linux)
private let systemName = "linux"
#elseif os(macOS)
private let systemName = "macos"
#else
private let systemName = "ios"
#endif

private func seconds(_ work: () throws -> Void) rethrows -> Double {
  let start = DispatchTime.now().uptimeNanoseconds
  try work()
  return Double(DispatchTime.now().uptimeNanoseconds - start) * 1e-9
}

/// Seconds of one run of an operator: the best of at least five in 0.3 seconds.
private func operatorSeconds(_ env: ORTEnv, _ kind: String, _ shapes: [[Int]], _ threads: Int)
  throws -> Double
{
  let options = try ORTSessionOptions()
  try options.setIntraOpNumThreads(threads)
  let model = try Model(env, oneOperator(kind, shapes), options)
  let tensors: [(String, ORTValue?)] = try shapes.enumerated().map { i, shape in
    let value = try ORTValue(.float32, shape)
    value.elements(Float.self).update(repeating: 0.5)
    return ("t\(i)", value)
  }
  let arguments = Arguments(tensors.dropLast(), tensors.suffix(1))
  var times: [Double] = []
  while times.count < 5 || times.reduce(0, +) < 0.3 {
    times.append(try seconds { try arguments.run(model) })
  }
  return times.min()!
}

/// Measure matrix products, convolutions, copies and storage, each five times: about half a
/// minute. Returns JSON. `memoryLimit` is what the system grants this app in bytes, if it tells:
/// os_proc_available_memory on iOS.
public func benchmark(
  _ env: ORTEnv, folder: String, threads: Int, memoryLimit: Int? = nil, fileBytes: Int = 64 << 20
) throws -> String {
  var found: [String: [Double]] = [:]
  func add(_ name: String, _ value: Double) { found[name, default: []].append(value) }
  func products(_ threads: Int) throws -> Double {
    try [256, 512, 1024].map { size in
      let square = [size, size]
      return try 2 * pow(Double(size), 3)
        / operatorSeconds(env, "MatMul", [square, square, square], threads)
    }.max()!
  }
  let path = "\(folder)/.odtpack-benchmark"
  var block = [UInt8](repeating: 0x78, count: 1 << 20)
  func timedWrite(_ file: OutputFile, _ bytes: Int) throws -> Double {
    try seconds {
      for done in stride(from: 0, to: bytes, by: block.count) {
        try file.write(&block, min(block.count, bytes - done))
      }
      try file.sync()
    }
  }
  do {
    for _ in 0..<5 {  // in turns: a slow minute shows in each
      add("gemm_flops", try products(threads))
      add("gemm_single_flops", threads == 1 ? found["gemm_flops"]!.last! : try products(1))
      let images = [[4, 64, 58, 58], [64, 64, 3, 3], [4, 64, 56, 56]]
      let work = 2.0 * 4 * 64 * 56 * 56 * 64 * 9
      add("convolution_flops", try work / operatorSeconds(env, "Conv", images, threads))
      let elements = 16 << 20
      let copy = try operatorSeconds(env, "Neg", [[elements], [elements]], 1)
      add("copy_bytes_per_second", 4 * Double(elements) / copy)
      let file = try OutputFile(path, O_CREAT | O_TRUNC)
      unlink(path)  // nothing stays, however this ends
      add("write_bytes_per_second", Double(fileBytes) / (try timedWrite(file, fileBytes)))
      for _ in 0..<8 { add("sync_seconds", try timedWrite(file, 4096)) }
      #if os(Linux)
      if posix_fadvise(file.descriptor, 0, 0, POSIX_FADV_DONTNEED) != 0 { throw SystemError() }
      #else
      if fcntl(file.descriptor, F_NOCACHE, 1) != 0 { throw SystemError() }
      #endif
      if lseek(file.descriptor, 0, SEEK_SET) != 0 { throw SystemError() }
      let reading = seconds { while read(file.descriptor, &block, block.count) > 0 {} }
      add("read_bytes_per_second", Double(fileBytes) / reading)
    }
  } catch let error as SystemError {
    throw notWritten(path, error)
  }
  let lists = found.sorted { $0.key < $1.key }.map { "\"\($0)\": \($1)" }.joined(separator: ", ")
  return "{\"format\": 1, \"kit\": \"swift\", \"onnxruntime\": \"\(onnxRuntimeVersion)\", "
    + "\"system\": \"\(systemName)\", \"threads\": \(threads), \"file_bytes\": \(fileBytes), "
    + "\"memory_bytes\": \(ProcessInfo.processInfo.physicalMemory), "
    + "\"memory_limit_bytes\": \(memoryLimit.map(String.init) ?? "null"), \(lists)}"
}
