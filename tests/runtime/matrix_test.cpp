// The matrix of equal bytes. Level "exact in one backend" of the table in ARCHITECTURE.md: every record of every step
// is compared, nothing is tolerated; what may differ between two classes of cells is named by category.
#include "tests/runtime/matrix.h"
#include <set>

#include "core/error.h"
#include "tests/catch.h"

namespace qe::testing {
namespace {

Overrides w_group(int g) { return {"gradients.w_group=" + std::to_string(g)}; }

TraceRecords trace_of(const Overrides& cell, int steps) {
  return run_training(test_config(kMatrixModel + cell), {.steps = steps}).trace;
}

void check_cells(const std::vector<Overrides>& all, int steps, const TraceRecords& reference) {
  REQUIRE(reference.size() > static_cast<std::size_t>(steps) * 1000);
  for (const Overrides& cell : all) {
    std::string text;
    for (const std::string& line : differences(reference, trace_of(cell, steps))) text += "\n  " + line;
    INFO(name_of(cell) << text);
    CHECK(text.empty());
  }
}

// One rank that calls everything eagerly, one full backward a microbatch.
const Overrides kPlain{"pipeline.schedule=1f1b", "pipeline.backward=full", "execution.mode=eager"};

// Both classes of gradient memory under every mapping, mode and backward.
void check_matrix(const std::vector<Overrides>& maps, int m, int steps) {
  const std::vector<Overrides> views = cells({{microbatches(m)}, maps, kModes, kBackwards, kViews});
  const std::vector<Overrides> slots = cells({{microbatches(m)}, maps, kModes, kBackwards, kSlots});
  CHECK(views.size() + slots.size() == 16 * maps.size());
  check_cells(views, steps, trace_of(microbatches(m) + kPlain + kViews[0], steps));
  check_cells(slots, steps, trace_of(microbatches(m) + kPlain + kSlots[1], steps));
}

void check_w_groups(const std::vector<int>& groups, int m, int steps) {
  for (const int group : groups) {
    const Overrides variant = microbatches(m) + w_group(group);
    check_cells(cells({{variant}, mappings(), kModes, kSlots}), steps, trace_of(variant + kSlots[1], steps));
  }
}

// The records of a first step that no weight gradient has touched.
TraceRecords before_weight_gradients(const TraceRecords& trace) {
  std::set<std::string> vectors;
  for (const Parameter& p : model_parameters(make_rank_config(test_config(kMatrixModel)).stage)) {
    if (p.kind == ParameterKind::kVector) vectors.insert(p.name);
  }
  TraceRecords kept;
  for (const auto& [key, digest] : trace) {
    if (key.category == "matrix gradient" || key.category == "clip norm") continue;
    if (key.category.starts_with("weight cache")) continue;  // of the next step
    if (key.category == "main gradient" && !vectors.contains(key.name)) continue;
    if (key.category == "state" && !key.name.starts_with("fp8.")) continue;  // masters and moments
    kept.emplace(key, digest);
  }
  return kept;
}

}  // namespace

TEST_CASE("five schedules, one to four ranks, either mode and backward, any placement: 240 cells, two sets of bytes") {
  REQUIRE(mappings().size() == 15);
  check_matrix(mappings(), 4, 6);
}

TEST_CASE("the 240 cells hold over twenty steps, with four microbatches and with eight", "[slow]") {
  check_matrix(mappings(), 4, 20);
  check_matrix(mappings(), 8, 20);
}

TEST_CASE("uneven cuts into four stages give the bytes of even ones") {
  const int steps = 3;
  std::vector<Overrides> maps;  // those of four stages
  for (const int ranks : {2, 4}) {
    for (const Overrides& m : mappings(ranks)) {
      const Config config = test_config(kMatrixModel + m);
      if (config.shape().stages() == 4) maps.push_back(m);
    }
  }
  REQUIRE(maps.size() == 5);
  const std::vector<Overrides> cuts{{"pipeline.layers_per_stage=[1,2,2,3]"}, {"pipeline.layers_per_stage=[3,1,3,1]"}};
  check_cells(cells({cuts, maps, kModes, {kViews[1]}}), steps, trace_of(kPlain + kViews[0], steps));
  check_cells(cells({cuts, maps, kModes, {kSlots[0]}}), steps, trace_of(kPlain + kSlots[1], steps));
}

TEST_CASE(
    "one microbatch, fewer than ranks and odd numbers of them run as on one rank, or are refused with the nearest") {
  int refused = 0;
  for (const int m : {1, 2, 3, 5, 7}) {
    std::vector<Overrides> possible;
    for (const Overrides& cell : cells({{microbatches(m)}, mappings()})) {
      try {
        test_config(kMatrixModel + cell);
        possible.push_back(cell);
      } catch (const ConfigError& e) {
        INFO(name_of(cell));
        CHECK_THAT(e.what(), ContainsSubstring("cannot divide") && ContainsSubstring("; use "));
        ++refused;
      }
    }
    check_cells(cells({possible, kModes}), 2, trace_of(microbatches(m) + kPlain, 2));
  }
  CHECK(refused == 4);  // interleaved_1f1b and zb1p with five and seven on two ranks; on four they make one round
}

TEST_CASE("a clip that is always active has one norm, one factor and one loss on every cut") {
  const Overrides clip{"optimizer.clip_grad=0.01"};
  const RunOutcome one = run_training(test_config(kMatrixModel + clip), {.steps = 4});
  for (const Overrides& cell :
       {mappings(1)[4], mappings(2)[2], mappings(2)[4], mappings(4)[1], mappings(4)[2], mappings(4)[4]}) {
    const RunOutcome run = run_training(test_config(kMatrixModel + clip + cell), {.steps = 4});
    INFO(name_of(cell));
    CHECK(run.losses == one.losses);
    CHECK(differences(one.trace, run.trace).empty());
    for (std::size_t step = 0; step < 4; ++step) {
      CHECK(run.scalars[step].norm == one.scalars[step].norm);
      CHECK(run.scalars[step].clip == one.scalars[step].clip);
      CHECK(run.scalars[step].clip < 0.5f);
    }
  }
}

TEST_CASE("W groups of two and of four have each the same bytes under every schedule, rank count, mode and slots") {
  check_w_groups({2, 4}, 4, 2);
}

TEST_CASE("W groups of one, two and four hold over twenty steps of eight microbatches", "[slow]") {
  check_w_groups({1, 2, 4}, 8, 20);
}

TEST_CASE("gradient placement, type and W group show nowhere in a first step but in what follows from W") {
  const TraceRecords whole = trace_of({}, 1);
  const TraceRecords reference = before_weight_gradients(whole);
  for (const Overrides& variant : {kViews[0], kViews[1], w_group(2), w_group(4), Overrides{"gradients.dtype=bf16"}}) {
    const TraceRecords trace = trace_of(variant, 1);
    INFO(name_of(variant));
    CHECK(differences(reference, before_weight_gradients(trace)).empty());
    CHECK_FALSE(differences(whole, trace).empty());
  }
}

}  // namespace qe::testing
