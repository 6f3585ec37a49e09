// What AdamW does beside its update: the copy of a weight that the next step reads, and rows without a gradient.
#include <cmath>
#include <limits>
#include <vector>

#include "tests/ops/adamw_fixture.h"

using namespace qe;
using namespace qe::test;

namespace {
constexpr float kNaN = std::numeric_limits<float>::quiet_NaN();
}

TEST_CASE("an update leaves the copy that quantize_weight makes of the new master, and a skipped one leaves it alone") {
  on_every_backend([](DeviceArrays& d) {
    for (const Shape shape : {Shape{64, 128}, Shape{65, 132}, Shape{192, 256}, Shape{130, 260}, Shape{700, 8},
                              Shape{48, 1040}, Shape{5, 3000}, Shape{67, 129}, Shape{3, 5}, Shape{1, 9000}}) {
      for (const std::int64_t pad : {0, 5}) {
        for (const DType type : {DType::kE4M3, DType::kE5M2, DType::kBF16, DType::kF32}) {
          INFO(shape.rows << " x " << shape.cols << " " << name_of(type) << ", pad " << pad);
          const DType other = pad == 0 ? DType::kBF16 : DType::kF32;
          Parameter p(d, shape, other, true, pad);
          const State state = make_state(static_cast<std::size_t>(shape.elements()), 90, DType::kF32, other);
          set(d, p.item, state);
          const auto copy = [&] {
            Operand o{d.matrix(type, shape.rows, shape.cols, pad ? shape.cols + 3 * pad : 0), {}, {}};
            if (is_fp8(type)) {
              o.columnwise = d.matrix(type, shape.cols, shape.rows, shape.rows + (pad ? 3 : 16));
              o.scale_inv = d.matrix(DType::kF32, 1, 1);
            }
            return o;
          };
          const Operand got = copy(), want = copy();
          float* scale = d.array<float>({300.0f, 0.25f, 0.25f});  // then two amaxes
          p.item.copy = got;
          p.item.quantizer = {scale, scale + 1};
          OptimizerScalars s = scalars_at(3, 0.01f);
          s.skip = 1;
          update(d, {p.item}, s);
          CHECK(d.get(got.rowwise) == d.get(want.rowwise));
          CHECK(d.read(scale, 3) == std::vector<float>{300.0f, 0.25f, 0.25f});
          s.skip = 0;
          update(d, {p.item}, s);
          d.ops().quantize_weight(d.stream(), {p.item.master, want, {scale, scale + 2}});
          CHECK(d.get(got.rowwise) != std::vector<float>(state.master.size(), 0.0f));
          CHECK(same_bytes(d.get(got.rowwise), d.get(want.rowwise)));
          CHECK((pad == 0 || d.padding_intact(got.rowwise)));
          if (!is_fp8(type)) continue;
          CHECK(d.codes(got.columnwise) == d.codes(want.columnwise));
          CHECK(d.padding_intact(got.columnwise));
          CHECK(d.get(got.scale_inv)[0] == d.get(want.scale_inv)[0]);
          CHECK(d.read(scale, 3)[1] == d.read(scale, 3)[2]);
          CHECK(d.read(scale, 3)[1] > 0.25f);
        }
      }
    }
  });
}

TEST_CASE("rows that no gradient touched count as zero, are not read, and counts end with the step") {
  on_every_backend([](DeviceArrays& d) {
    for (const Shape shape : {Shape{130, 256}, Shape{67, 129}, Shape{300, 8}}) {
      for (const bool skip : {false, true}) {
        const auto n = static_cast<std::size_t>(shape.elements());
        const State state = make_state(n, 95, DType::kF32, DType::kF32);
        State zeroed = state, poisoned = state;
        std::vector<float> counts(static_cast<std::size_t>(shape.rows), 0.0f);
        for (std::size_t i = 0; i < n; ++i) {
          const std::size_t row = i / static_cast<std::size_t>(shape.cols);
          if (row % 3 == 1) {
            counts[row] = 1.0f + static_cast<float>(row % 2);
          } else {
            zeroed.gradient[i] = 0.0f;
            poisoned.gradient[i] = kNaN;
          }
        }
        Parameter whole(d, shape, DType::kF32, false), sparse(d, shape, DType::kF32, false);
        set(d, whole.item, zeroed);
        set(d, sparse.item, poisoned);
        sparse.item.zero_gradient = whole.item.zero_gradient = true;
        sparse.item.touched = d.matrix(DType::kF32, 1, shape.rows, counts);
        float* squares = d.array<float>({0.0f, 0.0f});
        float* bad = d.array<float>({0.0f, 0.0f});
        d.ops().gradient_norm(
            d.stream(),
            {{{whole.item.gradient, {}, 0, {}}, {sparse.item.gradient, {}, 1, sparse.item.touched}}, squares, bad});
        CHECK(d.read(squares, 2)[0] == d.read(squares, 2)[1]);
        CHECK(d.read(squares, 2)[0] > 0.0f);
        CHECK(d.read(bad, 2) == std::vector<float>{0.0f, 0.0f});
        OptimizerScalars s = scalars_at(3, 0.01f);
        s.skip = skip ? 1 : 0;
        update(d, {whole.item, sparse.item}, s);
        CHECK(same_bytes(d.get(whole.item.master), d.get(sparse.item.master)));
        CHECK(same_bytes(d.get(whole.item.moment1), d.get(sparse.item.moment1)));
        CHECK(same_bytes(d.get(whole.item.moment2), d.get(sparse.item.moment2)));
        CHECK(d.get(sparse.item.touched) == std::vector<float>(counts.size(), 0.0f));
        const std::vector<float> left = d.get(sparse.item.gradient);
        for (std::size_t i = 0; i < n; i += 7) {
          const bool touched = counts[i / static_cast<std::size_t>(shape.cols)] != 0.0f;
          if (touched ? left[i] != 0.0f : !std::isnan(left[i])) FAIL("element " << i);
        }
      }
    }
  });
}
