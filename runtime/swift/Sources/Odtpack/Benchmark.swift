// What a device reaches through ONNX Runtime, for `odtpack devices import`
// (docs/formats/measurements.md).
import COdtpack

/// Measure matrix products, convolutions, copies and storage, each five times: about half a
/// minute. Returns JSON. `memoryLimit` is what the system grants this app in bytes, if it tells:
/// os_proc_available_memory on iOS.
public func benchmark(
  _ env: ORTEnv, folder: String, threads: Int, memoryLimit: Int? = nil, fileBytes: Int = 64 << 20
) throws -> String {
  try text {
    try odtpack_benchmark(
      env.handle, "swift", plain(folder), Int32(clamping: threads), UInt64(max(memoryLimit ?? 0, 0)),
      UInt64(max(fileBytes, 1)), 0, $0)
  }!
}
