// JSON, read strictly: RFC 8259, no key twice, numbers that a double holds, at most 64 levels and
// 200,000 values.
#pragma once

#include <sstream>

#include "odtpack/base.hpp"

namespace odtpack::detail {

/// A value of a document. What is not as it should be is an Error, manifest-invalid.
class Json {
 public:
  using List = std::vector<Json>;
  using Object = std::map<std::string, Json>;
  std::variant<std::nullptr_t, bool, double, std::string, List, Object> value;

  explicit operator bool() const { return value.index() != 0; }

  template <class T>
  const T& As(const std::string& what = "value") const {
    if (const T* found = std::get_if<T>(&value)) return *found;
    Fail("'" + what + "' is missing or of the wrong type");
  }
  /// The entry of an object, null if there is none.
  const Json& operator[](const std::string& key) const {
    static const Json null{};
    const auto& object = As<Object>("what should hold " + key);
    const auto found = object.find(key);
    return found == object.end() ? null : found->second;
  }
  /// Whether an object has an entry that may be left out, and that is not null where it stands.
  bool Has(const std::string& key) const {
    const auto& object = As<Object>("what should hold " + key);
    const auto found = object.find(key);
    if (found != object.end() && !found->second) Fail("'" + key + "' is null");
    return found != object.end();
  }
  template <class T>
  const T& Get(const std::string& key) const {
    return (*this)[key].As<T>(key);
  }
  template <class T>
  T Get(const std::string& key, const T& otherwise) const {
    return (*this)[key] ? Get<T>(key) : otherwise;
  }
  int64_t Whole() const {
    const auto number = As<double>("a whole number");
    if (number != std::floor(number) || std::abs(number) > 9007199254740991.0)
      Fail("a number is not whole, or is beyond 2^53 - 1");
    return static_cast<int64_t>(number);
  }
  int64_t Whole(const std::string& key, int64_t otherwise) const {
    return (*this)[key] ? (*this)[key].Whole() : otherwise;
  }
  std::vector<int64_t> Wholes(const std::string& key) const {
    std::vector<int64_t> numbers;
    for (const Json& entry : Get<List>(key, {})) numbers.push_back(entry.Whole());
    return numbers;
  }
  std::vector<std::string> Texts(const std::string& key) const {
    std::vector<std::string> texts;
    for (const Json& entry : Get<List>(key)) texts.push_back(entry.As<std::string>(key));
    return texts;
  }
  [[noreturn]] static void Fail(const std::string& problem) {
    throw Error("manifest-invalid", "The manifest is not valid: " + problem + ".", "",
                "build the package again with odtpack");
  }
};

class JsonReader {
 public:
  explicit JsonReader(const std::string& text) : text_(text) {}

  Json Read() {
    Require(IsUtf8(text_));
    Json json = Value(0);
    Require(!Take("") || at_ == text_.size());
    return json;
  }

 private:
  void Require(bool good) const {
    if (!good) Json::Fail("it is not JSON at byte " + std::to_string(at_));
  }
  /// Skip spaces and then a word, if it follows.
  bool Take(const std::string& word) {
    at_ = std::min(text_.find_first_not_of(" \t\r\n", at_), text_.size());
    return Skip(word);
  }
  bool Skip(const std::string& word) {
    const bool found = text_.compare(at_, word.size(), word) == 0;
    if (found) at_ += word.size();
    return found;
  }

  bool Next() {
    Count();
    return Take(",");
  }
  void Count() { Require(++values_ <= 200'000); }

  Json Value(int depth) {
    if (Take("null")) return {nullptr};
    if (Take("true")) return {true};
    if (Take("false")) return {false};
    if (Take("\"")) return {String()};
    Require(depth < 64 || (text_[at_] != '[' && text_[at_] != '{'));
    if (Take("[")) {
      Count();
      Json::List list;
      for (; !Take("]"); list.push_back(Value(depth + 1))) Require(list.empty() || Next());
      return {std::move(list)};
    }
    if (!Take("{")) return {Number()};
    Count();
    Json::Object object;
    while (!Take("}")) {
      Require((object.empty() || Next()) && Take("\""));
      const std::string key = String();
      Require(Take(":"));
      if (!object.emplace(key, Value(depth + 1)).second) Json::Fail("'" + key + "' occurs twice");
    }
    return {std::move(object)};
  }

  std::string String() {
    std::string result;
    while (!Skip("\"")) {
      Require(at_ < text_.size() && static_cast<uint8_t>(text_[at_]) >= 0x20);
      if (text_[at_] != '\\') {
        result += text_[at_++];
      } else if (Skip("\\u")) {
        uint32_t code = Hex();
        if (code >= 0xD800 && code < 0xDC00) {
          Require(Skip("\\u"));
          const uint32_t low = Hex();
          Require(low >= 0xDC00 && low < 0xE000);
          code = 0x10000 + ((code - 0xD800) << 10) + (low - 0xDC00);
        }
        Require(code < 0x110000 && (code < 0xD800 || code > 0xDFFF));
        flatbuffers::ToUTF8(code, &result);
      } else {
        const size_t escape = std::string("\"\\/bfnrt").find(text_.c_str()[++at_]);
        Require(at_++ < text_.size() && escape != std::string::npos);
        result += "\"\\/\b\f\n\r\t"[escape];
      }
    }
    return result;
  }

  uint32_t Hex() {
    const std::string digits = text_.substr(at_, 4);
    Require(digits.size() == 4 &&
            digits.find_first_not_of("0123456789abcdefABCDEF") == std::string::npos);
    at_ += 4;
    return static_cast<uint32_t>(std::stoul(digits, nullptr, 16));
  }

  double Number() {
    const size_t start = at_;
    const auto digits = [this] {
      const size_t first = at_;
      at_ = std::min(text_.find_first_not_of("0123456789", at_), text_.size());
      return at_ - first;
    };
    Skip("-");
    const bool zero = text_.compare(at_, 1, "0") == 0;
    const size_t count = digits();
    Require(count == 1 || (count > 1 && !zero));
    Require(!Skip(".") || digits() > 0);
    if (Skip("e") || Skip("E")) Require((Skip("-") || Skip("+") || true) && digits() > 0);
    std::istringstream stream(text_.substr(start, at_ - start));
    stream.imbue(std::locale::classic());
    double number = 0;
    Require(static_cast<bool>(stream >> number));
    return number;
  }

  const std::string& text_;
  size_t at_ = 0, values_ = 0;
};

/// The shortest text that reads back as the same number, as Python writes it.
inline std::string Repr(double number) {
  double read = std::nan("");
  std::string text;
  for (int digits = 1; digits <= 17 && read != number; ++digits) {
    std::stringstream stream;
    stream.imbue(std::locale::classic());
    stream.precision(digits);
    stream << number;
    text = stream.str();
    stream >> read;
  }
  return text.find_first_of(".en") == std::string::npos ? text + ".0" : text;
}

}  // namespace odtpack::detail
