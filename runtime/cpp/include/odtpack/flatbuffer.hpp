// Reads unverified flatbuffers: every offset and length is checked before it is
// used, and what nothing asks for is not looked at (docs/formats/checkpoint.md). The library's own
// verifier refuses what is not aligned and fields that are not read, and takes tables that overlap.
#pragma once

#include <unordered_set>

#include "odtpack/base.hpp"

namespace odtpack::detail {

/// The bytes of one flatbuffer. Tables and texts together are no larger than it, and no table is
/// referred to twice: what is made of it takes time and memory in proportion.
class FlatBuffer {
 public:
  FlatBuffer(std::string_view bytes, std::string where, std::string what = "checkpoint")
      : bytes_(bytes), where_(std::move(where)), what_(std::move(what)) {}

  [[noreturn]] void Fail(const std::string& reason) const {
    throw Error(what_ + "-corrupt", "It is not a readable " + what_ + ": " + reason + ".", where_,
                "copy or download the file again, or fall back to an earlier one");
  }
  /// Fail unless bytes from a position on lie inside.
  void Check(int64_t position, int64_t length) const {
    if (position < 0 || length > Size() - position) Fail("its offsets lead out of the file");
  }
  /// The number at a position, which need not be aligned.
  template <class T>
  T Number(int64_t position) const {
    Check(position, sizeof(T));
    T value;
    std::memcpy(&value, At(position), sizeof value);
    return flatbuffers::EndianScalar(value);
  }
  /// What an offset leads to, from where it stands.
  int64_t Follow(int64_t slot) const { return slot + Number<uint32_t>(slot); }

  const char* At(int64_t position) const { return bytes_.data() + position; }
  int64_t Size() const { return static_cast<int64_t>(bytes_.size()); }

  void CountTable(int64_t position, int64_t size) {
    if (!tables_.insert(position).second) Fail("two places refer to one table");
    if (tables_.size() > kMostTables) Fail("it holds too many tables");
    if ((table_bytes_ += size) > Size()) Fail("its tables overlap");
  }
  void CountText(int64_t size) {
    if ((text_bytes_ += size) > Size()) Fail("its strings overlap");
  }

 private:
  static constexpr size_t kMostTables = 1000000;  // as for the verifier of the reference

  std::string_view bytes_;
  std::string where_, what_;
  std::unordered_set<int64_t> tables_;
  int64_t table_bytes_ = 0, text_bytes_ = 0;
};

/// A vector in a flatbuffer: where its first element lies, and their number; none if it is absent.
struct FlatVector {
  int64_t position = 0, length = 0;
  bool there = false;
};

/// A table that is referred to for the first time. Fields have the numbers of the generated code:
/// where their offsets stand in the table's list of fields.
class FlatTable {
 public:
  FlatTable(FlatBuffer& source, int64_t position)
      : source_(&source),
        position_(position),
        fields_(position - source.Number<int32_t>(position)),
        fields_size_(source.Number<uint16_t>(fields_)),
        size_(source.Number<uint16_t>(fields_ + 2)) {
    if (fields_size_ < 4 || fields_size_ % 2 != 0 || size_ < 4) source.Fail("a table is malformed");
    source.Check(position, size_);
    source.Check(fields_, fields_size_);
    source.CountTable(position, size_);
  }

  template <class T>
  T Number(int field, T absent = 0) const {
    const int64_t slot = Slot(field, sizeof(T));
    return slot < 0 ? absent : source_->Number<T>(slot);
  }
  /// A vector of elements of so many bytes.
  FlatVector Vector(int field, int64_t width) const {
    const int64_t slot = Slot(field, 4);
    return slot < 0 ? FlatVector{} : VectorAt(slot, width);
  }
  /// A text; empty if it is absent.
  std::string Text(int field) const {
    const int64_t slot = Slot(field, 4);
    if (slot < 0) return {};
    const FlatVector vector = VectorAt(slot, 1);
    source_->CountText(vector.length);
    source_->Check(vector.position, vector.length + 1);
    const char* start = source_->At(vector.position);
    if (start[vector.length] != 0) source_->Fail("a text does not end with a zero byte");
    std::string text(start, static_cast<size_t>(vector.length));
    if (!IsUtf8(text)) source_->Fail("it holds text that is not UTF-8");
    return text;
  }
  std::optional<FlatTable> Table(int field) const {
    const int64_t slot = Slot(field, 4);
    if (slot < 0) return {};
    return FlatTable(*source_, source_->Follow(slot));
  }
  /// The number of tables in a vector of them; 0 if it is absent.
  size_t Count(int field) const { return static_cast<size_t>(Vector(field, 4).length); }
  /// Call an action with every table of a vector.
  template <class Action>
  void Each(int field, const Action& action) const {
    const FlatVector vector = Vector(field, 4);
    for (int64_t i = 0; i < vector.length; ++i)
      action(FlatTable(*source_, source_->Follow(vector.position + 4 * i)));
  }

 private:
  /// Where a field of so many bytes lies; -1 if it is absent.
  int64_t Slot(int field, int64_t width) const {
    const int64_t offset = field < fields_size_ ? source_->Number<uint16_t>(fields_ + field) : 0;
    if (offset == 0) return -1;
    if (offset < 4 || offset + width > size_) source_->Fail("a field lies outside of its table");
    return position_ + offset;
  }
  FlatVector VectorAt(int64_t slot, int64_t width) const {
    const int64_t position = source_->Follow(slot), length = source_->Number<uint32_t>(position);
    source_->Check(position + 4, length * width);
    return {position + 4, length, true};
  }

  FlatBuffer* source_;
  int64_t position_, fields_, fields_size_, size_;
};

}  // namespace odtpack::detail
