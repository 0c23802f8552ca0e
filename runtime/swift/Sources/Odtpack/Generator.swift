// Tokens that follow a prompt: the decoder of a package, with adapters that were trained for it.
import COdtpack
import Foundation

/// The inference model of a decoder that was trained in segments, loaded once. Any number of
/// adapters may be beside it, and each call says which one counts. One call at a time: a second one,
/// those of its tokens included, throws `busy`.
public final class Generator: @unchecked Sendable {
  private let env: ORTEnv, handle: OpaquePointer

  /// Load the decoder and its weights; throws `no-decoder` if the package has none. The options are
  /// the package's, with so many threads, unless others are given.
  public init(
    env: ORTEnv, package: TrainingPackage, threads: Int = 0,
    sessionOptions: ORTSessionOptions? = nil
  ) throws {
    self.env = env
    handle = try made {
      odtpack_generator_create(
        env.handle, sessionOptions?.handle, Int32(clamping: threads), package.handle, $0)
    }
  }
  deinit { odtpack_generator_release(handle) }

  /// Put an adapter beside the decoder, or in the place of the one of that name: a file or folder
  /// that `saveAdapter` or PEFT wrote.
  public func addAdapter(_ name: String, fromPath path: String) throws {
    try call(odtpack_generator_add_adapter(handle, plain(name), plain(path)))
  }
  /// The same of a checkpoint, as it is whenever it is used; do not train it then.
  public func addAdapter(_ name: String, of checkpoint: ORTCheckpoint) throws {
    try call(odtpack_generator_add_state(handle, plain(name), checkpoint.handle))
  }
  /// Forget an adapter, if it is there.
  public func removeAdapter(_ name: String) throws {
    try call(odtpack_generator_remove_adapter(handle, plain(name)))
  }

  /// The logits of the token after a sequence, one for each word; without an adapter those of the
  /// decoder as it was exported.
  public func logits(_ tokens: [Int], adapter: String? = nil) throws -> [Float] {
    var value: OpaquePointer?
    try call(
      odtpack_generator_logits(
        handle, tokens.map(Int64.init), tokens.count, adapter.map(plain), &value))
    return try ORTValue(owning: value!).array(of: Float.self)
  }

  /// The tokens that follow a prompt, each as soon as it is there: at most `maxTokens`, before one
  /// of `stop`. The likeliest each time with a `temperature` of 0; otherwise one is drawn of the
  /// softmax of the logits divided by it: of the `topK` likeliest (0 for all), and of the likeliest
  /// that have the probability `topP` together. One `seed` draws the same tokens everywhere.
  public func generate(
    _ prompt: [Int], adapter: String? = nil, maxTokens: Int = 256, stop: Set<Int> = [],
    temperature: Double = 0, topK: Int = 0, topP: Double = 1, seed: UInt64 = 0
  ) throws -> Tokens {
    guard topK >= 0 else { throw OdtpackError("bad-argument", "topK must be 0 or more.") }
    let name = try adapter.map(plain).map { strdup($0) } ?? nil
    defer { free(name) }
    return try stop.map(Int64.init).withUnsafeBufferPointer { stop in
      var options = odtpack_generate_options(
        adapter: name, max_tokens: Int64(maxTokens), stop: stop.baseAddress,
        stop_count: stop.count, temperature: temperature, top_k: UInt64(topK), top_p: topP,
        seed: seed)
      let tokens = try made {
        odtpack_tokens_begin(handle, prompt.map(Int64.init), prompt.count, &options, $0)
      }
      return Tokens(tokens, of: self)
    }
  }
}

/// Tokens as they are made: `for try await token in tokens`, away from the main actor.
public final class Tokens: AsyncSequence, AsyncIteratorProtocol, @unchecked Sendable {
  public typealias Element = Int
  private let handle: OpaquePointer, generator: Generator

  init(_ handle: OpaquePointer, of generator: Generator) {
    (self.handle, self.generator) = (handle, generator)
  }
  deinit { odtpack_tokens_release(handle) }

  public func makeAsyncIterator() -> Tokens { self }

  /// Make the next token; nil at the end. It takes a thread for as long as that; a task that is
  /// cancelled makes none.
  public func next() async throws -> Int? {
    try Task.checkCancellation()
    var found = false
    var token: Int64 = 0
    try call(odtpack_tokens_next(handle, &found, &token))
    return found ? Int(token) : nil
  }
}
