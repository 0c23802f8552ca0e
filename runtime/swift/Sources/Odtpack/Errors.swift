// Errors, and calls of the C++ kit through its C interface, odtpack.h.
import COdtpack
import Foundation

/// Bad input or usage, for the person who must correct it. Codes are those of the Python runtime.
public struct OdtpackError: LocalizedError, CustomStringConvertible {
  /// Stable kebab-case identifier, such as "checkpoint-corrupt".
  public let code: String
  public let message: String, place: String, hint: String

  init(_ code: String, _ message: String, place: String = "", hint: String = "") {
    (self.code, self.message, self.place, self.hint) = (code, message, place, hint)
  }
  public var description: String {
    message + (place.isEmpty ? "" : "\n  in: \(place)") + (hint.isEmpty ? "" : "\n  help: \(hint)")
      + "\n  code: \(code)"
  }
  public var errorDescription: String? { description }
}

/// Make a call, and throw what it returns.
func call(_ function: @autoclosure () -> OpaquePointer?) throws {
  _ = api  // is handed in first
  guard let error = function() else { return }
  defer { odtpack_error_release(error) }
  throw OdtpackError(
    String(cString: odtpack_error_code(error)), String(cString: odtpack_error_message(error)),
    place: String(cString: odtpack_error_place(error)),
    hint: String(cString: odtpack_error_hint(error)))
}

/// What a call makes through its last argument.
func made(_ create: (UnsafeMutablePointer<OpaquePointer?>) -> OpaquePointer?) throws
  -> OpaquePointer
{
  var found: OpaquePointer?
  try call(create(&found))
  return found!
}

extension odtpack_text {
  /// As a string, nil if there is none; what was handed out is freed.
  func take() -> String? {
    defer { odtpack_free(bytes) }
    return bytes.map { start in
      String(decoding: UnsafeRawBufferPointer(start: start, count: size), as: UTF8.self)
    }
  }
}

/// The text that a call returns.
func text(_ get: (UnsafeMutablePointer<odtpack_text>) -> OpaquePointer?) throws -> String? {
  var found = odtpack_text()
  try call(get(&found))
  return found.take()
}

/// Strings as C takes a list of them.
func withNames<Result>(
  _ names: [String], _ body: (UnsafePointer<UnsafePointer<CChar>?>) throws -> Result
) rethrows -> Result {
  let copies = names.map { UnsafePointer(strdup($0)) }
  defer { copies.forEach { free(UnsafeMutablePointer(mutating: $0)) } }
  return try (copies + [nil]).withUnsafeBufferPointer { try body($0.baseAddress!) }
}
