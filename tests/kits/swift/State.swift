// All that a state holds, through the calls of odtpack.h that an app does not need.
import COdtpack
import Foundation
@testable import Odtpack

struct State {
  struct Moment {
    let name: String, number: Int, group: Int, value: ORTValue
  }
  struct Optimizer {
    let step: Int64, rate: Float, kind: String, moments: [Moment]
  }
  var parameters: [(name: String, isTrainable: Bool, value: ORTValue)] = []
  var properties: [(name: String, value: Property)] = []
  var optimizer: Optimizer?

  init(_ checkpoint: ORTCheckpoint) throws {
    let handle = checkpoint.handle
    for (index, name) in checkpoint.parameterNames.enumerated() {
      let value =
        try checkpoint.isNominal
        ? ORTValue(checkpoint.types[index]!, [0])
        : checkpoint.tensor { odtpack_state_parameter(handle, index, $0, $1) }
      parameters.append((name, checkpoint.trainable[index], value))
    }
    for index in 0..<odtpack_state_property_count(handle) {
      var property = odtpack_property()
      let name = try text { odtpack_state_property_at(handle, index, $0, &property) }!
      properties.append((name, Property(property)))
    }
    var isFound = false, step: Int64 = 0, rate: Float = 0, count = 0
    let kind = try text {
      odtpack_state_optimizer(handle, &isFound, &step, &rate, $0, &count)
    }
    if !isFound { return }
    var moments: [Moment] = []
    for index in 0..<count {
      var name = odtpack_text(), number = 0, group = 0
      let value = try checkpoint.tensor {
        odtpack_state_moment(handle, index, &name, &number, &group, $0, $1)
      }
      moments.append(Moment(name: name.take()!, number: number, group: group, value: value))
    }
    optimizer = Optimizer(step: step, rate: rate, kind: kind!, moments: moments)
  }
  /// Of a file that is whole.
  init(path: String) throws {
    let checkpoint = try ORTCheckpoint(path: path)
    try expect(checkpoint.recovered == nil, "\(path) is damaged")
    try self.init(checkpoint)
  }
}

extension ORTCheckpoint {
  /// Save, with more tensors than so many bytes in a file of their own.
  func save(_ path: String, keepPrevious: Bool, externalAbove: Int) throws {
    try call(
      odtpack_state_save_above(handle, path, true, keepPrevious, UInt64(externalAbove)))
  }
}
