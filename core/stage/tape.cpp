#include "core/stage/tape.h"

#include "core/error.h"

namespace qe {

FieldId TapeLayout::push(Field field) {
  fields_.push_back(std::move(field));
  return FieldId{static_cast<std::int32_t>(fields_.size() - 1)};
}
FieldId TapeLayout::add(std::string name, DType dtype, Shape shape) {
  return push({std::move(name), dtype, shape, Kind::kSlot});
}
FieldId TapeLayout::add_columns(std::string name, DType dtype, Shape shape) {
  return push({std::move(name), dtype, shape, Kind::kColumns});
}
FieldId TapeLayout::add_rows(std::string name, DType dtype, Shape shape) {
  return push({std::move(name), dtype, shape, Kind::kRows});
}
FieldId TapeLayout::add_scale_inv(std::string name) {
  return push({std::move(name), DType::kF32, {1, 1}, Kind::kScaleInv});
}
FieldId TapeLayout::scratch(const std::string& name, DType dtype, Shape shape) {
  for (std::size_t i = 0; i < fields_.size(); ++i) {
    const Field& f = fields_[i];
    if (f.kind == Kind::kScratch && f.name == name) {
      QE_EXPECTS(f.dtype == dtype && f.shape == shape, "scratch of one name has one type and shape");
      return FieldId{static_cast<std::int32_t>(i)};
    }
  }
  return push({name, dtype, shape, Kind::kScratch});
}

OperandField add_operand(TapeLayout& layout, const std::string& name, DType dtype, Shape shape) {
  OperandField f;
  f.fp8 = is_fp8(dtype);
  if (f.fp8) {
    // The scratch is shared by every operand of this shape: F and I read rowwise right after it is written.
    f.rowwise =
        layout.scratch("rowwise " + std::string(name_of(dtype)) + " " + std::to_string(shape.cols), dtype, shape);
    f.columnwise = layout.add_columns(name + ".columnwise", dtype, {shape.cols, shape.rows});
    f.scale_inv = layout.add_scale_inv(name + ".scale_inv");
  } else {
    f.rowwise = layout.add_rows(name + ".rowwise", dtype, shape);
  }
  return f;
}

Tape::Tape(Device& device, const TapeLayout& layout, int slots, int group)
    : layout_(layout), slots_(slots), group_(group) {
  QE_EXPECTS(group >= 1 && slots % group == 0, "a W group is adjacent slots");
  constexpr std::int64_t kAlign = 256;
  std::int64_t group_bytes = 0;
  std::int64_t scratch_bytes = 0;
  for (const auto& f : layout_.fields_) {
    std::int64_t& total = f.kind == TapeLayout::Kind::kScratch ? scratch_bytes : group_bytes;
    const std::int64_t copies = f.kind == TapeLayout::Kind::kScratch ? 1 : group_;
    const std::int64_t elements = f.kind == TapeLayout::Kind::kScaleInv ? kScalePitch : f.shape.elements();
    const auto bytes = static_cast<std::int64_t>(size_of(f.dtype)) * elements;
    const bool aligned_copies = f.kind == TapeLayout::Kind::kSlot;
    offset_.push_back(total);
    total += copies * (aligned_copies ? (bytes + kAlign - 1) / kAlign * kAlign : bytes);
    total = (total + kAlign - 1) / kAlign * kAlign;
  }
  for (int g = 0; g < slots_ / group_; ++g) {
    slot_memory_.push_back(device.allocate(static_cast<std::size_t>(group_bytes), MemoryKind::kTape));
  }
  scratch_memory_ = device.allocate(static_cast<std::size_t>(scratch_bytes), MemoryKind::kWorkspace);
}

Tensor Tape::at(FieldId id, SlotIndex slot) const {
  const auto i = static_cast<std::size_t>(id);
  const auto& f = layout_.fields_.at(i);
  if (f.kind == TapeLayout::Kind::kScratch) {
    return make_tensor(scratch_memory_.as<unsigned char>() + offset_[i], f.dtype, f.shape);
  }
  const int s = to_int(slot);
  QE_EXPECTS(s >= 0 && s < slots_, "the slot exists");
  unsigned char* base = slot_memory_[static_cast<std::size_t>(s / group_)].as<unsigned char>() + offset_[i];
  const std::int64_t member = s % group_;
  const auto element = static_cast<std::int64_t>(size_of(f.dtype));
  switch (f.kind) {
    case TapeLayout::Kind::kColumns:
      return {base + member * f.shape.cols * element, f.dtype, f.shape, f.shape.cols * group_};
    case TapeLayout::Kind::kRows:
      return make_tensor(base + member * f.shape.elements() * element, f.dtype, f.shape);
    case TapeLayout::Kind::kScaleInv:
      return {base + member * kScalePitch * element, f.dtype, f.shape, kScalePitch};
    default: {
      const std::int64_t bytes = (f.shape.elements() * element + 255) / 256 * 256;
      return make_tensor(base + member * bytes, f.dtype, f.shape);
    }
  }
}

Operand Tape::at(const OperandField& f, SlotIndex slot) const {
  Operand o;
  o.rowwise = at(f.rowwise, slot);
  if (f.fp8) {
    o.columnwise = at(f.columnwise, slot);
    o.scale_inv = at(f.scale_inv, slot);
  }
  return o;
}

Operand Tape::group(const OperandField& f, SlotIndex first, int count) const {
  Operand o = at(f, first);
  if (count == 1) return o;
  QE_EXPECTS(to_int(first) % group_ == 0 && count == group_, "several microbatches of a W are one whole group");
  if (!f.fp8) {
    o.rowwise.shape.rows *= count;
    return o;
  }
  o.columnwise.shape.cols *= count;
  o.scale_inv.shape.rows = count;
  return o;
}

}  // namespace qe
