// Predictions with the parameters of the moment.
import COdtpack

/// Predicts with a copy of a state's parameters.
public final class Predictor {
  private let handle: OpaquePointer, env: ORTEnv
  public let inputNames: [String], outputNames: [String]

  init(_ env: ORTEnv, owning handle: OpaquePointer, _ outputNames: [String]) throws {
    (self.env, self.handle, self.outputNames) = (env, handle, outputNames)
    var count = 0
    var allocator: UnsafeMutablePointer<OrtAllocator>?
    try check(api.pointee.GetAllocatorWithDefaultOptions(&allocator))
    try check(api.pointee.SessionGetInputCount(handle, &count))
    inputNames = try (0..<count).map { index in
      var name: UnsafeMutablePointer<CChar>?
      try check(api.pointee.SessionGetInputName(handle, index, allocator, &name))
      defer { _ = api.pointee.AllocatorFree(allocator, name) }
      return String(cString: name!)
    }
  }
  deinit { api.pointee.ReleaseSession(handle) }

  /// The outputs for inputs in the order of `inputNames`.
  public func predict(_ inputs: [ORTValue]) throws -> [ORTValue] {
    guard inputs.count == inputNames.count else {
      throw OdtpackError("input-count", "\(inputs.count) inputs were given for \(inputNames).")
    }
    var outputs = [OpaquePointer?](repeating: nil, count: outputNames.count)
    try withExtendedLifetime(inputs) {
      try withNames(inputNames) { names in
        try withNames(outputNames) { wanted in
          try check(
            api.pointee.Run(
              handle, nil, names, inputs.map { $0.handle }, inputs.count, wanted, outputs.count,
              &outputs))
        }
      }
    }
    return try outputs.map { try ORTValue(owning: $0!) }
  }
}
