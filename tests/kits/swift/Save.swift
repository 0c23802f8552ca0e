// Saves without a pause. Every save writes its number into a property and into every element of
// every parameter: a file that is whole holds one number.
import Foundation
@testable import Odtpack

/// What loading a checkpoint says.
func printLoaded(_ path: String) throws {
  try refusing {
    let checkpoint = try ORTCheckpoint(path: path)
    print(checkpoint.isChecked ? "checked" : "unchecked", checkpoint.recovered ?? "", separator: "\n")
  }
}

/// Save what a checkpoint holds over another, which is kept.
func saveAgain(_ start: String, _ path: String, _ externalAbove: Int) throws {
  try refusing {
    try ORTCheckpoint(path: start).save(path, keepPrevious: true, externalAbove: externalAbove)
  }
}

private func refusing(_ work: () throws -> Void) throws {
  do {
    try work()
  } catch let error as OdtpackError {
    print(error.code, error, separator: "\n")
  }
}

/// Export the model of `folder`/package with the parameters of 1.ckpt as m.onnx.
func export(_ folder: String) throws {
  let session = try ORTTrainingSession(
    env: ORTEnv(), package: TrainingPackage(path: "\(folder)/package"),
    checkpoint: ORTCheckpoint(path: "\(folder)/1.ckpt"), threads: 1)
  try session.exportModelForInference(
    withOutputPath: "\(folder)/m.onnx", graphOutputNames: ["output"])
  print(1)
}

func saveForever(_ path: String, _ externalAbove: Int, _ keepsPrevious: Bool) throws {
  let checkpoint = try ORTCheckpoint(path: path)
  for number in try checkpoint.getIntProperty(withName: "number") + 1 ... .max {
    try checkpoint.addIntProperty(withName: "number", value: number)
    for name in checkpoint.parameterNames {
      try checkpoint.parameter(name).elements(Float.self).update(repeating: Float(number))
    }
    try checkpoint.save(path, keepPrevious: keepsPrevious, externalAbove: externalAbove)
    print(number)
  }
}
