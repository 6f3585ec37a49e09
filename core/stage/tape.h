// Tape: what a stage keeps from F until its last consumer, one copy per slot, and the scratch that one action uses.
// Blocks declare fields; memory is allocated once, at fixed addresses. Who may use a slot is the contract's business.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "core/device.h"
#include "core/ids.h"
#include "core/tensor.h"

namespace qe {

// Index of a declared field.
enum class FieldId : std::int32_t {};

class TapeLayout {
 public:
  // One copy per slot.
  FieldId add(std::string name, DType, Shape);
  // One copy per slot; the slots of a W group are adjacent column ranges of one buffer (design.md 4).
  FieldId add_columns(std::string name, DType, Shape);
  // The same with adjacent row ranges.
  FieldId add_rows(std::string name, DType, Shape);
  // One FP32 scale_inv per slot; those of a W group are adjacent rows.
  FieldId add_scale_inv(std::string name);
  // One copy for the stage, valid within one action; fields of one name share it, whatever layer asks.
  FieldId scratch(const std::string& name, DType, Shape);

 private:
  friend class Tape;
  enum class Kind : std::uint8_t { kSlot, kColumns, kRows, kScaleInv, kScratch };
  struct Field {
    std::string name;
    DType dtype;
    Shape shape;
    Kind kind;
  };
  FieldId push(Field);
  std::vector<Field> fields_;
};

// An Operand on the tape. In FP8 columnwise and scale_inv live until W and rowwise is scratch; otherwise rowwise lives.
struct OperandField {
  bool fp8 = false;
  FieldId rowwise{};
  FieldId columnwise{};
  FieldId scale_inv{};
};
OperandField add_operand(TapeLayout&, const std::string& name, DType, Shape);

class Tape {
 public:
  // group: microbatches of a W group; divides slots.
  Tape(Device&, const TapeLayout&, int slots, int group);

  [[nodiscard]] Tensor at(FieldId, SlotIndex) const;
  [[nodiscard]] Operand at(const OperandField&, SlotIndex) const;
  // The W side of `count` slots from `first`, as one operand: in FP8 columnwise [rows, count · cols] and count
  // scale_inv, else rowwise [count · rows, cols].
  [[nodiscard]] Operand group(const OperandField&, SlotIndex first, int count) const;
  [[nodiscard]] int slots() const noexcept { return slots_; }
  [[nodiscard]] int group() const noexcept { return group_; }

 private:
  TapeLayout layout_;
  int slots_;
  int group_;
  std::vector<Buffer> slot_memory_;  // by group of slots
  Buffer scratch_memory_;
  std::vector<std::int64_t> offset_;  // bytes, by field, in its group's or the scratch memory
};

}  // namespace qe
