// A training as it was written for ONNX Runtime 1.19, then what came since.
//
//     kit former PACKAGE IMAGES LABELS FOLDER SHAPE...
import Foundation
@testable import Odtpack

func trainFormerly(
  _ package: String, _ images: String, _ labels: String, _ folder: String, _ shape: [NSNumber]
) throws {
  let env = try ORTEnv()
  let options = try ORTSessionOptions()
  try options.setIntraOpNumThreads(1)
  try options.setGraphOptimizationLevel(.extended)
  let checkpoint = try ORTCheckpoint(path: package + "/checkpoint")
  let session = try ORTTrainingSession(
    env: env, sessionOptions: options, checkPoint: checkpoint,
    trainModelPath: package + "/training_model.onnx", evalModelPath: package + "/eval_model.onnx",
    optimizerModelPath: package + "/optimizer_model.onnx")
  try session.setLearningRate(0.01)
  let inputs = [
    try ORTValue(
      tensorData: NSMutableData(contentsOfFile: images, options: []), elementType: .float32,
      shape: shape),
    try ORTValue(
      tensorData: NSMutableData(contentsOfFile: labels, options: []), elementType: .int64,
      shape: [shape[0]]),
  ]
  for _ in 0..<12 {
    let outputs = try session.trainStep(withInputValues: inputs)
    try session.optimizerStep()
    try session.lazyResetGrad()
    try print(Double(outputs[0].array(of: Float.self)[0]))
  }
  try expect(session.inputNames(withTraining: true).count == 2, "the inputs")
  try expect(session.outputNames(withTraining: false)[0] == "loss", "the outputs")
  _ = try session.evalStep(withInputValues: inputs)
  let buffer = try session.toBuffer(withTrainable: true)
  try session.fromBuffer(withValue: buffer)
  try checkpoint.addIntProperty(withName: "epoch", value: 3)
  try checkpoint.addFloatProperty(withName: "share", value: 0.25)
  try checkpoint.addStringProperty(withName: "note", value: "one training")
  try expect(try checkpoint.getIntProperty(withName: "epoch") == 3, "the property")
  try checkpoint.saveCheckpoint(toPath: folder + "/former.ckpt", withOptimizerState: true)

  let fresh = try ORTCheckpoint(path: package + "/checkpoint")
  try fresh.carryOver(from: ORTCheckpoint(path: folder + "/former.ckpt"))
  try fresh.saveCheckpoint(toPath: folder + "/carried.ckpt", withOptimizerState: true)
}
