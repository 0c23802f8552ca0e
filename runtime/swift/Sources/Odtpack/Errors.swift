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

/// A name or path for C, where text ends at a zero.
func plain(_ text: String) throws -> String {
  if !text.utf8.contains(0) { return text }
  throw OdtpackError("bad-argument", "A name or path has a zero in it: \(text.debugDescription).")
}

/// Make a call, and throw what it returns.
func call(_ function: @autoclosure () throws -> OpaquePointer?) throws {
  _ = api  // is handed in first
  guard let error = try function() else { return }
  defer { odtpack_error_release(error) }
  throw OdtpackError(
    String(cString: odtpack_error_code(error)), String(cString: odtpack_error_message(error)),
    place: String(cString: odtpack_error_place(error)),
    hint: String(cString: odtpack_error_hint(error)))
}

/// What a call makes through its last argument.
func made(_ create: (UnsafeMutablePointer<OpaquePointer?>) throws -> OpaquePointer?) throws
  -> OpaquePointer
{
  var found: OpaquePointer?
  try call(try create(&found))
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
func text(_ get: (UnsafeMutablePointer<odtpack_text>) throws -> OpaquePointer?) throws -> String? {
  var found = odtpack_text()
  try call(try get(&found))
  return found.take()
}

/// Strings as C takes a list of them.
func withNames<Result>(
  _ names: [String], _ body: (UnsafePointer<UnsafePointer<CChar>?>) throws -> Result
) throws -> Result {
  let copies = try names.map(plain).map { UnsafePointer(strdup($0)) }
  defer { copies.forEach { free(UnsafeMutablePointer(mutating: $0)) } }
  return try (copies + [nil]).withUnsafeBufferPointer { try body($0.baseAddress!) }
}
