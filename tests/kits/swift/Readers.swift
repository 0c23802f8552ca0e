// What the kit's readers make of hostile files, for the comparison with Python's.
//
// `hostile` takes the cases of FOLDER/index.json and prints "NAME<TAB>ok" or "NAME<TAB>CODE"; `read`
// takes every *.ckpt, with a digest of what it holds, and every *.json as a manifest.
import COdtpack
import Foundation
@testable import Odtpack

/// Print a name and what an action gave, or the code of the error that it threw.
private func report(_ name: String, _ action: () throws -> String) {
  do {
    print(name, try action(), separator: "\t")
  } catch let error as OdtpackError {
    print(name, error.code, separator: "\t")
  } catch {
    print(name, "foreign:\(type(of: error))", separator: "\t")
  }
}

func readHostileCases(_ folder: String) throws {
  let env = try ORTEnv()
  for each in try readJson("\(folder)/index.json")["cases"].list() {
    func path(_ key: String) throws -> String { "\(folder)/\(try each[key].text())" }
    try report(each["name"].text()) {
      let action = try each["action"].text()
      if action == "checkpoint" {
        _ = try ORTCheckpoint(path: path("checkpoint"))
        return "ok"
      }
      let package = try TrainingPackage(path: path("package"))
      if action == "open" { return "ok" }
      let checkpoint = try ORTCheckpoint(path: path("checkpoint"))
      _ = try ORTTrainingSession(
        env: env, package: package, checkpoint: checkpoint, threads: 1)
      return "ok"
    }
  }
}

func readFiles(_ folder: String) throws {
  let names = try FileManager.default.contentsOfDirectory(atPath: folder)
  for name in names.sorted(by: { $0.utf8.lexicographicallyPrecedes($1.utf8) }) {
    if name.hasSuffix(".ckpt") {
      report(name) { "ok\t" + (try digest(ORTCheckpoint(path: "\(folder)/\(name)"))) }
    } else if name.hasSuffix(".json") {
      report(name) {
        let bytes = try content("\(folder)/\(name)")
        try bytes.withUnsafeBytes { try call(odtpack_manifest_check($0.baseAddress, $0.count)) }
        return "ok\t-"
      }
    }
  }
}

/// A digest of everything that a checkpoint holds.
func digest(_ checkpoint: ORTCheckpoint) throws -> String { sha256(try description(checkpoint)) }

/// Everything that a checkpoint holds, a line each.
private func description(_ checkpoint: ORTCheckpoint) throws -> Data {
  let state = try State(checkpoint)
  func sorted(_ lines: [(key: String, line: String)]) -> [String] {
    lines.sorted { $0.key < $1.key }.map(\.line)
  }
  func digest(_ value: ORTValue) -> String {
    withExtendedLifetime(value) { sha256(Data(bytes: value.bytes, count: value.byteCount)) }
  }
  var lines = sorted(
    state.parameters.map { name, isTrainable, value in
      let shape = checkpoint.isNominal ? [] : value.shape
      let dims = shape.map(String.init).joined(separator: "x")
      let own = "P \(isTrainable ? "t" : "f") \(value.elementType) \(dims.isEmpty ? "-" : dims)"
      return (hex(name), "\(own) \(digest(value)) \(hex(name))")
    })
  if let optimizer = state.optimizer {
    lines.append("O \(optimizer.step) \(bits(optimizer.rate))")
    for group in 0...(optimizer.moments.map(\.group).max() ?? 0) {
      lines += sorted(
        optimizer.moments.filter { $0.group == group }.map { moment in
          let label = "momentum\(moment.number)"
          return (
            "\(hex(moment.name)) \(moment.number)",
            "M \(group) \(label) \(digest(moment.value)) \(hex(moment.name))"
          )
        })
    }
  }
  lines += sorted(
    state.properties.map { name, property in
      switch property {
      case .int(let value): return (hex(name), "V i \(value) \(hex(name))")
      case .float(let value): return (hex(name), "V f \(bits(value)) \(hex(name))")
      case .string(let value): return (hex(name), "V s \(hex(value)) \(hex(name))")
      }
    })
  return Data(lines.joined(separator: "\n").utf8)
}

private func hex(_ text: String) -> String {
  text.utf8.map { String(format: "%02x", $0) }.joined()
}
private func bits(_ value: Float) -> String { String(format: "%08x", value.bitPattern) }
