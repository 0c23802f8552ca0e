// The kit's test program, an app of the kit's package:
//
//     kit conformance VECTORS [NAME...]    runs conformance vectors
//     kit measure JOB.json                 trains, and prints losses and memory as JSON
//     kit steps JOB.json                   trains and exports; see Steps.swift
//     kit hostile FOLDER, kit read FOLDER  see Readers.swift
//     kit hostile                          reads what standard input names; see Hostile.swift
//     kit saves FILE EXTERNAL_ABOVE keep|replace          saves until it is killed
//     kit export FOLDER                    exports a model; see Save.swift
//     kit load FILE                        prints whether it is checked, and what was lost
//     kit keep FROM FILE EXTERNAL_ABOVE    saves over a file, which is kept
//     kit calls COMMAND JOB.json TIMES     see Calls.swift
//     kit former PACKAGE IMAGES LABELS FOLDER SHAPE...    see Former.swift
//     kit adapters PACKAGE TRAINED TO FROM FILE           writes an adapter; reads one, and saves
//     kit decoder PACKAGE TRAINED ADAPTER... PROMPT       prints what follows; see Decoder.swift
//     kit signature PACKAGE                opens a package that must be signed
//     kit benchmark FOLDER THREADS [MEMORY_LIMIT_BYTES]
import Foundation
@testable import Odtpack

setvbuf(stdout, nil, _IOLBF, 0)
let arguments = Array(CommandLine.arguments.dropFirst())
do {
  switch arguments.first {
  case "conformance": exit(try Conformance.run(arguments[1], only: Array(arguments.dropFirst(2))))
  case "measure": try measure(arguments[1])
  case "steps": try makeSteps(arguments[1])
  case "hostile" where arguments.count > 1: try readHostileCases(arguments[1])
  case "hostile": try readHostile()
  case "read": try readFiles(arguments[1])
  case "calls": try testCalls(arguments[1], arguments[2], Int(arguments[3])!)
  case "saves":
    try saveForever(arguments[1], Int(arguments[2])!, arguments[3] == "keep")
  case "export": try export(arguments[1])
  case "load": try printLoaded(arguments[1])
  case "keep": try saveAgain(arguments[1], arguments[2], Int(arguments[3])!)
  case "former":
    try trainFormerly(
      arguments[1], arguments[2], arguments[3], arguments[4],
      arguments.dropFirst(5).map { NSNumber(value: Int($0)!) })
  case "adapters":
    let package = try TrainingPackage(path: arguments[1])
    let state = try ORTCheckpoint(path: package.path("checkpoint"))
    try ORTCheckpoint(path: arguments[2]).saveAdapter(of: package, toPath: arguments[3])
    try state.loadAdapter(of: package, fromPath: arguments[4])
    try state.saveCheckpoint(toPath: arguments[5], withOptimizerState: true)
  case "decoder": try await generate(Array(arguments.dropFirst()))
  case "signature": _ = try TrainingPackage(path: arguments[1], publicKey: Data(count: 32))
  case "benchmark":
    let limit = arguments.count > 3 ? Int(arguments[3]) : nil
    print(
      try benchmark(
        ORTEnv(), folder: arguments[1], threads: Int(arguments[2])!, memoryLimit: limit))
  default:
    print("the first line of main.swift says how this program is used")
    exit(2)
  }
} catch {
  FileHandle.standardError.write(Data("error: \(error)\n".utf8))
  exit(2)
}
