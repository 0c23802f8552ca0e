// Saves without a pause. Every save writes its number into a property and into every element of
// every parameter: a file that is whole holds one number.
import Foundation

/// What loading a checkpoint says.
func printLoaded(_ path: String) throws {
  do {
    let checkpoint = try ORTCheckpoint(path: path)
    print(checkpoint.isChecked ? "checked" : "unchecked", checkpoint.recovered ?? "", separator: "\n")
  } catch let error as OdtpackError {
    print(error.code, error, separator: "\n")
  }
}

/// Save what a checkpoint holds over another, which is kept.
func saveAgain(_ start: String, _ path: String, _ externalAbove: Int) throws {
  try CheckpointWriter.write(
    path, ORTCheckpoint(path: start).state, withOptimizer: true, externalAbove: externalAbove,
    previous: .replaced)
}

func saveForever(
  _ start: String, _ path: String, _ first: Int64, _ externalAbove: Int, _ previous: Previous
) throws {
  let checkpoint = try ORTCheckpoint(path: start)
  for number in first... {
    try checkpoint.addIntProperty(withName: "number", value: number)
    for name in checkpoint.parameterNames {
      try checkpoint.parameter(name).elements(Float.self).update(repeating: Float(number))
    }
    try CheckpointWriter.write(
      path, checkpoint.state, withOptimizer: true, externalAbove: externalAbove,
      previous: previous)
    print(number)
  }
}

func printNumber(_ path: String) throws {
  let checkpoint = try ORTCheckpoint(path: path)
  let number = try checkpoint.getIntProperty(withName: "number")
  for name in checkpoint.parameterNames {
    let values = try checkpoint.parameter(name).elements(Float.self)
    try expect(values.allSatisfy { $0 == Float(number) }, "two saves in one file")
  }
  print(number)
}
