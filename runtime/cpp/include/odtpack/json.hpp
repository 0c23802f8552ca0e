// JSON, read strictly: RFC 8259, no key twice, numbers that a double holds, at most 64 levels.
#pragma once

#include <cmath>
#include <locale>
#include <map>
#include <regex>
#include <sstream>
#include <variant>

#include "odtpack/base.hpp"

namespace odtpack::detail {

/// A value of a document. What is not as it should be is an Error with the code of the document.
class Json {
 public:
  using List = std::vector<Json>;
  using Object = std::map<std::string, Json>;
  std::variant<std::nullptr_t, bool, double, std::string, List, Object> value;

  bool IsNull() const { return value.index() == 0; }

  template <class T>
  const T& As(const std::string& what = "a value") const {
    const T* found = std::get_if<T>(&value);
    if (found == nullptr) Fail(what + " is of the wrong type");
    return *found;
  }
  /// The entry of an object, null if there is none.
  const Json& operator[](const std::string& key) const {
    static const Json null{};
    const auto& object = As<Object>("what should hold '" + key + "'");
    const auto found = object.find(key);
    return found == object.end() ? null : found->second;
  }
  template <class T>
  const T& Get(const std::string& key) const {
    return (*this)[key].As<T>("'" + key + "'");
  }
  template <class T>
  T Get(const std::string& key, const T& otherwise) const {
    return (*this)[key].IsNull() ? otherwise : Get<T>(key);
  }
  int64_t Whole(const std::string& what) const {
    const double number = As<double>(what);
    if (number != std::floor(number) || std::abs(number) > 9e15) Fail(what + " is no whole number");
    return static_cast<int64_t>(number);
  }
  int64_t Whole(const std::string& key, int64_t otherwise) const {
    return (*this)[key].IsNull() ? otherwise : (*this)[key].Whole("'" + key + "'");
  }
  std::vector<std::string> Texts(const std::string& key) const {
    std::vector<std::string> texts;
    for (const Json& entry : Get<List>(key)) texts.push_back(entry.As<std::string>(key));
    return texts;
  }
  [[noreturn]] static void Fail(const std::string& problem) {
    throw Error("manifest-invalid", "The manifest is not valid: " + problem + ".", {},
                "build the package again with odtpack");
  }
};

class JsonReader {
 public:
  explicit JsonReader(const std::string& text) : text_(text) {}

  Json Read() {
    Require(IsUtf8(text_));
    Json json = Value(0);
    Space();
    Require(at_ == text_.size());
    return json;
  }

 private:
  void Require(bool good) const {
    if (!good) Json::Fail("it is not JSON at byte " + std::to_string(at_));
  }
  void Space() { at_ = std::min(text_.find_first_not_of(" \t\r\n", at_), text_.size()); }
  bool Take(const std::string& word) {
    const bool found = text_.compare(at_, word.size(), word) == 0;
    if (found) at_ += word.size();
    return found;
  }

  Json Value(int depth) {
    Require(depth < 64);
    Space();
    if (Take("null")) return {nullptr};
    if (Take("true")) return {true};
    if (Take("false")) return {false};
    if (Take("\"")) return {String()};
    if (Take("[")) {
      Json::List list;
      for (Space(); !Take("]"); Space()) {
        Require(list.empty() || Take(","));
        list.push_back(Value(depth + 1));
      }
      return {std::move(list)};
    }
    if (Take("{")) {
      Json::Object object;
      for (Space(); !Take("}"); Space()) {
        Require(object.empty() || Take(","));
        Space();
        Require(Take("\""));
        const std::string key = String();
        Space();
        Require(Take(":"));
        if (!object.emplace(key, Value(depth + 1)).second) Json::Fail("'" + key + "' occurs twice");
      }
      return {std::move(object)};
    }
    return {Number()};
  }

  std::string String() {
    std::string result;
    while (!Take("\"")) {
      Require(at_ < text_.size() && static_cast<uint8_t>(text_[at_]) >= 0x20);
      const char next = text_[at_++];
      if (next != '\\') {
        result += next;
        continue;
      }
      const size_t escape = std::string_view("\"\\/bfnrt").find(text_[at_]);
      if (!Take("u")) {
        Require(at_ < text_.size() && escape != std::string_view::npos);
        result += "\"\\/\b\f\n\r\t"[escape];
        ++at_;
        continue;
      }
      uint32_t code = Hex();
      if (code >= 0xD800 && code < 0xDC00) {
        Require(Take("\\u"));
        const uint32_t low = Hex();
        Require(low >= 0xDC00 && low < 0xE000);
        code = 0x10000 + ((code - 0xD800) << 10) + (low - 0xDC00);
      }
      Require(code < 0xDC00 || code > 0xDFFF);
      flatbuffers::ToUTF8(code, &result);
    }
    return result;
  }

  uint32_t Hex() {
    const std::string digits = text_.substr(std::min(at_, text_.size()), 4);
    Require(digits.size() == 4 &&
            digits.find_first_not_of("0123456789abcdefABCDEF") == std::string::npos);
    at_ += 4;
    return static_cast<uint32_t>(std::stoul(digits, nullptr, 16));
  }

  double Number() {
    const size_t end = std::min(text_.find_first_not_of("+-.eE0123456789", at_), text_.size());
    const std::string token = text_.substr(at_, end - at_);
    static const std::regex grammar("-?(0|[1-9][0-9]*)(\\.[0-9]+)?([eE][-+]?[0-9]+)?");
    Require(token.size() < 400 && std::regex_match(token, grammar));
    std::istringstream stream(token);
    stream.imbue(std::locale::classic());
    double number = 0;
    Require(static_cast<bool>(stream >> number));
    at_ = end;
    return number;
  }

  const std::string& text_;
  size_t at_ = 0;
};

/// The shortest text that reads back as the same number, as Python writes it.
inline std::string Repr(double number) {
  std::string text;
  for (int digits = 1; digits <= 17; ++digits) {
    std::ostringstream stream;
    stream.imbue(std::locale::classic());
    stream.precision(digits);
    stream << number;
    text = stream.str();
    std::istringstream back(text);
    back.imbue(std::locale::classic());
    double read = 0;
    if (back >> read && read == number) break;
  }
  return text.find_first_of(".en") == std::string::npos ? text + ".0" : text;
}

}  // namespace odtpack::detail
