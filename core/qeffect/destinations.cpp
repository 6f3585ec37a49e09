// Destinations, binding half.
#include "core/qeffect/destinations.h"

#include <algorithm>
#include <cstdint>
#include <sstream>
#include <string>

#include "core/qeffect/violation.h"

namespace qe {
namespace {

// A view as equally spaced runs of bytes; a contiguous view is one run.
struct Runs {
  std::int64_t begin, width, pitch, count;
  [[nodiscard]] std::int64_t end() const noexcept { return begin + (count - 1) * pitch + width; }
};

Runs runs_of(const Tensor& t) noexcept {
  const auto begin = static_cast<std::int64_t>(reinterpret_cast<std::uintptr_t>(t.data));
  const auto size = static_cast<std::int64_t>(size_of(t.dtype));
  if (t.contiguous()) return {begin, t.shape.elements() * size, t.shape.elements() * size, 1};
  return {begin, t.shape.cols * size, t.row_pitch * size, t.shape.rows};
}

std::string describe(const Tensor& t, int device) {
  if (t.empty()) return "nothing bound";
  std::ostringstream text;
  text << name_of(t.dtype) << " [" << t.shape.rows << ", " << t.shape.cols << "] with pitch " << t.row_pitch << " at "
       << t.data << " on device " << device;
  return text.str();
}

bool same(const Tensor& a, const Tensor& b) noexcept {
  return a.data == b.data && a.dtype == b.dtype && a.shape == b.shape && a.row_pitch == b.row_pitch;
}

std::string name_of_destination(StageIndex stage, int matrix, MicrobatchIndex m) {
  return "stage " + std::to_string(to_int(stage)) + ", matrix " + std::to_string(matrix) + ", microbatch " +
         std::to_string(to_int(m));
}

[[noreturn]] void refuse(const char* operation, const std::string& key, const std::string& expected,
                         const std::string& found) {
  throw ContractViolation({Violation::kDestination, operation, key, "", expected, found});
}

}  // namespace

bool overlap(const Tensor& a, const Tensor& b) noexcept {
  const Runs x = runs_of(a);
  const Runs y = runs_of(b);
  if (x.end() <= y.begin || y.end() <= x.begin) return false;
  for (std::int64_t i = 0; i < x.count; ++i) {
    const std::int64_t from = x.begin + i * x.pitch;
    // The first run of y that ends after `from`; if it begins inside this run of x, they share a byte.
    const std::int64_t before = from - (y.begin + y.width);
    const std::int64_t k = before < 0 ? 0 : before / y.pitch + 1;
    if (k < y.count && y.begin + k * y.pitch < from + x.width) return true;
  }
  return false;
}

void Destinations::add_stage(StageIndex stage, int matrices, int shared, int microbatches) {
  QE_EXPECTS(shared >= 0 && shared <= matrices, "shared matrices are among the stage's matrices");
  const int own = matrices - shared;
  const auto cells =
      static_cast<std::size_t>(own) * static_cast<std::size_t>(microbatches) + static_cast<std::size_t>(shared);
  stages_.push_back({stage, matrices, own, microbatches, std::vector<Destination>(cells)});
}

std::size_t Destinations::find_stage(StageIndex stage) const {
  const auto found = std::find_if(stages_.begin(), stages_.end(), [&](const Stage& s) { return s.stage == stage; });
  QE_EXPECTS(found != stages_.end(), "the facade looks the stage up first");
  return static_cast<std::size_t>(found - stages_.begin());
}

std::size_t Destinations::index_of(const Stage& s, int matrix, MicrobatchIndex m) {
  const auto microbatches = static_cast<std::size_t>(s.microbatches);
  if (matrix < s.own) {
    return static_cast<std::size_t>(matrix) * microbatches + static_cast<std::size_t>(to_int(m));
  }
  return static_cast<std::size_t>(s.own) * microbatches + static_cast<std::size_t>(matrix - s.own);
}

void Destinations::require_unaliased(const Stage& stage, std::size_t index, const Tensor& tensor, int device,
                                     const std::string& key) const {
  for (const Stage& other : stages_) {
    for (std::size_t i = 0; i < other.bound.size(); ++i) {
      const Destination& d = other.bound[i];
      const bool itself = &other == &stage && i == index;
      if (itself || d.tensor.empty() || d.device != device || !overlap(d.tensor, tensor)) continue;
      refuse("bind_destination", key, "memory that no other gradient is bound to",
             describe(tensor, device) + ", aliased with " + describe(d.tensor, d.device) + " of stage " +
                 std::to_string(to_int(other.stage)));
    }
  }
}

void Destinations::bind(StageIndex stage, int matrix, MicrobatchIndex m, const Tensor& tensor, int device) {
  Stage& s = stages_[find_stage(stage)];
  const std::string key = name_of_destination(stage, matrix, m);
  if (matrix < 0 || matrix >= s.matrices || to_int(m) < 0 || to_int(m) >= s.microbatches) {
    refuse("bind_destination", key,
           std::to_string(s.matrices) + " matrices and " + std::to_string(s.microbatches) + " microbatches",
           "a gradient that does not exist");
  }
  if (tensor.empty() || tensor.shape.rows <= 0 || tensor.shape.cols <= 0 || tensor.row_pitch < tensor.shape.cols) {
    refuse("bind_destination", key, "a non-empty view whose rows do not overlap", describe(tensor, device));
  }
  const std::size_t index = index_of(s, matrix, m);
  Destination& bound = s.bound[index];
  if (!bound.tensor.empty() && same(bound.tensor, tensor) && bound.device == device) return;
  if (!bound.tensor.empty()) {
    refuse("bind_destination", key, describe(bound.tensor, bound.device) + ", as bound before",
           describe(tensor, device));
  }
  require_unaliased(s, index, tensor, device, key);
  bound = {tensor, device};
}

void Destinations::check(StageIndex stage, MicrobatchIndex m, std::span<const Tensor> actual, int device) const {
  const Stage& s = stages_[find_stage(stage)];
  const int given = static_cast<int>(actual.size());
  if (given != s.matrices || to_int(m) < 0 || to_int(m) >= s.microbatches) {
    refuse("check_destinations", name_of_destination(stage, std::min(given, s.matrices), m),
           std::to_string(s.matrices) + " matrices of a microbatch below " + std::to_string(s.microbatches),
           std::to_string(given) + " matrices of microbatch " + std::to_string(to_int(m)));
  }
  for (int matrix = 0; matrix < s.matrices; ++matrix) {
    const Destination& bound = s.bound[index_of(s, matrix, m)];
    const Tensor& written = actual[static_cast<std::size_t>(matrix)];
    if (!bound.tensor.empty() && same(bound.tensor, written) && bound.device == device) continue;
    refuse("check_destinations", name_of_destination(stage, matrix, m), describe(bound.tensor, bound.device),
           describe(written, device));
  }
}

}  // namespace qe
