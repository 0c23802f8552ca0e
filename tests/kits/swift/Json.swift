// Documents of JSON, whose mistakes are errors.
import Foundation
@testable import Odtpack

func invalid(_ problem: String) -> OdtpackError {
  OdtpackError("manifest-invalid", "The document is not valid: \(problem).")
}

/// A value of a document, absent if it is null. What is not as it should be is `manifest-invalid`.
struct Json {
  let value: Any?
  var name = "the document"

  init(_ value: Any?, name: String) {
    (self.value, self.name) = (value is NSNull ? nil : value, name)
  }
  init(data: Data) throws {
    value = try JSONSerialization.jsonObject(with: data)
  }
  var isPresent: Bool { value != nil }

  private func wrong() -> OdtpackError { invalid("'\(name)' is missing or of the wrong type") }
  private var number: NSNumber? {
    guard let number = value as? NSNumber else { return nil }
    let type = String(cString: number.objCType)
    return type == "c" || type == "B" ? nil : number  // true and false
  }
  func object() throws -> [String: Json] {
    guard let value = value as? [String: Any] else { throw wrong() }
    return Dictionary(uniqueKeysWithValues: value.map { ($0, Json($1, name: $0)) })
  }
  subscript(key: String) -> Json {
    get throws {
      guard let object = value as? [String: Any] else { throw wrong() }
      return Json(object[key], name: key)
    }
  }
  func list(_ otherwise: [Json]? = nil) throws -> [Json] {
    if let list = value as? [Any] { return list.map { Json($0, name: name) } }
    if value == nil, let otherwise { return otherwise }
    throw wrong()
  }
  func text(_ otherwise: String? = nil) throws -> String {
    if let text = value as? String { return text }
    if value == nil, let otherwise { return otherwise }
    throw wrong()
  }
  func flag(_ otherwise: Bool) throws -> Bool {
    if value == nil { return otherwise }
    guard number == nil, let flag = value as? Bool else { throw wrong() }
    return flag
  }
  func real(_ otherwise: Double? = nil) throws -> Double {
    if let number {
      // A decimal number's own doubleValue is off by some units in the last place.
      let decimal = (number as? NSDecimalNumber).flatMap { Double($0.stringValue) }
      let real = decimal ?? number.doubleValue
      if real.isFinite { return real }
    }
    if value == nil, let otherwise { return otherwise }
    throw wrong()
  }
  func whole(_ otherwise: Int? = nil) throws -> Int {
    let number = try real(otherwise.map(Double.init))
    guard number == number.rounded(), abs(number) <= 9e15 else { throw wrong() }
    return Int(number)
  }
  func texts() throws -> [String] { try list().map { try $0.text() } }
  func wholes() throws -> [Int] { try list([]).map { try $0.whole() } }
}
