// Tokens of a decoder's package.
import Foundation
@testable import Odtpack

/// A line for each adapter, for the state and for no adapter: tokens of a prompt such as 3,4,5,
/// greedily, drawn, drawn of a few, and before the fourth; then the logits of the first.
func generate(_ words: [String]) async throws {
  let prompt = words.last!.split(separator: ",").map { Int($0)! }
  let package = try TrainingPackage(path: words[0])
  let state = try ORTCheckpoint(path: words[1])
  var options: ORTSessionOptions?
  if let kept = ProcessInfo.processInfo.environment["ODTPACK_TEST_PACKED"] {
    options = try package.sessionOptions(threads: 1)
    try options?.addConfigEntry(withKey: "odtpack.packed_weights", value: kept)
  }
  let generator = try Generator(
    env: ORTEnv(), package: package, threads: 1, sessionOptions: options)
  func all(_ tokens: Tokens) async throws -> [Int] {
    try await tokens.reduce(into: []) { $0.append($1) }
  }
  let names = words.dropFirst(2).dropLast()
  for name in names { try generator.addAdapter(name, fromPath: name) }
  try generator.addAdapter("state", of: state)
  try generator.addAdapter("gone", of: state)
  try generator.removeAdapter("gone")
  for name: String? in Array(names) + ["state", nil] {
    let first = try await all(generator.generate(prompt, adapter: name, maxTokens: 9))
    var line: [any CustomStringConvertible] = first
    line += try await all(
      generator.generate(
        prompt, adapter: name, maxTokens: 9, temperature: 1.5, topP: 0.95, seed: 7))
    line += try await all(
      generator.generate(prompt, adapter: name, maxTokens: 9, temperature: 1.5, topK: 3, seed: 8))
    line += try await all(
      generator.generate(prompt, adapter: name, maxTokens: 9, stop: [first[3]]))
    line += try generator.logits(prompt, adapter: name)
    print(line.map(\.description).joined(separator: " "))
  }
  let cancelled = Task {
    withUnsafeCurrentTask { $0!.cancel() }
    return try await all(generator.generate(prompt, maxTokens: 9))
  }
  guard case .failure(let error) = await cancelled.result, error is CancellationError else {
    fatalError("a task that is cancelled makes tokens")
  }
  for begin in [
    { try generator.generate(prompt, adapter: "gone") },
    { try generator.generate(prompt, topP: 0) }, { try generator.generate([-1]) },
    { try generator.generate([3, 128]) },
  ] {
    do { _ = try await all(begin()) } catch let error as OdtpackError { print(error.code) }
  }
}
